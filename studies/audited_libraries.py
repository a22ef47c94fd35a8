"""What the audit says of real libraries, beside what a witness without mpdiag sees.

    python studies/audited_libraries.py                      # all that are installed: some minutes
    python studies/audited_libraries.py trainer-bf16 hsdp    # some
    python studies/audited_libraries.py --json studies/results/audited-libraries.json

The scripts in ``studies/library_scripts/`` train small random models with transformers, accelerate,
Lightning, TRL, torchao and torch's own wrappers on gloo ranks. Each runs twice: under
``dtype_witness.py``, and under ``mpdiag record``. Dtypes of which the two differ are listed. The line
and the findings are printed, to be read. Processes are forked from one that has loaded torch.

TRL and torchao are in none of the package's extras: install them elsewhere and run this file there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch.distributed.fsdp
import torch.distributed.tensor.parallel

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import dtype_witness  # noqa: E402

SCRIPTS = HERE / "library_scripts"
PACKAGES = "torch transformers accelerate lightning trl peft torchao".split()
LIMIT = 300
"""Seconds for a script."""


@dataclass(frozen=True)
class Case:
    """A script's way to train.

    Attributes:
        script: Its file and argument.
        ranks: Processes that train together.
        needs: Packages that it imports.
        codes: What the audit must find, in order.
    """

    script: str
    ranks: int = 1
    needs: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()


def _on_ranks(*kinds: str, ranks: int) -> dict[str, Case]:
    return {f"{kind}-{ranks}": Case(f"parallel.py {kind}", ranks) for kind in kinds}


_IGNORED = ("precision-policy-not-applied",)
CASES = {
    "trainer-fp32": Case("trainer.py fp32", needs=("transformers", "accelerate")),
    "trainer-bf16": Case("trainer.py bf16", needs=("transformers", "accelerate")),
    "trainer-auto": Case("trainer.py auto", needs=("transformers", "accelerate")),
    "accelerate-bf16": Case("accelerated.py bf16", needs=("accelerate",)),
    "accelerate-bf16-2": Case("accelerated.py bf16", 2, ("accelerate",)),
    "accelerate-fsdp2-2": Case("accelerated.py fsdp2", 2, ("accelerate",), _IGNORED),
    "accelerate-fsdp2-bf16-2": Case("accelerated.py fsdp2-bf16", 2, ("accelerate",), _IGNORED),
    "lightning-32-true": Case("lightning_fit.py 32-true", needs=("lightning",)),
    "lightning-bf16-true": Case("lightning_fit.py bf16-true", needs=("lightning",)),
    "lightning-bf16-mixed": Case("lightning_fit.py bf16-mixed", needs=("lightning",)),
    **{f"lora-{kind}": Case(f"lora.py {kind}", needs=("trl", "peft")) for kind in ("fp32", "bf16")},
    "lora-bf16-base": Case("lora.py bf16-base", needs=("trl", "peft")),
    **{
        f"torchao-{kind}": Case(f"quantized.py {kind}", needs=("torchao",))
        for kind in ("int8", "nf4", "int8-training", "adamw8bit", "adamw4bit", "adamwfp8")
    },
    **_on_ranks("ddp", "ddp-hook", "fsdp1", "fsdp2", "tp", "tp-fsdp2", ranks=2),
    **_on_ranks("ddp-hook", "fsdp1", "fsdp2", "hsdp", "tp", "tp-fsdp2", ranks=4),
}


def is_installed(package: str) -> bool:
    """Whether a package is here."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def on_ranks(run: Callable[[], None], ranks: int, folder: Path) -> str:
    """Run something in as many forked processes as ranks; returns what they printed.

    Raises:
        RuntimeError: If a rank fails, or is not done after ``LIMIT``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    said = folder / "said.txt"
    said.unlink(missing_ok=True)
    children = []
    for rank in range(ranks):
        own = {**meeting, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        pid = os.fork()
        if not pid:
            _child(run, own if ranks > 1 else {}, said, folder)
        children.append(pid)
    failures = [os.waitpid(pid, 0)[1] for pid in children]
    if any(failures):
        raise RuntimeError(said.read_text()[-3000:])
    return said.read_text()


def _child(
    run: Callable[[], None], environment: Mapping[str, Any], said: Path, folder: Path
) -> None:
    """Run something in this forked process, and leave it."""
    code = 1
    try:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        os.environ.update({name: str(value) for name, value in environment.items()})
        signal.alarm(LIMIT)
        run()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - the parent reads it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _mpdiag(*words: str) -> Callable[[], None]:
    """The command line, in a child: the parent and the witness have no mpdiag."""

    def run() -> None:
        import mpdiag.cli

        sys.argv = ["mpdiag", *words]
        mpdiag.cli.main()

    return run


def differences(seen: Mapping[str, Any], audit: Mapping[str, Any]) -> Iterator[str]:
    """Where the audit says another dtype than the witness saw."""
    parameters = {_short(p["name"]): p for p in audit["parameters"]}
    for name in set(seen["parameters"]) - set(parameters):  # of a part that is called by itself
        whole = [known for known in parameters if known.endswith(f".{name}")]
        if len(whole) == 1:
            parameters[name] = parameters.pop(whole[0])
    for name in sorted(set(parameters) ^ set(seen["parameters"])):
        yield f"{name}: {'only the audit' if name in parameters else 'only the witness'} has it"
    for name in sorted(set(parameters) & set(seen["parameters"])):
        witnessed, p = seen["parameters"][name], parameters[name]
        for field, value in _expected(name, witnessed, seen["forward"]).items():
            if p[field] != value:
                yield f"{name}: {field} is {value}, the audit says {p[field]}"
    reduced = {p["reduced"] for p in audit["parameters"] if p["reduced"]}
    collected = {dtype for dtype, numel in seen["collectives"].items() if numel > 200}
    if reduced != collected:
        yield f"collectives are in {sorted(collected)}, the audit says {sorted(reduced)}"


def _expected(
    name: str, witnessed: Mapping[str, Any], forward: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """What the audit should have of a parameter, as far as the witness saw it."""
    expected = {"stored": witnessed["stored"][0][0], "trainable": witnessed["trainable"]}
    if witnessed["grad"] is not None:
        expected["accumulated"] = witnessed["grad"]
    if witnessed["states"]:
        expected["states"] = {key: parts[0][0] for key, parts in witnessed["states"].items()}
    module, _, own = name.rpartition(".")
    inside = list(forward.get(module, ()))
    if own == "weight" and len(inside) == 1:
        expected["forward"] = inside[0]
    return expected


def _short(name: str) -> str:
    """A parameter's name without what wrappers add."""
    return ".".join(p for p in name.split(".") if p not in ("module", "_fsdp_wrapped_module"))


