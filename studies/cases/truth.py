"""What each case needs: by training it, never by rule.

    python studies/cases/truth.py --half tuning|opened|… [NAME …] [--limit SECONDS] [--minutes M]

Each way is trained with up to three seeds, paired with the same seeds in FP32. A way *fails* if in
most seeds its metric is worse than FP32's by more than the case's margin and by more than twice what a
change of the initial weights by 2^-17 does to FP32 training, or is not finite.

* ``fp16``: as ``torch.autocast`` does (emulated, FP32 weights), without a loss scale and its checks;
  where this fails, with constant scales and a dynamic one. *Needs a scale*: fails without, and holds
  with one of them. The dynamic one is that of ``torch.amp.GradScaler``'s defaults, and trained always:
  *FP16 by default*. (Truths of before 2026-11-26 lack it where FP16 holds without a scale.)
* ``bf16``: as ``torch.autocast`` does.
* ``fp16 weights``: FP32 arithmetic, weights stored in FP16. *Needs masters*: this fails.
* Where FP16 fails at every scale: each operation that autocast leaves in FP16, alone in FP16 (it reads
  and stores FP16, also in its backward pass, at a dynamic scale) and all else in FP32. An operation
  *needs FP32* if that fails. They are tried in groups that are halved where they fail. Then all
  operations but these in FP16, without a scale and with one: whether the rest needs one.

Results go into ``truth/HALF.json``, training by training: what is known is not trained again as long as
the case's source stays the same. Each truth has the number of the rule that it was settled by;
``--renew`` settles those of an older one again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from cases import arithmetic, collection
from cases.arithmetic import Autocast, FirstSteps, LossScale, Narrow, Observed, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cases.case import Case, Training

FOLDER = Path(__file__).resolve().parent / "truth"
SEEDS = (0, 1, 2)
CONSTANT_SCALES = (2.0**10, 2.0**4, 2.0**-6)
SPREADS = 2.0
"""A way's loss must exceed the effect of the perturbation by this factor."""
RULE = 2
"""The rule of failure and its arithmetic. 2: losses that stay non-finite end a training at every scale,
and a bound that a narrow operation compares with is rounded as its tensor is. It concerns `_SCALED`."""
_SCALED = ("fp16 dynamic", "fp16 scale", "narrow")
"""Beginnings of the ways that are trained with a scale, or one operation at a time."""


class OutOfTime(Exception):
    """The case's time is up, or the command's."""


class UnusableCase(Exception):
    """Nothing can be held against this case: it diverges in FP32."""


@dataclass
class Bench:
    """Trains one case and remembers every result.

    Attributes:
        case: The case.
        known: Metrics by way and seed, None where a training failed; as the file has them.
        until: When its time is up (``time.monotonic``).
        save: Called after each training.
        tell: Called with what is being trained.
    """

    case: Case
    known: dict[str, dict[str, float | None]]
    until: float = math.inf
    save: Callable[[], None] = lambda: None
    tell: Callable[[str], None] = lambda _: None
    bounds: dict[int, float] = field(default_factory=dict)

    def metric(self, way: str, seed: int, **options: Any) -> float:
        """The metric of a way; trained unless it is known."""
        results = self.known.setdefault(way, {})
        if str(seed) not in results:
            self.tell(f"{way}, seed {seed}")
            found = arithmetic.train(self.case, seed, tick=self._tick, **options)
            results[str(seed)] = float(f"{found:.6g}") if math.isfinite(found) else None
            self.save()
        value = results[str(seed)]
        return math.nan if value is None else value

    def _tick(self) -> None:
        if time.monotonic() > self.until:
            raise OutOfTime

    def fp32(self, seed: int) -> float:
        return self.metric("fp32", seed)

    def tolerance(self) -> float:
        """By how much a paired metric may be worse."""
        moved = [
            abs(self.metric("fp32 perturbed", s, perturbed=True) - self.fp32(s)) for s in SEEDS
        ]
        if not all(map(math.isfinite, moved)):
            message = "it diverges in FP32"
            raise UnusableCase(message)
        return max(self.case.margin, SPREADS * max(moved))

    def fails(self, way: str, **options: Any) -> bool:
        """Whether most seeds fail; the third is trained where two disagree.

        ``scale`` makes a fresh loss scale for each training.
        """
        bound, count = self.tolerance(), 0
        make = options.pop("scale", lambda: None)
        for i, seed in enumerate(SEEDS):
            value = self.metric(way, seed, scale=make(), **options)
            count += self.is_worse(value, seed, bound)
            if i == 1 and count != 1:
                break
        return count >= 2

    def is_worse(self, value: float, seed: int, bound: float) -> bool:
        """Whether one metric is worse than FP32's of the same seed by more than a bound."""
        if not math.isfinite(value):
            return True
        better = value - self.fp32(seed)
        return (better if self.case.higher_is_better else -better) < -bound


def fp16(training: Training) -> Autocast:
    return Autocast(torch.float16)


