"""Two profiles compared: what moved onto Tensor Cores, and what that gained."""

from dataclasses import asdict, dataclass
from typing import Any

from mpdiag.display.wording import counted, percent
from mpdiag.tensorcores.trace_profile import Profile
from mpdiag.tensorcores.work.traced_operation import OperationTime

_CLASSES = ("tensor_core", "cuda_core", "unknown", "layout", "helper", "other")


@dataclass(frozen=True)
class Move:
    """An operation whose class changed between two traces.

    Attributes:
        op, module, phase, size: The operation.
        before, now: The class of most of its matrix time.
        before_us, now_us: Time of one call.
    """

    op: str
    module: str
    phase: str
    size: str
    before: str
    now: str
    before_us: float
    now_us: float

    @property
    def gain(self) -> float:
        """How many times faster a call became."""
        return self.before_us / self.now_us if self.now_us else 1.0


@dataclass(frozen=True)
class ProfileComparison:
    """Two profiles side by side.

    Attributes:
        before, now: Shares of kernel time by class, and the total time.
        moves: Operations whose class changed, those that save most first.
        gained: Whether a larger share of the time is on Tensor Cores now.
    """

    before: dict[str, float]
    now: dict[str, float]
    moves: tuple[Move, ...]

    @property
    def gained(self) -> bool:
        """Whether a larger share is on Tensor Cores now."""
        return self.now["tensor_core"] > self.before["tensor_core"]

    @property
    def verdict(self) -> str:
        """What changed, in one sentence."""
        onto = sum(m.now == "tensor_core" for m in self.moves)
        off = sum(m.before == "tensor_core" for m in self.moves)
        words = f"{counted(onto, 'operation')} moved onto Tensor Cores"
        words += f", {off} off them" if off else ""
        return (
            f"Tensor Core share {percent(self.before['tensor_core'], 1)} → "
            f"{percent(self.now['tensor_core'], 1)}, kernel time "
            f"{self.before['time_us'] / 1000:.1f} → {self.now['time_us'] / 1000:.1f} ms; {words}"
        )

    def to_json(self) -> dict[str, Any]:
        """The ``against`` of ``mpdiag profile --json``."""
        moves = [asdict(m) | {"gain": m.gain} for m in self.moves]
        return {"verdict": self.verdict, "before": self.before, "now": self.now, "moves": moves}


def compare_profiles(before: Profile, now: Profile) -> ProfileComparison:
    """Join two profiles by operation, module, phase and size.

    Args:
        before: The profile from before the change.
        now: The profile from after it.
    """
    earlier, later = _by_place(before), _by_place(now)
    moves = []
    for key in earlier.keys() & later.keys():
        old, new = earlier[key], later[key]
        if _class(old) != _class(new):
            op, module, phase, size = key
            a, b = old.time_us / max(1, old.calls), new.time_us / max(1, new.calls)
            moves.append(Move(op, module, phase, size, _class(old), _class(new), a, b))
    moves.sort(key=lambda m: (m.now_us - m.before_us, m.op, m.module))
    return ProfileComparison(_shares(before), _shares(now), tuple(moves))


def _shares(profile: Profile) -> dict[str, float]:
    shares = {name: profile.fraction(name) for name in _CLASSES}
    return shares | {"time_us": profile.kernel_time_us}


def _by_place(profile: Profile) -> dict[tuple[str, str, str, str], OperationTime]:
    found: dict[tuple[str, str, str, str], OperationTime] = {}
    for judged in profile.operations:
        o = judged.operation
        if not o.op.startswith("(not linked)"):
            size = f"{o.work.m} × {o.work.n} × {o.work.k}" if o.work else ""
            key = (o.op, o.module, o.phase, size)
            if key not in found or o.time_us > found[key].time_us:
                found[key] = o
    return found


def _class(o: OperationTime) -> str:
    """The class of most of its matrix time, or of most of its time if it has none."""
    times = {name: float(getattr(o, f"{name}_us")) for name in _CLASSES}
    matrix = {name: times[name] for name in ("tensor_core", "cuda_core", "unknown")}
    return max(matrix if any(matrix.values()) else times, key=lambda name: times[name])
