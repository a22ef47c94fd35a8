"""A picture: a figure, the table it is drawn from, and the receipt that gives the same numbers.

The dashboard and the HTML report show these same objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.layers import Layers
from mpdiag.numerics.formats import FORMATS, FP16
from mpdiag.reports import receipts
from mpdiag.reports.figures import comparing as draw_comparing
from mpdiag.reports.figures import gradients as draw_gradients
from mpdiag.reports.figures import roofline as draw_roofline
from mpdiag.reports.figures import sensitivity as draw_sensitivity
from mpdiag.reports.figures import tensorcores as draw_tensorcores
from mpdiag.reports.figures import training as draw_training
from mpdiag.reports.figures import updates as draw_updates
from mpdiag.reports.frames import comparing, gradients, tensorcores, training, updates
from mpdiag.reports.frames import roofline as frames_roofline
from mpdiag.reports.words import layer_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    import plotly.graph_objects as go

    from mpdiag.analysis.scaling.replay import Replay
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.plan import LossScalePlan
    from mpdiag.reports.frames.sensitivity import Ranking
    from mpdiag.runs.records import Records
    from mpdiag.runs.schema import Kind
    from mpdiag.runs.training_log import TrainingLog


@dataclass(frozen=True, eq=False)
class Picture:
    """One figure with all that belongs to it.

    Attributes:
        key: A short stable name, of files and of widgets.
        title: What it shows; text, no markup.
        caption: How to read it; text, no markup.
        figure: The figure.
        frame: Its numbers.
        receipt: A script that computes them from the run folder.
    """

    key: str
    title: str
    caption: str
    figure: go.Figure
    frame: pd.DataFrame
    receipt: str


KIND_WORDS: Mapping[Kind, str] = {
    "activation_grad": "activation gradients",
    "weight_grad": "weight gradients",
    "activation": "activations",
    "weight": "weights",
    "update": "updates",
}


def found(layers: Layers, text: str) -> Layers:
    """The layers whose name holds a text, whatever the case."""
    wanted = text.strip().lower()
    rows = np.array([wanted in layer_name(str(n)).lower() for n in layers.names], bool)
    keep = np.flatnonzero(rows)
    return Layers(
        layers.kinds[keep], layers.names[keep], layers.histograms[keep], layers.steps[keep]
    )


def interval_of(scale: LossScalePlan) -> tuple[float, float]:
    """The recommended interval of loss scales, as exponents."""
    upper = np.inf if scale.upper is None else float(np.log2(scale.upper))
    return float(np.log2(scale.lower)), upper


# -- gradients -------------------------------------------------------------------------------------


def heat_map(
    run: str, layers: Layers, kind: Kind, fmt: FloatFormat, exponent: int, *, log: bool = True
) -> Picture:
    """Layers × exponents with the format's window."""
    frame = gradients.exponent_frame(layers)
    names = [str(name) for name in layers.names]
    return Picture(
        "heat-map",
        f"Where the {KIND_WORDS[kind]} lie, layer by layer",
        f"Each cell is a power of two of one layer, coloured by what {fmt.label} makes of it at this "
        "loss scale, the stronger the more values lie there. A larger scale moves the window left.",
        draw_gradients.heat_map(frame, names, fmt, exponent, log=log),
        frame,
        receipts.exponents(run, kind),
    )


def one_histogram(
    run: str,
    layers: Layers,
    kind: Kind,
    fmt: FloatFormat,
    exponent: int,
    *,
    layer: str | None = None,
    log: bool = True,
) -> Picture:
    """One layer's histogram, or all layers' together, each bar by its fate."""
    if layer is not None:
        own = np.flatnonzero(layers.names == layer)
        layers = Layers(
            layers.kinds[own], layers.names[own], layers.histograms[own], layers.steps[own]
        )
    frame = gradients.total_frame(layers)
    zeros = int(layers.histograms.zeros.sum())
    whose = "all layers together" if layer is None else layer_name(layer)
    return Picture(
        "histogram",
        f"{KIND_WORDS[kind].capitalize()} of {whose}",
        "Counts per power of two; values that are exactly 0 stand apart at the left.",
        draw_gradients.histogram(frame, zeros, fmt, exponent, log=log),
        frame,
        receipts.totals(run, kind, layer),
    )


def consequences(run: str, layers: Layers, kind: Kind, fmt: FloatFormat, exponent: int) -> Picture:
    """What each layer loses at a loss scale."""
    frame = gradients.scale_frame(layers, fmt, exponent)
    return Picture(
        "consequences",
        f"What {fmt.label} loses at this loss scale",
        "The layers that lose most. Σ|x| says how much of the gradient's sum goes, "
        "an estimate within a few percent; the share of values is exact.",
        draw_gradients.consequences(frame),
        frame,
        receipts.losses_at_scale(run, kind, fmt, exponent),
    )


