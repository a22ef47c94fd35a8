"""One set of sizes for a model: the cases in which padding each size alone was refused by torch."""

from dataclasses import replace

import pytest
import torch
from doc_pages import ROOT
from recorded_steps import Layers, record_steps, recorded_twice
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.shapes.advice import advise_shapes, solve_run
from mpdiag.analysis.shapes.recorded import from_operations
from mpdiag.analysis.shapes.sizes import Sizes, number
from mpdiag.analysis.shapes.solution import Wanted, solve_sizes
from mpdiag.analysis.shapes.tensors import Part, dense_strides, layout
from studies.shapes import first_half, second_half
from studies.shapes.trial import try_model


def attend(model, x):
    """Nine values a head in functional attention, packed and split by the script."""
    b, t, c = x.shape
    q, k, v = (y.view(b, t, 5, c // 5).transpose(1, 2) for y in model.packed(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v)
    return x + model.out(y.transpose(1, 2).reshape(b, t, c))


def advise(run, target="fp16", **wanted):
    return advise_shapes(run, Wanted(target, **wanted))[0]


def findings(run, code, **wanted):
    return [f for f in advise_shapes(run, Wanted("fp16", **wanted))[1] if f.code == code]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    model = Layers(lambda m, x: m.conv(x), conv=nn.Conv2d(36, 36, 3, groups=3))
    return recorded_twice(model, torch.randn(2, 36, 8, 8), tmp_path_factory.mktemp("g") / "run")


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    model = Layers(attend, packed=nn.Linear(45, 135), out=nn.Linear(45, 45))
    return recorded_twice(model, torch.randn(4, 6, 45), tmp_path_factory.mktemp("a") / "run")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Seven heads of nine values in torch's own attention."""
    model = Layers(lambda m, x: x + m.own(x, x, x)[0], own=nn.MultiheadAttention(63, 7))
    return recorded_twice(model, torch.randn(5, 2, 63), tmp_path_factory.mktemp("o") / "run")


def sizes(advice):
    return {(a.module, a.dimension): a.padded for a in advice if a.module}


def test_groups_are_padded_each(grouped):
    advice = advise(grouped)
    assert sizes(advice) == {("conv", "in_channels"): 48, ("conv", "out_channels"): 48}
    one = advice[0]
    assert "3 groups of 12 → 16" in one.reason
    assert (one.evidence["together_with"], one.evidence["proved"]) == ([], True)
    solved = solve_run(grouped, Wanted("fp16"))
    assert solved.cost == pytest.approx((48 / 36) ** 2 - 1)
    assert solved.expected_time == pytest.approx((48 / 36) ** 2 / 2)


def test_a_head_that_the_script_splits(attention):
    """Nine is padded nowhere alone: the whole width follows, and it is no proof."""
    advice = advise(attention, worthwhile=False)
    assert sizes(advice) == {
        ("packed", "in_features"): 80, ("packed", "out_features"): 240,
        ("out", "in_features"): 80, ("out", "out_features"): 80,
    }  # fmt: skip
    assert not any(a.evidence["proved"] for a in advice if a.module)
    assert all("not proved" in a.reason for a in advice if a.module)


def test_attention_with_aligned_heads_is_left_alone(tmp_path):
    model = Layers(attend, packed=nn.Linear(40, 120), out=nn.Linear(40, 40))
    run = recorded_twice(model, torch.randn(4, 8, 40), tmp_path / "run")
    assert advise(run, worthwhile=False) == ()


def test_attention_modules_stay_divisible(own):
    advice = advise(own, worthwhile=False)
    (one,) = [a for a in advice if a.dimension == "embed_dim"]
    assert (one.padded, "7 heads of 9 → 16" in one.reason) == (112, True)
    assert {a.dimension for a in advice if a.module == "own"} <= {"embed_dim", "sequence"}


def test_what_does_not_pay_is_said_to_stay(own, attention):
    (left,) = findings(own, "shapes-left-alone")
    assert left.fix.startswith("own: use 8 heads of 8 (embed_dim 64 alone) instead of ")
    (left,) = findings(attention, "shapes-left-alone")
    assert {s["module"] for s in left.evidence["sizes"]} >= {"packed", "out"}
    assert all(s["growth"] > 0 for s in left.evidence["sizes"])
    assert solve_run(attention, Wanted("fp16")).expected_time <= 1.0


def test_a_size_that_is_to_be_padded_is_not_left_alone():
    """Three channels become four, which are no multiple of eight: both findings named them."""
    run = mpdiag.open_run(ROOT / "sample_runs" / "denoiser")
    assert {(a.size, a.padded) for a in advise(run)} == {(3, 4)}
    assert len(findings(run, "shapes-to-pad")) == 1
    assert findings(run, "shapes-left-alone") == []


@pytest.mark.parametrize(
    ("target", "shards", "padded"),
    [("fp8_e4m3", 1, 48), ("mxfp8_e4m3", 1, 96), ("fp8_128x128", 1, 384), ("fp8_e4m3", 2, 96)],
)
def test_other_formats_and_shards(grouped, target, shards, padded):
    found = advise(grouped, target, shards=shards, worthwhile=False)
    assert set(sizes(found).values()) == {padded}


def test_a_recording_without_strides_proves_nothing(grouped, attention):
    for run in (grouped, attention):
        plain = [
            replace(op, scalars={k: v for k, v in op.scalars.items() if k != "views"})
            for op in run.operations()
        ]
        assert from_operations(run.modules(), plain) is None
    shapes = {t.shape for op in attention.operations() for t in op.inputs if t.shape[-1:] == (45,)}
    assert {(24, 45), (4, 6, 45)} <= shapes  # one tensor, read in two shapes


class _Recurrent(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.first = nn.Linear(12, 30)
        self.rnn = nn.LSTM(30, 45, **settings)
        width = (settings.get("proj_size") or 45) * (2 if settings.get("bidirectional") else 1)
        self.last = nn.Linear(width, 21)

    def forward(self, x):
        return self.last(self.rnn(self.first(x))[0])


def fused(run, op, states):
    """The forward operations with all of the LSTM's in one, as cuDNN or torch's own ``lstm`` has it."""
    forward = [o for o in run.operations() if o.phase == "forward"]
    inside = [o for o in forward if o.module == "rnn"]
    sizes = {str(r["name"]): tuple(r["shape"]) for r in run.modules() if r["what"] == "parameter"}
    weights = [
        replace(inside[0].outputs[0], argument="weight" if op != "lstm" else "params",
                tensor=900 + i, producer=-1, parameter=name, shape=shape)
        for i, (name, shape) in enumerate(n for n in sizes.items() if n[0].startswith("rnn."))
    ]  # fmt: skip
    x = next(o for o in forward if o.module == "first").outputs[0]
    x = replace(x, argument="input", shape=(7, 8, 30))
    y = next(t for o in forward if o.module == "last" for t in o.inputs if t.argument == "mat1")
    settings = next(s for s in (r for r in run.modules()) if s["name"] == "rnn")["settings"]
    directions = 2 if '"bidirectional": true' in settings else 1
    layers, projected = (2, 0) if '"num_layers": 2' in settings else (1, 20)
    width = projected or 45
    state = [
        replace(x, argument=name, tensor=950 + i, producer=-1, shape=(layers * directions, 8, n))
        for i, (name, n) in enumerate(zip(states, (width, 45), strict=True))
    ]
    scalars = {
        "num_layers": layers, "bidirectional": directions == 2, "proj_size": projected, "views": [],
    }  # fmt: skip
    outputs = (
        replace(y, argument="out", producer=inside[0].index, shape=(7, 8, directions * width)),
        *(replace(s, argument="out", tensor=970 + i) for i, s in enumerate(state)),
        replace(x, argument="out", tensor=980, shape=(1234,)),
    )
    one = replace(inside[0], op=op, inputs=(x, *weights, *state), outputs=outputs, scalars=scalars)
    rest = [
        replace(o, inputs=tuple(
            replace(t, producer=one.index, tensor=outputs[0].tensor) if t.argument == "mat1" else t
            for t in o.inputs)) if o.module == "last" else o
        for o in forward if o.module != "rnn"
    ]  # fmt: skip
    at = next(i for i, o in enumerate(rest) if o.module == "last")
    return [*rest[:at], one, *rest[at:]]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("settings", "padded"),
    [
        ({"num_layers": 2, "bidirectional": True}, {"input_size": 32, "hidden_size": 48}),
        ({"proj_size": 20}, {"input_size": 32, "hidden_size": 48, "proj_size": 24}),
    ],
)
def test_a_recurrent_layer_in_one_operation(tmp_path, settings, padded):
    """As on a GPU: all layers and directions at once, input, state and output as wide as before."""
    run = recorded_twice(_Recurrent(**settings), torch.randn(7, 8, 12), tmp_path / "run")
    directions = 2 if settings.get("bidirectional") else 1
    leaving = padded.get("proj_size", padded["hidden_size"])
    for op, states in (("_cudnn_rnn", ("hx", "cx")), ("lstm", ("hx", "hx"))):
        model = from_operations(run.modules(), fused(run, op, states))
        solved = solve_sizes(model, Wanted("fp16", worthwhile=False))
        found = {(s.module, s.name): solved.new(s.size) for s in model.dimensions}
        assert {n: v for (m, n), v in found.items() if m == "rnn"} == padded
        assert found["first", "out_features"] == 32
        assert found["last", "in_features"] == directions * leaving
        products = [p for p in model.products if p.kind == "rnn"]
        assert len(products) == (3 if "proj_size" in settings else 8)


def test_findings_are_of_the_same_shards_as_the_advice(tmp_path):
    """40 is a multiple of 8, but 20 a shard is none."""
    run = recorded_twice(nn.Sequential(nn.Linear(40, 40)), torch.randn(64, 40), tmp_path / "run")
    for shards, modules in ((1, set()), (2, {"0"})):
        advised = {a.module for a in advise(run, shards=shards) if a.module}
        padded = findings(run, "shapes-to-pad", shards=shards)
        assert {m for f in padded for m in f.evidence["modules"]} == advised == modules


def test_heads_that_tensor_parallelism_cannot_share_out(own, attention):
    for recording, heads in ((own, {"own": [7]}), (attention, {"": [5]})):
        (found,) = findings(recording, "heads-not-divisible", shards=2)
        assert found.severity == "warning"
        assert found.evidence["heads"] == heads
        assert "each takes whole heads" in found.message
        (count,) = next(iter(heads.values()))
        for shards in (1, count):
            assert not findings(recording, "heads-not-divisible", shards=shards)


def test_that_sizes_fit_together_is_said_where_it_is_proved(grouped, attention, root):
    """It stood beside "not proved: sizes of the same number are taken to be the same"."""
    (proved,) = findings(grouped, "shapes-to-pad")
    assert "the recorded operations fit together" in proved.fix
    stored = [mpdiag.open_run(root / "sample_runs" / name) for name in ("ssd", "gpt")]
    for run in (attention, *stored):
        for found in findings(run, "shapes-to-pad"):
            assert "check that the new sizes fit together" in found.fix


def joined(model, x):
    """Sizes that are sums, halves and products of others, and one that the script fixes."""
    y = torch.cat([model.left(x), model.right(x)], 1).flatten(1)
    a, b = model.gate(y).chunk(2, -1)
    y = torch.relu(a) * b
    return model.head(y + 0), model.odd(y) * torch.ones(4, 20)


def test_sums_halves_and_products_of_sizes(tmp_path):
    convolutions = {"left": nn.Conv2d(3, 12, 3), "right": nn.Conv2d(3, 18, 3)}
    layers = {"gate": nn.Linear(30 * 4, 44), "head": nn.Linear(22, 10), "odd": nn.Linear(22, 20)}
    model = Layers(joined, **convolutions, **layers)
    run = recorded_twice(model, torch.randn(4, 3, 4, 4), tmp_path / "run")
    advice = advise(run, worthwhile=False)
    assert sizes(advice) == {
        ("left", "in_channels"): 8, ("right", "in_channels"): 8,
        ("left", "out_channels"): 16, ("right", "out_channels"): 24,
        ("gate", "in_features"): 160, ("gate", "out_features"): 48,
        ("head", "in_features"): 24, ("head", "out_features"): 16,
        ("odd", "in_features"): 24, ("odd", "out_features"): 24,
    }  # fmt: skip
    (odd,) = [a for a in advice if (a.module, a.dimension) == ("odd", "out_features")]
    assert "the script creates tensors of this size" in odd.reason


@pytest.mark.parametrize("residual", [False, True])
def test_the_layers_of_a_stream_are_tied_whatever_their_number(tmp_path, residual):
    def stream(model, x):
        for layer in model.layers:
            x = x + layer(x) if residual else layer(x)
        return x

    layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(300))
    run = recorded_twice(Layers(stream, layers=layers), torch.randn(8, 30), tmp_path / "run")
    padded = sizes(advise(run))
    assert len(padded) == 600
    assert set(padded.values()) == {32}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (first_half.DepthwiseCnn, 14),
        (first_half.GroupedQueries, 8),
        (first_half.Recommender, 10),
        (first_half.UNet, 12),
        (second_half.PositionedEncoder, 20),
        (second_half.RotaryWindows, 12),
        (second_half.SqueezeExcite, 15),
        (second_half.Translator, 11),
    ],
)
@pytest.mark.filterwarnings("ignore:.*padding")
def test_torch_trains_with_all_advised_sizes(kind, changed, tmp_path):
    """A few of the thirty models of ``studies/awkward_shapes.py``, each made again with the sizes."""
    for outcome in try_model(kind, tmp_path):
        assert outcome.problems == []
        assert outcome.worthwhile or len(outcome.advice) == changed


