"""Hostile files for every reader: only our own errors, bounded time and memory, no other file.

    python studies/fuzz.py                      # 10,000 inputs for each reader
    python studies/fuzz.py --count 500 --only plan,nsys --json fuzz.json
    python studies/fuzz.py --only plan --again 1234     # one input once more, with its traceback

An input is a real file, corrupted: bits, bytes and lengths; JSON values of other types, huge numbers,
NaN, keys twice, values nested deep; CSV cells and columns; Parquet columns of other types; views in
a database that never end; paths, control characters, HTML and formulas for names. Its number and
``--seed`` name it. A reader may read it or refuse it with one of our errors, in one sentence; the
first inputs, and every ``deep`` one, also go through what is shown of them, and through the command
line, which must exit with 0 or 3. Everything else is a failure and is printed with its number.

Each reader works in a process of its own, whose files are watched by an audit hook: a file outside
its folder that is read or written is a failure, and so is a process or a connection that is opened.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutations import CORRUPTIONS

from mpdiag.errors import MpdiagError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SECONDS = 20.0
"""Time limit for an input; a process that does not answer for three times as long is killed."""
MEMORY = 3 << 30
"""Address space of a process beyond what it has before the first input."""
DEEP_EVERY = 50


@dataclass(frozen=True)
class Reader:
    """A reader that is fuzzed.

    Attributes:
        name: Of the reader.
        file: The corrupted file, in the folder the functions are given.
        how: How it is corrupted, a key of ``mutations.CORRUPTIONS``.
        seeds: Good files.
        read: Reads the folder.
        show: Reads and shows all that is shown of it.
        command: Words of the command line that reads it.
        base: A folder that the file belongs into, copied once; None for an empty one.
    """

    name: str
    file: str
    how: str
    seeds: tuple[bytes, ...]
    read: Callable[[Path], object]
    show: Callable[[Path], object]
    command: tuple[str, ...]
    base: Path | None = None


# -- good files ------------------------------------------------------------------------------------

_TENSOR = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"
_SGEMM = "ampere_sgemm_128x64_nn"


def record_run(folder: Path) -> None:
    """A tiny recording with everything in it: two models' worth of layers, operations, a log."""
    import torch

    import mpdiag
    from mpdiag.runs.training_log import LogWriter, Metric, TrainingStep

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with mpdiag.record(model, optimizer, folder, every=1, operations=1, overwrite=True):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).exp().mean().log()
            loss.backward()
            optimizer.step()
    log = LogWriter(folder)
    for step in range(6):
        log.append(
            TrainingStep(step, 1.0 / (step + 1), 128.0, step == 2, "inf in 0", 0.5, 10**8, 0.1)
        )
    log.append(Metric("accuracy", 0.9))
    log.append({"alarm": "scale at its floor", "step_": 4})
    log.close()
    mpdiag.analyze(folder).plan.save(folder / "plan.json")
    x = torch.randn(4, 8)
    mpdiag.measure_sensitivity(model, lambda: model(x).exp().mean().log(), folder)
    skip_a_step(folder.with_name("capsule"))


def skip_a_step(folder: Path) -> None:
    """A capsule of a step that overflowed."""
    import torch

    import mpdiag
    from mpdiag.training.skips.capsule import save_capsule
    from mpdiag.training.skips.random_state import capture_random

    model, _ = capsule_model()
    facts = {
        "step": 3, "scale": 128.0, "reason": "Inf in 0", "model": "model.Net", "training": True,
        "level": "O1", "backend": "emulated", "device": "cpu",
        "plan": mpdiag.PrecisionPlan().to_json(),
    }  # fmt: skip
    batch = {"x": torch.randn(2, 4), "names": ["a", None, 1.5]}
    save_capsule(
        folder, weights=model.state_dict(), random=capture_random(), batch=batch, facts=facts
    )


def capsule_model() -> tuple[Any, Callable[[Any, Any], Any]]:
    """The capsule's model, and a loss that ignores the batch, whose content is not ours."""
    import torch

    return torch.nn.Linear(4, 2), lambda model, _batch: model(torch.ones(2, 4)).mean()


