"""Whether a layer has outgrown what the last recorded operations showed.

Its largest output, how many outputs there are, as of longer texts, or how many are 0, as where a sensor
falls silent and a standard deviation is divided by.
"""

from collections.abc import Iterable

PASSES = 4.0
"""A size passes what it was when it is more than so many times as large."""


class LayerGrowth:
    """Compares sizes of layers' outputs with those of the steps whose operations were recorded.

    Attributes:
        passed: Whether one has passed since operations were recorded last. A size that has passed once
            must be passed in turn: a layer whose values jump up and down asks for operations once.
    """

    def __init__(self) -> None:
        self.passed = False
        self._recorded = -1
        self._known: dict[str, float] = {}

    def operations_recorded(self, step: int) -> None:
        """The operations of a step were recorded; its layers' sizes may be noted before or after."""
        self._recorded, self.passed = step, False

    def note(self, step: int, sizes: Iterable[tuple[str, float]]) -> None:
        """Note sizes of a recorded step by name; steps come in order."""
        known, shown = self._known, step <= self._recorded
        for name, size in sizes:
            before = known.get(name)
            if before is None or (shown and size > before):
                known[name] = size
            elif size > PASSES * before and not shown:
                known[name], self.passed = size, True
