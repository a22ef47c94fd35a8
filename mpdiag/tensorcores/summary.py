"""A trace in a few sentences: what was eligible, what each cause costs, steps, idle time."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpdiag.display import wording
from mpdiag.display.wording import counted
from mpdiag.files.documents import finite
from mpdiag.hardware.alignment import is_amd
from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.causes import JudgedOperation, Worth
from mpdiag.tensorcores.roofline import AchievedRate, speedup
from mpdiag.tensorcores.timeline.host_spans import GAP_CAUSES
from mpdiag.tensorcores.timeline.sweep import Timeline, Window
from mpdiag.tensorcores.work.traced_operation import OperationTime

MANY = 1e6
"""A bound above this means that the rest is nothing."""
MOST_SIZES = 4
LEAST = 0.01
"""Share of the time below which something is left out of a sentence."""
LITTLE = 0.0005
"""The same of a part of a whole that is told by its parts."""
_CAUSES = read_table(Path(__file__).with_name("causes.tsv"))
CAUSES = {row["cause"]: row["label"] for row in _CAUSES}
"""What each cause is called."""
SHORT = {row["cause"]: row["short"] for row in _CAUSES}
"""The same in a table."""
IDLE_CAUSES = {row["cause"]: row for row in read_table(Path(__file__).with_name("idle_causes.tsv"))}
"""What is said of idle time, by its cause."""
IDLE = {cause: row["label"] for cause, row in IDLE_CAUSES.items()}
_KERNELS = (
    ("tensor_core", "on Tensor Cores"),
    ("cuda_core", "matrix work on CUDA cores"),
    ("collective", "collectives"),
    ("unknown", "unknown kernels"),
)


_AMD = (
    ("Tensor Core", "matrix core"),
    ("CUDA core", "vector unit"),
    ("CUDA graph", "HIP graph"),
    ("CUDA and cuDNN", "ROCm"),
    ("nvidia-smi dmon", "amd-smi monitor"),
    ("with ncu", "with rocprofv3"),
)


def in_words_of(words: str, *, amd: bool) -> str:
    """A sentence about NVIDIA's units and tools; with ``amd`` about AMD's."""
    for nvidias, amds in _AMD if amd else ():
        words = words.replace(nvidias, amds)
    if amd and words.startswith(tuple(amds for _, amds in _AMD)):
        return words[0].upper() + words[1:]
    return words


def is_of_amd(profile: Mapping[str, Any]) -> bool:
    """Whether the profile is of a GPU of AMD's, see ``is_amds``."""
    device, kernels = profile.get("device"), profile.get("kernels")
    known = device if isinstance(device, dict) else {}
    rows = kernels if isinstance(kernels, list) else []
    written_for = (str(k.get("generation")) for k in rows if isinstance(k, dict))
    return is_amds(str(known.get("name")), known.get("generation"), written_for)


def is_amds(name: str, generation: str | None, kernels: Iterable[str]) -> bool:
    """Whether a GPU is AMD's, by its name, its generation or those that its kernels are written for."""
    return generation == "cdna" or is_amd(name) or any(k.startswith("gfx") for k in kernels)


def percent(share: float) -> str:
    """A share with one decimal; a trace tells no more."""
    return wording.percent(share, 1)


def at_most(bound: float) -> str:
    """Amdahl's bound in words."""
    return f"at most {bound:.2f}×" if bound < MANY else "all there is"