def torch_traces() -> tuple[bytes, ...]:
    """A trace of torch.profiler: plain, indented and gzipped."""
    device = {"id": 0, "name": "NVIDIA A100", "computeMajor": 8, "computeMinor": 0, "numSms": 108}
    events: list[dict[str, Any]] = [
        _event("python_function", "nn.Module: Linear_0", 0, 12),
        _event("python_function", "train.py(3): step", 0, 99),
    ]
    for i, (name, kind) in enumerate(((_TENSOR, "c10::Half"), (_SGEMM, "float")), 1):
        shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": [kind, kind]}
        more = {
            "Sequence number": i,
            "Input Strides": [[32, 1], [16, 1]],
            "Concrete Inputs": ["", ""],
        }
        events += [
            _event("cpu_op", "aten::mm", 10 * i, 8, **shapes, **more),
            _event("cuda_runtime", "cudaLaunchKernel", 10 * i + 3, 1, correlation=i),
            _event("kernel", name, 100 * i, 50, correlation=i, device=0, stream=7),
            {"ph": "s", "id": i, "pid": 7, "tid": 1, "ts": 5, "cat": "ac2g", "name": "ac2g"},
        ]
    document = {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events}
    text = json.dumps(document).encode()
    return text, json.dumps(document, indent=1).encode(), gzip.compress(text)


def _event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    times = {"pid": 7, "tid": 1, "ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **times, "args": args}


def database() -> bytes:
    """An export of nsys."""
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.executescript(
            "CREATE TABLE StringIds (id INTEGER, value TEXT);"
            "CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, computeMajor INT, computeMinor INT,"
            " smCount INT, totalMemory INT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT,"
            " correlationId INT, demangledName INT, shortName INT, graphNodeId INT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT,"
            " correlationId INT, nameId INT);"
            "CREATE TABLE GPU_METRICS (typeId INT, metricId INT, value REAL);"
            "CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INT, metricId INT, metricName TEXT);"
        )
        names = [(1, _TENSOR), (2, _SGEMM), (3, "cudaLaunchKernel_v7000"), (4, "gemm")]
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
        base.execute(
            "INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100', 8, 0, 108, 85000000000)"
        )
        for i in range(8):
            row = (1000 * i, 1000 * i + 500, 0, 7, i, 1 + i % 2, 4, None)
            base.execute(
                f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 8)})", row
            )
            launch = (1000 * i - 90, 1000 * i - 80, 5, i, 3)
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", launch)
            base.execute("INSERT INTO GPU_METRICS VALUES (1, 1, ?)", (10.0 * i,))
        base.execute("INSERT INTO TARGET_INFO_GPU_METRICS VALUES (1, 1, 'Tensor Active [%]')")
        base.commit()
        return base.serialize()


def ncu_tables() -> tuple[bytes, ...]:
    """Counters of ncu, a row for each metric and a column for each."""
    head = '"ID","Process ID","Kernel Name","CC","Section Name",'
    head += '"Metric Name","Metric Unit","Metric Value"'
    lines = ["==PROF== Connected to process 7", "64 64 64 1 10.0 0.0524288", head]
    metrics = (
        ("gpu__time_duration.sum", "usecond", "10.5"),
        ("sm__inst_executed_pipe_tensor.sum", "inst", "4,096"),
        ("smsp__cycles_elapsed.avg.per_second", "cycle/nsecond", "1.41"),
    )
    for i, name in enumerate((_TENSOR, _SGEMM)):
        lines += [f'"{i}","7","{name}","8.0","Command","{m}","{u}","{v}"' for m, u, v in metrics]
    wide = [
        '"ID","Kernel Name","CC","gpu__time_duration.sum","sm__inst_executed_pipe_tensor.sum"',
        '"","","","usecond","inst"',
        *(f'"{i}","{name}","8.0","1{i}.5","4,096"' for i, name in enumerate((_TENSOR, _SGEMM))),
    ]
    return "\n".join(lines).encode(), "\n".join(wide).encode()


