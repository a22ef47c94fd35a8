"""What ran on Tensor Cores: the document that ``mpdiag profile --json`` prints, kept as profile.json."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mpdiag.display.colors import VERDICT_COLORS
from mpdiag.display.wording import counted, percent
from mpdiag.reports.contents import RunContents
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import empty, figure
from mpdiag.tensorcores.summary import is_of_amd, milliseconds
from mpdiag.tensorcores.views import tensor_core_use

VERDICTS = ("tensor_core", "cuda_core", "helper", "layout", "other", "unknown")
_KERNELS = [
    *("name", "calls", "time_us", "verdict", "instruction", "dtype", "alignment"),
    *("op", "module", "shapes", "evidence"),
]
_OPERATIONS = [
    *("op", "module", "m", "n", "k", "dtype", "aligned", "cause", "fix", "time_us"),
    *("amdahl_bound", "verdict"),
]


def kernel_frame(profile: Mapping[str, Any]) -> pd.DataFrame:
    """The kernels, longest first, each with its ``share`` of the time of all kernels.

    ``unit`` is where it ran, in the words of the device: a CPU has no CUDA cores.
    """
    frame = _table(profile.get("kernels", []), _KERNELS)
    words = unit_names(profile)
    frame.insert(3, "unit", [words.get(str(v), str(v)) for v in frame["verdict"]])
    frame["time_us"] = _numbers(frame["time_us"])
    whole = frame["time_us"].sum()
    frame["share"] = frame["time_us"] / whole if whole else 0.0
    return frame.sort_values("time_us", ascending=False, kind="stable", ignore_index=True)


def verdict_frame(profile: Mapping[str, Any]) -> pd.DataFrame:
    """Time by verdict: ``verdict``, ``time_us``, ``share``; all verdicts, in fixed order.

    Of a GPU the time of kernels, of a CPU that of operations: oneDNN's log has some of them alone.
    """
    rows = operation_frame(profile) if is_cpu(profile) else kernel_frame(profile)
    times = rows.groupby("verdict")["time_us"].sum()
    frame = times.reindex(VERDICTS, fill_value=0.0).rename_axis("verdict").reset_index()
    whole = frame["time_us"].sum()
    frame["share"] = frame["time_us"] / whole if whole else 0.0
    return frame


def operation_frame(profile: Mapping[str, Any]) -> pd.DataFrame:
    """Matrix operations, longest first, with their ``shape``, misaligned ones with a ``padded`` one.

    The profile's own advice, or M, N and K rounded up to 16 bytes: multiples of 8 for FP16 and
    BF16, of 16 for 8-bit types, of 4 for FP32 as TF32. A bound that the profile writes as null is
    infinite; one that it lacks is 1.
    """
    rows = list(profile.get("operations", []))
    frame = _table(rows, _OPERATIONS)
    frame["time_us"] = _numbers(frame["time_us"])
    frame["amdahl_bound"] = [_bound(row) for row in rows]
    frame["padded"] = [_padded(row) for row in rows]
    frame["shape"] = [_shape(row) for row in rows]
    return frame.sort_values("time_us", ascending=False, kind="stable", ignore_index=True)


def combined_bound(bounds: Collection[float]) -> float:
    """How much faster everything becomes, at most, with several fixes together.

    A bound b of one fix means that it saves 1 - 1/b of the time; different operations' savings add.
    """
    saved = sum(1.0 - 1.0 / bound for bound in bounds if bound > 1.0)
    return 1.0 / (1.0 - saved) if saved < 1.0 else float("inf")


def _bound(row: Mapping[str, Any]) -> float:
    value = row.get("amdahl_bound", 1.0)
    if value is None:
        return float("inf")
    return float(value) if isinstance(value, (int, float)) else 1.0


def _shape(row: Mapping[str, Any]) -> str:
    """M × N × K, ? for what is not known; empty where there is no matrix work."""
    sizes = [row.get(name) for name in "mnk"]
    if not any(isinstance(size, (int, float)) for size in sizes):
        return ""
    return " × ".join(str(size) if isinstance(size, (int, float)) else "?" for size in sizes)


def _padded(row: Mapping[str, Any]) -> str:
    advice = row.get("padded")
    if isinstance(advice, list) and all(isinstance(item, dict) for item in advice):
        words = (f"{i.get('dimension')}: {i.get('size')} → {i.get('padded')}" for i in advice)
        return ", ".join(words)
    if row.get("aligned") is not False:
        return ""
    dtype = str(row.get("dtype") or "")
    step = 16 if "8" in dtype and "bfloat" not in dtype else 4 if "32" in dtype else 8
    sizes = []
    for name in ("m", "n", "k"):
        value = row.get(name)
        if not isinstance(value, (int, float)) or value != value or value <= 0:
            return ""
        sizes.append(-(-int(value) // step) * step)
    same = all(size == int(row[name]) for size, name in zip(sizes, "mnk", strict=True))
    return "" if same else " × ".join(map(str, sizes))


def _table(rows: Any, columns: list[str]) -> pd.DataFrame:
    # Fields that are not shown are left out; missing ones are empty.
    return pd.DataFrame(
        [{name: row.get(name) for name in columns} for row in rows], columns=columns
    )


def _numbers(column: Any, default: float = 0.0) -> Any:
    return pd.to_numeric(column, errors="coerce").fillna(default).astype(float)


def is_cpu(profile: Mapping[str, Any]) -> bool:
    """Whether a profile is of a CPU."""
    device = profile.get("device")
    return isinstance(device, dict) and device.get("type") == "cpu"


def unit_names(profile: Mapping[str, Any]) -> dict[str, str]:
    """What each verdict is called on a profile's device."""
    fast, plain = "Tensor Cores", "CUDA cores"
    if is_cpu(profile):
        fast, plain = "AMX", "vector units"
    elif is_of_amd(profile):
        fast, plain = "matrix cores", "vector units"
    rest = {"helper": "helpers", "layout": "layout conversion", "other": "not matrix work"}
    return {"tensor_core": fast, "cuda_core": plain, **rest, "unknown": "unknown"}


