"""Public precision faults beside their repaired twins: what the audit says of each.

    python studies/audited_faults.py                       # all: some minutes
    python studies/audited_faults.py areal_1292 ao_4915    # some
    python studies/audited_faults.py --json studies/results/audited-faults.json

``studies/precision_faults/`` holds a fault to a file, a script without mpdiag. Both halves are recorded
as ``mpdiag record`` records a stranger's script, and audited. A fault counts as named if a finding
matches what ``NAMED_BY`` says of its cause, as measured if one matches its consequence, and a twin as
clean if no finding matches the cause. All other findings are listed, to be read.

Processes are forked from one that has loaded torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import mpdiag
import mpdiag.cli
from mpdiag.analysis.findings import Finding

FOLDER = Path(__file__).parent / "precision_faults"
HALVES = ("fault", "twin")
UNSEEN = frozenset(
    "ao_4915 dreambooth_1417 gptneox_1003 modelopt_2322 pytorch_149205 transformers_47831".split()
)
"""Half of the second dozen, drawn by chance: unseen by the rules' authors in the first two scores."""


@dataclass(frozen=True)
class Named:
    """What a finding must say.

    Attributes:
        code: A pattern that its code matches.
        words: A pattern that its message matches.
    """

    code: str
    words: str = ""

    def __call__(self, finding: Mapping[str, Any]) -> bool:
        named = re.fullmatch(self.code, finding["code"])
        return named is not None and bool(re.search(self.words, finding["message"]))


AWAY = "precision-updates-rounded-away"
STUCK = "precision-stuck-state"
NAMED_BY = {
    "accelerate_3979": (
        Named("precision-policy-without-masters", "BF16 weights"),
        Named(AWAY, "round to nothing"),
    ),
    "ao_4915": (
        Named("precision-narrow-counter", "in BF16"),
        Named("precision-narrow-counter", "stops at 256.*bias correction"),
    ),
    "areal_1292": (Named(STUCK, "exp_avg_sq in BF16"), Named(STUCK, "times FP32's")),
    "astrai_57": (
        Named("precision-narrow-part", "chooses by BF16 values"),
        Named("precision-narrow-part", r"\d+ of \d+ rows"),
    ),
    "automodel_825": (
        Named("precision-narrow-collective", "gradient norm .* in BF16"),
        Named("precision-narrow-collective", r"by up to [\d.]+ %"),
    ),
    "automodel_2213": (
        Named("precision-equal-parted", "head.weight"),
        Named("precision-equal-parted", "differ"),
    ),
    "automodel_2484": (
        Named("precision-narrow-part", "A_log.*BF16"),
        Named("precision-narrow-part", r"\d %"),
    ),
    "automodel_3822": (
        Named("precision-copies-differ", "scale"),
        Named("precision-copies-differ", "on one rank and"),
    ),
    "deepspeed_8442": (
        Named("precision-no-orthogonalization"),
        Named("precision-no-orthogonalization", "SGD"),
    ),
    "dreambooth_1417": (
        Named("precision-average-still", "BF16 copies"),
        Named("precision-average-still", r"\d %"),
    ),
    "flashoptim_2": (
        Named("precision-narrow-values", "exp_avg_sq"),
        Named("precision-narrow-values|precision-stuck-state", "cannot fall"),
    ),
    "gptneox_1003": (
        Named("precision-narrow-part", "angles up to .* BF16|BF16 numbers of"),
        Named("precision-narrow-part", "collide|can be off by"),
    ),
    "megatron_149": (Named("precision-narrow-sum"), Named("precision-narrow-sum", r"\d %|e-\d")),
    "modelopt_2322": (Named(AWAY, "BF16 weights"), Named(AWAY, "round to nothing")),
    "muon_54": (
        Named("precision-frozen-moved", "up.weight"),
        Named("precision-frozen-moved", r"moved by .* %"),
    ),
    "onetrainer_996": (
        Named("precision-decay-without-effect"),
        Named("precision-decay-without-effect", "no effect"),
    ),
    "openrig3r_35": (
        Named("precision-no-loss-scale"),
        Named("precision-no-loss-scale", r"\d %"),
    ),
    "pytorch_106395": (
        Named("precision-narrow-reduction"),
        Named("precision-narrow-reduction", r"\d %|e-\d"),
    ),
    "pytorch_149205": (
        Named("precision-unheld"),
        Named("precision-unheld", "do not reach the model"),
    ),
    "speculators_668": (Named(AWAY, "BF16 weights"), Named(AWAY, "norm")),
    "torchtitan_2886": (
        Named("precision-policy-not-applied"),
        Named("precision-policy-not-applied", "FP32"),
    ),
    "transformers_47831": (
        Named("precision-weights-not-finite", "A_log"),
        Named("precision-weights-not-finite", "no update changes"),
    ),
    "unet_468": (
        Named("precision-clipped-scaled", "loss scale"),
        Named("precision-clipped-scaled", r"norm falls from .* to"),
    ),
    "verl_6150": (
        Named("precision-policy-not-applied", "FP32"),
        Named("precision-policy-not-applied", "BF16"),
    ),
}
"""By file: the findings of cause and consequence; what no rule finds has no entry."""


