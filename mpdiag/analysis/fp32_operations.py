"""Operations that stay in FP32, by rule: from recorded magnitudes and the kind of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.plan import Fp32Choice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpdiag.analysis.layers import Layers
    from mpdiag.formats import FloatFormat

NORMS = ("BatchNorm", "SyncBatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm")
EXPONENTIALS = ("Softmax", "LogSoftmax", "Softmax2d", "Softmin", "Softplus")
CLOSE = 8.0
"""An activation within this factor of the format's largest value is called close to it."""


def choose_fp32_operations(
    layers: Layers, modules: Sequence[Mapping[str, Any]], target: FloatFormat
) -> tuple[Fp32Choice, ...]:
    """Modules whose operation stays in FP32, each with the recorded numbers.

    *Mixed Precision Training* (section 3.3) keeps large reductions in FP32: statistics of
    normalisations, softmax and losses. An activation past the format's range must stay there, too,
    and no loss scale mends it.
    """
    activations = layers.of_kind("activation")
    h = activations.histograms
    overflow = np.asarray(h.overflow(target).lower)
    where = {name: i for i, name in enumerate(activations.names)}
    choices = []
    for module in modules:
        if module["what"] != "module":
            continue
        name, kind = str(module["name"]), str(module["type"])
        i = where.get(name)
        if i is None:
            continue
        numbers = {"absmax": float(h.absmax[i]), "overflow": int(overflow[i]), "type": kind}
        if overflow[i] > 0:
            reason = (
                f"its output reaches {h.absmax[i]:.3g}, past {target.label}'s largest value "
                f"{target.max:.5g}"
            )
        elif kind.startswith(NORMS):
            reason = "a normalisation: its statistics are a large reduction"
        elif kind in EXPONENTIALS:
            reason = "an exponential and a sum over its outputs"
        elif kind.endswith("Loss"):
            reason = "a loss: a reduction over everything"
        else:
            continue
        choices.append(Fp32Choice(op=kind, module=name, reason=reason, evidence=numbers))
    return tuple(choices)