def headline(profile: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """The four shares of kernel time that say most; one that the profile lacks is counted here."""
    shares = verdict_frame(profile).set_index("verdict")["share"]

    def known(name: str, verdict: str) -> float:
        value = profile.get(name)
        return float(value) if isinstance(value, (int, float)) else float(shares[verdict])

    words, cpu = unit_names(profile), is_cpu(profile)
    cells = (
        (f"On {words['tensor_core']}", "tensor_core_fraction", "tensor_core"),
        (f"Matrix work on {words['cuda_core']}", "matrix_cuda_core_fraction", "cuda_core"),
        ("Not matrix work", "", "other")
        if cpu
        else ("Layout conversion", "layout_fraction", "layout"),
        ("Unknown" if cpu else "Unknown kernels", "unknown_fraction", "unknown"),
    )
    return tuple((label, known(name, verdict)) for label, name, verdict in cells)


def fixable(operations: pd.DataFrame) -> pd.DataFrame:
    """The operations of an ``operation_frame`` with a fix that would make anything faster.

    What is no matrix work has one fix for all of it, and so one row at the end; alone it is no choice.
    """
    known = operations["fix"].notna() & (operations["fix"].astype(str) != "")
    known &= operations["amdahl_bound"] > 1.0
    found = operations[known]
    outside = found["cause"] == "outside"
    if outside.all():
        return found.head(0)
    if outside.sum() < 2:
        return found.reset_index(drop=True)
    rest = found[outside]
    together = rest.head(1).assign(
        op=f"{counted(len(rest), 'operation')} that are not matrix work",
        module="",
        time_us=rest["time_us"].sum(),
        amdahl_bound=combined_bound(list(rest["amdahl_bound"])),
    )
    return pd.concat([found[~outside], together], ignore_index=True)


def verdict_figure(frame: pd.DataFrame, words: Mapping[str, str]) -> go.Figure:
    """Kernel time by verdict (``verdict_frame``), one bar; ``words`` is what verdicts are called."""
    if frame["time_us"].sum() == 0:
        return empty("the profile holds no kernel time")
    whole = "operator time" if words["tensor_core"] == "AMX" else "kernel time"
    fig = figure(250, barmode="stack", legend_traceorder="normal")
    fig.update_layout(legend={"entrywidth": 175, "font": {"size": 12}})  # two in a row on a phone
    for row in frame[frame["time_us"] > 0].to_dict("records"):
        name = words[str(row["verdict"])]
        fig.add_bar(
            x=[row["share"]],
            y=[""],
            width=0.6,
            orientation="h",
            name=f"{name} {percent(row['share'])}",
            marker={"color": VERDICT_COLORS.get(str(row["verdict"]), VERDICT_COLORS["unknown"])},
            hovertemplate=f"{name}: {row['time_us']:,.0f} µs<extra></extra>",
        )
    fig.update_xaxes(tickformat=".0%", range=[0, 1], title=f"share of {whole}")
    return fig


def verdicts(run: str, profile: Mapping[str, Any]) -> Picture:
    """Time by verdict."""
    frame = verdict_frame(profile)
    rows, title = "kernels", "Kernel time by verdict"
    caption = (
        f"Shares of {_spent(frame)} in kernels, judged by kernel names. Collectives count; memory "
        "copies and sets do not."
    )
    if is_cpu(profile):
        rows, title = "operations", "Operator time by where it ran"
        caption = (
            f"Shares of {_spent(frame)} in operators. oneDNN's log shows where matrix work ran."
        )
    figure_ = verdict_figure(frame, unit_names(profile))
    lines = tensor_core_use.TEXTS["verdicts"].substitute(rows=rows)
    return Picture("verdicts", title, caption, figure_, frame, tensor_core_use.receipt(run, lines))


def _spent(frame: pd.DataFrame) -> str:
    return milliseconds(float(frame["time_us"].sum()))


def pictures(run: str, profile: Mapping[str, Any]) -> Iterator[Picture]:
    """What reports show of a profile."""
    yield verdicts(run, profile)
    yield from tensor_core_use.steps(run, profile)


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows of the run's own profile."""
    if contents.profile is not None:
        first, *rest = pictures(str(contents.folder), contents.profile)
        causes = (f"{words}." for _, words, _ in tensor_core_use.cause_costs(contents.profile))
        yield replace(first, caption=" ".join((first.caption, *causes)))
        yield from rest