@pytest.mark.parametrize(
    ("factors", "values"), [((1, 1), (3, 4)), ((3, 2), (10, 15)), ((2, 1), (6, 12))]
)
def test_what_cannot_be_written_in_the_other_is_fixed(factors, values):
    u = Sizes()
    a, b = map(u.new, values)
    u.equate(number(factors[0]) * a, number(factors[1]) * b)
    tied = factors == (2, 1)
    assert (u.resolve(a), u.resolve(b)) == (
        (a, number(2) * a) if tied else tuple(map(number, values))
    )
    u.equate(number(2) * a, number(12) if values[0] == 6 else number(2 * values[0]))
    assert u.resolve(a) == number(values[0])


@pytest.mark.parametrize(
    ("base", "view", "strides", "offset", "parts"),
    [
        # Keys of a packed projection [2, 5, 3 · 4 · 8] seen as [2, 4, 5, 8] begin after the queries.
        ((2, 5, 96), (2, 4, 5, 8), (480, 8, 96, 1), 32,
         [(Part(0, 1, 2),), (Part(2, 8, 4),), (Part(1, 1, 5),), (Part(2, 1, 8),)]),
        ((4, 6, 10), (24, 10), (10, 1), 0, [(Part(0, 1, 4), Part(1, 1, 6)), (Part(2, 1, 10),)]),
        # [T, B, E] seen as [T, B · heads, head], as MultiheadAttention does.
        ((5, 3, 12), (5, 6, 6), (36, 6, 1), 0,
         [(Part(0, 1, 5),), (Part(1, 1, 3), Part(2, 6, 2)), (Part(2, 1, 6),)]),
        ((6, 10), (10, 6), (1, 10), 0, [(Part(1, 1, 10),), (Part(0, 1, 6),)]),
        ((6, 10), (3, 6, 10), (0, 10, 1), 0, [(), (Part(0, 1, 6),), (Part(1, 1, 10),)]),
        ((6, 10), (7, 7), (9, 1), 0, None),
    ],
)  # fmt: skip
def test_the_dimensions_of_views(base, view, strides, offset, parts):
    found = layout((base, dense_strides(base)), (view, strides), offset)
    assert (found and found[0]) == parts
    if offset:
        assert found[1] == [0, 0, 32]


