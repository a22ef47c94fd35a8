"""The page of a report: its style sheet, its one script, and the parts that it is made of.

plotly.js is embedded once; light or dark follows the reader's system, and print is light. Every name
that comes from a file goes through ``html.escape``, and no figure's data can end its script.
"""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.files.atomic import atomic_path, writing
from mpdiag.reports.words import sentence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpdiag.files.paths import AnyPath
    from mpdiag.reports.pictures import Picture

SHORT = 12
"""Characters of a cell up to which it stays in one line."""

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
.short { white-space: nowrap; overflow-wrap: normal; }
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


def document(title: str, body: Iterable[str]) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs

    parts = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n{parts}\n</main>\n"
        f"<script>{THEMING}</script>\n</body>\n</html>\n"
    )


def finding(severity: str, message: str, fix: str, code: str) -> str:
    """What stands out, and what to do about it."""
    escape = html.escape
    return (
        f'<div class="finding {escape(severity)}"><b>{escape(severity)}</b> '
        f"{escape(sentence(message))}<br>→ {escape(sentence(fix))} <code>{escape(code)}</code></div>"
    )


def cards(facts: Iterable[tuple[str, str, str, str]]) -> str:
    """Label, figure, note and meaning of each fact; the last is told to a pointer that rests there."""
    inside = "".join(
        f'<div class="card" title="{html.escape(meaning)}"><span>{html.escape(label)}</span>'
        f"<strong>{html.escape(value)}</strong><small>{html.escape(note)}</small></div>"
        for label, value, note, meaning in facts
    )
    return f'<div class="cards">{inside}</div>'


def picture(picture: Picture) -> str:
    """A figure with its caption and its receipt."""
    from plotly.utils import PlotlyJSONEncoder  # which turns NaN into null, as plotly.js wants it

    document = picture.figure.to_plotly_json()
    text = json.dumps(document, cls=PlotlyJSONEncoder, allow_nan=False)
    # A name may hold "</script>": inside a script element no "<" may stand as such.
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    escape = html.escape
    return (
        f'<section id="{picture.key}"><h3>{escape(picture.title)}</h3>\n'
        f'<div class="figure" role="img" aria-label="{escape(picture.title)}" '
        f'data-key="{picture.key}"></div>\n'
        f'<script type="application/json" id="data-{picture.key}">{text}</script>\n'
        f"<p class='caption'>{escape(picture.caption)}</p>\n"
        f"<details><summary>Receipt: these numbers in plain pandas</summary>"
        f"<pre>{escape(picture.receipt)}</pre></details></section>"
    )


def table(columns: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A table that scrolls where it is too wide."""
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in columns)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"


def _cells(row: Iterable[Any]) -> str:
    return "".join(_cell(_word(value)) for value in row)


def _cell(text: str) -> str:
    start = '<td class="short">' if len(text) <= SHORT else "<td>"
    return f"{start}{html.escape(text)}</td>"


def _word(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def save(path: AnyPath, text: str) -> AnyPath:
    """Write a report whole.

    Raises:
        UsageError: If the file cannot be written.
    """
    with writing(path), atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path
