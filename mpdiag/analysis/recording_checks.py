"""Whether a recording is one to rely on: FP32, of whole steps, enough of them, and complete.

Also whether it is of a training that a verdict can speak of, which ranks stopped early, and which
ranks hold different weights.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.findings import Finding, error, info, warning
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.scaling.clipping import Clipping
from mpdiag.display.wording import counted, enumerated, percent
from mpdiag.errors import DamagedRun, MpdiagError
from mpdiag.numerics.periods import unseen_periods
from mpdiag.runs.answers import half_products
from mpdiag.runs.coverage import stepped_in
from mpdiag.runs.precision import HALF
from mpdiag.runs.records import Records
from mpdiag.runs.run import Run

NOT_FP32 = "not-fp32"
"""The code of each finding that says that a recording is not of FP32 training."""
WIDER_THAN_FP32 = frozenset({"float64", "complex128"})
"""Dtypes that hold more than FP32 does."""
_AGAIN = "record again with --fp32 (in code: fp32=True)"
_NO_CASTS = "remove the model's casts to half precision, and record again"
FEW_STEPS = 20
"""Recorded steps below which an analysis says that it rests on few."""


def require_finite_gradients(run: Run, layers: Layers, recorded_in: str) -> None:
    """Refuse a run without a single finite gradient.

    Raises:
        DamagedRun: If gradients were recorded and all of them are NaN or infinite.
    """
    h = layers.of_kind("activation_grad", "weight_grad").histograms
    if h.numel.sum() > 0 and h.finite.sum() == 0:
        raise DamagedRun(
            f"all gradients in {run.folder} are NaN or infinite: the {recorded_in} training diverged "
            "before its first recorded step; fix it and record again"
        )


def recording_findings(run: Run, layers: Layers, recorded_in: str) -> list[Finding]:
    """What limits the conclusions that a recording of a training in a format allows."""
    return [
        *_loop_findings(run, layers),
        *_precision_findings(run),
        *_length_findings(run),
        *_failure_findings(run),
        *_coverage_findings(run),
        *_optimizer_findings(run, layers),
        *_search_findings(run),
        *_loss_findings(run, recorded_in),
    ]


def _loop_findings(run: Run, layers: Layers) -> Iterator[Finding]:
    """A loop without optimizer steps, or whose weights are not FP32."""
    seen = int(run.meta.get("steps_seen") or 0)
    stepped = len(layers.of_kind("update")) > 0
    if run.meta.get("optimizers") and len(layers) and seen <= 1 and not stepped:
        yield warning(
            code="no-optimizer-step",
            message="the loop called no optimizer step, so the whole recording counts as one step",
            evidence={"steps_seen": seen},
            fix="call optimizer.step() after backward(), and record again",
        )
    unseen = [optimizer.kind for optimizer in stepped_in(run) if optimizer.unseen]
    if unseen:
        yield warning(
            code="optimizer-not-recorded",
            message=f"no step of {counted(len(unseen), 'optimizer')} was recorded "
            f"({' and '.join(unseen)}); all recorded steps are other optimizers'",
            evidence={"optimizers": unseen},
            fix="record without --every and --max-steps, or with another --every; if optimizers take "
            "turns, --every 2 can miss every step of one",
        )


def _precision_findings(run: Run) -> Iterator[Finding]:
    """What of the training was not FP32: then advice describes what it does already."""
    precision = run.meta.get("precision") or {}
    found = [*_narrow_weights(run), *_narrow_in_spite(precision)]
    yield from found
    if precision.get("autocast"):
        yield _autocast_finding(precision)
    elif found:
        return
    elif policies := _policies(run):
        names, dtypes = " and ".join(sorted(policies)), " and ".join(sorted({*policies.values()}))
        yield warning(
            code=NOT_FP32,
            message=f"{names} casts the weights to {dtypes}, so this is not a recording of FP32 "
            f"training; it cannot show what {dtypes} rounded away",
            evidence={"policies": policies},
            fix=f"{_AGAIN}, which switches {names} off",
        )
    elif precision.get("half_modules"):
        yield warning(
            code=NOT_FP32,
            message=f"{counted(precision['half_modules'], 'module')} returned half precision; "
            "the recording does not show what that rounded away",
            evidence={"half_modules": precision["half_modules"]},
            fix=_NO_CASTS,
        )
    else:
        yield from _narrow_products(run)


def _narrow_in_spite(precision: Mapping[str, Any]) -> Iterator[Finding]:
    """What ``--fp32`` met and could not switch off."""
    kept = [str(what) for what in precision.get("not_switched_off") or ()]
    if kept:
        more = f", and {counted(len(kept) - 1, 'more thing')}" if len(kept) > 1 else ""
        yield warning(
            code=NOT_FP32,
            message=f"--fp32 could not switch off {kept[0]}{more}, so this is not a recording of "
            "FP32 training; it cannot show what that rounded away",
            evidence={"not_switched_off": kept},
            fix="remove it from the script, and record again with --fp32",
        )


def _policies(run: Run) -> dict[str, str]:
    """Wrappers' policies that cast weights to half precision, with their dtype."""
    facts = run.readable_precision
    read = () if facts is None else facts.parameters
    chosen = ((p.set_by, p.forward) for p in read if p.stored not in HALF)
    return {by: dtype for by, dtype in chosen if by and dtype in HALF}