def bf16(training: Training) -> Autocast:
    return Autocast(torch.bfloat16)


def dynamic() -> LossScale:
    return LossScale(arithmetic.FIRST_SCALE, dynamic=True)


def examine(bench: Bench) -> dict[str, Any]:
    """Everything about a case, from trainings.

    Raises:
        OutOfTime: If its time is up; what is known so far is saved.
        UnusableCase: If it diverges in FP32.
    """
    found: dict[str, Any] = {"tolerance": float(f"{bench.tolerance():.6g}")}
    unscaled = bench.fails("fp16", arithmetic=fp16)
    scale = "1" if not unscaled else _scale_that_holds(bench)
    found["fp16_fails_without_scale"] = unscaled
    found["scale"] = scale
    found["fp16_trains"] = scale is not None
    found["needs_scale"] = unscaled if scale is not None else None
    found["default_trains"] = not bench.fails("fp16 dynamic", arithmetic=fp16, scale=dynamic)
    found["bf16_trains"] = not bench.fails("bf16", arithmetic=bf16)
    found["needs_masters"] = bench.fails("fp16 weights", fp16_weights=True)
    found["operations"] = []
    if scale is None:
        found |= _operations(bench)
    return found


def _scale_that_holds(bench: Bench) -> str | None:
    if not bench.fails("fp16 dynamic", arithmetic=fp16, scale=dynamic):
        return "dynamic"
    for scale in CONSTANT_SCALES:
        way = f"fp16 scale {scale:g}"
        if not bench.fails(way, arithmetic=fp16, scale=lambda s=scale: LossScale(s)):
            return f"{scale:g}"
    return None


def _operations(bench: Bench) -> dict[str, Any]:
    """Which operations fail alone, and whether the rest holds without them."""
    every = observed(bench)
    needed, together = _find(bench, every)
    found: dict[str, Any] = {
        "candidates": len(every),
        "operations": [list(o) for o in sorted(needed)],
        "together": [[list(o) for o in sorted(group)] for group in together],
    }
    gone = {*needed, *(o for group in together for o in group)}
    rest = [o for o in every if o not in gone]
    holds = not narrow_fails(bench, rest)
    found["rest_trains"] = holds
    if holds:
        found["needs_scale"] = narrow_fails(bench, rest, scaled=False)
    return found


def observed(bench: Bench) -> list[Operation]:
    """The operations that autocast leaves in FP16, in the order of the forward pass."""
    looks: list[Observed] = []

    def look(training: Training) -> Observed:
        looks.append(Observed(training.model))
        return looks[-1]

    few = arithmetic.shortened(bench.case, FirstSteps.COUNT)
    arithmetic.train(few, SEEDS[0], look, dynamic())
    return looks[-1].operations


def narrow_fails(bench: Bench, group: Collection[Operation], *, scaled: bool = True) -> bool:
    """Whether training fails with just these operations in FP16."""
    names = " ".join(sorted(f"{module}:{op}" for module, op in group))
    way = f"narrow {'' if scaled else 'unscaled '}{names}"
    return bool(group) and bench.fails(
        way,
        arithmetic=lambda training: Narrow(training.model, frozenset(group)),
        scale=dynamic if scaled else lambda: None,
    )


def _find(bench: Bench, group: list[Operation]) -> tuple[list[Operation], list[list[Operation]]]:
    """Those that fail alone; and groups that fail though neither half does."""
    if not group or not narrow_fails(bench, group):
        return [], []
    if len(group) == 1:
        return group, []
    middle = len(group) // 2
    parts = [_find(bench, half) for half in (group[:middle], group[middle:])]
    alone, together = ([x for part in parts for x in part[i]] for i in (0, 1))
    return alone, together if alone or together else [group]


# -- the file --------------------------------------------------------------------------------------


