"""Everything that reads a file, and what is shown of it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostile import traces
from hostile.good_files import baseline, capsule_model, search_state
from mpdiag.errors import MpdiagError
from mpdiag.installation.bundled import app_folder

sys.path.insert(0, str(app_folder()))  # the list of the dashboard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    for name, how, seeds in _traces():
        yield Reader(name, "trace", how, seeds, _read_trace, _show_trace, ("profile", "trace"))
    yield Reader(
        "search.json", "search.json", "json", (search_state(),), _read_search, _read_search, ()
    )
    yield Reader(
        "baseline", "baseline.json", "json", (baseline(run),), _read_side, _show_side,
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
            ("why", "capsule", "--model", "hostile.good_files:capsule_model"), base,
        )  # fmt: skip


def _traces() -> Iterator[tuple[str, str, tuple[bytes, ...]]]:
    """Every kind of trace: its name, how it is corrupted, and good ones."""
    plain, indented, packed = traces.torch_traces()
    yield "torch.profiler", "json", (plain, indented)
    yield "torch.profiler.gz", "packed", (packed,)
    yield "nsys", "database", (traces.database(),)
    yield "ncu", "csv", traces.ncu_tables()
    yield "nvprof", "csv", traces.nvprof_tables()
    yield "rocprof", "json", (traces.rocprof_document(),)
    yield "kernel tables", "csv", traces.kernel_tables()


_PARQUET = ("stats", "modules", "operations")


def _run_files(run: Path) -> list[str]:
    return [str(p.relative_to(run)) for p in sorted(run.rglob("*")) if p.is_file()]


def _opened(folder: Path) -> Any:
    from mpdiag.runs.run import open_run

    return open_run(folder / "run")


def _read_meta(folder: Path) -> object:
    from mpdiag.reports.text.lists import runs_json, runs_table
    from mpdiag.runs.run import list_runs

    listings = list_runs(folder)
    return runs_json(listings), _shown(runs_table(listings)), _opened(folder)._repr_html_()


HOSTILE = "<script>alert(1)</script>", "<img src=x onerror"
"""Names among the corrupted ones that must not stand in a page as they are."""


def _show_run(folder: Path) -> object:
    from run_list import Listed, runs_frame

    from mpdiag.analysis.analyzer import analyze
    from mpdiag.reports.contents import read_contents
    from mpdiag.reports.documents.run_report import run_page
    from mpdiag.reports.text.analysis import analysis_text
    from mpdiag.runs.run import list_runs

    runs_frame([Listed(item, item.folder.name) for item in list_runs(folder)])
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
    from mpdiag.runs.results import read_sensitivities

    return read_sensitivities(folder / "run")


def _show_sensitivities(folder: Path) -> object:
    from mpdiag.analysis.analyzer import analyze
    from mpdiag.reports.contents import read_contents
    from mpdiag.reports.views.operations import ranking, sensitivity, shown

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
    from mpdiag.reports.views.training import Trainings

    shown = Trainings("", {"run": _read_log(folder)})
    _ = shown.steps, shown.outcomes()
    comparison = compare(folder / "run", folder / "run")
    json.dumps(comparison.to_json(), allow_nan=False)
    return _shown(comparison_text(comparison))


def _read_trace(folder: Path) -> Any:
    from mpdiag.tensorcores.trace_analysis import profile_trace

    return profile_trace(folder / "trace")


def _show_trace(folder: Path) -> object:
    from mpdiag.tensorcores.reports.gpu_profile import profile_text
    from mpdiag.tensorcores.reports.trace_report import write_trace_report

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
        (Path(folder) / "trace").write_bytes(traces.torch_traces()[0])
        return json.dumps(_read_trace(Path(folder)).to_json()).encode()


def _read_profile(folder: Path) -> Any:
    from mpdiag.runs.results import read_profile

    return read_profile(folder)


def _show_profile(folder: Path) -> object:
    from mpdiag.tensorcores.views import tensor_cores as frames
    from mpdiag.tensorcores.views.tensor_core_use import cause_costs

    document = _read_profile(folder)
    operations = frames.operation_frame(document)
    _ = frames.headline(document), frames.fixable(operations), frames.verdict_frame(document)
    return frames.verdicts("run", document), cause_costs(document)


def _shown(renderable: object) -> str:
    """What a terminal would get; a control character from a file must not reach it."""
    from mpdiag.reports.terminal import Terminal

    out = io.StringIO()
    Terminal(file=out, width=120, force_terminal=False).print(renderable)
    text = out.getvalue()
    text.encode()
    loose = [c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160]
    assert not loose, f"a control character {loose[0]!r} reaches the terminal"
    return text
