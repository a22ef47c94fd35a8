"""Does ``mpdiag diff`` find mistakes that people make? Planted without looking at its code.

    python studies/blind_faults.py dev2 --as before [--only NAME] [--code CHECKOUT] [--work DIR]
    python studies/blind_faults.py --table

The trainings in studies/blind_scripts/ are written as people write them. mistakes*.txt there change
a line or a few of one of them, and say which module a reader would blame. They were written before
the first run. One side of a pair is the right training in FP32 on one device. The other one is of
some kind (autocast, a compiler, two ranks …), right or with one mistake. A hash of a pair's name puts
it into one half: ``dev`` was shown to who mends ``diff``, ``unseen`` was not. Both halves of the first
round have been shown since; ``dev2`` and ``unseen2`` are of other trainings, ``dev3`` and ``unseen3``
of others again. The fourth and the fifth round have other trainings too and no half to show: all of
them is ``unseen4`` and ``unseen5``. ``unseen6`` to ``unseen9`` have clean pairs only.

- *named*: the first place is the culprit, or lies in it; of a compiled model also around it.
- *seen*: another place that the mistake reaches. *missed*: the runs are said to agree.
- *cannot say*: not even that.

Every pair is stored as soon as it is judged; stored ones are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "studies" / "blind_scripts"
RESULTS = ROOT / "studies" / "results" / "blind-faults.json"
TIMEOUT = 1200
HALVES = (
    "dev",
    "unseen",
    "dev2",
    "unseen2",
    "dev3",
    "unseen3",
    *(f"unseen{n}" for n in range(4, 10)),
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "bf16": ("--amp", "bf16"),
    "fp16": ("--amp", "fp16"),
    "aot_eager": ("--compile", "aot_eager"),
    "inductor": ("--compile", "inductor"),
    "ddp": (),
    "fsdp": ("--fsdp",),
    "accum": ("--accum", "2"),
    "refactor": (),
}
"""Kinds of pairs: the options of the second training."""
TITLES = {
    "bf16": "FP32, BF16",
    "fp16": "FP32, FP16 with a GradScaler",
    "aot_eager": "eager, compiled (`aot_eager`)",
    "inductor": "eager, compiled (`inductor`)",
    "ddp": "one device, DDP on 2 ranks",
    "fsdp": "one device, FSDP2 on 2 ranks",
    "accum": "one batch, two accumulated halves",
    "refactor": "before and after a refactoring",
}
RANKS = ("ddp", "fsdp")
COMPILED = ("aot_eager", "inductor")
MISTAKES = (
    "mistakes.txt",
    "mistakes-2-dev.txt",
    "mistakes-2-unseen.txt",
    "mistakes-3-dev.txt",
    "mistakes-3-unseen.txt",
    "mistakes-4.txt",
    "mistakes-5.txt",
)
REFACTORINGS = (
    "refactors.txt",
    "refactors-2.txt",
    "refactors-3.txt",
    "refactors-4.txt",
    "refactors-5.txt",
    "refactors-6.txt",
    "refactors-7.txt",
    "refactors-9.txt",
)
CLEAN = {
    "bf16": ("gpt", "cnn", "moe", "ssm", "translate", "diffusion", "clip"),
    "fp16": ("gpt", "cnn", "moe", "translate", "diffusion", "graph"),
    "aot_eager": ("gpt", "translate", "graph"),
    "inductor": ("cnn", "ssm", "clip", "moe"),
    "ddp": ("gpt", "translate", "clip", "graph"),
    "fsdp": ("gpt", "translate", "diffusion"),
    "accum": ("gpt", "ssm", "translate"),
    "refactor": ("gpt", "cnn", "moe", "ssm", "translate", "diffusion"),
}
CLEAN_2 = {
    "bf16": ("mlm", "tagger", "vit", "unet", "dlrm", "dit", "dpo", "moco"),
    "fp16": ("mlm", "vit", "unet", "dlrm", "dpo", "moco"),
    "aot_eager": ("mlm", "tagger", "vit", "unet", "dpo"),
    "inductor": ("vit", "unet", "dlrm"),
    "ddp": ("mlm", "tagger", "dlrm", "dpo", "moco"),
    "fsdp": ("mlm", "vit", "dit", "dpo"),
    "accum": ("mlm", "tagger", "dit", "moco"),
    "refactor": ("mlm", "tagger", "vit", "unet", "dlrm", "dit", "dpo", "moco"),
}
"""The second round's; its trainings are others."""
THIRD = ("conformer", "detector", "vqvae", "swin", "patchtst", "grpo", "gan")
CLEAN_3 = {
    **dict.fromkeys(("bf16", "fp16", "aot_eager", "ddp", "fsdp", "accum", "refactor"), THIRD),
    "inductor": ("detector", "swin", "patchtst", "grpo"),
}
"""The third round's. A second way of each refactoring, ``refactor-b``, is clean only."""
CLEAN_4 = {
    "bf16": ("tts", "ppo", "glow", "graphormer"),
    "fp16": ("nerf", "deeplab", "dino"),
    "aot_eager": ("tts", "glow", "dino"),
    "inductor": ("nerf", "ppo", "graphormer"),
    "ddp": ("tts", "ppo", "glow", "dino"),
    "fsdp": ("nerf", "graphormer", "dino"),
    "accum": ("tts", "glow", "graphormer"),
    "refactor": ("tts", "nerf", "ppo", "glow", "deeplab", "graphormer", "dino"),
}
"""The fourth round's. ``deeplab`` normalizes each batch: its parts and ranks would differ."""
CLEAN_5 = {
    "bf16": ("t5", "arcface", "mae", "tcn"),
    "fp16": ("arcface", "mae", "ftt"),
    "aot_eager": ("t5", "ftt", "tcn"),
    "inductor": ("arcface", "mae", "ftt"),
    "ddp": ("t5", "mae", "ftt", "tcn"),
    "fsdp": ("t5", "mae", "ftt", "tcn"),
    "accum": ("t5", "mae", "ftt", "tcn"),
    "refactor": ("t5", "arcface", "mae", "ftt", "tcn"),
}
"""The fifth round's. ``arcface`` normalizes each batch, as ``deeplab`` does."""
SIXTH = ("llama", "convnext", "whisper", "awd")
CLEAN_6 = dict.fromkeys(OPTIONS, SIXTH)
"""The sixth round's, without mistakes; all are refactored in two ways, as the third round's are."""
SEVENTH = ("nli", "towers", "mixer", "perceiver", "neox", "translit")
CLEAN_7 = {
    **dict.fromkeys(("bf16", "fp16", "aot_eager", "refactor"), SEVENTH),
    "inductor": ("nli", "towers", "neox"),
    **dict.fromkeys(("ddp", "fsdp", "accum"), ("nli", "mixer", "perceiver", "neox", "translit")),
}
"""The seventh round's, clean pairs alone. Negatives of ``towers`` are of the same batch."""
EIGHTH = ("bit", "uvit", "detr", "retnet", "distil", "wavenet")
CLEAN_8 = {
    **dict.fromkeys(("bf16", "fp16", "aot_eager", "ddp", "fsdp", "accum", "refactor"), EIGHTH),
    "inductor": ("bit", "uvit", "distil", "wavenet"),
}
"""The eighth round's, clean pairs alone."""
NINTH = (
    "albert",
    "efficientnet",
    "dcn",
    "bilstm",
    "trocr",
    "nbeats",
    "sasrec",
    "deepspeech",
    "gin",
)
CLEAN_9 = {
    **dict.fromkeys(("bf16", "aot_eager", "ddp", "fsdp", "accum", "refactor"), NINTH),
    "fp16": tuple(script for script in NINTH if script != "bilstm"),
    "inductor": ("dcn", "nbeats", "sasrec", "gin"),
}
"""The ninth round's, clean pairs alone. CPUs have no LSTM in FP16."""
DROPOUT = (
    "gpt",
    "translate",
    "ssm",
    "mlm",
    "tagger",
    "vit",
    "dpo",
    "conformer",
    "swin",
    "patchtst",
    "grpo",
    "tts",
    "deeplab",
    "graphormer",
    "dino",
    "t5",
    "arcface",
    "ftt",
    "tcn",
    "convnext",
    "whisper",
    "awd",
    *SEVENTH,
    *EIGHTH,
    *(script for script in NINTH if script != "trocr"),
)
"""Scripts that drop out in clean pairs of kinds that draw the same masks."""