class TruthFile:
    """``truth/HALF.json``: the truths by case, and the trainings behind them."""

    def __init__(self, half: str) -> None:
        self.path = FOLDER / f"{half}.json"
        self.cases: dict[str, Any] = {}
        self._names: frozenset[str] = frozenset()
        if self.path.is_file():
            self.cases = json.loads(self.path.read_text(encoding="utf-8"))["cases"]

    def entry(self, case: Case) -> dict[str, Any]:
        """What is known of a case; empty if its source changed."""
        key = collection.fingerprint(case)
        known = self.cases.get(case.name)
        if known is None or known["source"] != key:
            empty = {"source": key, "rule": RULE, "truth": None, "trainings": {}}
            known = self.cases[case.name] = empty
        return known

    def is_old(self, case: Case) -> bool:
        """Whether a case was settled by an older rule."""
        known = self.entry(case)
        return known["truth"] is not None and known.get("rule", 1) < RULE

    def renew(self, case: Case) -> None:
        """Settle a truth of an older rule anew: it stays until the new one is known.

        The trainings that the rule does not concern are kept.
        """
        known = self.entry(case)
        if self.is_old(case) and "renewing" not in known:
            known["renewing"] = {
                w: m for w, m in known["trainings"].items() if not w.startswith(_SCALED)
            }

    def drop_all_but(self, names: Collection[str]) -> None:
        """Forget cases that are no more."""
        self._names = frozenset(names)
        self.cases = {n: self.cases[n] for n in sorted(names) if n in self.cases}

    def _take_over(self) -> None:
        """Add what another process has found meanwhile."""
        if not self.path.is_file():
            return
        for name, theirs in json.loads(self.path.read_text(encoding="utf-8"))["cases"].items():
            ours = self.cases.get(name)
            if ours is None:
                if name in self._names:
                    self.cases[name] = theirs
            elif ours["source"] != theirs["source"] or ours.get("rule", 1) > theirs.get("rule", 1):
                continue
            elif ours.get("rule", 1) < theirs.get("rule", 1):
                self.cases[name] = theirs
            else:
                ours["truth"] = ours["truth"] or theirs["truth"]
                if "unusable" in theirs:
                    ours["unusable"] = theirs["unusable"]
                for way, metrics in theirs["trainings"].items():
                    ours["trainings"][way] = metrics | ours["trainings"].get(way, {})

    def save(self) -> None:
        """Write the file; what another process has written meanwhile is kept."""
        self._take_over()
        self.path.parent.mkdir(exist_ok=True)
        text = json.dumps({"seeds": SEEDS, "cases": self.cases}, indent=1, allow_nan=False)
        beside = self.path.with_suffix(f".{os.getpid()}.new")
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(self.path)


def settle(
    case: Case, file: TruthFile, limit: float, until: float, tell: Callable[..., None]
) -> None:
    """Find a case's truth unless it is known, or that it has none."""
    entry = file.entry(case)
    renewing = entry.get("renewing")
    if "unusable" in entry or (entry["truth"] is not None and renewing is None):
        return
    stop = min(until, time.monotonic() + limit)
    trainings = entry["trainings"] if renewing is None else renewing
    try:
        truth = examine(Bench(case, trainings, stop, file.save, tell))
    except UnusableCase as error:
        truth, entry["unusable"] = None, str(error)
    if renewing is not None:
        entry |= {"rule": RULE, "trainings": entry.pop("renewing")}
    entry["truth"] = truth
    file.save()


def words(entry: dict[str, Any]) -> str:
    """A truth in a line."""
    truth = entry["truth"]
    if truth is None:
        return f"unusable: {entry['unusable']}" if "unusable" in entry else "not settled"
    told = {True: "yes", False: "no", None: "?"}
    said = (
        f"fp16 {told[truth['fp16_trains']]} (scale {truth['scale'] or '-'}), "
        f"needs scale {told[truth['needs_scale']]}, masters {told[truth['needs_masters']]}, "
        f"bf16 {told[truth['bf16_trains']]}"
    )
    operations = " ".join(f"{m or '(root)'}:{op}" for m, op in truth["operations"])
    rest = "" if truth.get("rest_trains", True) else ", the rest fails, too"
    together = f", together {truth['together']}" if truth.get("together") else ""
    return f"{said}{', in FP32: ' + operations if operations else ''}{together}{rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--half", choices=collection.HALVES, required=True)
    parser.add_argument("--limit", type=float, default=150, help="Seconds a case and call.")
    parser.add_argument("--minutes", type=float, default=3.5, help="Start no case after this.")
    parser.add_argument(
        "--renew", action="store_true", help="Settle truths of an older rule again."
    )
    parser.add_argument("--show", action="store_true", help="Train nothing, show what is known.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = TruthFile(options.half)
    everything = collection.load(options.half)
    cases = collection.load(options.half, options.names)
    file.drop_all_but(everything)
    until = time.monotonic() + 60 * options.minutes
    left = 0
    for i, (name, case) in enumerate(cases.items()):
        if options.renew:
            file.renew(case)
        began = time.monotonic()

        def tell(what: str, i: int = i, name: str = name) -> None:
            if sys.stderr.isatty():
                bar = "█" * (20 * i // len(cases))
                print(
                    f"\r\x1b[K{bar:20} {i}/{len(cases)} {name}: {what}"[:150],
                    end="",
                    file=sys.stderr,
                )

        note = ""
        if not options.show and began < until:
            try:
                settle(case, file, options.limit, until, tell)
            except OutOfTime:
                note = "; out of time, call again to go on"
        entry = file.entry(case)
        left += "renewing" in entry or (entry["truth"] is None and "unusable" not in entry)
        took = time.monotonic() - began
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(clear, end="", file=sys.stderr)
        print(f"[{i + 1}/{len(cases)}] {name}: {words(entry)}{note}  [{took:.0f} s]", flush=True)
    if not options.show:
        file.save()
    print(f"{len(cases) - left} of {len(cases)} settled" + (", call again" if left else ""))
    old = [name for name, case in cases.items() if file.is_old(case)]
    if old:
        print(f"by an older rule (--renew): {', '.join(old)}")


if __name__ == "__main__":
    main()
