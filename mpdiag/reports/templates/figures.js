const dark = matchMedia("(prefers-color-scheme: dark)");
const ink = () => (dark.matches ? "#e4e9f0" : "#1c2430");
const panel = () => (dark.matches ? "#1a222d" : "#ffffff");
const places = [...document.querySelectorAll(".figure")];
for (const place of places) {
  const { data, layout } = JSON.parse(document.getElementById("data-" + place.dataset.key).text);
  layout.font.color = ink();
  layout.hoverlabel = { ...layout.hoverlabel, bgcolor: panel() };
  Plotly.newPlot(place, data, layout, { responsive: true, displaylogo: false,
    toImageButtonOptions: { format: "svg", filename: place.dataset.key } });
}
const repaint = (color) => places.forEach((place) =>
  Plotly.relayout(place, { "font.color": color, "hoverlabel.bgcolor": panel() }));
dark.addEventListener("change", () => repaint(ink()));
addEventListener("beforeprint", () => repaint("#000000"));
addEventListener("afterprint", () => repaint(ink()));