class Experts(nn.Module):
    """400 rows, of which each expert gets those that the gate gives it."""

    def __init__(self, rows=(93, 142, 101, 64)):
        super().__init__()
        self.rows = rows
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in rows)
        self.head = nn.Linear(64, 16)

    def forward(self, x):
        parts = x.split(self.rows)
        return self.head(torch.cat([e(p) for e, p in zip(self.experts, parts, strict=True)]))


def test_the_rows_of_one_expert_are_no_batch(tmp_path):
    assert advise(recorded_twice(Experts(), torch.randn(400, 64), tmp_path / "even")) == ()
    odd = recorded_twice(Experts((94, 142, 101, 64)), torch.randn(401, 64), tmp_path / "odd")
    (batch,) = advise(odd)
    assert (batch.dimension, batch.size, batch.padded) == ("batch", 401, 408)


def attend_apart(model, x):
    b, t, c = x.shape
    q, k, v = (
        m(x).view(b, t, model.heads, -1).transpose(1, 2) for m in (model.q, model.k, model.v)
    )
    y = F.scaled_dot_product_attention(q, k, v)
    return x + model.out(y.transpose(1, 2).reshape(b, t, c))


@pytest.mark.parametrize(
    ("heads", "width", "padded", "instead"),
    [
        (6, 60, 60, "the model: use 8 heads of 8 (64 in all) instead of 6 heads of 10"),
        (4, 100, 128, ""),
    ],
)
def test_a_head_is_padded_to_a_whole_multiple_or_not_at_all(
    tmp_path, heads, width, padded, instead
):
    """Six heads of 10 became 12: a fifth more work, and attention padded them again."""
    parts = {name: nn.Linear(width, width) for name in ("q", "k", "v", "out")}
    model = Layers(attend_apart, **parts)
    model.heads = heads
    run = recorded_twice(model, torch.randn(8, 16, width), tmp_path / "run")
    changed = {padded for (module, _), padded in sizes(advise(run)).items() if module}
    assert changed == ({padded} if padded != width else set())
    assert [f.fix for f in findings(run, "shapes-left-alone")] == ([instead] if instead else [])


