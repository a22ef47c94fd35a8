"""All subjects, in the order of the table's columns."""

from __future__ import annotations

from conformance.subjects.hf_accelerate import Accelerate
from conformance.subjects.lightning_fabric import Lightning
from conformance.subjects.ours import Ours
from conformance.subjects.torch_amp import TorchAmp

PEERS = (TorchAmp(), Accelerate(), Lightning())
OURS = tuple(Ours(level) for level in ("O0", "O1", "O2", "O3"))
SUBJECTS = (*PEERS, *OURS)