@dataclass(frozen=True)
class Pair:
    """The right training beside another one.

    Attributes:
        culprits: Modules, or ``outside``, ``input``, ``gradient``, ``update``; empty if clean.
        edits: Old and new texts of the second training's script.
    """

    name: str
    script: str
    kind: str
    culprits: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()

    @property
    def half(self) -> str:
        if self.script in CLEAN_4["refactor"]:
            return "unseen4"
        if self.script in CLEAN_5["refactor"]:
            return "unseen5"
        if self.script in SIXTH:
            return "unseen6"
        if self.script in (*SEVENTH, *EIGHTH):
            return "unseen7" if self.script in SEVENTH else "unseen8"
        if self.script in NINTH:
            return "unseen9"
        half = "dev" if sha256(self.name.encode()).digest()[0] % 2 else "unseen"
        second = "2" if self.script in CLEAN_2["refactor"] else ""
        return half + ("3" if self.script in THIRD else second)

    @property
    def way(self) -> str:
        """The header of its refactoring."""
        return f"{self.script} b" if self.name == f"clean-{self.script}-refactor-b" else self.script

    @property
    def shared(self) -> tuple[str, ...]:
        """Options of both trainings."""
        drops = not self.culprits and self.kind in ("aot_eager", "refactor")
        return ("--dropout", "0.1") if drops and self.script in DROPOUT else ()


