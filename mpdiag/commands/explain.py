"""``mpdiag explain``: what a finding means, and what to do about it."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from mpdiag.commands.shared.options import JsonOption
from mpdiag.display.explanations import codes, explanation, listing
from mpdiag.display.wording import did_you_mean
from mpdiag.errors import UsageError

_META = "meta.json"  # as runs have it; the module that says so would load more than this needs


def explain(
    finding: Annotated[
        str | None,
        Argument(
            metavar="FINDING",
            autocompletion=lambda: list(codes()),
            help="The code in brackets below a finding. Without one, list all codes.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a finding. What it means, how it was computed, how to fix it."""
    from mpdiag.reports import terminal
    from mpdiag.reports.text.lists import explanation_text, listing_text

    if finding is None:
        if as_json:
            pages = [page.to_json() for group in listing().values() for page in group]
            terminal.show_json({"schema_version": 1, "findings": pages})
        else:
            terminal.show(listing_text())
        return
    code = finding.strip("[]").lower()
    page = explanation(code)
    if page is None:
        raise UsageError(_refusal(finding, code))
    if as_json:
        terminal.show_json({"schema_version": 1, **page.to_json()})
    else:
        terminal.show(explanation_text(page))


def _refusal(word: str, code: str) -> str:
    """What to do instead, in a sentence: a run is not a finding, and a name may be mistyped."""
    path = Path(word or "finding")  # an empty word is no path
    if (path / _META).is_file():
        return f"{word} is a run, not a finding: its findings are in mpdiag analyze {word}"
    if path.exists() or len(path.parts) > 1:
        return f"{word} is a path, not a finding: mpdiag explain lists the codes of all findings"
    hint = did_you_mean(code, codes())
    named = code or repr(code)
    return f"there is no finding {named}{hint}: mpdiag explain lists all of them"
