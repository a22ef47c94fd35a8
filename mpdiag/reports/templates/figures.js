const PAPER = 680;  // of A4 and of Letter, within the margins
const NARROW = 520;
const dark = matchMedia("(prefers-color-scheme: dark)");
const ink = () => (dark.matches ? "#e4e9f0" : "#1c2430");
const panel = () => (dark.matches ? "#1a222d" : "#ffffff");
const places = [...document.querySelectorAll(".figure")];
const drawn = new Set();

// On a phone half the width would be names, whose ends say most; words above the plot would lie on
// each other, and each entry of the legend has a line of its own.
const LINE = 22;
const shortened = (name) => (name.length > 15 && !name.includes("&") ? "…" + name.slice(-14) : name);
const narrowed = (data, layout) => {
  layout.font = { ...layout.font, size: 11 };
  const axis = layout.yaxis;
  if (axis && axis.ticktext) axis.ticktext = axis.ticktext.map(shortened);
  if (layout.xaxis && layout.xaxis.ticktext) {
    const every = Math.ceil(layout.xaxis.ticktext.length / 6);
    layout.xaxis.ticktext = layout.xaxis.ticktext.map((word, i) => (i % every ? "" : word));
  }
  const above = (layout.annotations || []).filter((note) =>
    note.y === 1 && /paper|domain/.test(note.yref || "") && note.yanchor === "bottom");
  above.forEach((note, i) => { note.yshift = (note.yshift || 0) + 13 * i; });
  const entries = data.filter((trace) => trace.name && trace.showlegend !== false &&
    !["heatmap", "contour"].includes(trace.type)).length;
  if (layout.showlegend === false || entries === 0) return;
  // The legend stays below the plot, as its style has it, and the figure grows by its lines. Plotly
  // reserves room for a horizontal one alone.
  layout.height = (layout.height || 380) + LINE * entries;
  layout.legend = { ...layout.legend, orientation: "h", entrywidth: 1, entrywidthmode: "fraction" };
};
const draw = (place) => {
  if (drawn.has(place)) return;
  drawn.add(place);
  const { data, layout } = JSON.parse(document.getElementById("data-" + place.dataset.key).text);
  layout.font = { ...layout.font, color: ink() };
  layout.hoverlabel = { ...layout.hoverlabel, bgcolor: panel() };
  const narrow = place.clientWidth > 0 && place.clientWidth < NARROW;
  if (narrow) narrowed(data, layout);
  Plotly.newPlot(place, data, layout, { responsive: true, displaylogo: false,
    displayModeBar: narrow ? false : "hover",
    toImageButtonOptions: { format: "svg", filename: place.dataset.key } });
};
const drawWithin = (part) => part.querySelectorAll(".figure").forEach((place) => {
  if (place.offsetParent === null) return;  // inside of what is still closed
  if (drawn.has(place)) Plotly.Plots.resize(place); else draw(place);
});
drawWithin(document);
document.addEventListener("toggle", (event) => drawWithin(event.target), true);

for (const part of document.querySelectorAll(".switched")) {
  const panes = [...part.querySelectorAll(".pane")];
  part.addEventListener("change", (event) => {
    if (event.target.name !== part.dataset.name) return;
    panes.forEach((pane) => { pane.hidden = pane.dataset.pane !== event.target.value; });
    drawWithin(part);
  });
}

const repaint = () => drawn.forEach((place) =>
  Plotly.relayout(place, { "font.color": ink(), "hoverlabel.bgcolor": panel() }));
dark.addEventListener("change", repaint);
let folded = [], hidden = [];
addEventListener("beforeprint", () => {  // on paper nothing can be opened
  folded = [...document.querySelectorAll("details.fold:not([open])")];
  hidden = [...document.querySelectorAll(".pane[hidden]")];
  folded.forEach((part) => { part.open = true; });
  hidden.forEach((part) => { part.hidden = false; });
  places.forEach(draw);
  places.forEach((place) => Plotly.relayout(place, { "font.color": "#000000", width: PAPER }));
});
addEventListener("afterprint", () => {
  folded.forEach((part) => { part.open = false; });
  hidden.forEach((part) => { part.hidden = true; });
  places.forEach((place) => Plotly.relayout(place, { "font.color": ink(), width: null }));
  drawWithin(document);
});