def _blocks(text: str) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Headers and edits: lines of ``- old`` followed by lines of ``+ new``."""
    header, edits, before = "", list[tuple[list[str], list[str]]](), ""
    for line in text.splitlines():
        sign = line[:2] if line[:2] in ("- ", "+ ") else line[:1] if line in ("-", "+") else ""
        if not line or line.startswith("#"):
            continue
        if not sign:
            if header:
                yield header, tuple(("\n".join(a), "\n".join(b)) for a, b in edits)
            header, edits = line, []
        elif sign[0] == "-":
            if before != "-":
                edits.append(([], []))
            edits[-1][0].append(line[2:])
        else:
            edits[-1][1].append(line[2:])
        before = sign[:1]
    yield header, tuple(("\n".join(a), "\n".join(b)) for a, b in edits)


def pairs() -> list[Pair]:
    """All pairs, faulty and clean. Raises ValueError if two have one name."""
    found = []
    for header, edits in chain.from_iterable(_blocks((SCRIPTS / f).read_text()) for f in MISTAKES):
        name, script, kind, culprits, _ = (part.strip() for part in header.split("|"))
        found.append(Pair(f"{script}-{name}", script, kind, tuple(culprits.split()), edits))
    for clean in (CLEAN, CLEAN_2, CLEAN_3, CLEAN_4, CLEAN_5, CLEAN_6, CLEAN_7, CLEAN_8, CLEAN_9):
        found += [Pair(f"clean-{s}-{kind}", s, kind) for kind in clean for s in clean[kind]]
    twice = (way.removesuffix(" b") for way in refactorings() if way.endswith(" b"))
    found += [Pair(f"clean-{script}-refactor-b", script, "refactor") for script in twice]
    if len({pair.name for pair in found}) < len(found):
        raise ValueError("two pairs have the same name")
    return sorted(found, key=lambda pair: (pair.kind == "inductor", pair.script, pair.kind))


def refactorings() -> dict[str, tuple[tuple[str, str], ...]]:
    return {k: v for file in REFACTORINGS for k, v in _blocks((SCRIPTS / file).read_text())}


def write(pair: Pair, folder: Path) -> Path:
    """Writes the second training's script. Raises ValueError if an edit does not fit exactly once."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    texts = {name: (SCRIPTS / name).read_text() for name in (f"{pair.script}.py", "common.py")}
    for old, new in pair.edits:
        places = [name for name, text in texts.items() if text.count(old) == 1]
        if len(places) != 1:
            raise ValueError(f"{pair.name}: {old!r} does not occur exactly once")
        texts[places[0]] = texts[places[0]].replace(old, new)
    if pair.kind == "refactor":
        for old, new in refactorings()[pair.way]:
            texts[f"{pair.script}.py"] = texts[f"{pair.script}.py"].replace(old, new)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / f"{pair.script}.py"