def audited(case: Case, folder: Path) -> dict[str, Any]:
    """What the audit says, and where the witness saw otherwise."""
    file, argument = case.script.split()
    script = [str(SCRIPTS / file), argument]
    seen = folder / "seen.json"
    on_ranks(lambda: dtype_witness.run(seen, script), case.ranks, folder)
    options = ("--out", "run", "--every", "1", "--operations", "3")
    said = on_ranks(_mpdiag("record", *options, "--", *script), case.ranks, folder)
    text = on_ranks(_mpdiag("audit", "run", "--json"), 1, folder)
    audit = json.loads(text.replace(f"{SCRIPTS}/", ""))  # no path of this machine
    text = on_ranks(_mpdiag("audit", "run", "-v"), 1, folder)
    failures = [json.loads(f.read_text())["failures"] for f in folder.glob("run/meta*.json")]
    return {
        "line": audit["summary"],
        "findings": [{k: f[k] for k in ("code", "severity", "message")} for f in audit["findings"]],
        "differences": list(differences(json.loads(seen.read_text()), audit)),
        "failures": [words for found in failures for words in found],
        "text": text.splitlines(),
        "said": [line for line in said.splitlines() if "mpdiag: " in line],
    }


def main() -> None:
    """Record, audit, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    found = {}
    for name in chosen.names:
        case = CASES[name]
        missing = [package for package in case.needs if not is_installed(package)]
        if missing:
            print(f"{name}: not run, {', '.join(missing)} is not installed")
            continue
        try:
            with tempfile.TemporaryDirectory() as place:
                found[name] = audited(case, Path(place))
        except RuntimeError as error:
            print("=" * 100, name, f"!! failed: {error}", sep="\n", flush=True)
            continue
        print("=" * 100, name, *found[name]["said"], *found[name]["text"], sep="\n")
        for words in (*found[name]["differences"], *found[name]["failures"]):
            print("!!", words)
        sys.stdout.flush()
        if chosen.json:
            keep(name, found[name], chosen.json)


def keep(name: str, found: Mapping[str, Any], path: Path) -> None:
    """Write what was found of a case, beside what was found of others before."""
    kept = {k: v for k, v in found.items() if k not in ("text", "said")}
    versions = {p: importlib.metadata.version(p) for p in PACKAGES if is_installed(p)}
    kept |= {"date": str(date.today()), "versions": versions}
    before = json.loads(path.read_text())["cases"] if path.exists() else {}
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        "cases": {**before, name: kept},
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
