"""A harmless recording, for tests of what is said of it."""

import numpy as np
from row_buffer import write_rows


def parameter(name, numel, reason=""):
    row = {"name": name, "what": "parameter", "type": "Parameter", "dtype": "float32"}
    return row | {"numel": numel, "recorded": not reason, "reason": reason}


def record(folder, steps=30, modules=(), **meta):
    """A harmless run: gradients of one layer, far from both ends of FP16's range."""
    g = np.exp2(np.random.default_rng(0).normal(-10.0, 2.0, 200)).astype(np.float32)
    layers = (("activation_grad", "layer"), ("weight_grad", "layer.weight"))
    rows = [(step, *layer, g) for step in range(steps) for layer in layers]
    return write_rows(folder, rows, modules, steps=steps, **{"optimizers": [{}]} | meta)