def nvprof_tables() -> tuple[bytes, ...]:
    """A GPU trace of nvprof and its summary."""
    trace = [
        "==7== NVPROF is profiling process 7",
        "==7== Profiling result:",
        '"Start","Duration","Grid X","Device","Context","Stream","Name","Correlation_ID"',
        "s,us,,,,,,",
        f'0.1,25.5,8,"Tesla V100","1","7","{_SGEMM} [12]",12',
        '0.2,75.5,8,"Tesla V100","1","7","volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn [13]",13',
        '0.3,5.5,8,"Tesla V100","1","7","[CUDA memcpy HtoD]",14',
    ]
    summary = [
        '"Type","Time(%)","Time","Calls","Avg","Min","Max","Name"',
        ",%,ms,,us,us,us,",
        f'"GPU activities",80.0,12.5,100,125.0,1.0,200.0,"{_SGEMM}"',
        '"API calls",80.0,12.5,100,125.0,1.0,200.0,"cudaLaunchKernel"',
    ]
    return "\n".join(trace).encode(), "\n".join(summary).encode()


def search_state() -> bytes:
    """A search's file, as ``sensitivity.search_state`` writes it."""
    from mpdiag.sensitivity.ranking import Fp32Candidate
    from mpdiag.sensitivity.search_state import Probe, SearchState

    found = [Fp32Candidate("0", "linear"), Fp32Candidate("1", "layer_norm")]
    with tempfile.TemporaryDirectory() as folder:
        state = SearchState({"level": "O1", "seeds": 2}, Path(folder) / "search.json")
        state.reference.update({0: (0.9, 1.5), 1: (0.8, 1.25)})
        state.candidates += [(c, float(i)) for i, c in enumerate(found)]
        state.probes.append(Probe(frozenset(found), (0.9, float("nan")), True, 2.5))
        state.save()
        return (Path(folder) / "search.json").read_bytes()


# -- readers ---------------------------------------------------------------------------------------


def readers(base: Path) -> Iterator[Reader]:
    """Every reader; ``base`` is a folder that holds the run ``run``."""
    run = base / "run"
    small = {name: (run / name).read_bytes() for name in _run_files(run)}
    first = {kind: next(n for n in small if n.startswith(kind)) for kind in _PARQUET}
    for name, file, read in (
        ("meta.json", "meta.json", _read_meta),
        ("statistics", first["stats"], lambda f: _opened(f).records),
        ("modules", first["modules"], lambda f: _opened(f).modules()),
        ("operations", first["operations"], _read_operations),
    ):
        how = "json" if file.endswith("json") else "parquet"
        words = ("analyze", "run")
        yield Reader(name, f"run/{file}", how, (small[file],), read, _show_run, words, base)
    yield Reader(
        "plan.json", "plan.json", "json", (small["plan.json"],), _read_plan, _show_plan,
        ("export", "plan.json", "--to", "torch"),
    )  # fmt: skip
    log = (small["training.jsonl"],)
    yield Reader(
        "training.jsonl", "run/training.jsonl", "lines", log, _read_log, _show_log,
        ("compare", "run", "run"), base,
    )  # fmt: skip
    profiled = ("profile", "trace")
    yield Reader(
        "torch.profiler", "trace", "json", torch_traces()[:2], _read_trace, _show_trace, profiled
    )
    packed = torch_traces()[2:]
    yield Reader("torch.profiler.gz", "trace", "packed", packed, _read_trace, _show_trace, profiled)
    yield Reader("nsys", "trace", "database", (database(),), _read_trace, _show_trace, profiled)
    yield Reader("ncu", "trace", "csv", ncu_tables(), _read_trace, _show_trace, profiled)
    yield Reader("nvprof", "trace", "csv", nvprof_tables(), _read_trace, _show_trace, profiled)
    yield Reader(
        "search.json", "search.json", "json", (search_state(),), _read_search, _read_search, ()
    )
    yield Reader(
        "baseline", "baseline.json", "json", (_baseline(run),), _read_side, _show_side,
        ("compare", "baseline.json", "baseline.json"),
    )  # fmt: skip
    yield Reader(
        "profile.json", "profile.json", "json", (_profile_document(),), _read_profile,
        _show_profile, (),
    )  # fmt: skip
    yield Reader(
        "sensitivity.json", "run/sensitivity.json", "json", (small["sensitivity.json"],),
        _read_sensitivities, _show_sensitivities, (), base,
    )  # fmt: skip
    for file, how in (("capsule.json", "json"), ("tensors.safetensors", "bytes")):
        seed = (base / "capsule" / file).read_bytes()
        yield Reader(
            f"capsule/{file}", f"capsule/{file}", how, (seed,), _read_capsule, _show_capsule,
            ("why", "capsule", "--model", "fuzz:capsule_model"), base,
        )  # fmt: skip


