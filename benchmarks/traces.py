"""Reading a trace: time and peak memory, beside ``json.load`` and HolisticTraceAnalysis.

    python benchmarks/traces.py [TRACE] [--hta PYTHON] [--large MB] [--json FILE]

A trace (without one, a generated training) is grown to 50 MB by repeating its events, shifted in
time, with correlations and sequence numbers of their own. Each reader runs in a process of its own,
three times; the least processor time counts, and the peak of the process with its imports.
HolisticTraceAnalysis is only measured where ``--hta`` names a Python that has it:

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis
    python benchmarks/traces.py --hta /tmp/hta/bin/python
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

MB = 1_000_000
ROUNDS = 3

_MEASURE = """
import re, sys, time
from pathlib import Path
{imports}
start = time.process_time()
{work}
taken = time.process_time() - start
status = Path("/proc/self/status").read_text(encoding="utf-8")
print(taken, int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024)
"""
READERS = {
    "mpdiag": (
        "from mpdiag.tensorcores.trace_analysis import profile_trace",
        "profile_trace(sys.argv[1])",
    ),
    "json.load": ("import json", "json.load(open(sys.argv[1], encoding='utf-8'))"),
}
_QUIET = "import logging, warnings; logging.disable(); warnings.simplefilter('ignore')\n"
HTA = {
    "HolisticTraceAnalysis": (  # what its users call before any question
        _QUIET + "from hta.trace_analysis import TraceAnalysis",
        "TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=str(Path(sys.argv[1]).parent))",
    ),
    "… its parser alone": (
        _QUIET + "from hta.common.trace_parser import parse_trace_dataframe\n"
        "from hta.configs.parser_config import ParserConfig",
        "parse_trace_dataframe(sys.argv[1], ParserConfig.get_default_cfg())",
    ),
}


# -- traces ----------------------------------------------------------------------------------------


def generate(steps: int = 20) -> dict:
    """A training of forty layers, as torch.profiler writes it with shapes."""
    events, ids = [], 0
    layers, names = (
        40,
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", "elementwise"),
    )

    def host(category: str, name: str, start: float, length: float, **args: object) -> None:
        place = {"pid": 1, "tid": 1, "ts": start, "dur": length}
        events.append({"ph": "X", "cat": category, "name": name, **place, "args": args})

    for step in range(steps):
        for layer in range(layers):
            at = step * 1e5 + layer * 100.0
            for kind, name in enumerate(("aten::addmm", "aten::relu")):
                ids += 1
                begin = at + 50 * kind
                args = {
                    "External id": ids,
                    "Sequence number": ids,
                    "Fwd thread id": 0,
                    "Input Dims": [[512], [256, 512], [512, 512], [], []],
                    "Input type": ["c10::Half", "c10::Half", "c10::Half", "Scalar", "Scalar"],
                    "Input Strides": [[1], [512, 1], [1, 512], [], []],
                }
                host("cpu_op", "aten::linear", begin, 40, **args)
                host("cpu_op", name, begin + 1, 38, **args)
                host("cuda_runtime", "cudaLaunchKernel", begin + 5, 9, correlation=ids, cbid=211)
                events.append(
                    {"ph": "s", "id": ids, "pid": 1, "tid": 1, "ts": begin, "cat": "ac2g"}
                )
                kernel = {"ph": "X", "cat": "kernel", "name": names[kind], "pid": 0, "tid": 7}
                where = {"device": 0, "stream": 7, "correlation": ids, "grid": [8, 8, 1]}
                events.append(kernel | {"ts": begin + 60, "dur": 20.5, "args": where})
    device = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0}
    return {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events}


def load(path: Path | None) -> dict:
    """A trace, or the generated one."""
    if path is None:
        return generate()
    opener = gzip.open if path.read_bytes()[:2] == b"\x1f\x8b" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        return json.load(file, strict=False)


def grow(document: dict, path: Path, size: int) -> None:
    """Write a trace's events over and over until the file has ``size`` bytes."""
    events = [e for e in document["traceEvents"] if isinstance(e.get("ts"), int | float)]
    head = {k: document[k] for k in ("schemaVersion", "deviceProperties", "distributedInfo")
            if k in document}  # fmt: skip
    times = [e["ts"] for e in events if e.get("cat") != "Trace"]
    span = max(times) - min(times) + 1e6
    highest = max((e.get("args", {}).get("correlation", 0) for e in events), default=0) + 1
    sequences = max((e.get("args", {}).get("Sequence number", 0) for e in events), default=0) + 1
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ',\n"traceEvents": [\n')
        copy = 0
        while file.tell() < size:
            file.write(",\n" if copy else "")
            file.write(",\n".join(
                json.dumps(_shifted(e, copy, span, highest, sequences)) for e in events
            ))  # fmt: skip
            copy += 1
        file.write("\n]}\n")


