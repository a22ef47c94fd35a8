"""Small trainings to try the toolkit on, with data that ships with installed libraries.

    >>> from mpdiag import workloads
    >>> workloads.names()
    ('dcgan', 'denoiser', 'digits', 'gpt', 'language_model', 'speech', 'ssd', 'translation',
     'two_stage', 'vgg', 'vit')
    >>> ssd = workloads.load("ssd", mean_over="matched")  # options are its fields

How to start, train and evaluate a workload is described in `mpdiag.workloads.protocol`. Importing this
package loads neither torch nor scikit-learn; loading a workload does.
"""

from __future__ import annotations

import dataclasses
import typing
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import did_you_mean
from mpdiag.errors import UsageError
from mpdiag.installation.extras import EXTRAS

if TYPE_CHECKING:
    from mpdiag.workloads.protocol import Workload

__all__ = ["BadOption", "UnknownWorkload", "load", "names"]

# name -> class; the class lives in the module of that name in this folder.
_CLASSES = {
    "dcgan": "Dcgan",
    "denoiser": "Denoiser",
    "digits": "Digits",
    "gpt": "Gpt",
    "language_model": "LanguageModel",
    "speech": "Speech",
    "ssd": "Ssd",
    "translation": "Translation",
    "two_stage": "TwoStage",
    "vgg": "Vgg",
    "vit": "Vit",
}
_OF_REAL_IMAGES = ("dcgan", "denoiser", "digits", "ssd", "two_stage", "vgg", "vit")
"""Their data comes with scikit-learn."""


class UnknownWorkload(UsageError, ValueError):
    """There is no workload of this name."""


class BadOption(UsageError, ValueError):
    """The workload has no such option, or the option cannot take this value."""


SIZES = ("small", "large")
"""Sizes of every workload: for two CPU cores, and for a GPU."""


def names() -> tuple[str, ...]:
    """Every name that `load` accepts, sorted."""
    return tuple(sorted(_CLASSES))


def load(name: str, **options: Any) -> Workload:
    """The workload called `name`; `options` replace the defaults of its fields.

    Raises:
        UnknownWorkload: If there is none.
        MissingExtra: If its data comes with a package that is not installed.
        BadOption: If it does not take an option.
    """
    if name not in _CLASSES:
        hint = did_you_mean(name, names())
        message = f"there is no workload {name!r}{hint}: choose one of {', '.join(names())}"
        raise UnknownWorkload(message)
    if name in _OF_REAL_IMAGES:
        EXTRAS["demo"].need(f"the data of {name}")
    kind: type[Workload] = getattr(import_module(f"{__name__}.{name}"), _CLASSES[name])
    _check(name, kind, options)
    return kind(**options)


def _check(name: str, kind: type[Workload], options: dict[str, Any]) -> None:
    """Refuse the first option whose name or value the workload does not know."""
    types = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # each is one
    for option, value in options.items():
        if option not in known:
            accepted = f"its options are {', '.join(known)}" if known else "it has none"
            hint = did_you_mean(option, known)
            message = f"the workload {name!r} has no option {option!r}{hint}: {accepted}"
            raise BadOption(message)
        choices = typing.get_args(types[option])  # of a Literal; other types have none
        if choices and value not in choices:
            accepted = ", ".join(map(str, choices))
            hint = did_you_mean(str(value), map(str, choices))
            message = (
                f"the workload {name!r} has no {option} {value!r}{hint}: choose one of {accepted}"
            )
            raise BadOption(message)
