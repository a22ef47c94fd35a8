"""What each extra of the package brings, and the sentence for one that is not there."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mpdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


class MissingExtra(UsageError, ImportError):
    """A package of an extra is not installed."""


@dataclass(frozen=True)
class Extra:
    """An extra of ``pyproject.toml``.

    Attributes:
        name: As in ``pip install 'mpdiag[NAME]'``.
        serves: What for.
        packages: Name of each package, and what it is imported as.
    """

    name: str
    serves: str
    packages: dict[str, str]

    @property
    def install(self) -> str:
        """The line that installs it."""
        return f"pip install 'mpdiag[{self.name}]'"

    def missing(self) -> list[str]:
        """Its packages that cannot be imported here."""
        return [name for name, module in self.packages.items() if find_spec(module) is None]

    def need(self, what: str = "") -> None:
        """Do nothing where it is installed.

        Args:
            what: Who needs it; by default what it serves.

        Raises:
            MissingExtra: If a package of it is not there.
        """
        if missing := self.missing():
            raise self._lack(missing, what)

    @contextmanager
    def imports(self, what: str) -> Iterator[None]:
        """Around imports of its packages: one that is not installed is said in a sentence."""
        try:
            yield
        except ModuleNotFoundError as error:
            lacking = (error.name or "").partition(".")[0]
            names = [name for name, module in self.packages.items() if module == lacking]
            if not names:
                raise
            raise self._lack(names, what) from error

    def _lack(self, names: list[str], what: str) -> MissingExtra:
        listed = " and ".join(names)
        return MissingExtra(f"{what or self.serves} needs {listed}: {self.install}")


EXTRAS = {
    extra.name: extra
    for extra in (
        Extra("demo", "the demo's data", {"scikit-learn": "sklearn", "pillow": "PIL"}),
        Extra("app", "the dashboard", {"streamlit": "streamlit"}),
        Extra("lightning", "Lightning", {"lightning": "lightning"}),
        Extra(
            "huggingface",
            "Transformers",
            {"transformers": "transformers", "accelerate": "accelerate"},
        ),
        Extra("accelerate", "Accelerate", {"accelerate": "accelerate"}),
        Extra("tensorboard", "mpdiag board", {"tensorboard": "tensorboard"}),
        Extra("wandb", "mpdiag board", {"wandb": "wandb"}),
        Extra("s3", "runs at s3://", {"s3fs": "s3fs"}),
    )
}
"""What a user may want; the extras of those who work on the package itself are not among them."""