def _narrow_products(run: Run) -> Iterator[Finding]:
    """Products that the training's own code computes in half precision, forward and backward."""
    narrow = half_products(run.operations())
    if not narrow:
        return
    dtypes = " and ".join(sorted(set(narrow.values())))
    places = sorted(narrow)
    yield warning(
        code=NOT_FP32,
        message=f"the training computes matrix products in {dtypes} (at {places[0]}), so this is "
        f"not an FP32 recording; it does not show what {dtypes} rounded away",
        evidence={"half_products": places},
        fix=_NO_CASTS,
    )


def _narrow_weights(run: Run) -> Iterator[Finding]:
    sizes: dict[str, int] = {}
    for row in run.modules():
        if row["what"] == "parameter":
            sizes[str(row["dtype"])] = sizes.get(str(row["dtype"]), 0) + int(row["numel"] or 0)
    halves = HALF & set(sizes)
    others = set(sizes) if "float32" not in sizes else set()
    if not halves and not others:
        return
    kinds = sorted(halves or others)
    dtypes = " and ".join(kinds)
    share = sum(sizes[kind] for kind in kinds) / max(1, sum(sizes.values()))
    which = "the weights" if share == 1 else f"{percent(share, 1)} of the weights"
    missing = f"it does not show what {dtypes} rounded away or could not represent"
    fix = f"{_AGAIN}, which makes them FP32"
    if not halves and set(kinds) <= WIDER_THAN_FP32:
        missing = "it does not show whether FP32 is enough"
        fix = "convert model and inputs to FP32, check that it still trains, and record again"
    yield warning(
        code=NOT_FP32,
        message=f"{which} are {dtypes}, so this is not an FP32 recording; {missing}",
        evidence={"dtypes": kinds, "share": share},
        fix=fix,
    )


def _autocast_finding(precision: Mapping[str, Any]) -> Finding:
    dtypes = " and ".join(precision["autocast"])
    again = f"{_AGAIN}, which disables autocast"
    by_hand = "remove torch.set_autocast_enabled from the script, because --fp32 cannot disable it"
    return warning(
        code=NOT_FP32,
        message=f"the training used autocast ({dtypes}), so this is not an FP32 recording; it does not "
        f"show what {dtypes} rounded away",
        evidence={"autocast": list(precision["autocast"])},
        fix=by_hand if precision.get("autocast_off") else again,
    )


def _length_findings(run: Run) -> Iterator[Finding]:
    steps = int(run.meta.get("steps_recorded") or 0)
    if 0 < steps < FEW_STEPS:
        yield info(
            code="few-steps",
            message=f"only {counted(steps, 'step')} {'was' if steps == 1 else 'were'} recorded",
            evidence={"steps_recorded": steps},
            fix="record a few hundred steps: gradients shrink during training",
        )


def _failure_findings(run: Run) -> Iterator[Finding]:
    failures = run.meta.get("failures") or []
    if not failures:
        return
    times = "" if len(failures) == 1 else f"{len(failures)} times, first "
    yield warning(
        code="recording-failed",
        message=f"the recording failed {times}in {failures[0].get('where')}",
        evidence={"failures": failures},
        fix="see the evidence (--json), remove the cause, and record again",
    )


def _coverage_findings(run: Run) -> Iterator[Finding]:
    coverage = run.meta.get("coverage") or {}
    missing = [
        item
        for item in coverage.get("not_recorded") or []
        if item.get("what") == "module" and "compiled" in str(item.get("reason"))
    ]
    if not missing:
        return
    yield warning(
        code="modules-not-recorded",
        message=f"{counted(len(missing), 'module')} ran under torch.compile and "
        f"{'was' if len(missing) == 1 else 'were'} not recorded",
        evidence={"modules": [item.get("name") for item in missing]},
        fix="begin the recording before the first compiled step, or record the eager model",
    )


def clipping_findings(seen: Clipping) -> Iterator[Finding]:
    """What is not known of gradients that the loop clips before they are recorded."""
    if seen.largest:
        steps = len(seen.largest)
        yield info(
            code="gradients-clipped",
            message="your loop clips gradients before they are recorded; by up to "
            f"{seen.ratio:.3g} times in the {counted(steps, 'step')} with recorded operations",
            evidence={"ratio": seen.ratio, "steps": sorted(seen.largest)},
            fix="if steps are skipped, record more operations (operations=N) or use a dynamic "
            "loss scale",
        )


