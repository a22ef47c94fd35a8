"""Whether a layer has outgrown what the last recorded operations showed."""

PASSES = 4.0
"""A layer's largest output passes what it was when it is more than so many times as large."""


class LayerGrowth:
    """Compares layers' largest outputs with those of the steps whose operations were recorded.

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

    def note(self, step: int, name: str, size: float) -> None:
        """Note the largest |x| that a layer has put out in a recorded step; steps come in order."""
        known = self._known.get(name)
        if known is None or step <= self._recorded:
            self._known[name] = max(size, known or 0.0)
        elif size > PASSES * known:
            self._known[name], self.passed = size, True