class Commands:
    """Runs mpdiag's commands in forks of a process that has imported torch, as the tests do."""

    def __init__(self, code: Path) -> None:
        self.code = code
        modules = ("torch._inductor.compile_fx", "torch.distributed.tensor")
        command = [sys.executable, "-W", "ignore", str(code / "tests" / "fork_server.py"), *modules]
        environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps(order), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def mpdiag(self, *words: str) -> tuple[int, str]:
        """Exit code and output. Raises TimeoutError, with the command still running."""
        cwd = str(self.code)  # ranks import mpdiag from it
        job = {"program": "mpdiag", "words": words, "cwd": cwd, "env": {}}
        (pid,) = self._ask({"start": [job]})
        said, until = ["", ""], time.monotonic() + TIMEOUT
        while time.monotonic() < until:
            ((ended, *more),) = self._ask({"look": [pid]})
            said = [old + new for old, new in zip(said, more, strict=True)]
            if ended is not None:
                return ended, "".join(said) if ended else said[0]
            time.sleep(0.1)
        raise TimeoutError(f"mpdiag {words[0]} ran for {TIMEOUT} s")


def record(commands: Commands, folder: Path, command: Sequence[str], ranks: int = 1) -> None:
    """Records a traced training into ``folder/run``. Raises RuntimeError if that fails."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    launcher = ("torchrun", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    words = ("record", "--trace", "--out", str(folder / "run"), "--", *launcher, *command)
    ended, said = commands.mpdiag(*words)
    if ended:
        raise RuntimeError(f"the training failed: {said[-600:]}")
    (folder / "done").touch()


def culprit_found(pair: Pair, first: dict[str, Any]) -> bool:
    """Whether the first place is one that a reader would blame."""
    module, phase, kind = first["module"] or "", first["phase"], first["kind"]
    names = {old.removeprefix("self."): new.removeprefix("self.") for old, new in _renames(pair)}
    for culprit in pair.culprits:
        special = {
            "outside": not module and kind != "input" and phase != "update",
            "input": kind == "input",
            "gradient": kind == "weight_grad",
            "update": phase == "update",
        }
        if culprit in special:
            if special[culprit]:
                return True
            continue
        renamed = ".".join(names.get(part, part) for part in culprit.split("."))
        for name in (culprit, renamed):
            around = pair.kind in COMPILED and (name + ".").startswith(module + ".")
            if module and ((module + ".").startswith(name + ".") or around):
                return True
    return False


def _renames(pair: Pair) -> list[tuple[str, str]]:
    if pair.kind != "refactor":
        return []
    return [edit for edit in refactorings()[pair.way] if edit[0].startswith("self.")]


def judge(pair: Pair, said: dict[str, Any]) -> str:
    """What diff's answer is worth."""
    first, unsure = said["first"], said["compared"]["cannot_say_from"] is not None
    if first is None:
        if not pair.culprits:
            return "agree" if said["agree"] else "cannot say"
        return "missed" if said["agree"] and not unsure else "cannot say"
    if not pair.culprits:
        return "false alarm"
    return "named" if culprit_found(pair, first) else "seen"


def run(pair: Pair, commands: Commands, work: Path) -> dict[str, Any]:
    """Records both sides, unless they are there, and judges what diff says of them."""
    reference = work / "-".join((pair.script, "right", *pair.shared[1:]))
    other, ranks = work / pair.name, 2 if pair.kind in RANKS else 1
    try:
        if not (reference / "done").exists():
            record(commands, reference, [str(SCRIPTS / f"{pair.script}.py"), *pair.shared])
        if not (other / "done").exists():
            script = str(write(pair, other))
            record(commands, other, [script, *pair.shared, *OPTIONS[pair.kind]], ranks)
        _, text = commands.mpdiag("diff", str(reference / "run"), str(other / "run"), "--json")
        said = json.loads(text)
    except (RuntimeError, ValueError, TimeoutError) as error:
        return {"result": "failed", "error": str(error)[-800:]}
    return {"result": judge(pair, said), **said}


