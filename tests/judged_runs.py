"""A harmless recording, for tests of what is said of it."""

from __future__ import annotations

import numpy as np
from row_buffer import RowBuffer

from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs.writer import RunWriter

LABELS = {
    "rank": 0,
    "tensors": 1,
    "dtype": "float32",
    "placement": "local",
    "stage": "local",
    "scale": 1.0,
    "skipped": False,
}


def parameter(name, numel, reason=""):
    row = {"name": name, "what": "parameter", "type": "Parameter", "dtype": "float32"}
    return row | {"numel": numel, "recorded": not reason, "reason": reason}


def record(folder, steps=30, modules=(), **meta):
    """A harmless run: gradients of one layer, far from both ends of FP16's range."""
    buffer = RowBuffer()
    g = np.exp2(np.random.default_rng(0).normal(-10.0, 2.0, 200)).astype(np.float32)
    for step in range(steps):
        for kind, name in (("activation_grad", "layer"), ("weight_grad", "layer.weight")):
            micro = 0 if kind == "activation_grad" else -1
            histogram = ExponentHistogram.of(g)
            buffer.append(histogram, step=step, micro=micro, kind=kind, name=name, **LABELS)
    writer = RunWriter(folder)
    writer.write_meta(
        {"state": "complete", "steps_recorded": steps, "steps_seen": steps, "optimizers": [{}]}
        | meta
    )
    writer.write_modules(modules)
    writer.append(buffer.to_table())
    return folder
