"""HTML from templates: one Jinja environment for reports and notebooks, with autoescape on.

A template is text inside the package, named by its path from there. What it is given is escaped
unless it is ``Markup``, and a name that it is not given is an error rather than an empty string.
Jinja is imported when something is first rendered, so that importing a plan stays cheap.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The environment of every template in the package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("mpdiag", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> str:
    """A whole document.

    Args:
        template: Such as ``reports/templates/run.html.j2``.
        values: What it is given.
    """
    return environment().get_template(template).render(**values)


def render_macro(template: str, macro: str, *arguments: Any) -> Markup:
    """A part of a page: one macro of a template.

    Args:
        template: Such as ``display/templates/notebook.html.j2``.
        macro: Its name.
        arguments: What it is given.
    """
    html: Markup = getattr(environment().get_template(template).module, macro)(*arguments)
    return html
