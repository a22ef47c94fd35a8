"""Small trainings to try the toolkit on, and how to write one.

    >>> from mpdiag import workloads
    >>> workloads.names()
    ('digits', 'gpt', 'ssd')
    >>> ssd = workloads.load("ssd", mean_over="matched")  # options are its fields
    >>> mine = workloads.load("my_training.py")  # the one workload that a file defines

A workload is described in `mpdiag.workloads.protocol`. More of them are in the repository, under
`studies/workloads/`, and are found by name in a clone. Importing this package loads neither torch nor
scikit-learn; loading a workload does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
import typing
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import did_you_mean
from mpdiag.errors import InputError, UsageError
from mpdiag.installation.bundled import studied_workloads
from mpdiag.installation.extras import EXTRAS

if TYPE_CHECKING:
    from mpdiag.workloads.protocol import Workload

__all__ = ["BadOption", "DamagedWorkload", "UnknownWorkload", "load", "names"]

_BUILT_IN = ("digits", "gpt", "ssd")
_IN_THE_REPOSITORY = (
    "dcgan", "denoiser", "language_model", "speech", "translation", "two_stage", "vgg", "vit",
)  # fmt: skip
_OF_SCIKIT_LEARN = ("dcgan", "denoiser", "digits", "ssd", "two_stage", "vgg", "vit")
"""Their data comes with scikit-learn, which is asked for before anything is trained."""
SIZES = ("small", "large")
"""Sizes of every built-in workload: for two CPU cores, and for a GPU."""


class UnknownWorkload(UsageError, ValueError):
    """There is no workload of this name."""


class BadOption(UsageError, ValueError):
    """The workload has no such option, or the option cannot take this value."""


class DamagedWorkload(InputError):
    """A file of a workload is missing, cannot be imported, or defines no single workload."""


def names() -> tuple[str, ...]:
    """The built-in workloads, sorted."""
    return _BUILT_IN


def load(name: str, **options: Any) -> Workload:
    """A workload, with `options` in place of the defaults of its fields.

    Args:
        name: A built-in workload; in a clone, also a file's name in `studies/workloads/`; or the path
            of a file, which ends in `.py` and defines one frozen dataclass derived from `Workload`.
        **options: Its fields.

    Raises:
        UnknownWorkload: If there is none of this name here.
        DamagedWorkload: If the file is missing, cannot be imported, or defines none or several.
        MissingExtra: If its data comes with a package that is not installed.
        BadOption: If it does not take an option.
    """
    if name in _OF_SCIKIT_LEARN:
        EXTRAS["demo"].need(f"the data of {name}")
    kind = _class_in(_module_of(name), name)
    _check(name, kind, options)
    return kind(**options)


def _module_of(name: str) -> ModuleType:
    if name in _BUILT_IN:
        return import_module(f"{__name__}.{name}")
    if name.endswith(".py"):
        return _imported(Path(name))
    if name not in _IN_THE_REPOSITORY:
        hint = did_you_mean(name, (*_BUILT_IN, *_IN_THE_REPOSITORY))
        choice = f"choose one of {', '.join(_BUILT_IN)}, or name a file that defines one"
        raise UnknownWorkload(f"there is no workload {name!r}{hint}: {choice}")
    folder = studied_workloads()
    if folder is None:
        message = f"the workload {name!r} is not installed with mpdiag: run this command in a clone"
        raise UnknownWorkload(message)
    return _imported(folder / f"{name}.py")


_DEFINE = "define one frozen dataclass derived from Workload"


class _LeavesNoFile(SourceFileLoader):
    """Imports a file without writing compiled code beside it."""

    def set_data(self, *_args: Any, **_options: Any) -> None:
        """Keep nothing."""


def _imported(path: Path) -> ModuleType:
    """A file as a module of its own.

    Raises:
        DamagedWorkload: If it is missing, defines no dataclass, or raises while it is imported.
    """
    if not path.is_file():
        message = f"there is no file {path}: name a workload or a file that defines one"
        raise DamagedWorkload(message)
    source = path.read_bytes()
    if b"dataclass" not in source:  # a training script would train while it is imported
        raise DamagedWorkload(f"{path} defines no workload: {_DEFINE}")
    # Named by its content: the same file gives the same class again, a changed one a new class.
    digest = hashlib.sha256(bytes(path.resolve()) + b"\0" + source).hexdigest()[:12]
    name = f"workload_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _LeavesNoFile(name, str(path.resolve()))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look their module up
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        message = f"{path} cannot be imported ({type(error).__name__}: {error}): fix it first"
        raise DamagedWorkload(message) from error
    return module


def _class_in(module: ModuleType, name: str) -> type[Workload]:
    from mpdiag.workloads.protocol import Workload

    members: list[Any] = list(vars(module).values())
    classes = [m for m in members if isinstance(m, type) and issubclass(m, Workload)]
    own = [kind for kind in classes if kind.__module__ == module.__name__]
    kinds = [k for k in own if not inspect.isabstract(k) and hasattr(k, "__dataclass_fields__")]
    if len(kinds) != 1:
        count = f"{len(kinds)} workloads" if len(kinds) > 1 else "no workload"
        raise DamagedWorkload(f"{name} defines {count}: {_DEFINE}")
    return kinds[0]


def _check(name: str, kind: type[Workload], options: dict[str, Any]) -> None:
    """Refuse the first option whose name or value the workload does not know."""
    types = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # each is one
    for option, value in options.items():
        if option not in known:
            accepted = f"its options are {', '.join(known)}" if known else "it has none"
            hint = did_you_mean(option, known)
            raise BadOption(f"the workload {name!r} has no option {option!r}{hint}: {accepted}")
        choices = typing.get_args(types[option])  # of a Literal; other types have none
        if choices and value not in choices:
            accepted = ", ".join(map(str, choices))
            hint = did_you_mean(str(value), map(str, choices))
            raise BadOption(
                f"the workload {name!r} has no {option} {value!r}{hint}: choose one of {accepted}"
            )
