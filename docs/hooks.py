"""What the site computes as it is built: options of commands, and the pages of findings.

``<!-- options: NAME -->`` becomes the table of a command's options, taken from the command itself.
``<!-- findings -->`` becomes the table of all findings, and each of them gets a page, the one that
``mpdiag explain`` prints. What commands print stands in the pages: ``outputs.py`` writes it.
"""

from __future__ import annotations

import re
from typing import Any

_OPTIONS = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)
_FINDINGS = "<!-- findings -->"
_POWER = re.compile(r"\b([0-9a-z])\^(?:\((.+?)\)|([-−]?\w+(?:\.\d+)?))")
_OUTPUT = re.compile(r"^<!-- output.*-->\n```text$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the page of each finding; called by mkdocs."""
    from mkdocs.structure.files import File

    from mpdiag.display.explanations import codes

    for code in codes():
        address = f"findings/{code}.md"
        files.append(File.generated(config, address, content=finding_page(code)))
    return files


def finding_page(code: str) -> str:
    """A finding's page, with links where ``mpdiag explain`` prints names."""
    from mpdiag.display.explanations import SECTIONS, codes, explanation

    page = explanation(code)
    if page is None:
        message = f"there is no finding {code}"
        raise KeyError(message)
    command = page.command.split()[1]
    link = f"[`{page.command}`](../commands/{command}.md)"
    facts = f"**{page.severity}** · {page.about} · printed by {link}"
    parts = [f"# {code}", facts, page.summary]
    for title in SECTIONS:
        text = page.sections[title]
        if title == SECTIONS[-1]:
            text = re.sub(
                r"`([\w-]+)`", lambda m: f"[{m[0]}]({m[1]}.md)" if m[1] in codes() else m[0], text
            )
        parts += [f"## {title}", text]
    return "\n\n".join(parts) + "\n"


def findings_table() -> str:
    """All findings as tables of Markdown, one for each thing that they are about."""
    from mpdiag.display.explanations import listing

    parts = []
    for group, pages in listing().items():
        rows = [f"| [`{p.code}`]({p.code}.md) | {p.severity} | {p.summary} |" for p in pages]
        parts += [f"## {group}", "\n".join(["| finding | severity | |", "|---|---|---|", *rows])]
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in a page before it becomes HTML; called by mkdocs."""
    if _FINDINGS in markdown:
        markdown = markdown.replace(_FINDINGS, findings_table())
    markdown = _OPTIONS.sub(lambda match: options_table(match[1]), markdown)
    return _OUTPUT.sub("\n```{.text .output}", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Raise exponents such as ``2^-24``, which Markdown leaves as they are; called by mkdocs."""
    parts = re.split(r"(<(?:pre|code)\b.*?</(?:pre|code)>|<[^>]*>)", html, flags=re.DOTALL)
    return "".join(part if part.startswith("<") else _POWER.sub(_raised, part) for part in parts)


def _raised(match: re.Match[str]) -> str:
    return f"{match[1]}<sup>{match[2] or match[3]}</sup>"


def commands() -> dict[str, Any]:
    """Every command of the program, by name."""
    from mpdiag.cli import COMMANDS, command

    return {name: command(name) for name in COMMANDS}


def options_table(name: str) -> str:
    """Arguments and options of a command as a Markdown table."""
    import click

    command = commands()[name]
    context = click.Context(command, info_name=f"mpdiag {name}")
    usage = command.get_usage(context).removeprefix("Usage: ")
    rows = [_row(parameter, context) for parameter in command.get_params(context)]
    return "\n".join(
        ["```text", " ".join(usage.split()), "```", "", "| | | default |", "|---|---|---|", *rows]
    )


def _row(parameter: Any, context: Any) -> str:
    words = parameter.get_help_record(context)
    if words is None and getattr(parameter, "hidden", False):  # no room in a help of 24 lines
        words = (f"{parameter.opts[0]} {parameter.metavar}", parameter.help)
    if words is None:  # an argument of older versions of click
        words = (parameter.make_metavar(context), parameter.help or "")
    name, text = words
    text = re.sub(r"\s*\[(default|required|\w+[<>=]|x[<>]).*?\]", "", text).strip()
    default = "" if callable(parameter.default) else parameter.default
    plain = default in (None, "", False, ()) or "--help" in parameter.opts
    shown = "" if plain else f"`{default}`"
    if parameter.required:
        shown = "required"
    return f"| `{name}` | {text} | {shown} |".replace("\\|", "|")
