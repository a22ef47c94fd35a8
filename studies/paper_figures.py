"""The figures of *Mixed Precision Training* and of NVIDIA's guide, from our own recordings.

    python studies/paper_figures.py --folder runs/families [--out figures.html] [--json FILE]

Reads what ``families.py`` and ``studies/ablations.py`` left in --folder. For each workload:
the histogram of its activation gradients with the zero bar and FP16's window (the guide's figures 1
and 2, the paper's figure 3), that of its weight gradients with the share below 2^-24 after the
learning rate (figure 2b), FP32, scaled and unscaled training curves (figures 4 and 5), and, where
they were trained, FP16 weights with masters and without (figure 2a).
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpdiag import analyze, workloads
from mpdiag.analysis.layers import share
from mpdiag.errors import InputError
from mpdiag.numerics.formats import FP16
from mpdiag.reports.views import training
from mpdiag.reports.views.gradients.pictures import Gradients
from mpdiag.runs.training_log import TrainingLog, read_log
from studies.families import EVERY

CURVES = {
    "FP32": "fp32",
    "FP16, no scale": "fp16-no-scale",
    "FP16 by the plan": "fp16-plan",
    "FP16 weights with masters": "fp16-o2",
    "FP16 weights, no masters": "fp16-no-masters",
    "sums in FP16": "fp16-sums",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/families"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    body, figures = [], {}
    for name in EVERY:
        if (options.folder / name / "fp32" / "seed0" / "stats").is_dir():
            shown, figures[name] = figures_of(name, options.folder / name)
            body += [f"<h1>{html.escape(workloads.load(name).title)}</h1>", *shown]
            print(name, json.dumps(figures[name]))
    if options.out:
        head = f"<meta charset='utf-8'><title>The paper's figures</title><script>{get_plotlyjs()}"
        text = f"<!doctype html>{head}</script>{''.join(body)}"
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def figures_of(name: str, place: Path) -> tuple[list[str], dict[str, Any]]:
    """One workload's figures as HTML, and the numbers they show."""
    analysis = analyze(place / "fp32" / "seed0")
    logs = {title: log for title, way in CURVES.items() if (log := _log(place / way / "seed0"))}
    run = f"{name}/fp32/seed0"
    gradients = analysis.layers.of_kind("activation_grad")
    updates = analysis.layers.of_kind("weight_grad")
    rate = learning_rate(name)
    drawn = [
        Gradients(run, "activation_grad", gradients).histogram(0),
        Gradients(run, "weight_grad", updates).histogram(round(math.log2(rate))),
        training.Trainings(name, logs).losses(window=9),
    ]
    shown = [
        f"<h2>{html.escape(p.title)}</h2><p>{html.escape(p.caption)}</p>"
        + p.figure.to_html(full_html=False, include_plotlyjs=False)
        for p in drawn
    ]
    h = gradients.histograms
    masters = analysis.plan.master_weights
    numbers = {
        "activation_gradients_zero_in_fp32": float(share(h.zeros.sum(), h.numel.sum())),
        "activation_gradients_lost_at_scale_1": analysis.loss_scale.underflow_before,
        "learning_rate": rate,
        "weight_gradients_below_2^-24_after_learning_rate": below(analysis, rate),
        "updates_fp16_weights_would_not_take": masters.swallowed_fraction,
        "last_losses": {title: _last(log) for title, log in logs.items()},
    }
    return shown, numbers


def below(analysis: Any, rate: float) -> list[float]:
    """Share of non-zero weight gradients that fall below 2^-24 once multiplied by the learning rate.

    A learning rate is no power of two, so it moves values between bins: the true share lies between
    those at the powers around it.
    """
    h = analysis.layers.of_kind("weight_grad").histograms
    # FP16's threshold is 2^-25; 2^-24 is reached one bin, that is half the rate, earlier.
    around = {math.floor(math.log2(rate)) - 1, math.ceil(math.log2(rate)) - 1}
    lost = [h.lost_to_zero(FP16, e).value.sum() for e in sorted(around, reverse=True)]
    return [float(share(part, h.nonzero.sum())) for part in lost]


def learning_rate(name: str) -> float:
    """The first optimizer's at the beginning, before any schedule."""
    workload = workloads.load(name)
    return float(workload.optimizers(workload.model())[0].defaults["lr"])


def _log(run: Path) -> TrainingLog | None:
    try:
        return read_log(run)
    except InputError:
        return None


def _last(log: TrainingLog) -> float | None:
    losses = [s.loss for s in log.steps[-10:] if s.loss is not None and math.isfinite(s.loss)]
    return sum(losses) / len(losses) if losses else None


if __name__ == "__main__":
    main()