def _shifted(event: dict, copy: int, span: float, highest: int, sequences: int) -> dict:
    args = event.get("args")
    event = event | {"ts": event["ts"] + copy * span}
    if args:
        args = dict(args)
        for key, by in (
            ("correlation", highest),
            ("Sequence number", sequences),
            ("External id", highest),
        ):
            if isinstance(args.get(key), int):
                args[key] += copy * by
        event["args"] = args
    return event


# -- measuring -------------------------------------------------------------------------------------


def measure(python: str, imports: str, work: str, trace: Path) -> tuple[float, float] | str:
    """Seconds and peak MB of one reading in a process of its own; or why there are none."""
    code = _MEASURE.format(imports=imports, work=work)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [python, "-c", code, str(trace)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if child.returncode:
        return (child.stderr.strip().splitlines() or ["no reason given"])[-1]
    taken, peak = map(float, child.stdout.split()[-2:])
    return taken, peak


def least(python: str, reader: tuple[str, str], trace: Path, rounds: int) -> dict | str:
    """The least time and peak of some rounds."""
    found = []
    for _ in range(rounds):
        result = measure(python, *reader, trace)
        if isinstance(result, str):
            return result
        found.append(result)
    return {"seconds": min(t for t, _ in found), "peak_mb": min(p for _, p in found)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path, nargs="?", help="what to grow; default: generated")
    parser.add_argument("--hta", help="a Python that has HolisticTraceAnalysis")
    parser.add_argument("--large", type=int, default=1000, help="MB of the large trace; 0: none")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    document = load(options.trace)
    results: dict = {
        "date": date.today().isoformat(),
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "trace": options.trace.name if options.trace else "generated",
        "readers": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        small = Path(temporary) / "small.json"
        grow(document, small, 50 * MB)
        results["small_mb"] = small.stat().st_size / MB
        readers = {name: (sys.executable, reader) for name, reader in READERS.items()}
        if options.hta:
            readers |= {name: (options.hta, reader) for name, reader in HTA.items()}
        for name, (python, reader) in readers.items():
            results["readers"][name] = least(python, reader, small, ROUNDS)
        if not options.hta:
            results["readers"]["HolisticTraceAnalysis"] = "absent: give --hta PYTHON"
        show(results)
        if options.large:
            small.unlink()
            large = Path(temporary) / "large.json"
            grow(document, large, options.large * MB)
            results["large_mb"] = large.stat().st_size / MB
            results["large"] = least(sys.executable, READERS["mpdiag"], large, 1)
            show_large(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def show(results: dict) -> None:
    own = results["readers"]["mpdiag"]
    print(f"{results['trace']}, grown to {results['small_mb']:.0f} MB; {results['cpu']}")
    print(f"{'reader':24} {'CPU s':>8} {'over ours':>10} {'peak MB':>8} {'over ours':>10}")
    for name, found in results["readers"].items():
        if isinstance(found, str) or isinstance(own, str):
            print(f"{name:24} {found}")
            continue
        seconds, peak = found["seconds"], found["peak_mb"]
        print(
            f"{name:24} {seconds:8.2f} {seconds / own['seconds']:10.2f} "
            f"{peak:8.0f} {peak / own['peak_mb']:10.2f}",
            flush=True,
        )


def show_large(results: dict) -> None:
    own, large = results["readers"]["mpdiag"], results["large"]
    if isinstance(own, str) or isinstance(large, str):
        print(f"large trace: {large}")
        return
    print(
        f"{results['large_mb']:.0f} MB: {large['seconds']:.1f} s, peak {large['peak_mb']:.0f} MB, "
        f"{large['peak_mb'] / own['peak_mb']:.2f} times that of {results['small_mb']:.0f} MB"
    )


if __name__ == "__main__":
    main()