def commit(code: Path) -> str:
    command = ["git", "-C", str(code), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def slim(pair: Pair, when: str, code: str, found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a pair: no paths of this machine."""
    first = found.get("first")
    kept = (
        "module",
        "op",
        "phase",
        "kind",
        "name",
        "rank",
        "step",
        "difference",
        "tolerance",
        "code",
    )
    described = asdict(pair)
    del described["edits"]
    return {
        **described,
        "half": pair.half,
        "when": when,
        "commit": code,
        "result": found["result"],
        "first": None if first is None else {key: first[key] for key in kept},
        "compared": found.get("compared"),
        "coarse": found.get("coarse"),
        "not_compared": [re.sub(r"/\S+/", "", said) for said in found.get("not_compared") or ()],
    }


def stored(results: Path) -> list[dict[str, Any]]:
    return json.loads(results.read_text()) if results.exists() else []


def store(row: dict[str, Any], results: Path) -> None:
    key = (row["name"], row["when"])
    rows = [old for old in stored(results) if (old["name"], old["when"]) != key] + [row]
    rows.sort(key=lambda row: (row["when"], row["name"]))
    results.write_text(json.dumps(rows, indent=1) + "\n")


def _range(values: Sequence[float]) -> str:
    differ = [value for value in values if value]
    return f"{statistics.median(differ):.2g}, {max(differ):.2g}" if differ else "none differs"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One table of the stored pairs for each half and time, in Markdown."""
    lines = []
    for half, when in sorted({(row["half"], row["when"]) for row in rows}):
        chosen = [row for row in rows if (row["half"], row["when"]) == (half, when)]
        lines += [
            f"\n{half}, {when}",
            "",
            "| pair | named | seen | missed | cannot say | clean that agree | median, largest ratio |",
            "|---|---|---|---|---|---|---|",
        ]
        for kind in (*OPTIONS, "all"):
            of = [row for row in chosen if kind in (row["kind"], "all")]
            faults = [row["result"] for row in of if row["culprits"]]
            clean = [row for row in of if not row["culprits"]]
            agree = [row for row in clean if row["result"] == "agree"]
            ratios = [row["compared"]["largest_ratio"] or 0.0 for row in clean if row["compared"]]
            cells = [f"{faults.count('named')} of {len(faults)}"]
            cells += [str(faults.count(result)) for result in ("seen", "missed", "cannot say")]
            cells += [f"{len(agree)} of {len(clean)}", _range(ratios)]
            lines.append(f"| {TITLES.get(kind, kind)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", nargs="?", choices=HALVES)
    parser.add_argument("--as", dest="when", default="after", help="the name of this round")
    parser.add_argument("--only", help="the pairs with this in their name, stored or not")
    parser.add_argument("--code", type=Path, default=ROOT, help="the checkout that is judged")
    parser.add_argument("--work", type=Path, help="keep recordings here, and use them again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where rows are stored")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.half is not None:
        with TemporaryDirectory() as temporary:
            work, code = (args.work or Path(temporary)).resolve(), args.code.resolve()
            done = {row["name"] for row in stored(args.results) if row["when"] == args.when}
            commands = Commands(code)
            for pair in pairs():
                again = args.only is not None and args.only in pair.name
                if pair.half != args.half or not (again or args.only is None):
                    continue
                if pair.name in done and not again:
                    continue
                found = run(pair, commands, work)
                store(slim(pair, args.when, commit(code), found), args.results)
                first = found.get("first") or {}
                where = f"{first.get('module')} {first.get('op')} {first.get('phase')}"
                print(f"{pair.name}: {found['result']} {where if first else ''}", flush=True)
                if args.work:
                    (work / pair.name / "said.json").write_text(json.dumps(found, indent=1))
    if args.table:
        print(table(stored(args.results)))


if __name__ == "__main__":
    main()
