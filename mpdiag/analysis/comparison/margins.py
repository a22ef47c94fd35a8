"""How much of a metric's difference does not matter, by the kind of metric.

One share of the mean does not fit all: 2 % of an accuracy of 0.990 is more than its whole error. So
the kind is told from the metric's name, its direction and its values:

- a **score** between 0 and 1 (accuracy, F1, mAP, BLEU …) or an **error rate** (WER …): 5 % of the score
  or of the error, whichever is smaller, at least 0.1 and at most 0.5 percentage points;
- a **loss** (cross entropy, perplexity, a distance …): 2 % of its mean, which counts as at least
  1e-5 of the training loss's first value: near 0 a loss may double and has still fallen as far;
- **decibels** (PSNR …): 0.1 dB.

Of any other metric nobody knows how much matters but who trains. It gets 2 % of its mean, marked as
provisional: a difference beyond it is called one, but nothing is called equivalent by it.

Better than the kind are, in this order: the margin that was given; the one in the reference's own
``meta.json``; the spread of its FP32 seeds.
"""

import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mpdiag.display.wording import did_you_mean
from mpdiag.errors import UsageError

MetricKind = Literal["score", "error rate", "loss", "decibel", "unknown"]
MarginKind = MetricKind | Literal["run", "seeds"]

LOSS_SHARE = 0.02
"""Of a loss's mean."""
LEAST_OF_START = 1e-5
"""Share of the loss at the start that a loss's mean counts as at least."""
SCORE_SHARE = 0.05
"""Of a score or of its error, whichever is smaller."""
LEAST_POINTS, MOST_POINTS = 0.001, 0.005
"""Between which the margin of a score lies."""
DECIBELS = 0.1

_SCORES = re.compile(
    r"\b(acc(uracy)?|top ?\d*|precision|recall|f ?1|f score|m?ap|average precision|"
    r"(au)?roc|auc|auroc|auprc|m?iou|jaccard|dice|ssim|ms ssim|bleu|sacrebleu|rouge( ?\w)?|chrf|meteor|"
    r"exact match|em|hits? ?\d*|ndcg|mrr|r2|correct|right)\b"
)
_ERRORS = re.compile(
    r"\b(error rate|wer|cer|ter|eer|(classification|top ?\d) error|misclassified|wrong)\b"
)
_LOSSES = re.compile(
    r"\b(loss|cross entropy|entropy|nll|perplexity|ppl|bpc|bpb|bpd|bits|nats|elbo|kl|"
    r"mse|rmse|mae|mape|squared error|absolute error|l1|l2|residual|fid|kid|distance|divergence)\b"
)
_DECIBELS = re.compile(r"\b(db|psnr|snr|sdr|si ?sdr|si ?snr)\b")


@dataclass(frozen=True)
class Margin:
    """The largest difference of a metric that does not matter.

    Attributes:
        width: In the metric's own units.
        kind: What was taken for the metric's kind; ``run``: the reference's own margin; ``seeds``:
            the spread of its FP32 seeds; None where the margin was given.
    """

    width: float
    kind: MarginKind | None

    @property
    def given(self) -> bool:
        """Whether it was given."""
        return self.kind is None

    @property
    def provisional(self) -> bool:
        """Whether nobody knows how much matters, so that nothing is equivalent by it."""
        return self.kind == "unknown"


def metric_kind(name: str, values: Sequence[float], *, higher_is_better: bool) -> MetricKind:
    """What kind of metric this is, as far as its name, direction and finite values show."""
    # "val_acc@1", "valLoss" and "WER (%)" in words.
    words = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", name)
    words = " ".join(re.findall(r"[a-z]+\d*|\d+", words.lower()))
    share = all(0 <= v <= 100 for v in values)
    if _DECIBELS.search(words):
        return "decibel" if higher_is_better else "unknown"
    if share and not higher_is_better and _ERRORS.search(words):
        return "error rate"
    if _LOSSES.search(words):
        return "loss" if not higher_is_better and all(v >= 0 for v in values) else "unknown"
    if share and higher_is_better and _SCORES.search(words):
        return "score"
    return "unknown"


def default_margin(
    name: str,
    reference: Sequence[float],
    others: Sequence[float],
    *,
    higher_is_better: bool,
    start: float = 0.0,
) -> Margin:
    """The margin of a metric's kind.

    Args:
        name: The metric's name.
        reference: The finite values of the first side, whose mean counts.
        others: Those of the second.
        higher_is_better: Whether more is better.
        start: The reference's loss at the start; 0 where it is not known, or of another metric.
    """
    values = [v for v in (*reference, *others) if math.isfinite(v)]
    kind = metric_kind(name, values, higher_is_better=higher_is_better)
    finite = [v for v in reference if math.isfinite(v)]
    mean = math.fsum(finite) / len(finite) if finite else 0.0
    if kind == "decibel":
        return Margin(DECIBELS, kind)
    if kind in ("score", "error rate"):
        # Percent where a value is beyond 1. A best value of exactly 1 % errors reads as 1, or all.
        whole = 100.0 if max(values, default=0.0) > 1 else 1.0
        share = SCORE_SHARE * min(mean / whole, 1 - mean / whole)
        return Margin(whole * min(MOST_POINTS, max(LEAST_POINTS, share)), kind)
    size = max(abs(mean), LEAST_OF_START * abs(start))
    return Margin(LOSS_SHARE * size or LOSS_SHARE, kind)


def known_margin(own: object, seeds: Sequence[float]) -> Margin | None:
    """The margin that the reference brings along; None if it brings none.

    Args:
        own: Of its ``meta.json``; anything but a finite number above 0 is none.
        seeds: The finite values of FP32 trainings that differ by their seed, the reference's first.
    """
    if isinstance(own, int | float) and math.isfinite(own) and own > 0:
        return Margin(float(own), "run")
    spread = statistics.stdev(seeds) if len(seeds) > 1 else 0.0
    return Margin(spread, "seeds") if spread > 0 else None


def given_margin(
    margins: float | Mapping[str, float] | None, name: str, metrics: Collection[str]
) -> Margin | None:
    """The margin that was given for a metric; None if none was.

    Args:
        margins: One for all metrics, or by name.
        name: The metric.
        metrics: Names of all metrics that are compared.

    Raises:
        UsageError: If one was given for a metric that is not compared, or makes no sense.
    """
    if margins is None:
        return None
    if isinstance(margins, int | float):
        return Margin(_checked(margins), None)
    for known in margins:
        if known not in metrics:
            raise UsageError(
                f"a margin was given for {known!r}{did_you_mean(known, metrics)}, which is none of "
                f"the metrics compared: {', '.join(metrics)}"
            )
    return Margin(_checked(margins[name]), None) if name in margins else None


def parse_margins(texts: Sequence[str]) -> float | dict[str, float] | None:
    """``["0.5"]`` as 0.5, ``["accuracy=0.001", "loss=0.02"]`` by name, nothing as None.

    Raises:
        UsageError: If one of them is neither a number nor NAME=NUMBER.
    """
    named: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError as error:
            raise UsageError(f"--margin takes a number or NAME=NUMBER, not {text!r}") from error
        if not equals:
            if len(texts) > 1:
                message = "--margin VALUE is for all metrics: give it once, or NAME=VALUE for each"
                raise UsageError(message)
            return number
        named[name] = number
    return named or None


def _checked(margin: float) -> float:
    if not (math.isfinite(margin) and margin > 0):
        message = f"the margin must be a number above 0, in the metric's own units, not {margin!r}"
        raise UsageError(message)
    return margin
