"""The report's style sheet and its one script: draw the figures, in the colours of the page."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --panel: #f3f5f8; --ink: #1c2430; --soft: #5b6675;
  --line: #d9dee6; --error: #b34700; --warning: #8a6100; --fine: #00724f; --info: #1f6aa5; }
@media (prefers-color-scheme: dark) { :root { --ground: #10151c; --panel: #1a222d; --ink: #e4e9f0;
  --soft: #98a4b3; --line: #2c3642; --error: #ff9a57; --warning: #f0bc4a; --fine: #3ecf9f;
  --info: #7cbcf0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 "Source Sans Pro", Inter, system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .2rem 0 1.2rem; }
h1.error { color: var(--error); } h1.warning { color: var(--warning); } h1.fine { color: var(--fine); }
h2 { font-size: 1.2rem; margin: 2rem 0 .6rem; } h3 { font-size: 1.02rem; margin: 1.8rem 0 .2rem; }
.eyebrow, .caption, small { color: var(--soft); } .eyebrow { margin: 0; } .caption { margin: .2rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; }
.card { background: var(--panel); border-radius: .6rem; padding: .8rem 1rem; }
.card span, .card small { display: block; } .card strong { font-size: 1.5rem; }
.finding { border-left: 4px solid var(--info); background: var(--panel); padding: .5rem .9rem;
  margin: .5rem 0; border-radius: 0 .4rem .4rem 0; }
.finding.error { border-color: var(--error); } .finding.warning { border-color: var(--warning); }
table { border-collapse: collapse; font-size: .92rem; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { white-space: nowrap; color: var(--soft); font-weight: 600; }
pre { background: var(--panel); padding: .8rem; overflow-x: auto; border-radius: .4rem;
  font-size: .82rem; }
summary { cursor: pointer; color: var(--soft); } section { break-inside: avoid; }
@media print { :root { --ground: #fff; --ink: #000; --panel: #f3f5f8; --soft: #444; --line: #ccc; }
  details { display: none; } }
"""

THEMING = """
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
"""