def every_scale(
    run: str,
    layers: Layers,
    kind: Kind,
    fmt: FloatFormat,
    exponent: int,
    scale: LossScalePlan,
    *,
    frame: pd.DataFrame | None = None,
) -> Picture:
    """What is lost at every loss scale; ``frame`` is its table, where it is known already."""
    if frame is None:
        frame = gradients.every_scale_frame(layers, fmt)
    recommended = int(np.log2(scale.recommended))
    return Picture(
        "every-scale",
        "Every loss scale at once",
        "Red: the scale chosen; dashed: the one recommended; shaded: sufficient and admissible.",
        draw_gradients.every_scale(frame, exponent, interval_of(scale), recommended),
        frame,
        receipts.every_scale(run, kind, fmt),
    )


def over_time(
    run: str,
    records: Records,
    kind: Kind,
    layer: str,
    fmt: FloatFormat,
    exponent: int,
    *,
    log: bool = True,
) -> Picture:
    """One layer over the recorded steps."""
    frame = gradients.time_frame(records, kind, layer)
    return Picture(
        "over-time",
        f"{layer_name(layer)} over time",
        f"Each column is a recorded step; between the lines lies {fmt.label}'s window.",
        draw_gradients.over_time(frame, fmt, exponent, log=log),
        frame,
        receipts.over_time(run, kind, layer),
    )


# -- updates ---------------------------------------------------------------------------------------


def ratios(run: str, records: Records, parameter: str | None, *, log: bool = True) -> Picture:
    """Updates by |w|/|Δw|."""
    frame = updates.ratio_frame(records, parameter)
    whose = "all parameters" if parameter is None else layer_name(parameter)
    return Picture(
        "ratios",
        f"How small the updates are beside the weights: {whose}",
        "From a ratio of 2048 an FP16 weight begins to swallow its update, beyond 4096 it "
        "swallows every one (for normal weights).",
        draw_updates.ratios(frame, log=log),
        frame,
        receipts.ratios(run, parameter),
    )


def swallowed(run: str, records: Records, *, frame: pd.DataFrame | None = None) -> Picture:
    """Swallowed share by parameter; ``frame`` is its table, where it is known already."""
    if frame is None:
        frame = updates.update_frame(records)
    return Picture(
        "swallowed",
        "Swallowed by 16-bit weights",
        "Measured in the FP32 training: elements that changed, but whose 16-bit weight would not.",
        draw_updates.swallowed(frame),
        frame,
        receipts.updates(run),
    )


def swallowed_over_time(run: str, records: Records, parameter: str | None) -> Picture:
    """Swallowed share at each recorded step."""
    frame = updates.swallowed_frame(records, parameter)
    return Picture(
        "swallowed-over-time",
        "Swallowed updates over time",
        "They grow as the learning rate falls and the training settles.",
        draw_updates.swallowed_over_time(frame),
        frame,
        receipts.swallowed_over_time(run, parameter),
    )


# -- operations ------------------------------------------------------------------------------------


def output_ranges(run: str, layers: Layers, fmt: FloatFormat = FP16) -> Picture:
    """The range of each module's output."""
    frame = comparing.layers_frame(layers.of_kind("activation"))
    return Picture(
        "output-ranges",
        "From the smallest to the largest |x| of each output",
        f"Between the lines lies {fmt.label} without a scale: no loss scale moves activations.",
        draw_comparing.ranges(frame, fmt),
        frame,
        receipts.layers(run, "activation"),
    )


def sensitivity(run: str, found: Ranking) -> Picture:
    """Operations by how sensitive they are, each beside what the plan does with it."""
    label = FORMATS[found.format].label if found.format in FORMATS else found.format
    caption = {
        "measured": f"Measured: each operation ran once in {label} while all else stayed in FP32.",
        "searched": "Estimated from one backward pass: what rounding each result changes, times "
        "its adjoint. Trainings decided which of them must stay.",
        "recorded": f"Estimated from the recorded values alone: what storing a result in {label} "
        "moves, gradients at the recommended loss scale. How much the loss depends on it is not in "
        "there: mpdiag search and mpdiag.measure_sensitivity find that out.",
    }[found.source]
    return Picture(
        "sensitivity",
        "The most sensitive operations first",
        f"{caption} A filled mark stays in FP32, by the plan or by training.",
        draw_sensitivity.sensitivity(found.frame, found.value),
        found.frame,
        receipts.sensitivity(run, found),
    )


# -- trainings -------------------------------------------------------------------------------------


