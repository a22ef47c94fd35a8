"""A pass as Markdown: the table of promises, and how its parts ended."""

from __future__ import annotations

from typing import Any

from gpu_sections.document import counts
from gpu_sections.promises import SECTIONS

MARKS = {"held": "held", "broken": "**broken**", "not testable": "not testable"}


def report(document: dict[str, Any]) -> str:
    """The whole report of a pass."""
    lines = [f"# {title(document)}", "", *facts(document), "", *table(document)]
    lines += ["", "## How the sections ran", "", *_parts(document)]
    return "\n".join(lines) + "\n"


def title(document: dict[str, Any]) -> str:
    """What the pass ran on."""
    name = document["device"].get("name", "unknown device")
    return f"Rehearsal on {name}" if document["mode"] == "rehearsal" else f"Promises on {name}"


def facts(document: dict[str, Any]) -> list[str]:
    """Device, versions, date and the counts of states, a line each."""
    device = {k: v for k, v in document["device"].items() if k != "name" and v is not None}
    versions = {k: v for k, v in document["versions"].items() if v is not None}
    found = counts(document)
    lines = [
        (
            f"{document['date']}, {document['mode']} pass: {found['held']} held, "
            f"{found['broken']} broken, {found['not testable']} not testable."
        ),
        "",
        f"- device: {document['device'].get('name')}"
        + "".join(f", {k.replace('_', ' ')} {v}" for k, v in device.items()),
        "- versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()),
    ]
    for package, parts in document["missing"].items():
        lines.append(f"- missing: {package}, which {', '.join(parts)} would use")
    return lines


def table(document: dict[str, Any]) -> list[str]:
    """The promises with their states, a table for each section."""
    rehearsed = document["mode"] == "rehearsal"
    state = "state; rehearsal" if rehearsed else "state"
    lines: list[str] = []
    for letter, name in SECTIONS.items():
        rows = [p for p in document["promises"].values() if p["section"] == letter]
        lines += ["" if lines else None, f"### ({letter}) {name}", ""]  # type: ignore[list-item]
        lines += [f"| promise | shown by | {state} | figure |", "|---|---|---|---|"]
        lines += [_row(p, rehearsed=rehearsed) for p in rows]
    return [line for line in lines if line is not None]


def _row(promise: dict[str, Any], *, rehearsed: bool) -> str:
    said = MARKS[promise["state"]]
    shown = [promise["figure"], promise["reason"]]
    if rehearsed:
        said += f"; {promise['rehearsal']}"
        if promise["rehearsal"] == "ran":  # on small sizes: a figure would say nothing
            shown = []
    figure = "; ".join(text for text in shown if text)
    cells = (promise["sentence"], promise["shown_by"], said, figure)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _parts(document: dict[str, Any]) -> list[str]:
    lines = ["| part | ended | seconds | limit |", "|---|---|---|---|"]
    tails: list[str] = []
    for key, part in document["parts"].items():
        said = ": ".join(str(part[k]) for k in ("state", "reason") if k in part)
        lines.append(f"| {key} | {_cell(said)} | {part['seconds']:.1f} | {part['limit']:.0f} |")
        tails += ["", *(f"- {key}: {note}" for note in part["notes"])] if part["notes"] else []
        if part.get("tail"):
            tails += ["", f"The last lines of {key}:", "", "```text", *part["tail"], "```"]
    return lines + tails