_PARQUET = ("stats", "modules", "operations")


def _run_files(run: Path) -> list[str]:
    return [str(p.relative_to(run)) for p in sorted(run.rglob("*")) if p.is_file()]


def _opened(folder: Path) -> Any:
    from mpdiag.runs.run import open_run

    return open_run(folder / "run")


def _read_meta(folder: Path) -> object:
    from mpdiag.reports.text.runs import runs_json, runs_table
    from mpdiag.runs.run import list_runs

    listings = list_runs(folder)
    return runs_json(listings), _shown(runs_table(listings)), _opened(folder)._repr_html_()


HOSTILE = "<script>alert(1)</script>", "<img src=x onerror"
"""Names among the corrupted ones that must not stand in a page as they are."""


def _show_run(folder: Path) -> object:
    from mpdiag.analysis.analyzer import analyze
    from mpdiag.reports.contents import read_contents
    from mpdiag.reports.documents.run_report import run_page
    from mpdiag.reports.text.analysis import analysis_text
    from mpdiag.reports.views.runs import runs_frame
    from mpdiag.runs.run import list_runs

    listings = list_runs(folder)
    runs_frame(listings, ["complete"] * len(listings))
    analysis = analyze(folder / "run")
    page = run_page(read_contents(analysis))
    assert not any(text in page for text in HOSTILE), "a name stands unescaped in the report"
    json.dumps(analysis.to_json(), allow_nan=False)
    return _shown(analysis_text(analysis))


def _read_operations(folder: Path) -> object:
    from mpdiag.analysis.operations.detection import find_operations
    from mpdiag.analysis.operations.rounding_error import operation_errors
    from mpdiag.numerics.formats import FP16

    operations = _opened(folder).operations()
    return find_operations(operations, FP16, 128.0), operation_errors(operations, FP16, 7)


def _read_sensitivities(folder: Path) -> Any:
    from mpdiag.runs.sensitivity import read_sensitivities

    return read_sensitivities(folder / "run")


def _show_sensitivities(folder: Path) -> object:
    from mpdiag.analysis.analyzer import analyze
    from mpdiag.reports.contents import read_contents
    from mpdiag.reports.views.sensitivity import ranking, sensitivity, shown

    found = ranking(read_contents(analyze(folder / "run")))
    return shown(found), sensitivity("run", found)


def _read_capsule(folder: Path) -> Any:
    from mpdiag.training.skips.capsule import load_capsule

    return load_capsule(folder / "capsule")


def _show_capsule(folder: Path) -> object:
    from mpdiag.reports.text.why import skip_text
    from mpdiag.training.skips.capsule_replay import replay_capsule

    replayed = replay_capsule(_read_capsule(folder), capsule_model)
    json.dumps(replayed.to_json(), allow_nan=False)
    return _shown(skip_text(replayed.to_json(), replayed.first))


def _read_plan(folder: Path) -> Any:
    from mpdiag.plan import PrecisionPlan

    return PrecisionPlan.load(folder / "plan.json")


def _show_plan(folder: Path) -> object:
    from mpdiag.exports.registry import EXPORTERS, export_plan

    plan = _read_plan(folder)
    page = plan._repr_html_()
    assert "<script>" not in page, "a name stands unescaped in the notebook"
    json.dumps(plan.to_json(), allow_nan=False)
    for name in EXPORTERS:
        with contextlib.suppress(MpdiagError):  # a framework that cannot hold this plan says so
            export_plan(plan, name).text.encode()
    return repr(plan)


def _read_log(folder: Path) -> Any:
    from mpdiag.runs.training_log import read_log

    return read_log(folder / "run")