def losses(
    folder: str, logs: Mapping[str, TrainingLog], *, log: bool = False, window: int = 1
) -> Picture:
    """Loss curves of several trainings."""
    frame = training.losses_frame(logs)
    return Picture(
        "losses",
        "Loss",
        f"Pale: each step; full: a running median over {window} steps." if window > 1 else "",
        draw_training.losses(frame, log=log, window=window),
        frame,
        receipts.losses(folder, list(logs)),
    )


def scales(folder: str, logs: Mapping[str, TrainingLog]) -> Picture:
    """The loss scales of several trainings, and each skip with its cause."""
    frame = training.scales_frame(logs)
    return Picture(
        "scale",
        "Loss scale",
        "A cross is a skipped step; its cause stands under the pointer and in the table of skips.",
        draw_training.scale(frame),
        frame,
        receipts.scales(folder, list(logs)),
    )


def drift(folder: str, logs: Mapping[str, TrainingLog]) -> Picture:
    """Norms of the gradients of several trainings, and where they left what was predicted."""
    frame = training.norms_frame(logs)
    runs = list(logs)
    return Picture(
        "drift",
        "Gradients over time, and alarms of drift",
        "Unscaled, before clipping. A triangle is an alarm: there the gradients left what the "
        "plan's recording predicted.",
        draw_training.drift(frame, training.alarms_frame(logs), runs),
        frame,
        receipts.norms(folder, runs),
    )


def replayed(run: str, played: Replay, arguments: str) -> Picture:
    """A scaler replayed over the recorded steps."""
    frame = training.replay_frame(played)
    return Picture(
        "replay",
        "Loss-scale replay",
        "What this scaler would have done with the recorded gradients. Exact for recorded steps; "
        "those between are taken to repeat the one before.",
        draw_training.replay(frame),
        frame,
        receipts.command(f"mpdiag replay {run} {arguments} --json"),
    )


# -- Tensor Cores ----------------------------------------------------------------------------------


def verdicts(run: str, profile: Mapping[str, Any]) -> Picture:
    """Kernel time by verdict."""
    frame = tensorcores.verdict_frame(profile)
    return Picture(
        "verdicts",
        "Kernel time by verdict",
        "Of the time in oneDNN's primitives, by its own log."
        if tensorcores.is_cpu(profile)
        else "By kernel name alone; collectives included, memory copies and sets excluded.",
        draw_tensorcores.verdicts(frame, tensorcores.unit_words(profile)),
        frame,
        receipts.profile(run),
    )


def kernels(run: str, profile: Mapping[str, Any]) -> Picture:
    """The longest kernels."""
    frame = tensorcores.kernel_frame(profile)
    return Picture(
        "kernels",
        "The longest kernels",
        "The table has all of them, with the operation and the module that launched each.",
        draw_tensorcores.kernels(frame, tensorcores.unit_words(profile)),
        frame,
        receipts.kernels(run),
    )


def roofline(run: str, profile: Mapping[str, Any]) -> Picture:
    """Matrix operations under the roofs of the device."""
    frame = frames_roofline.roofline_frame(profile)
    roofs = frames_roofline.roofs_of(profile)
    rates = (
        f"Roofs: {roofs.source}."
        if roofs
        else "No roof is drawn: no published rates are known for this device."
    )
    missing = frames_roofline.left_out(profile, frame)
    absent = f" {missing} operations are missing: their sizes are not known." if missing else ""
    return Picture(
        "roofline",
        "Roofline: what each product achieved, and what the device could do",
        "Under the slope memory limits an operation, under a flat roof the units that multiply; the "
        "larger the mark, the more time. FLOP are those asked for: a shortcut (Winograd, FFT) may "
        f"rise above its roof. {rates}{absent}",
        draw_roofline.roofline(frame, roofs, tensorcores.unit_words(profile)),
        frame,
        receipts.roofline(run),
    )


# -- two runs --------------------------------------------------------------------------------------


def side_by_side(
    a: str, b: str, sides: tuple[Layers, Layers], names: tuple[str, str], kind: Kind, measure: str
) -> Picture:
    """Two runs, layer by layer."""
    frame = comparing.comparison_frame(sides[0].of_kind(kind), sides[1].of_kind(kind))
    title = {"absmax": "Largest |x|", "underflow": "Lost to 0", "overflow": "Overflow"}[measure]
    return Picture(
        "side-by-side",
        f"{title}: {KIND_WORDS[kind]} of {names[0]} and {names[1]}",
        "Most moved first. Shares are FP16's at loss scale 1.",
        draw_comparing.side_by_side(frame, *names, measure),
        frame,
        receipts.comparison(a, b, kind),
    )
