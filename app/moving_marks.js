// Marks that move over a figure which stays: a vertical line and its words, drawn into the figure's own
// picture, so that a file of the figure holds them, too.
const SVG = "http://www.w3.org/2000/svg"
const GAP = 5 // pixels from the plot's upper edge to the foot of the words
const ANCHORS = { left: "start", center: "middle", right: "end" }
const DASHES = { dash: "9,9", dot: "3,3" }

function element(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name)
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value)
  made.textContent = text
  return made
}

function drawn(mark, { xaxis, yaxis, font }) {
  const x = xaxis._offset + xaxis.d2p(mark.x)
  const top = yaxis._offset
  const line = { x1: x, x2: x, y1: top, y2: top + yaxis._length }
  const stroke = { stroke: mark.color, "stroke-width": mark.width }
  const dashed = DASHES[mark.dash] ? { "stroke-dasharray": DASHES[mark.dash] } : {}
  const words = {
    x,
    y: top - GAP - mark.shift,
    "text-anchor": ANCHORS[mark.anchor],
    fill: mark.ink ?? font.color,
    "font-size": mark.size,
    "font-family": font.family,
  }
  return [element("line", { ...line, ...stroke, ...dashed }), element("text", words, mark.text)]
}

function place(card, { alt, marks }) {
  const plot = card.querySelector(".js-plotly-plot")
  const picture = plot && [...plot.querySelectorAll(".main-svg")].pop()
  if (!picture || !plot._fullLayout?.xaxis?.d2p) return // comes later: the observer tells
  const group = element("g", { class: "moving-marks", style: "pointer-events: none" })
  for (const mark of marks) group.append(...drawn(mark, plot._fullLayout))
  const before = picture.querySelector(".moving-marks")
  // What stands there already stays, for the observer sees each change made here.
  if (before?.outerHTML === group.outerHTML) return
  before?.remove()
  picture.append(group)
  card.querySelector('[data-testid="stPlotlyChart"]').setAttribute("aria-label", alt)
}

export default function ({ data, parentElement }) {
  const card = parentElement.closest('[data-testid="stVerticalBlock"]')
  parentElement.observer?.disconnect() // of the call before this one, with older marks
  // Plotly draws again when the figure, its width, the zoom or the theme changes.
  const observer = new MutationObserver(() => place(card, data))
  const changes = { childList: true, subtree: true, attributeFilter: ["width", "d", "transform"] }
  observer.observe(card, changes)
  parentElement.observer = observer
  place(card, data)
  return () => parentElement.observer.disconnect()
}
