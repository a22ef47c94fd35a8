"""What ``mismatch`` prints: the difference per token, the layers that add it, and what would help."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from mpdiag.analysis.mismatch import MATTERS, Distance, Mismatch
from mpdiag.display.wording import layer_name, percent, scale_text, some_of
from mpdiag.reports.text.tables import Fitted, titled_rows

TOP = 8
"""Layers that are shown."""


def mismatch_text(found: Mismatch) -> Iterator[RenderableType]:
    """The page of ``mpdiag mismatch``."""
    if not found.distance.max:
        yield Text(f"The log-probabilities of {found.tokens:,} tokens are the same", "bold green")
        return
    far = found.distance
    words = f"differ by {far.mean:.3g} on average and {far.max:.3g} at most (KL {far.kl:.2g})"
    yield Text(f"The log-probabilities of {found.tokens:,} tokens {words}", "bold")
    numel = sum(layer.numel for layer in found.layers)
    table = Fitted(
        ("layer", "difference", "adds", "FP32 removes", "parameters"),
        names=frozenset({"layer"}),
        right=frozenset({"difference", "adds", "FP32 removes", "parameters"}),
        spare=("parameters",),
        boxed=False,
    )
    largest = sorted(found.layers, key=lambda one: -max(one.added, one.removable or 0.0))[:TOP]
    for layer in (layer for layer in found.layers if layer in largest):
        held = layer.numel / numel if layer.numel else None
        shares = (layer.difference, layer.added, layer.removable, held)
        figures = ("–" if share is None else percent(share) for share in shares)
        table.add_row(layer_name(layer.name), *figures)
    if found.ranking:
        yield table
    rows = titled_rows()
    for title, words in _advice(found, numel):
        rows.add_row(title, Text(words))
    yield rows


def _advice(found: Mismatch, numel: int) -> Iterator[tuple[str, str]]:
    """What would help: titles and words."""
    if found.unequal:
        words = f"The models' weights differ by more than rounding: {some_of(found.unequal)}."
        yield "Weights", f"{words} Copy them first: the gains below include that."
    if found.kept is not None:
        kept = ", ".join(found.keep)
        yield "FP32", _gain(found, found.kept, f"Keep {kept} in FP32", f"{kept} in FP32")
    elif not found.ranking:
        yield "FP32", "Not measured: no layer gave outputs of the same shapes in both passes."
    else:
        yield "FP32", f"No layer within {percent(found.budget, 0)} of the parameters helps."
    beyond = [layer for layer in found.ranking if layer.name not in found.keep][:1]
    for layer in (one for one in beyond if (one.removable or 0.0) >= MATTERS):
        removed, held = percent(layer.removable or 0.0, 0), percent(layer.numel / numel, 0)
        words = f"would remove {removed}, but the layer holds {held} of the parameters"
        yield "", f"FP32 in {layer_name(layer.name)} {words} (--budget {found.budget:g})."
    if found.fp16 is not None:
        scale = " Record a training to learn its loss scale."
        if found.loss_scale is not None:
            needed = f" Train with a loss scale of {scale_text(found.loss_scale)}."
            scale = " It needs no loss scale." if found.loss_scale == 1 else needed
        yield "FP16", _gain(found, found.fp16, "Use it in place of BF16", "It", scale)
    else:
        yield "FP16", f"Not measured: {found.fp16_reason}."


def _gain(found: Mismatch, other: Distance, advice: str, name: str, then: str = "") -> str:
    """Advice with what it gains, or that it does not help, as measured."""
    if not other.mean:
        return f"{advice}. The difference is gone (measured).{then}"
    times = found.distance.mean / other.mean
    if times < 1.05:  # another rounding alone may do that
        return f"{name} does not help. Measured: {other.mean:.3g} on average."
    return f"{advice}. Measured: {other.mean:.3g} on average, {times:.2g} times smaller.{then}"
