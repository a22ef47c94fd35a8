// A figure of horizontal bars with marks on them, drawn anew in a few milliseconds: it follows a slider,
// and Plotly would need a hundred for each position. What is written into a file of it is this same picture.
const SVG = "http://www.w3.org/2000/svg"
const SIZE = 12 // pixels of its words
const GRID = "rgba(128, 136, 150, 0.22)", LINE = "rgba(128, 136, 150, 0.6)"
const TICK = 64 // pixels from one share on the axis to the next, at least
const ENTRY = 118 // pixels of an entry of the legend
const FOOT = 84 // pixels below the rows: shares, the axis's words, two lines of entries

function element(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name)
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value)
  made.textContent = text
  return made
}

function word(text, x, y, more = {}) {
  return element("text", { x, y, fill: "currentColor", ...more }, text)
}

const percent = (share) => `${Number((100 * share).toPrecision(6))}%`

function ticks(top, most) {
  const least = top / Math.max(1, most)
  const power = 10 ** Math.floor(Math.log10(least))
  const step = [1, 2, 5, 10].find((factor) => factor * power >= least) * power
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step)
}

function mark(symbol, size, color, x, y) {
  const r = size / 2
  const paths = {
    square: `M${x - r},${y - r}h${size}v${size}h${-size}z`,
    diamond: `M${x},${y - 1.3 * r}l${1.3 * r},${1.3 * r}l${-1.3 * r},${1.3 * r}l${-1.3 * r},${-1.3 * r}z`,
    x: `M${x - r},${y - r}l${size},${size}M${x - r},${y + r}l${size},${-size}`,
  }
  const ink = symbol === "x" ? { stroke: color, "stroke-width": 4, fill: "none" } : { fill: color }
  return element("path", { d: paths[symbol], ...ink })
}

// One row of words above the rows says what the pointer, or a finger, is on.
function spoken(rows, said, { left, top, width, row }) {
  return rows.map(({ hint }, i) => {
    const area = { x: 0, y: top + i * row, width: left + width, height: row, fill: "transparent" }
    const over = element("rect", area)
    over.append(element("title", {}, hint))
    over.onpointerenter = over.onpointerdown = () => (said.textContent = hint)
    over.onpointerleave = () => (said.textContent = "")
    return over
  })
}

function picture({ rows, series, axis, top: high, plot, margin }, whole) {
  const left = margin.l, top = margin.t, deep = plot
  const width = Math.max(40, whole - left - margin.r), height = top + deep + FOOT
  const row = deep / rows.length
  const x = (share) => left + (share / high) * width
  const y = (i) => top + (i + 0.5) * row
  const svg = element("svg", {
    class: "main-svg", width: whole, height, "font-size": SIZE, "font-family": "Source Sans, sans-serif",
  })
  for (const share of ticks(high, Math.floor(width / TICK))) {
    svg.append(element("path", { d: `M${x(share)},${top}v${deep}`, stroke: GRID }))
    svg.append(word(percent(share), x(share), top + deep + 18, { "text-anchor": "middle" }))
  }
  svg.append(element("path", { d: `M${left},${top}v${deep}`, stroke: LINE }))
  svg.append(word(axis, left + width / 2, top + deep + 40, { "text-anchor": "middle" }))
  const middle = { "text-anchor": "end", "dominant-baseline": "central" }
  rows.forEach(({ name }, i) => svg.append(word(name, left - 8, y(i), middle)))
  const columns = Math.max(1, Math.floor(whole / ENTRY))
  series.forEach(({ name, color, symbol, size, opacity, values }, place) => {
    const group = element("g", { class: "series", opacity })
    values.forEach((share, i) => {
      if (share === null) return
      const bar = { x: left, y: y(i) - 0.4 * row, width: Math.max(0, x(share) - left), height: 0.8 * row }
      group.append(symbol ? mark(symbol, size, color, x(share), y(i)) : element("rect", { ...bar, fill: color }))
    })
    const at = [10 + ENTRY * (place % columns), height - 8 - 18 * Math.floor(place / columns)]
    group.append(mark(symbol || "square", size || 11, color, at[0], at[1] - 4))
    svg.append(group, word(name, at[0] + 14, at[1]))
  })
  const said = word("", left, top - 5, { class: "said" })
  svg.append(said, ...spoken(rows, said, { left, top, width, row }))
  return svg
}

export default function ({ data, parentElement }) {
  const place = parentElement.querySelector(".bars-figure")
  place.style.height = `${data.margin.t + data.plot + FOOT}px`
  place.setAttribute("aria-label", data.alt)
  const draw = () => {
    // Of a tab that is not open there is no width yet: it comes with the change of its size.
    if (place.clientWidth) place.replaceChildren(picture(data, place.clientWidth))
  }
  parentElement.observer?.disconnect() // of the call before this one, with the older numbers
  parentElement.observer = new ResizeObserver(draw)
  parentElement.observer.observe(place)
  draw()
  return () => parentElement.observer.disconnect()
}