def milliseconds(microseconds: float) -> str:
    """A time as people read it."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    return f"{microseconds / 1e3:.1f} ms" if microseconds >= 1e3 else f"{microseconds:.0f} µs"


@dataclass(frozen=True)
class Eligibility:
    """Kernel time by whether its operation could use Tensor Cores, and did.

    Attributes:
        total_us: Of all kernels.
        times, counts: Time and number of eligible operations that used them (``"used"``), that did not
            (``"not_used"``) and of which the trace does not say (``"use_unknown"``), and of those of
            which it does not say whether they are eligible (``"eligibility_unknown"``).
    """

    total_us: float
    times: Mapping[str, float]
    counts: Mapping[str, int]

    def share(self, *classes: str) -> float:
        """Share of the time of all kernels."""
        return sum(self.times[name] for name in classes) / (self.total_us or 1.0)

    @property
    def eligible(self) -> float:
        """Share of kernel time in operations known to be eligible."""
        return self.share("used", "not_used", "use_unknown")

    @property
    def used_range(self) -> tuple[float, float] | None:
        """The least and the most of the eligible time that used them; None where none is eligible.

        The least counts everything unknown as not used, the most as used.
        """
        unknown = self.times["use_unknown"] + self.times["eligibility_unknown"]
        used, whole = self.times["used"], self.times["used"] + self.times["not_used"] + unknown
        return (used / whole, (used + unknown) / whole) if whole else None

    def to_json(self) -> dict[str, Any]:
        """The ``eligibility`` of ``mpdiag profile --json``; fractions are of all kernels' time."""
        limits = self.used_range
        return {
            "eligible_fraction": self.eligible,
            **{f"{name}_fraction": self.share(name) for name in self.times},
            "operations": dict(self.counts),
            "used_of_eligible_least": limits[0] if limits else None,
            "used_of_eligible_most": limits[1] if limits else None,
        }


_BY_USE = {True: "used", False: "not_used", None: "use_unknown"}


def sum_eligibility(judged: Iterable[JudgedOperation], total_us: float) -> Eligibility:
    """Add operations up.

    Args:
        judged: With ``eligible`` and ``used``. Where an operation's calls ran on both kinds of
            cores, its time is shared out as its matrix kernels' time is.
        total_us: Time of all kernels.
    """
    times = dict.fromkeys((*_BY_USE.values(), "eligibility_unknown"), 0.0)
    counts = dict.fromkeys(times, 0)
    for j in judged:
        if j.eligible is False:
            continue
        name = "eligibility_unknown" if j.eligible is None else _BY_USE[j.used]
        counts[name] += 1
        for part, spent in _shared_out(j.operation, name).items():
            times[part] += spent
    return Eligibility(total_us, times, counts)


def _shared_out(o: OperationTime, name: str) -> dict[str, float]:
    matrix = o.tensor_core_us + o.cuda_core_us + o.unknown_us
    proved = name == "used" and o.verdict != "tensor_core"  # by its rate
    if name == "eligibility_unknown" or proved or not matrix:
        return {name: o.time_us}
    parts = {"used": o.tensor_core_us, "not_used": o.cuda_core_us, "use_unknown": o.unknown_us}
    return {part: o.time_us * spent / matrix for part, spent in parts.items()}


def eligible_sentence(e: Eligibility) -> str:
    """How much could have used Tensor Cores, and did; "" where nothing is known to be matrix work.

    Its shares count all of an operation's kernels, and so exceed those of the verdict, which counts
    the matrix kernels alone.
    """
    number = sum(e.counts[name] for name in _BY_USE.values())
    unknown = percent(e.share("eligibility_unknown"))
    if not number and not e.counts["eligibility_unknown"]:
        return ""
    if not number:
        return (
            f"Eligible for Tensor Cores: unknown for {unknown} of kernel time (no shapes recorded)"
        )
    parts = [f"{percent(e.share('used'))} used them" if e.times["used"] else "none used them"]
    if e.times["not_used"]:
        parts.append(f"{percent(e.share('not_used'))} did not")
    if e.times["use_unknown"]:
        parts.append(f"unknown for {percent(e.share('use_unknown'))}")
    words = (
        f"Eligible for Tensor Cores: {counted(number, 'operation')}, {percent(e.eligible)} "
        f"of kernel time with all their kernels; {', '.join(parts)}"
    )
    if e.share("eligibility_unknown") >= LITTLE:
        words += f"; eligibility unknown: {unknown}"
    return words