def test_an_image_that_is_made_is_no_first_layer(tmp_path):
    parts = {"fc": nn.Linear(16, 768), "up": nn.ConvTranspose2d(48, 3, 4, 2, 1)}
    parts["head"] = nn.Linear(192, 16)
    made = Layers(lambda m, x: m.head(m.up(m.fc(x).view(-1, 48, 4, 4)).flatten(1)), **parts)
    assert advise(recorded_twice(made, torch.randn(8, 16), tmp_path / "made")) == ()
    read = Layers(lambda m, x: m.conv(x), conv=nn.Conv2d(3, 16, 3))
    (first,) = advise(recorded_twice(read, torch.randn(8, 3, 8, 8), tmp_path / "read"))
    assert (first.dimension, first.padded) == ("in_channels", 4)
    assert first.reason.startswith("in channels_last, the first layer reads")
    table = Layers(lambda m, x: m.b(m.a(x)), a=nn.Linear(3, 32), b=nn.Linear(32, 2))
    advice = advise(recorded_twice(table, torch.randn(64, 3), tmp_path / "table"))
    (column,) = [a for a in advice if (a.module, a.dimension) == ("a", "in_features")]
    assert column.padded == 4
    assert column.reason.startswith("Tensor Cores load 8 FP16 values at once")


