"""What ``compare`` prints: the verdict, each metric with its interval, the layers that changed."""

import math

from rich.console import Group, RenderableType
from rich.text import Text

from mpdiag.analysis.comparison.compare import Comparison
from mpdiag.analysis.comparison.comparison_findings import (
    MetricComparison,
    Tone,
    rate_words,
    tone_of,
)
from mpdiag.analysis.comparison.equivalence import Equivalence
from mpdiag.display.wording import layer_name
from mpdiag.reports.text.tables import EXPLAIN, Fitted, finding_lines
from mpdiag.runs.training_log import FINAL_LOSS, FINAL_WORDS

_STYLES: dict[Tone, str] = {"good": "bold green", "bad": "bold red", "open": "bold yellow"}
_KINDS = {
    "score": "as a score",
    "error rate": "as an error rate",
    "loss": "as a loss",
    "decibel": "in decibels",
    "unknown": "2 % of its mean",
    "run": "from the run",
    "seeds": "from the spread of FP32 seeds",
}
WIDTH = 33
TOP = 8


def comparison_text(comparison: Comparison) -> RenderableType:
    """The whole report of ``mpdiag compare``."""
    a, b = comparison.a, comparison.b
    title = f"{b.name} against {a.name}: {comparison.answer}"
    parts: list[RenderableType] = [Text(title, _STYLES[tone_of(comparison.answer)]), Text("")]
    above = comparison.hindrances  # said before anything else
    for f in reversed(above):
        lines = Text(f.message, _STYLES["bad"]), Text(f"  {f.fix}  [{f.code}]"), Text("")
        parts[:0] = lines
    parts += [_metrics(comparison)]
    diverged = comparison.divergence  # trainings that the table above leaves out
    if diverged.any:
        tested = f"Boschloo's exact test p = {diverged.p_value:.2g}, Clopper-Pearson intervals"
        words = f"{rate_words(diverged, (comparison.a, comparison.b))}; {tested}"
        parts.append(Text(words, style="dim"))
    curve = comparison.curve
    if curve.worst_step is not None:
        spread = "" if curve.spread is None else f", where seeds spread by {curve.spread:.3g}"
        parts.append(
            Text(
                f"largest gap between the loss curves: {curve.departure:+.3g} at step "
                f"{curve.worst_step}{spread}",
                style="dim",
            )
        )
    if comparison.shifts:
        parts += [Text(""), _shifts(comparison)]
    if comparison.findings:
        parts.append(Text(""))
    parts += finding_lines(comparison.findings[len(above) :])
    if comparison.findings:
        parts.append(Text(EXPLAIN, "dim"))
    return Group(*parts)


def _metrics(comparison: Comparison) -> Fitted:
    numbers = ("reference", "candidate", "difference", "margin")
    alone = all(m.alone for m in comparison.metrics)
    interval = "difference, margin in brackets" if alone else "interval, margin in brackets"
    table = Fitted(
        ("metric", "verdict", *numbers, interval),
        right=frozenset(numbers),
        charts=frozenset({interval}),
        lead=2,
    )
    for m in comparison.metrics:
        table.add_row(
            m.metric,
            Text(m.answer, _STYLES[tone_of(m.answer)]),
            _figures(m.a),
            _figures(m.b),
            "–" if math.isnan(m.result.difference) else f"{m.result.difference:+.4g}",
            f"±{m.result.margin:.3g}",
            draw_interval(m.result),
        )
    table.caption = _caption(comparison.metrics)
    return table


def _caption(metrics: tuple[MetricComparison, ...]) -> str:
    first = metrics[0].result
    way = "paired by seed" if first.paired else "Welch"
    levels = sorted({100 * (1 - 2 * m.result.alpha) for m in metrics})
    text = (
        f"two one-sided t-tests, {way}, {' to '.join(f'{x:.4g}' for x in _ends(levels))} % interval"
    )
    if all(m.alone for m in metrics):
        text = "one seed per side, so no interval; more than 3 margins is worse"
    elif len(metrics) > 1:
        text += ", Holm-corrected over all metrics"
    chosen = [m for m in metrics if not m.margin_given]
    if chosen:
        kinds = ", ".join(f"{m.metric} {_KINDS[m.margin.kind or 'unknown']}" for m in chosen)
        text += f"; margin: {kinds}; set your own with --margin NAME=VALUE"
    if any(m.metric == FINAL_LOSS for m in metrics):
        text += f"; {FINAL_LOSS}: {FINAL_WORDS}"
    return text


def _ends(levels: list[float]) -> list[float]:
    return levels if len(levels) < 2 else [levels[0], levels[-1]]


def _figures(values: tuple[float, ...]) -> str:
    values = tuple(v for v in values if math.isfinite(v))
    if len(values) < 2:
        return f"{values[0]:.4g}" if values else "–"
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return f"{mean:.4g} ± {spread:.2g} (n={len(values)})"


def draw_interval(result: Equivalence) -> str:
    """The interval of the difference on a line from −2 to +2 margins: ``···[··──●──]···``.

    A difference beyond the line is an arrow at its end.
    """
    line = ["·"] * WIDTH

    def at(value: float) -> int:
        share = (value / result.margin + 2) / 4
        return round(min(1.0, max(0.0, share)) * (WIDTH - 1))

    if math.isnan(result.difference):
        return "".join(line)
    if math.isfinite(result.low):
        for i in range(at(result.low), at(result.high) + 1):
            line[i] = "─"
    line[at(-result.margin)], line[at(result.margin)] = "[", "]"
    line[WIDTH // 2] = "┼" if line[WIDTH // 2] == "─" else "|"
    beyond = abs(result.difference) > 2 * result.margin
    line[at(result.difference)] = ("▶" if result.difference > 0 else "◀") if beyond else "●"
    return "".join(line)


def _shifts(comparison: Comparison) -> Fitted:
    table = Fitted(
        ("layer", "tensor", "powers of two"),
        "Layers with the largest change of |x| max",
        right=frozenset({"powers of two"}),
    )
    for shift in comparison.shifts[:TOP]:
        table.add_row(layer_name(shift.name), shift.kind.replace("_", " "), f"{shift.octaves:+.2f}")
    return table
