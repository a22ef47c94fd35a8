"""The table of ``docs/conformance.md``, written from a run of every behaviour.

python studies/tests/conformance_table.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from conformance.behaviours.everything import CHAPTERS
from conformance.outcomes import Behaviour, Chapter, Outcome, outcome_of
from conformance.subjects.ours import ours
from conformance.subjects.protocol import Subject
from peers import PEERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
YES, NO, NONE = "yes", "no", "–"


def peer_cell(behaviour: Behaviour, subject: Subject, outcome: Outcome) -> str:
    """What the table says of a peer."""
    if outcome.kind == "not applicable":
        return NONE
    return (
        YES
        if outcome.kind == "holds"
        else f"{NO}: {behaviour.instead.get(subject.name, outcome.note)}"
    )


def our_cell(behaviour: Behaviour, outcomes: Sequence[tuple[Subject, Outcome]]) -> str:
    """What the table says of ours: one word where all levels agree, else each with its word."""
    by_word: dict[str, list[str]] = {}
    for subject, outcome in outcomes:
        if outcome.kind == "not applicable":
            continue
        word = YES
        if outcome.kind == "fails":
            reason = behaviour.purpose(subject)
            word = f"{NO}, on purpose: {reason}"
            if not reason:
                word = f"not yet: {outcome.note}"
        by_word.setdefault(word, []).append(subject.label)
    asked = sum(map(len, by_word.values()))
    if asked == len(outcomes) and len(by_word) == 1:
        return next(iter(by_word))
    return "; ".join(f"{', '.join(names)}: {word}" for word, names in by_word.items()) or NONE


def rows(chapter: Chapter) -> list[str]:
    """A line of the table for each behaviour."""
    result = []
    for behaviour in chapter.behaviours:
        peers = [peer_cell(behaviour, s, outcome_of(behaviour, s)) for s in PEERS]
        own = our_cell(behaviour, [(s, outcome_of(behaviour, s)) for s in ours(chapter)])
        name = behaviour.name.replace("``", "`")
        cells = " | ".join((name, *peers, own, behaviour.source))
        result.append(f"| {cells} |")
    return result


def table() -> str:
    """All chapters, each with its table."""
    names = [s.name for s in PEERS]
    head = " | ".join(("behaviour", *names, "mpdiag", "described in"))
    lines: list[str] = []
    for chapter in CHAPTERS:
        lines += [f"### {chapter.title}", "", f"| {head} |", "|---" * (len(names) + 3) + "|"]
        lines += [*rows(chapter), ""]
    return "\n".join(lines).rstrip()


def written() -> str:
    """The table that stands in the page."""
    text = PAGE.read_text(encoding="utf-8")
    return text.split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
