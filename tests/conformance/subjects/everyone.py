"""All subjects, in the order of the table's columns."""

from __future__ import annotations

from conformance.outcomes import Chapter
from conformance.subjects.hf_accelerate import Accelerate
from conformance.subjects.lightning_fabric import Lightning
from conformance.subjects.ours import Ours
from conformance.subjects.torch_amp import TorchAmp

from mpdiag import MixedPrecision

PEERS = (TorchAmp(), Accelerate(), Lightning())
LEVELS = tuple(Ours(level) for level in ("O0", "O1", "O2", "O3"))
IS_PROPERTY = isinstance(vars(MixedPrecision)["scaler"], property)
DROP_IN = () if IS_PROPERTY else (Ours("O1", drop_in=True), Ours("O2", drop_in=True))


def ours(chapter: Chapter) -> tuple[Ours, ...]:
    """Ours, as far as a chapter is asked of them."""
    return (*LEVELS, *DROP_IN) if chapter.about_loops else LEVELS
