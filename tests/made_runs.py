"""A run with known values, written without training."""

import json

import numpy as np
from row_buffer import LABELS, RowBuffer, UpdateCounts

from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs.writer import RunWriter

HOSTILE = '<img src=x onerror="window.hacked=1">'
SCRIPT = "</script><script>window.hacked=1</script>"
MARKDOWN = "[a](javascript:alert(1)) **b** `c` $d$ _e_"
NAMES = ("", HOSTILE, SCRIPT, MARKDOWN)
STEPS = 6


def values_of(name: str, kind: str, step: int) -> np.ndarray:
    """What a layer held at a step: spread over FP16's lower end, some zeros, some subnormals."""
    seed = [NAMES.index(name), ("activation", "activation_grad", "weight_grad").index(kind), step]
    generator = np.random.default_rng(seed)
    exponents = {"activation": (-6, 17), "activation_grad": (-44, -8), "weight_grad": (-30, 3)}
    values = np.exp2(generator.uniform(*exponents[kind], 200)).astype(np.float32)
    values[:5] = 0.0
    if kind == "activation_grad":
        values[5:8] = np.float32(1e-40)
    return values


def write_log(folder, *lines):
    """A training log of these lines, in a folder that is made for it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "training.jsonl").write_text(text, encoding="utf-8")


def write_run(folder, *, world_size=1, scale=1.0, state="complete", **meta):
    """Write it: activations, their gradients, weight gradients and updates of hostile names."""
    for rank in range(world_size):
        writer = RunWriter(folder, rank=rank, world_size=world_size)
        buffer = RowBuffer()
        for step in range(STEPS):
            for name in NAMES:
                for kind in ("activation", "activation_grad", "weight_grad"):
                    _append(buffer, name, kind, step, rank, world_size, scale)
                _append_update(buffer, name, step, rank, world_size)
        writer.append(buffer.to_table())
        kinds = ["Model", *["LayerNorm"] * (len(NAMES) - 1)]
        rows = [
            {"name": name, "what": "module", "type": kind, "recorded": True}
            for name, kind in zip(NAMES, kinds, strict=True)
        ]
        writer.write_modules(rows)
        model = {"type": HOSTILE, "parameters": 100}
        writer.write_meta(
            {
                "state": state,
                "created": "2026-01-01T00:00:00.000+00:00",
                "model": model,
                "steps_seen": STEPS,
                "steps_recorded": STEPS,
                "world_size": world_size,
                "argv": [SCRIPT],
                **meta,
            }
        )
    return folder


def _labels(name, kind, step, rank, placement, *, micro=0, **others):
    own = {"step": step, "micro": micro, "rank": rank, "kind": kind, "name": name}
    return LABELS | own | {"placement": placement, **others}


def _append(buffer, name, kind, step, rank, world_size, scale):
    values = values_of(name, kind, step)
    if kind == "weight_grad":
        # Two micro-batches and their total, which alone counts; every rank has a copy of it.
        placement = "replicated" if world_size > 1 else "local"
        for micro, part in ((0, values[::2]), (1, values[1::2]), (-1, values)):
            h = ExponentHistogram.of(part)
            buffer.append(h, **_labels(name, kind, step, rank, placement, micro=micro))
        return
    factor = scale if kind == "activation_grad" else 1.0
    h = ExponentHistogram.of(values * np.float32(factor))
    buffer.append(h, **_labels(name, kind, step, rank, "local", scale=factor))


def _append_update(buffer, name, step, rank, world_size):
    counts = tuple(
        int(c) for c in np.random.default_rng([7, NAMES.index(name), step]).integers(0, 9, 20)
    )
    changed = sum(counts) + 2
    update = UpdateCounts(changed, counts[-1], counts[-1] + counts[-2], 1, 2, -2, counts)
    h = ExponentHistogram.of(np.exp2(np.linspace(-20, -3, changed)))
    placement = "replicated" if world_size > 1 else "local"
    labels = _labels(name, "update", step, rank, placement, micro=-1, skipped=step == 3)
    buffer.append(h, update, **labels)


def assert_one_sentence(caught, *words):
    """Check that an error that was raised is one line, with these words in it."""
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
