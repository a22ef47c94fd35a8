// Buttons that write a figure as the page shows it, with its title and its caption, into a file.
const LINE = 18, EDGE = 16, SIZE = 13

function linesOf(text, width) {
  const most = Math.max(20, Math.floor(width / (SIZE * 0.5)))
  const lines = [""]
  for (const word of text.split(" ")) {
    const last = lines[lines.length - 1]
    if (last && last.length + 1 + word.length > most) lines.push(word)
    else lines[lines.length - 1] = last ? `${last} ${word}` : word
  }
  return lines
}

function escaped(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;")
}

function drawing({ figure, title, caption }) {
  const plot = document.querySelector(`.st-key-${figure} .js-plotly-plot`)
  if (!plot) return null
  const layers = [...plot.querySelectorAll(".main-svg")]
  const width = layers[0].clientWidth || Number(layers[0].getAttribute("width"))
  const height = layers[0].clientHeight || Number(layers[0].getAttribute("height"))
  const page = getComputedStyle(document.querySelector('[data-testid="stApp"]'))
  const under = caption ? linesOf(caption, width) : []
  const top = 2 * EDGE + LINE
  const whole = top + height + EDGE + under.length * LINE + EDGE
  // Marks are cut at areas that they name by address: in a file of its own an address begins with #.
  const inner = layers
    .map((svg) => new XMLSerializer().serializeToString(svg))
    .map((text) => text.replace(/url\((&quot;|["']?)[^#)]*#/g, "url($1#"))
    .map((text) => text.replace("<svg ", `<svg color="${page.color}" x="${EDGE}" y="${top}" `))
  const words = (text, y, more = "") =>
    `<text x="${EDGE}" y="${y}" fill="${page.color}" ${more}>${escaped(text)}</text>`
  const text =
    `<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" ` +
    `width="${width + 2 * EDGE}" height="${whole}" font-family="Source Sans, sans-serif" ` +
    `font-size="${SIZE}">` +
    `<rect width="100%" height="100%" fill="${page.backgroundColor}"/>` +
    words(title, EDGE + LINE, 'font-size="16" font-weight="600"') +
    inner.join("") +
    under.map((line, i) => words(line, top + height + EDGE + (i + 1) * LINE)).join("") +
    "</svg>"
  return { text, width: width + 2 * EDGE, height: whole }
}

function save(blob, name) {
  const link = document.createElement("a")
  link.href = URL.createObjectURL(blob)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 10000)
}

function asImage({ text, width, height }, name) {
  const image = new Image()
  image.onload = () => {
    const canvas = document.createElement("canvas")
    canvas.width = 2 * width
    canvas.height = 2 * height
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height)
    canvas.toBlob((blob) => save(blob, name), "image/png")
  }
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`
}

export default function ({ data, parentElement }) {
  for (const button of parentElement.querySelectorAll("button")) {
    button.onclick = () => {
      const drawn = drawing(data)
      if (!drawn) return
      if (button.name === "png") asImage(drawn, `${data.file}.png`)
      else save(new Blob([drawn.text], { type: "image/svg+xml" }), `${data.file}.svg`)
    }
  }
}
