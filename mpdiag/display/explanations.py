"""What each finding means: a page of Markdown for each code, which terminal, site and dashboard show.

The pages lie in ``mpdiag/explanations/CODE.md``: a few lines of facts between ``---``, a heading, one
sentence, and the sections of ``SECTIONS``.
"""

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "explanations"
SECTIONS = ("What it means", "How it was computed", "How to fix it", "An example", "See also")
"""The headings of every page, in order."""
GROUPS = (
    "The recording",
    "Training",
    "Precision",
    "Ranks",
    "Gradients and loss scale",
    "Operations and activations",
    "Shapes and layout",
    "The probe",
    "A stored plan",
    "Comparison",
    "GPU profile",
    "CPU profile",
)
"""What findings are about, in the order in which they are listed."""


@dataclass(frozen=True)
class Explanation:
    """One finding's page.

    Attributes:
        code: As ``findings`` in JSON have it.
        severity: ``info``, ``warning`` or ``error``, or two of them: the numbers decide.
        about: One of ``GROUPS``.
        command: What prints the finding.
        summary: One sentence.
        sections: Markdown by heading.
    """

    code: str
    severity: str
    about: str
    command: str
    summary: str
    sections: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The page as plain values."""
        return asdict(self)


def command_for(code: str) -> str:
    """The command that explains a finding: the value of ``explained`` in JSON."""
    return f"mpdiag explain {code}"


@cache
def codes() -> tuple[str, ...]:
    """The codes of all findings, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.md")))


@cache
def explanation(code: str) -> Explanation | None:
    """The page of a finding; None for a code that no finding has."""
    if code not in codes():
        return None
    return parse(code, (FOLDER / f"{code}.md").read_text(encoding="utf-8"))


def meaning_of(code: str) -> str:
    """What a finding means, as plain text in one paragraph; "" for a code that no finding has."""
    page = explanation(code)
    return "" if page is None else " ".join(page.sections[SECTIONS[0]].replace("`", "").split())


def listing() -> dict[str, list[Explanation]]:
    """All pages by what they are about, in the order of ``GROUPS``."""
    found: dict[str, list[Explanation]] = {group: [] for group in GROUPS}
    for code in codes():
        page = explanation(code)
        if page is not None:
            found[page.about].append(page)
    return found


def parse(code: str, text: str) -> Explanation:
    """Read the page of a finding from its file's text."""
    _, facts, body = text.split("---\n", 2)
    known = dict(line.split(": ", 1) for line in facts.splitlines())
    head, *parts = body.split("\n## ")
    sections = {}
    for part in parts:
        title, _, content = part.partition("\n")
        sections[title] = content.strip()
    return Explanation(
        code=code,
        severity=known["severity"],
        about=known["about"],
        command=known["command"],
        summary=" ".join(head.strip().partition("\n")[2].split()),
        sections=sections,
    )