_SCORED = ("cause", "consequence", "twin clean")


def names() -> list[str]:
    """The files, by name."""
    return sorted(path.stem for path in FOLDER.glob("*_[0-9]*.py"))


def load(name: str) -> ModuleType:
    """A file's module; nothing of it trains."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(
            f"precision_faults_{name}", FOLDER / f"{name}.py"
        )
        if spec is None or spec.loader is None:
            raise FileNotFoundError(name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


def record(name: str, half: str, folder: Path, ranks: int, every: int) -> None:
    """Record one half as ``mpdiag record --every`` does, on as many ranks as it needs.

    Raises:
        RuntimeError: If a rank fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = ["record", "--out", folder, "--every", every, "--operations", "3", "--"]
    words = [str(word) for word in (*words, FOLDER / f"{name}.py", half)]
    said = folder.with_suffix(".txt")
    children = []
    for rank in range(ranks):
        own = {**meeting, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
        pid = os.fork()
        if not pid:
            _child(words, {k: str(v) for k, v in own.items()}, said)
        children.append(pid)
    failures = [os.waitpid(pid, 0)[1] for pid in children]
    if any(failures):
        raise RuntimeError(f"{name} {half} failed:\n{said.read_text()[-3000:]}")


def _child(words: Sequence[str], environment: Mapping[str, str], said: Path) -> None:
    """Run ``mpdiag`` in this forked process, and leave it."""
    code = 1
    try:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(environment)
        sys.argv = ["mpdiag", *words]
        mpdiag.cli.main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def audited(name: str, half: str, place: Path) -> dict[str, Any]:
    """The line and the findings of one half."""
    folder = place / f"{name}-{half}"
    module = load(name)
    record(name, half, folder, module.RANKS, getattr(module, "EVERY", 1))
    found = mpdiag.audit(folder)
    return {"line": found.line, "findings": [_plain(finding) for finding in found.findings]}


def _plain(finding: Finding) -> dict[str, Any]:
    return {"code": finding.code, "severity": finding.severity, "message": finding.message}


def score(name: str, halves: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Whether the fault is named and measured, the twin is clean, and what else was found."""
    fault, twin = (halves[half]["findings"] for half in HALVES)
    expected = NAMED_BY.get(name)
    row: dict[str, Any] = dict(zip(_SCORED, (False, False, True), strict=True))
    if expected:
        cause, consequence = expected
        row["cause"] = any(map(cause, fault))
        row["consequence"] = any(map(consequence, fault))
        row["twin clean"] = not any(map(cause, twin))
    row["others"] = [f for f in fault if not expected or not any(e(f) for e in expected)]
    row["others on the twin"] = list(twin)
    return row


def summary(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """How many of all, and of the unseen ones, are named, measured and clean."""
    lines = []
    for title, chosen in (
        ("all", scores),
        ("unseen", {n: scores[n] for n in scores if n in UNSEEN}),
    ):
        counts = {key: sum(s[key] for s in chosen.values()) for key in _SCORED}
        alarms = sum(len(s["others on the twin"]) for s in chosen.values())
        words = ", ".join(f"{key} {count}" for key, count in counts.items())
        lines.append(f"{title} ({len(chosen)}): {words}; findings on twins {alarms}")
    return "\n".join(lines)


def main() -> None:
    """Record, audit and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=names())
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    table = {}
    with tempfile.TemporaryDirectory() as place:
        for name in chosen.names:
            halves = {half: audited(name, half, Path(place)) for half in HALVES}
            table[name] = {**halves, "score": score(name, halves)}
            scored = table[name]["score"]
            print(name, {k: v for k, v in scored.items() if isinstance(v, bool)}, flush=True)
            for half in HALVES:
                print(f"  {half}: {halves[half]['line']}")
                for finding in halves[half]["findings"]:
                    print(f"    {finding['code']}: {finding['message']}", flush=True)
    print(summary({name: entry["score"] for name, entry in table.items()}))
    if chosen.json:
        chosen.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
