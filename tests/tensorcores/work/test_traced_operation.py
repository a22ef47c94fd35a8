"""M, N, K and FLOP of operations, against torch's own FLOP counter and against hand counts."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from tensorcores.traces import real
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.work.attention_calls import attention_call
from mpdiag.tensorcores.work.convolutions import convolution_backward, convolution_forward
from mpdiag.tensorcores.work.traced_operation import matrix_work, readers


def calls_of(run, tmp_path):
    """What a trace says of each operation that ``run`` called."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [(e["name"], e["args"]) for e in events if e.get("cat") == "cpu_op"]


def works_of(run, tmp_path, *names):
    """The matrix work of those of its operations that are named."""
    found = []
    for name, args in calls_of(run, tmp_path):
        if name.removeprefix("aten::") in names:
            fields = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
            found.append(matrix_work(name, *(args.get(f, []) for f in fields)))
    return found


def flops_of(run):
    """What torch counts."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


CONVOLUTIONS = {
    "plain": (nn.Conv2d(6, 10, 3), (2, 6, 9, 8)),
    "strided": (nn.Conv2d(6, 10, 3, stride=2, padding=1), (2, 6, 9, 8)),
    "dilated": (nn.Conv2d(6, 10, (3, 1), dilation=(2, 1), padding=(2, 0)), (2, 6, 9, 8)),
    "grouped": (nn.Conv2d(6, 12, 3, groups=3), (2, 6, 9, 8)),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6), (2, 6, 9, 8)),
    "one dimension": (nn.Conv1d(6, 10, 5, stride=3), (2, 6, 50)),
    "three dimensions": (nn.Conv3d(2, 4, 3), (1, 2, 5, 6, 7)),
    "transposed": (nn.ConvTranspose2d(6, 10, 3, stride=2), (2, 6, 9, 8)),
    "transposed, grouped": (nn.ConvTranspose2d(6, 12, 3, stride=2, groups=3), (2, 6, 9, 8)),
    "three inputs": (nn.Conv2d(3, 8, 3), (2, 3, 9, 8)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_its_gradients(name, tmp_path):
    model, shape = CONVOLUTIONS[name]
    x = torch.randn(shape, requires_grad=True)

    def run():
        model(x).sum().backward()

    forward, backward = works_of(run, tmp_path, "convolution", "convolution_backward")
    assert forward.flops == flops_of(lambda: model(x))
    assert backward.flops == 2 * forward.flops
    if model.groups == 1:  # torch counts a grouped weight gradient as if it were not grouped
        assert forward.flops + backward.flops == flops_of(run)
    assert forward.dtype == backward.dtype == "fp32"
    assert forward.depthwise == backward.depthwise == (name == "depthwise")
    assert forward.flops == 2 * forward.m * forward.n * forward.k * forward.batch
    assert forward.sizes == (
        ("input channels", model.in_channels),
        ("output channels", model.out_channels),
    )
    assert forward.channels_last is False


@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_this_machine(tmp_path, causal):
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))

    def run():
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        y.sum().backward()

    name = "_scaled_dot_product_flash_attention_for_cpu"
    forward, backward = works_of(run, tmp_path, name, f"{name}_backward")
    pairs = 16 * 17 // 2 if causal else 16 * 16
    assert forward.flops == 6 * pairs * 2 * (8 + 8)
    assert backward.flops == 6 * pairs * 2 * 5 * 8
    assert (forward.m, forward.n, forward.k, forward.batch) == (16, 16, 8, 6)
    if not causal:  # torch counts a causal attention in full
        assert forward.flops == sdpa_flop_count(q.shape, k.shape, v.shape)
        assert backward.flops == sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)


def described(work):
    """A work as ``calls.tsv`` writes it."""
    if work is None:
        return "none"
    sizes = ",".join(f"{name}:{size}" for name, size in work.sizes).replace(" ", "_")
    fields = {
        "batch": work.batch, "dtype": work.dtype, "flops": work.flops, "bytes": work.bytes,
        "fewest": work.fewest, "groups": work.groups if work.groups > 1 else None,
        "leading": "x".join(map(str, work.leading)) or None, "depthwise": work.depthwise or None,
        "channels_last": work.channels_last,
    }  # fmt: skip
    known = " ".join(f"{k}={v}" for k, v in fields.items() if v is not None or k == "dtype")
    return f"{work.kind} {work.m}x{work.n}x{work.k} {known} sizes={sizes}"


def test_calls_as_traces_record_them():
    rows = read_table(Path(__file__).with_name("calls.tsv"))
    assert len(rows) > 70
    for row in rows:
        columns = ("dims", "types", "strides", "values")
        work = matrix_work(row["operation"], *(json.loads(row[c] or "[]") for c in columns))
        assert described(work) == row["work"], row


def schemas(function):
    """Each reader of a kind, and the names of the arguments in this torch, where it has them."""
    for name, read in readers().items():
        operator = getattr(torch.ops.aten, name, None)
        if read.func is function and operator is not None:
            for overload in {"default", "input", "output_mask"} & set(operator.overloads()):
                arguments = getattr(operator, overload)._schema.arguments
                yield name, read, [argument.name for argument in arguments]


def test_positions_of_convolutions_are_those_of_pytorchs_schemas():
    seen = 0
    for name, read, names in schemas(convolution_forward):
        always_transposed = "groups" in read.keywords and "transposed" not in read.keywords
        usual = {} if always_transposed else {"stride": 3, "padding": 4, "dilation": 5}
        for argument, position in (usual | read.keywords).items():
            assert position is None or names[position] == argument, name
            seen += 1
    for name, read, names in schemas(convolution_backward):
        assert names[read.keywords.get("mask", 10)] == "output_mask", name
        seen += 1
    assert seen >= 50


def test_positions_of_attentions_are_those_of_pytorchs_schemas():
    found = list(schemas(attention_call))
    assert len(found) >= 16
    for name, read, names in found:
        (at,) = read.args
        assert names[at.query : at.query + 3] == ["query", "key", "value"], name
        assert names[at.causal] in ("is_causal", "custom_mask_type"), name
        if at.packed:
            begins = [names[at.packed + i][:4] for i in range(2)]
            assert begins in (["cum_", "cum_"], ["cu_s", "cu_s"]), name
            assert [names[at.longest + i][:4] for i in range(2)] == ["max_", "max_"], name
        if at.window:
            assert names[at.window : at.window + 2] == ["window_size_left", "window_size_right"]


def test_resnet50_counted_from_a_trace():
    """A real V100 trace: its backward convolutions are ResNet-50's, known from the paper's sizes.

    4.09 billion multiplications an image forward (fully connected layer apart), twice that
    backward less the first layer's input gradient; 32 images, 6 steps.
    """
    with gzip.open(real("v100_resnet50_fp32.json.gz")) as file:
        events = json.loads(file.read().decode("utf-8", "replace"))["traceEvents"]
    total = sum(
        work.flops
        for e in events
        if e.get("name") == "aten::cudnn_convolution_backward"
        and (work := matrix_work(e["name"], e["args"]["Input Dims"], e["args"]["Input type"]))
    )
    assert total == pytest.approx(6 * 32 * 2 * 2 * 4.09e9, rel=0.005)