def rate_text(rate: AchievedRate | None) -> str:
    """TFLOP/s, and the share of the peak in brackets; "" where it is not known."""
    if rate is None:
        return ""
    exact = rate.least >= 0.995 * rate.most
    words = _number(rate.most)
    if not exact:
        words = f"≤ {words}" if not rate.least else f"{_number(rate.least)}–{words}"
    if rate.above_peak:
        return f"{words} (> peak)"
    if rate.shares is None:
        return words
    low, high = (f"{100 * s:.0f}" if s >= 0.01 else "< 1" for s in rate.shares)
    return f"{words} ({high} %)" if exact or not rate.least else f"{words} ({low}–{high} %)"


def _number(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"


@dataclass(frozen=True)
class CauseGroup:
    """What one cause costs, everywhere together.

    Attributes:
        cause: Its code.
        label: What it is called.
        operations: How many.
        share: Of kernel time, the part that a fix affects.
        bound: The speed-up of all kernels together if that part vanished.
        run_bound: The speed-up of the recorded time; None where the trace has no times.
        fix: The fix that most of that time has.
        others: How many operations have another one.
    """

    cause: str
    label: str
    operations: int
    share: float
    bound: float
    fix: str
    others: int
    run_bound: float | None = None

    @property
    def sentence(self) -> str:
        """``TF32 off: 5 operations, 62.0 % of kernel time, at most 2.63×``.

        Where kernels do not fill the recorded time, the bound is that of the recorded time.
        """
        count = counted(self.operations, "operation")
        bound = at_most(self.bound)
        if self.run_bound is not None and self.bound - self.run_bound >= 0.01 * self.bound:
            bound = f"{at_most(self.run_bound)} for the whole run"
        return f"{self.label}: {count}, {percent(self.share)} of kernel time, {bound}"

    def to_json(self) -> dict[str, Any]:
        """An entry of ``causes`` in ``mpdiag profile --json``."""
        return {
            "cause": self.cause,
            "label": self.label,
            "operations": self.operations,
            "fraction": self.share,
            "amdahl_bound": finite(self.bound),
            "run_amdahl_bound": None if self.run_bound is None else finite(self.run_bound),
            "sentence": self.sentence,
            "fix": self.advice,
        }

    @property
    def advice(self) -> str:
        """The fix, and how many operations need another one."""
        if not self.others or not self.fix:
            return self.fix
        count = counted(self.others, "operation needs", "operations need")
        return f"{self.fix} ({count} another fix)"


def cause_groups(
    operations: Sequence[JudgedOperation],
    worths: Sequence[Worth],
    total_us: float,
    *,
    run_us: float | None = None,
    amd: bool = False,
) -> list[CauseGroup]:
    """The causes that have a fix, matrix work first, each by the time it affects.

    Args:
        operations: All of a trace.
        worths: What fixing each cause could gain.
        total_us: Time of all kernels.
        run_us: The recorded time; None where the trace does not say when kernels ran.
        amd: Whether the GPU is AMD's.
    """
    whole = total_us or 1.0
    members: dict[str, list[JudgedOperation]] = {}
    for judged in operations:
        if judged.affected_us > 0:
            members.setdefault(judged.cause, []).append(judged)
    groups = []
    for worth in worths:
        found = members.get(worth.cause, [])
        if not found:
            continue
        fix, others = _commonest(found)
        groups.append(
            CauseGroup(
                worth.cause,
                in_words_of(CAUSES.get(worth.cause, worth.cause.replace("_", " ")), amd=amd),
                worth.operations,
                worth.affected_us / whole,
                worth.amdahl_bound,
                fix,
                others,
                speedup(worth.affected_us / run_us) if run_us else None,
            )
        )
    return sorted(groups, key=lambda g: (g.cause == "outside", -g.share))


def summary_sentences(eligibility: Eligibility, timeline: Timeline | None) -> list[str]:
    """What was eligible, and where the time went, as far as the trace tells."""
    sentences = [eligible_sentence(eligibility)]
    if timeline is not None:
        sentences += [step_sentence(timeline), idle_sentence(timeline)]
    return [sentence for sentence in sentences if sentence]


def _commonest(found: Sequence[JudgedOperation]) -> tuple[str, int]:
    """The fix of the most time, and how many operations have another.

    Sizes to pad are one fix: each is named once, whichever dimension it is.
    """
    padded = {f"{f.size} → {f.padded}" for judged in found for f in judged.faults}
    if padded and all(judged.faults for judged in found):
        sizes = sorted(padded, key=lambda words: int(words.split()[0]))
        more = f" and {len(sizes) - MOST_SIZES} more sizes" if len(sizes) > MOST_SIZES else ""
        return f"pad {', '.join(sizes[:MOST_SIZES])}{more}", 0
    times: Counter[str] = Counter()
    for judged in found:
        times[judged.fix] += int(1000 * judged.affected_us) + 1
    fix = times.most_common(1)[0][0]
    return fix, sum(judged.fix != fix for judged in found)


def step_sentence(timeline: Timeline) -> str:
    """How long the steps took, and what a usual one consists of."""
    step = timeline.usual_step
    if step is None:
        return "Steps: unknown (no ProfilerStep marks, fewer than two optimizer steps)"
    number = len(timeline.steps)
    by = "ProfilerStep" if timeline.marks.source == "profiler" else "optimizer"
    if timeline.median_us is None:
        words = f"1 step (by {by}) of {milliseconds(step.wall_us)}"
    else:
        words = (
            f"{number} steps (by {by}): the first {milliseconds(timeline.steps[0].wall_us)}, the "
            f"others {milliseconds(timeline.median_us)} (median)"
        )
    whose = "a usual one's" if number > 1 else "its"
    return f"{words}; of {whose} length: {shares_sentence(step)}"


def shares_sentence(step: Window) -> str:
    """What a window's time went to, as shares of its length."""
    known = [(step.kernel_us.get(kind, 0.0), words) for kind, words in _KERNELS]
    rest = sum(step.kernel_us.values()) - sum(spent for spent, _ in known)
    parts = [*known, (rest, "other kernels"), (step.copying_us, "copies alone")]
    shares = [(spent / step.wall_us, words) for spent, words in parts]
    said = [f"{percent(share)} {words}" for share, words in shares if share >= LITTLE]
    return ", ".join([*said, f"{percent(step.idle_fraction)} idle"])


def idle_sentence(timeline: Timeline) -> str:
    """How long the GPU was idle, why, and what ending that could gain."""
    whole = timeline.whole
    causes = sorted(GAP_CAUSES, key=lambda c: -whole.gaps[c])
    shown = [
        f"{percent(whole.gaps[c] / whole.wall_us)} {IDLE[c]}"
        for c in causes
        if whole.gaps[c] >= LEAST * whole.wall_us
    ]
    bound = 1 / (1 - whole.idle_fraction) if whole.idle_fraction < 1 else MANY
    why = f": {', '.join(shown)}" if shown else ""
    copies = whole.copying_us / whole.wall_us if whole.wall_us else 0.0
    copied = f"; copies alone {percent(copies)}" if copies >= LEAST else ""
    return (
        f"GPU idle: {percent(whole.idle_fraction)} of {milliseconds(whole.wall_us)}{why}; "
        f"{at_most(bound)} (recording slows the host){copied}"
    )


STEPS = ("step", "length", "Tensor Cores", "CUDA cores", "other", "unknown", "collective", "idle")


def step_rows(timeline: Timeline) -> list[list[str]]:
    """Each step: its length, kernel time by verdict, idle time."""
    rows = []
    for step in timeline.steps:
        times = step.kernel_us
        rest = sum(times.get(kind, 0.0) for kind in ("other", "helper", "layout"))
        cells = [times.get("tensor_core", 0.0), times.get("cuda_core", 0.0), rest]
        cells += [times.get("unknown", 0.0), times.get("collective", 0.0), step.idle_us]
        rows.append([step.name, milliseconds(step.wall_us), *map(milliseconds, cells)])
    return rows


GAPS = ("idle", "after", "why", "host call", "next kernel")


def gap_rows(timeline: Timeline) -> list[list[str]]:
    """The longest gaps."""
    start = timeline.whole.start_us
    return [
        [
            milliseconds(gap.duration_us),
            milliseconds(gap.start_us - start),
            IDLE[gap.cause],
            gap.host,
            gap.after or "a copy",
        ]
        for gap in timeline.longest
    ]
