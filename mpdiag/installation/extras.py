"""What each extra of the package installs, and the error for one that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mpdiag.errors import UsageError
from mpdiag.hardware.tables import read_table


class MissingExtra(UsageError, ImportError):
    """A package of an extra is not installed."""


@dataclass(frozen=True)
class Extra:
    """An extra of ``pyproject.toml``.

    Attributes:
        name: As in ``pip install '.[NAME]'`` in a clone.
        serves: What it is for.
        packages: The name of each package, and the module it is imported as.
    """

    name: str
    serves: str
    packages: dict[str, str]

    @property
    def install(self) -> str:
        """The command that installs its packages, wherever this package came from.

        Not by the extra's own name: an index may have no package of this name, or another's.
        """
        return f"pip install {' '.join(self.packages)}"

    def missing(self) -> list[str]:
        """Its packages that cannot be imported here."""
        return [name for name, module in self.packages.items() if find_spec(module) is None]

    def need(self, what: str = "") -> None:
        """Raise unless it is installed.

        Args:
            what: What needs it; by default what it is for.

        Raises:
            MissingExtra: If one of its packages is missing.
        """
        if missing := self.missing():
            raise self._lack(missing, what)

    @contextmanager
    def imports(self, what: str) -> Iterator[None]:
        """A context for imports of its packages, which turns a missing one into ``MissingExtra``."""
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


EXTRAS: dict[str, Extra] = {}
for _row in read_table(Path(__file__).with_name("extras.tsv")):
    _extra = EXTRAS.setdefault(_row["extra"], Extra(_row["extra"], _row["serves"], {}))
    _extra.packages[_row["package"]] = _row["module"]
"""Extras for users; those for developers of the package are not listed."""