def _show_log(folder: Path) -> object:
    from mpdiag.analysis.comparison.compare import compare
    from mpdiag.reports.text.comparison import comparison_text
    from mpdiag.reports.views.training import losses_frame, outcome_frame, scales_frame

    logs = {"run": _read_log(folder)}
    _ = losses_frame(logs), scales_frame(logs), outcome_frame(logs)
    comparison = compare(folder / "run", folder / "run")
    json.dumps(comparison.to_json(), allow_nan=False)
    return _shown(comparison_text(comparison))


def _read_trace(folder: Path) -> Any:
    from mpdiag.tensorcores.trace_analysis import profile_trace

    return profile_trace(folder / "trace")


def _show_trace(folder: Path) -> object:
    from mpdiag.reports.documents.write import write_trace_report
    from mpdiag.reports.text.gpu_profile import profile_text

    profile = _read_trace(folder)
    document = profile.to_json()
    json.dumps(document, allow_nan=False)
    for name in ("tensor_core_fraction", "layout_fraction", "unknown_fraction", "linked_fraction"):
        assert 0.0 <= document[name] <= 1.0 + 1e-9, f"{name} is {document[name]}"
    write_trace_report(folder / "trace", folder / "report.md")
    page = write_trace_report(folder / "trace", folder / "report.html").read_text(encoding="utf-8")
    assert not any(text in page for text in HOSTILE), "a name stands unescaped in the report"
    return _shown(profile_text(profile))


def _read_search(folder: Path) -> object:
    from mpdiag.sensitivity.search_state import load_state

    return load_state(folder / "search.json", {"level": "O1", "seeds": 2})


def _baseline(run: Path) -> bytes:
    from mpdiag.analysis.comparison.groups import read_group, save_baseline

    with tempfile.TemporaryDirectory() as folder:
        save_baseline(read_group(run), Path(folder) / "baseline.json")
        return (Path(folder) / "baseline.json").read_bytes()


def _read_side(folder: Path) -> object:
    from mpdiag.analysis.comparison.groups import read_group

    return read_group(folder / "baseline.json")


def _show_side(folder: Path) -> object:
    from mpdiag.analysis.comparison.compare import compare
    from mpdiag.reports.text.comparison import comparison_text

    comparison = compare(folder / "baseline.json", folder / "baseline.json")
    json.dumps(comparison.to_json(), allow_nan=False)
    return _shown(comparison_text(comparison))


def _profile_document() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trace").write_bytes(torch_traces()[0])
        return json.dumps(_read_trace(Path(folder)).to_json()).encode()


def _read_profile(folder: Path) -> Any:
    from mpdiag.runs.stored.profile import read_profile

    return read_profile(folder)


def _show_profile(folder: Path) -> object:
    from mpdiag.reports.views import tensor_cores as frames
    from mpdiag.reports.views.tensor_cores import kernels, verdicts

    document = _read_profile(folder)
    operations = frames.operation_frame(document)
    _ = frames.headline(document), frames.fixable(operations), frames.verdict_frame(document)
    return verdicts("run", document), kernels("run", document)


def _shown(renderable: object) -> str:
    """What a terminal would get; a control character from a file must not reach it."""
    from mpdiag.reports.console import Terminal

    out = io.StringIO()
    Terminal(file=out, width=120, force_terminal=False).print(renderable)
    text = out.getvalue()
    text.encode()
    loose = [c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160]
    assert not loose, f"a control character {loose[0]!r} reaches the terminal"
    return text


# -- one input -------------------------------------------------------------------------------------


class TooSlowError(BaseException):
    """An input takes too long; no reader may catch this."""


def corrupt(reader: Reader, rng: random.Random) -> bytes:
    """One hostile file."""
    return CORRUPTIONS[reader.how](rng.choice(reader.seeds), rng)


def numbered(reader: Reader, seed: int, number: int) -> bytes:
    """The hostile file of a number."""
    return corrupt(reader, random.Random(f"{reader.name}:{seed}:{number}"))  # noqa: S311


