"""A gallery of small trainings: half need FP32 somewhere, half need it nowhere.

    >>> from studies import exhibits as gallery
    >>> exhibit = gallery.load("naive_softplus")

Anything that flags operations (rules, lists, estimates) can be scored on it: see
``studies.exhibits.scoring``. What each exhibit needs is *not* written here: it comes from
training it in emulated FP16 (``studies/gallery_truth.py``). Importing this package loads no
torch; loading an exhibit does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mpdiag.display.wording import did_you_mean
from mpdiag.errors import UsageError

if TYPE_CHECKING:
    from studies.exhibits.exhibit import Exhibit

_ROOMS = ("losses", "layers", "physics", "classics", "twins")


def _all() -> dict[str, Exhibit]:
    found: dict[str, Exhibit] = {}
    for room in _ROOMS:
        exhibits: tuple[Exhibit, ...] = import_module(f"{__name__}.{room}").EXHIBITS
        found.update({e.name: e for e in exhibits})
    return found


def names() -> tuple[str, ...]:
    """Every name that ``load`` accepts."""
    return tuple(_all())


def load(name: str) -> Exhibit:
    """The exhibit with a name.

    Raises:
        UsageError: If there is none.
    """
    exhibits = _all()
    if name not in exhibits:
        hint = did_you_mean(name, exhibits)
        message = f"there is no exhibit {name!r}{hint}: choose one of {', '.join(sorted(exhibits))}"
        raise UsageError(message)
    return exhibits[name]