def period_findings(run: Run, recorded: Sequence[int]) -> Iterator[Finding]:
    """Periods of which the recording holds only some phases.

    Args:
        run: The run, which knows how many steps its training took.
        recorded: Numbers of the recorded steps.
    """
    steps = int(run.meta.get("steps_seen") or 0)
    unseen = unseen_periods(recorded, steps)
    if not unseen:
        return
    every = (run.meta.get("cadence") or {}).get("every")
    yield info(
        code="periods-not-seen",
        message="the recording may have missed what your training does every "
        f"{_ranges(sorted(unseen))} steps; {len(recorded)} of {counted(steps, 'step')} were recorded",
        evidence={
            "steps_recorded": len(recorded),
            "steps_seen": steps,
            "every": every,
            "unseen": {str(period): list(phases) for period, phases in unseen.items()},
        },
        fix="record more steps, or without every=, or with every=1"
        if every
        else "record more steps, or all of them with every=1",
    )


def _ranges(numbers: Sequence[int]) -> str:
    """``2, 4 to 6 and 8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    words = []
    for part in parts:
        words += [f"{part[0]} to {part[-1]}"] if len(part) > 2 else list(map(str, part))
    return enumerated(words)


LIVE_SECONDS = 120.0
"""A rank that wrote within this time may still be running."""
COMPARED_STEPS = 64
"""Number of steps at which copies are compared in a long run: once different, they stay different."""


def rank_findings(run: Run) -> Iterator[Finding]:
    """Findings about ranks that stopped early, left no recording, or hold different weights."""
    world = int(run.meta.get("world_size") or 1)
    if world < 2:
        return
    metas = run.rank_metas()
    yield from _stopped(run, metas, world)
    yield from _disagreeing(run)
    silent = [r for r in range(world) if r not in metas]
    if silent:
        yield warning(
            code="rank-missing",
            message=f"{_ranks(silent)} of {world} left no recording",
            evidence={"ranks": silent, "world_size": world},
            fix="check that they trained, and that they could write to the run folder",
        )


def _stopped(run: Run, metas: Mapping[int, Mapping[str, Any]], world: int) -> Iterator[Finding]:
    """Ranks that were killed or failed while others continued."""
    if all(m.get("state") == "recording" for m in metas.values()) and _is_live(metas):
        return
    last: dict[int, int] = {}
    for piece in _pieces(run, histograms=False):
        for rank in np.unique(piece.rank).tolist():
            top = int(piece.step[piece.rank == rank].max())
            last[rank] = max(top, last.get(rank, -1))
    steps = {
        rank: max(last.get(rank, -1) + 1, int(meta.get("steps_seen") or 0))
        for rank, meta in metas.items()
    }
    killed = [r for r, m in metas.items() if m.get("state") == "recording"]
    short = [r for r in metas if r not in killed and steps[r] < max(steps.values())]
    failed = [r for r in short if metas[r].get("state") != "complete"]
    for rank in sorted(killed) or sorted(failed):
        others = [steps[r] for r in metas if r != rank]
        went_on = f"; the others went on to step {max(others)}" if others else ""
        how = "was killed" if rank in killed else "failed"
        updated = metas[rank].get("updated")
        evidence = {
            "rank": rank,
            "state": metas[rank].get("state"),
            "steps": steps[rank],
            "updated": updated,
            "steps_of_ranks": {str(r): count for r, count in steps.items()},
        }
        yield warning(
            code="rank-stopped",
            message=f"rank {rank} of {world} {how} after {steps[rank]} steps (last update "
            f"{updated}){went_on}",
            evidence=evidence,
            fix="check that rank's log; the recording up to then is sound",
        )


def _is_live(metas: Mapping[int, Mapping[str, Any]]) -> bool:
    moments = [moment for m in metas.values() if (moment := _moment(m.get("updated"))) is not None]
    aware = [m for m in moments if m.tzinfo is not None]
    if not aware:
        return False
    return (datetime.now(timezone.utc) - max(aware)).total_seconds() < LIVE_SECONDS


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _pieces(run: Run, *, histograms: bool) -> Iterable[Records]:
    """The rows: all at once if they are in memory already, else part by part."""
    if "records" in vars(run):
        return (run.records,)
    return run.pieces(histograms=histograms)


def _disagreeing(run: Run) -> Iterator[Finding]:
    """Replicated weights that differ between ranks, judging by their histograms.

    Copies of shards are left out: which of them are of the same shard is not recorded.
    """
    seen: set[int] = set()
    sharded: set[str] = set()
    for piece in _pieces(run, histograms=False):
        seen.update(np.unique(piece.step[_copies(piece)]).tolist())
        parts = piece.name[piece.placement == piece.code("placement", "sharded")]
        sharded.update(piece.words["name"][i] for i in np.unique(parts))
    steps = _spread(sorted(seen))
    held: dict[tuple[int, str], tuple[int, bytes]] = {}  # by step and name: a rank and its copy
    differing: dict[str, tuple[int, set[int]]] = {}  # by name: first step, ranks
    for piece in _pieces(run, histograms=True) if steps else ():
        names = piece.words["name"]
        for row in np.flatnonzero(_copies(piece) & np.isin(piece.step, steps)).tolist():
            step, name = int(piece.step[row]), names[piece.name[row]]
            if name in sharded:
                continue
            rank, copy = int(piece.rank[row]), _digest(piece, row)
            other, expected = held.setdefault((step, name), (rank, copy))
            if copy != expected:
                first, ranks = differing.get(name, (step, set()))
                if step < first:
                    first, ranks = step, set()
                if step == first:
                    ranks |= {rank, other}
                differing[name] = first, ranks
    if not differing:
        return
    name, (step, ranks) = min(differing.items(), key=lambda item: (item[1][0], item[0]))
    others = f", and of {len(differing) - 1} other parameters" if len(differing) > 1 else ""
    yield warning(
        code="ranks-disagree",
        message=f"{_ranks(sorted(ranks))} hold different copies of {name} at step {step}{others}",
        evidence={"parameters": sorted(differing), "first_step": step, "ranks": sorted(ranks)},
        fix="give every rank the same initial weights and the same steps: seed before "
        "creating the model, and let DDP wrap the model that the optimizer updates",
    )


def _copies(piece: Records) -> NDArray[np.bool_]:
    """Which rows are copies of weights."""
    replicated: NDArray[np.bool_] = piece.placement == piece.code("placement", "replicated")
    return piece.of_kind("weight") & replicated


def _spread(steps: list[int]) -> list[int]:
    """At most ``COMPARED_STEPS`` of the steps, including the first and the last."""
    if len(steps) <= COMPARED_STEPS:
        return steps
    return [steps[i] for i in np.linspace(0, len(steps) - 1, COMPARED_STEPS).astype(int).tolist()]


def _digest(piece: Records, row: int) -> bytes:
    """A short digest of the histogram in a row."""
    scalars = ("numel", "zeros", "infs", "nans", "absmax", "absmin")
    bins = piece.bins
    start, stop = bins.offsets[row], bins.offsets[row + 1]
    content = repr([getattr(piece, name)[row].item() for name in scalars]).encode()
    content += bins.first_exponent[row].tobytes()
    content += bins.counts[start:stop].astype(np.int64).tobytes()
    return hashlib.blake2b(content, digest_size=8).digest()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _optimizer_findings(run: Run, layers: Layers) -> Iterator[Finding]:
    """A recording without an optimizer."""
    if run.meta.get("optimizers") != [] or len(layers.of_kind("update")):
        return
    yield warning(
        code="no-optimizer",
        message="no optimizer was recorded, so the recording has no weight update",
        evidence={"optimizers": 0},
        fix="pass the optimizer to mpdiag.record(model, optimizer, …), and record again"
        if run.meta.get("script") is None
        else "update the weights with an optimizer of torch.optim, and record again",
    )


def _search_findings(run: Run) -> Iterator[Finding]:
    """Optimizers that go by differences which a recording of FP32 does not show rounded."""
    for one in stepped_in(run):
        if one.searches:
            yield warning(
                code="optimizer-searches",
                message=f"{one.kind} evaluated its loss {counted(one.evaluations, 'time')} in "
                f"{counted(one.taken, 'step')} and compares the values; half precision rounds them, and "
                "an FP32 recording does not show where the search then ends",
                evidence={
                    "optimizer": one.kind,
                    "steps": one.taken,
                    "evaluations": one.evaluations,
                },
                fix="train by the plan and compare with FP32, or train this phase in FP32",
            )


def _loss_findings(run: Run, recorded_in: str) -> Iterator[Finding]:
    """Losses of the training that are not finite; all its steps have one, recorded or not."""
    try:
        steps = run.recorded_steps()
    except MpdiagError:  # other commands say what is wrong with the log
        return
    bad = [s.step for s in steps if s.loss is not None and not math.isfinite(s.loss)]
    if not bad:
        return
    yield error(
        code="non-finite-losses",
        message=f"the loss of the {recorded_in} training was infinite or NaN in "
        f"{counted(len(bad), 'step')}, first in step {bad[0]}",
        evidence={"steps": len(bad), "first": bad[0]},
        fix=f"fix the {recorded_in} training first; a loss scale cannot help",
    )