def test_a_depthwise_convolution_is_not_said_to_run_on_tensor_cores(tmp_path):
    parts = {"wide": nn.Conv2d(16, 30, 1), "deep": nn.Conv2d(30, 30, 3, groups=30)}
    model = Layers(lambda m, x: m.narrow(m.deep(m.wide(x))), **parts, narrow=nn.Conv2d(30, 16, 1))
    advice = advise(recorded_twice(model, torch.randn(8, 16, 8, 8), tmp_path / "run"))
    said = {a.module: a.reason for a in advice}
    assert said["deep"].startswith("its neighbours need this size; a depthwise convolution")
    assert "loads of" not in said["deep"]
    assert said["wide"].startswith("Tensor Cores load 8 FP16 values")


def test_what_no_line_of_the_script_makes_is_not_said_to_be_made_there(tmp_path):
    """A batch norm's statistics have the size of its channels, and change with them."""
    parts = {"conv": nn.Conv2d(16, 36, 1), "norm": nn.BatchNorm2d(36), "fc": nn.Linear(36 * 16, 8)}
    model = Layers(lambda m, x: m.fc(m.norm(m.conv(x)).flatten(1)), **parts)
    said = {
        (a.module, a.dimension): a.reason
        for a in advise(recorded_twice(model, torch.randn(8, 16, 4, 4), tmp_path / "run"))
    }
    assert said["conv", "out_channels"].startswith("Tensor Cores load 8 FP16 values at once")
    assert said["fc", "in_features"].startswith("its neighbours need this size")  # 576 is aligned
    assert not any("the script creates" in reason for reason in said.values())


@pytest.mark.parametrize(("classes", "padded"), [(10, []), (90, [("fc", "out_features", 90, 96)])])
def test_a_few_classes_are_not_padded(tmp_path, classes, padded):
    """Ten of them lie in one tile of the product, as sixteen would."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    model.add_module("fc", nn.Linear(64, classes))

    def loss(model, _step):
        return F.cross_entropy(model(torch.randn(32, 64)), torch.randint(0, classes, (32,)))

    run = record_steps(tmp_path / "run", model, loss, steps=2)
    assert [(a.module, a.dimension, a.size, a.padded) for a in advise(run)] == padded
    (left,) = findings(run, "shapes-left-alone" if classes == 10 else "shapes-to-pad")
    assert left.evidence["share_of_flops"] > 0.05