def attempt(reader: Reader, folder: Path, data: bytes, *, deep: bool = False) -> str:
    """Give one file to a reader; returns the name of our error, or "read".

    Raises:
        Exception: Whatever is no error of ours, or one that is not one sentence.
    """
    (folder / reader.file).write_bytes(data)
    try:
        (reader.show if deep else reader.read)(folder)
    except MpdiagError as error:
        text = str(error)
        assert text, "an error without a sentence"
        assert len(text) < 1_100, f"an error of {len(text)} characters"
        outcome = type(error).__name__
    else:
        outcome = "read"
    if deep and reader.command:
        _command(reader, folder)
    return outcome


def _command(reader: Reader, folder: Path) -> None:
    from typer.testing import CliRunner

    from mpdiag.cli import app

    words = [str(folder / w) if (folder / w).exists() else w for w in reader.command]
    for more in ([], ["--json"]):
        result = CliRunner().invoke(app, [*words, *more])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code in (0, 2 if reader.name == "plan.json" else 0, 3), (
            f"exit code {result.exit_code}"
        )
        if result.exit_code:
            said = result.stderr.strip().splitlines()
            assert len(said) == 1, f"{len(said)} lines of error"
            assert all(ord(c) >= 32 and not 127 <= ord(c) < 160 for c in said[0]), repr(
                said[0][:200]
            )


def prepare(reader: Reader, folder: Path) -> None:
    """The files beside the corrupted one."""
    if reader.base is not None:
        shutil.copytree(reader.base, folder, dirs_exist_ok=True)


# -- many inputs -----------------------------------------------------------------------------------

_REFUSED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
_FILES = ("open", "sqlite3.connect", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir")


class Watch:
    """An audit hook: which files were touched outside the folder."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self.seen: list[str] = []
        here = Path(__file__).resolve().parents[1]
        libraries = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path)}
        self._allowed = tuple(str(p) for p in (folder, here / "mpdiag", *libraries))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _REFUSED or event == "pickle.find_class":
            self.seen.append(f"{event} {args[0]!r}"[:200])
        elif event in _FILES and args and isinstance(args[0], str | bytes | os.PathLike):
            path = os.fsdecode(args[0]).removeprefix("file://").removesuffix("?mode=ro")
            allowed = path.startswith((*self._allowed, "/proc/", "/dev/", "/sys/"))
            if not allowed and Path(path).is_absolute():
                self.seen.append(f"{event} {path}"[:200])


def work(
    reader: Reader, seed: int, start: int, count: int, deep_every: int, folder: str, pipe: Any
) -> None:
    """Try inputs from start to count in this process, and report each before it is tried."""
    place = Path(folder)
    prepare(reader, place)
    attempt(reader, place, reader.seeds[0], deep=True)  # imports what it needs
    watch = Watch(place)
    statistics = Path("/proc/self/statm").read_text()
    limit = int(statistics.split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak()

    def ring(_number: int, _frame: Any) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, ring)
    for number in range(start, count):
        pipe.send(("at", number))
        data = numbered(reader, seed, number)
        began = time.perf_counter()
        problem = None
        outcome = ""
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        watch.on = True
        try:
            outcome = attempt(reader, place, data, deep=number % deep_every == 0)
        except TooSlowError:
            problem = f"took more than {SECONDS:g} s"
        except BaseException as error:  # noqa: BLE001 - that is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            problem = (
                f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
            )
        finally:
            watch.on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        if watch.seen:
            problem = problem or f"touched {watch.seen[0]}"
            watch.seen.clear()
        pipe.send(("done", number, outcome, problem, time.perf_counter() - began))
    pipe.send(("end", _peak() - before))


def _peak() -> float:
    """Largest memory so far, MB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


@dataclass
class Result:
    """The results of a reader's inputs."""

    reader: str
    inputs: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    slowest_s: float = 0.0
    seconds: float = 0.0
    memory_mb: float = 0.0

    def take(self, number: int, outcome: str, problem: str | None, seconds: float) -> None:
        self.inputs += 1
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)
        if problem is None:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        else:
            self.failures.append({"number": number, "problem": problem})


