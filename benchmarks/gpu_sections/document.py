"""The results of a pass: one JSON document, rewritten after every part.

A document has ``schema_version``, ``mode`` (full, quick or rehearsal), ``date``, ``device``,
``versions``, ``missing``, ``parts`` (how each child process ended) and ``promises``. The state of a
promise is ``held``, ``broken`` or ``not testable``; with the last goes a ``reason``. A rehearsal on a
CPU settles nothing, so all of its promises are not testable; ``rehearsal`` then says whether the check
``ran``, ``failed`` or was ``not run``.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from gpu_sections.parts import PARTS
from gpu_sections.promises import PROMISES, named, of_part

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_VERSION = 1
FINISHED, LEFT_OUT = "finished", "left out"
"""How a part ended that ran to its end, and one that a quick pass does not have; any other is run again
with ``--resume``."""


def new(mode: str, facts: dict[str, Any], missing: dict[str, list[str]]) -> dict[str, Any]:
    """A document in which nothing has been settled yet.

    Args:
        mode: ``full``, ``quick`` or ``rehearsal``.
        facts: ``date``, ``device`` and ``versions``.
        missing: Parts by the package they lack.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "mode": mode,
        **facts,
        "missing": missing,
        "parts": {},
        "promises": {p.id: _untouched(p.id, "its section was not run") for p in PROMISES},
    }


def _untouched(name: str, reason: str) -> dict[str, Any]:
    promise = named(name)
    return {
        "section": promise.section,
        "sentence": promise.sentence,
        "shown_by": promise.shown_by,
        "state": "not testable",
        "reason": reason,
        "figure": "",
        "figures": {},
        "rehearsal": "not run",
    }


def enter(
    document: dict[str, Any], part: str, ended: dict[str, Any], lines: list[dict[str, Any]]
) -> None:
    """Put what a part reported into the document.

    Args:
        document: Changed in place.
        part: Its key.
        ended: ``state``, ``seconds``, ``limit`` and, where it did not finish, ``reason`` and ``tail``.
        lines: What it reported, a dict a line; later ones overrule earlier ones.
    """
    rehearsed = document["mode"] == "rehearsal"
    reason = f"its section {ended['reason']}" if "reason" in ended else ""
    for promise in of_part(part):
        document["promises"][promise.id] = _untouched(
            promise.id, reason or "its section did not come to it"
        )
    notes = []
    for line in lines:
        if "note" in line:
            notes.append(line["note"])
        elif line.get("promise") in {p.id for p in of_part(part)}:
            entry = _untouched(line["promise"], "")
            document["promises"][line["promise"]] = entry | _settled(line, rehearsed=rehearsed)
    document["parts"][part] = {**ended, "notes": notes}


def _settled(line: dict[str, Any], *, rehearsed: bool) -> dict[str, Any]:
    """The fields of a promise that a line of a part's report settles."""
    held, reason = line["held"], line.get("reason", "")
    fields = {"figure": line.get("figure", ""), "figures": line.get("figures", {})}
    if held is None:
        return fields | {"state": "not testable", "reason": reason}
    if not rehearsed:
        return fields | {"state": "held" if held else "broken", "reason": reason}
    failed = not held and (named(line["promise"]).kind == "exact" or line.get("raised", False))
    why = "rehearsed on a CPU" + (f": {reason}" if reason else "")
    return fields | {
        "state": "not testable",
        "reason": why,
        "rehearsal": "failed" if failed else "ran",
    }


def done(document: dict[str, Any], part: str) -> bool:
    """Whether a part ran to its end in an earlier pass."""
    return document["parts"].get(part, {}).get("state") == FINISHED


def same_pass(document: dict[str, Any], mode: str, facts: dict[str, Any]) -> bool:
    """Whether a stored document can be gone on with: of the same device, with the same versions."""
    return (
        document.get("schema_version") == SCHEMA_VERSION
        and document.get("mode") == mode
        and document.get("device", {}).get("name") == facts["device"]["name"]
        and document.get("versions") == facts["versions"]
    )


def verdict(document: dict[str, Any]) -> int:
    """The exit code: 1 if something is broken or did not run to its end, else 0."""
    promises = document["promises"].values()
    bad = any(p["state"] == "broken" or p["rehearsal"] == "failed" for p in promises)
    unfinished = any(p["state"] not in (FINISHED, LEFT_OUT) for p in document["parts"].values())
    return int(bad or unfinished)


def counts(document: dict[str, Any]) -> dict[str, int]:
    """How many promises are in each state."""
    states = [p["state"] for p in document["promises"].values()]
    return {state: states.count(state) for state in ("held", "broken", "not testable")}


def load(path: Path) -> dict[str, Any] | None:
    """A stored document; None if there is none, or it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def save(path: Path, document: dict[str, Any]) -> None:
    """Write a document beside its place and rename it: a cut-off run keeps a whole file."""
    order = {part.key: i for i, part in enumerate(PARTS)}
    parts = dict(sorted(document["parts"].items(), key=lambda item: order[item[0]]))
    text = json.dumps(_finite({**document, "parts": parts}), indent=1, ensure_ascii=False)
    write(path, text + "\n")


def write(path: Path, text: str) -> None:
    """Write a text file in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: their names replace them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