def fuzz(reader_name: str, base: Path, seed: int, count: int, deep_every: int) -> Result:
    """All inputs of a reader, in processes that are replaced when an input kills them."""
    result = Result(reader_name)
    context = multiprocessing.get_context("spawn")
    start = 0
    while start < count:
        with tempfile.TemporaryDirectory(dir=_memory_disk()) as folder:
            ours, theirs = context.Pipe()
            arguments = (reader_name, str(base), seed, start, count, deep_every, folder, theirs)
            child = context.Process(target=_work_by_name, args=arguments)
            child.start()
            theirs.close()
            start = _listen(ours, child, result, start, count)
            child.join()
    return result


def _work_by_name(name: str, base: str, *rest: Any) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - torch's warnings
    reader = next(r for r in readers(Path(base)) if r.name == name)
    work(reader, *rest)


def _listen(pipe: Any, child: Any, result: Result, start: int, count: int) -> int:
    """Collect what a process reports; returns the number of the next input."""
    at: int | None = None
    while True:
        try:
            if not pipe.poll(3 * SECONDS if at is not None else 300):
                child.kill()
                result.take(start if at is None else at, "", "does not come back", 3 * SECONDS)
                break
            message = pipe.recv()
        except EOFError:
            child.join()
            how = f"the process died with {child.exitcode}"
            result.take(start if at is None else at, "", how, 0.0)
            break
        if message[0] == "at":
            at = message[1]
        elif message[0] == "done":
            result.take(*message[1:])
        else:
            result.memory_mb = max(result.memory_mb, message[1])
            return count
    return (start if at is None else at) + 1


def _memory_disk() -> str | None:
    shared = Path("/dev/shm")  # noqa: S108 - files that live for a millisecond
    return str(shared) if shared.is_dir() and os.access(shared, os.W_OK) else None


def store(results: list[Result], options: argparse.Namespace) -> None:
    """Write the figures so far; earlier figures of other readers stay."""
    from mpdiag.files.atomic import write_json
    from mpdiag.runs import provenance

    path: Path = options.json
    kept = json.loads(path.read_text())["readers"] if path.is_file() else []
    figures = [{**vars(r), "failures": r.failures[:20], "failed": len(r.failures)} for r in results]
    for figure in figures:
        figure |= {"seed": options.seed, "deep_every": options.deep_every}
        figure |= {k: round(figure[k], 3) for k in ("slowest_s", "seconds", "memory_mb")}
    names = {figure["reader"] for figure in figures}
    kept = [figure for figure in kept if figure["reader"] not in names]
    write_json(path, {"versions": provenance.versions(), "readers": [*kept, *figures]})


def main(words: Iterable[str] | None = None) -> int:
    """Run it; 1 if there is any failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="inputs for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="names of readers, with commas between")
    parser.add_argument("--deep-every", type=int, default=DEEP_EVERY)
    parser.add_argument("--again", type=int, help="try one input of one reader, here")
    parser.add_argument("--json", type=Path, help="store the figures here")
    options = parser.parse_args(None if words is None else list(words))
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        record_run(base / "run")
        found = list(readers(base))
        wanted = options.only.split(",") if options.only else [r.name for r in found]
        if options.again is not None:
            reader = next(r for r in found if r.name == wanted[0])
            folder = base / "again"
            folder.mkdir()
            prepare(reader, folder)
            data = numbered(reader, options.seed, options.again)
            print(data[:2_000])
            deep = options.again % options.deep_every == 0
            print(attempt(reader, folder, data, deep=deep))
            return 0
        results = []
        print(
            f"{'reader':20}{'inputs':>8}{'read':>8}{'refused':>9}{'failed':>8}{'slowest':>10}{'memory':>9}"
        )
        for name in wanted:
            result = fuzz(name, base, options.seed, options.count, options.deep_every)
            results.append(result)
            read = result.outcomes.get("read", 0)
            refused = sum(result.outcomes.values()) - read
            print(
                f"{name:20}{result.inputs:8}{read:8}{refused:9}{len(result.failures):8}"
                f"{result.slowest_s:8.2f} s{result.memory_mb:6.0f} MB",
                flush=True,
            )
            for failure in result.failures[:8]:
                print(f"    {failure['number']}: {failure['problem']}", flush=True)
            if options.json is not None:
                store(results, options)
    return int(any(r.failures for r in results))


if __name__ == "__main__":
    sys.exit(main())
