"""Tensors rounded to block formats: against exact fractions, torchao, ml_dtypes and gfloat.

The rounding of elements alone is tested with the formats (tests/numerics/test_formats.py).
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from block_measure import mx_exponent
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpdiag.emulation.block_rounding import fake_quantize, quantize_blocks
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import BLOCK_FORMATS, block_format
from mpdiag.numerics.formats import FP8_E4M3
from studies import block_formats as study
from studies.block_formats import RULES, planted

MX = [name for name in BLOCK_FORMATS if name.startswith("mx")]
EVERY = pytest.mark.parametrize("name", BLOCK_FORMATS)
INF, NAN = math.inf, math.nan


def same(found, expected):
    """Bit for bit, but for the payload of NaN."""
    return bool(study.same(torch.atleast_1d(found), torch.atleast_1d(expected)).all())


# -- exact fractions -------------------------------------------------------------------------------


def mx_by_hand(block, element, rule):
    """A block of finite FP32 values, rounded and scaled back in exact arithmetic."""
    exponent = mx_exponent(max(abs(x) for x in block), element, rule)
    scaled = [float(Fraction(x) / Fraction(2) ** exponent) for x in block]
    clipped = np.clip(scaled, -element.max, element.max)
    return [math.ldexp(q, exponent) for q in element.round(clipped)]


EDGES = [1.0, 1.25, 1.5, 1.75, 1.8125, 1.875, 1.96875, 2.0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
def test_mx_equals_exact_fractions(name, rule):
    element = BLOCK_FORMATS[name].element
    # Largest values on and beside each edge at which a rule changes the exponent, at all sizes.
    tops = torch.tensor([edge * 2.0**e for edge in EDGES for e in (-90, -3, 0, 7, 100)])
    tops = torch.cat([tops, tops.nextafter(tops * 0), tops.nextafter(tops * 2)])
    blocks = torch.rand((len(tops), 32), generator=torch.Generator().manual_seed(1)) * 2 - 1
    blocks = (blocks * tops[:, None]).clamp(-tops[:, None], tops[:, None])
    blocks[:, 7] = tops
    found = fake_quantize(blocks, name, scale_rounding=rule)
    expected = [mx_by_hand(block, element, rule) for block in blocks.tolist()]
    assert same(found, torch.tensor(expected))


def e4m3(x):
    return np.float32(FP8_E4M3.round(min(float(x), 448.0)))


def te_by_hand(tensor, rows=1, expand=None):
    """TransformerEngine's chain for one matrix in NumPy's FP32: E2M1 by its table of thresholds."""
    f = np.float32
    bound = f(448.0 if expand is None else 256.0)
    whole = f(np.abs(tensor).max())
    encode = f(bound * f(6)) / whole
    thresholds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=f)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=f)

    def candidate(block, scale):
        y = np.abs(block * (f(1) / (scale * (f(1) / encode))))
        index = np.searchsorted(thresholds, y, side="left")
        index += np.isin(y, thresholds[[1, 3, 5]])  # ties to the even code
        value = np.copysign(codes[index], block)
        error = np.zeros(len(block), dtype=f)
        for column in range(16):
            error = error + abs(
                value[:, column] * scale * whole / f(bound * f(6)) - block[:, column]
            )
        while len(error) > 1:
            error = error[: len(error) // 2] + error[len(error) // 2 :]
        return value * f(f(scale * whole) * f(1 / 2688 if expand is None else 1 / 1536)), error[0]

    found = np.empty_like(tensor)
    for row in range(0, tensor.shape[0], rows):
        for column in range(0, tensor.shape[1], 16):
            at = slice(row, row + rows), slice(column, column + 16)
            top = f(np.abs(tensor[at]).max())
            if expand is None:
                found[at] = candidate(tensor[at], e4m3(top * f(encode * f(1 / 6))))[0]
                continue
            base = f(top / f(6)) * encode
            six, six_error = candidate(tensor[at], e4m3(base))
            four, four_error = candidate(tensor[at], e4m3(base * f(1.5)))
            # The kernel sums what it dequantizes by a division; the sum decides, the value stays.
            found[at] = four if four_error < six_error else six
    return torch.from_numpy(found)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("four_over_six", [False, True])
def test_the_chain_of_transformer_engine(rows, four_over_six):
    # Of these seeds, the errors of some blocks differ by so little that the order of sums decides.
    generator = torch.Generator().manual_seed({1: 473, 16: 54}[rows])
    shape = (24 * rows, 16 * rows + 64)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-8, 1, shape, generator=generator).float())
    x[:rows, :16] *= 2.0**-9  # its scale is a subnormal number of E4M3
    x = x.bfloat16().float()
    # 2688 and 1536 times the reciprocal of 6.7 are not the quotients: it shows at the thresholds.
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) / 6 * 6.7
    x[-1, -15:] = torch.cat([edges, edges.nextafter(edges * 0), torch.tensor([6.7])])
    block = f"{rows}x16"
    found = fake_quantize(x, "nvfp4_te", block=block, four_over_six=four_over_six)
    expected = te_by_hand(x.numpy(), rows, expand=1.5 if four_over_six else None)
    assert same(found, expected)
    assert not torch.equal(found, fake_quantize(x, "nvfp4", block=block))


def test_the_two_chains_differ_in_small_blocks():
    x = torch.ones(1, 64)
    x[:, 16:32] = torch.linspace(-1, 1, 16) * 2.0**-17  # takes a scale below 2^-6
    x[:, 32:] = 2.0**-19  # takes a scale of 0, or again of 2^-6
    te, ao = ((fake_quantize(x, name) - x).abs() for name in ("nvfp4_te", "nvfp4"))
    assert te[0, 16:32].sum() < ao[0, 16:32].sum()
    assert te[0, 32:].sum() == x[0, 32:].sum() > ao[0, 32:].sum() > 0


# -- other people's references ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchao():
    return pytest.importorskip("torchao", reason="torchao is the oracle; pip install torchao")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MX)
def test_mx_equals_torchao(torchao, name, dtype):
    x = planted(1 << 15, seed=len(name)).to(dtype)  # 2^20 values
    for rule in RULES:
        expected, _ = study.torchao_mx(x, name, rule)
        assert same(fake_quantize(x, name, scale_rounding=rule), expected), rule
        columns = x[:64].reshape(64, 32).T  # blocks along the first axis of 32 × 64
        assert same(fake_quantize(columns, name, 0, scale_rounding=rule), expected[:64].T), rule


@pytest.mark.parametrize("whole", [True, False], ids=["tensor scale", "no tensor scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_nvfp4_equals_torchao(torchao, dtype, whole):
    x = planted(1 << 16, seed=3, width=16)
    x = x[x.isfinite().all(1)].to(dtype)
    x = x[x.isfinite().all(1)]
    fmt = replace(BLOCK_FORMATS["nvfp4"], tensor_scale=whole)
    assert same(fake_quantize(x, fmt), study.torchao_nvfp4(x, whole))
    if not whole:  # with one, a tensor is NaN whole
        x[::5, 3], x[1::5, 3] = NAN, INF
        assert same(fake_quantize(x, fmt), study.torchao_nvfp4(x, whole))


def test_fp8_with_fp32_scales_equals_torchao(torchao):
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

    x = planted(1 << 10, seed=4)
    x = x[x.isfinite().all(1) & (x.abs().amax(1) > 1e-12)]  # below, torchao's scale stays the same
    for power_of_two in (False, True):
        for name, amax in (("fp8_row", x.abs().amax(1, keepdim=True)), ("fp8_e5m2", x.abs().max())):
            dtype = getattr(torch, str(BLOCK_FORMATS[name].element.torch_name))
            scale = amax_to_scale(amax, dtype, power_of_two)
            expected = to_fp8_saturated(x * scale, dtype).float() * scale.reciprocal()
            assert same(fake_quantize(x, name, power_of_two=power_of_two), expected)


@pytest.mark.parametrize("name", MX)
def test_elements_equal_ml_dtypes_and_gfloat(name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the oracle")
    formats = pytest.importorskip("gfloat.formats", reason="gfloat is the oracle")
    gfloat = pytest.importorskip("gfloat")
    element = BLOCK_FORMATS[name].element
    # All BF16 values in reach, and their neighbours in FP32: every tie, and both sides of it.
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.isfinite() & (every.abs() <= element.max)]
    every = torch.cat([every, every.nextafter(every * 2), every.nextafter(every * 0)])
    every = every[every.abs() <= element.max]
    # The largest value of the element first, so that RCEIL's scale is 1.
    pad = torch.zeros(-len(every) % 31)
    x = torch.cat([every, pad]).reshape(-1, 31)
    x = torch.cat([torch.full((len(x), 1), element.max), x], dim=1)
    found = fake_quantize(x, name)[:, 1:].reshape(-1)[: len(every)]
    short = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    dtype = short.get(element.name) or element.name.replace("fp", "float") + "fn"
    cast = every.numpy().astype(getattr(ml_dtypes, dtype)).astype(np.float32)
    assert same(found, torch.from_numpy(cast))
    info = getattr(formats, f"format_info_ocp_{element.name[4:]}")
    rounded = gfloat.round_ndarray(info, every.double().numpy(), sat=True)
    assert same(found, torch.from_numpy(rounded).float())


# -- shapes ----------------------------------------------------------------------------------------


@EVERY
def test_axes_and_ragged_tails(name):
    fmt = BLOCK_FORMATS[name]
    x = torch.randn((5, 37, 300), generator=torch.Generator().manual_seed(5))
    kept = x.clone()
    rows = fake_quantize(x, name)
    assert (rows.shape, rows.dtype, torch.equal(x, kept)) == (x.shape, x.dtype, True)
    assert not torch.equal(rows, x)
    columns = fake_quantize(x, name, axis=-2)
    assert torch.equal(columns, fake_quantize(x.mT.contiguous(), name).mT)
    assert torch.equal(fake_quantize(x.mT, name).mT, columns)  # whatever the strides
    if fmt.block == "tensor":
        assert torch.equal(rows, columns)
        return
    padded = torch.nn.functional.pad(x, (0, 384 - 300, 0, 128 - 37))
    if fmt.block != "row":
        assert torch.equal(fake_quantize(padded, name)[:, :37, :300], rows)
    if not fmt.tensor_scale:
        assert torch.equal(fake_quantize(x[2], name), rows[2])
    first = torch.stack([fake_quantize(x[:, :, k], name, 0) for k in range(300)], -1)
    if fmt.block in ("row", (1, 32), (1, 128)):
        assert torch.equal(fake_quantize(x, name, 0), first)


@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("nvfp4", 16, 16), ("fp8_128x128", 128, 128)]
)
def test_square_blocks_are_rows_of_their_values(name, rows, columns):
    x = torch.randn((256, 384), generator=torch.Generator().manual_seed(6))
    found = fake_quantize(x, name, block=f"{rows}x{columns}")
    tiles = x.reshape(256 // rows, rows, 384 // columns, columns).movedim(1, 2)
    flat = fake_quantize(tiles.reshape(-1, rows * columns), name, block=f"1x{rows * columns}")
    assert torch.equal(found, flat.reshape(tiles.shape).movedim(2, 1).reshape(x.shape))
    assert torch.equal(found, fake_quantize(x, name, -2, block=f"{rows}x{columns}"))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_go_through_fp32(name, dtype):
    x = torch.randn((4, 40), generator=torch.Generator().manual_seed(7)).to(dtype)
    found = fake_quantize(x.requires_grad_(), name)
    assert (found.dtype, found.requires_grad) == (dtype, False)
    assert torch.equal(found, fake_quantize(x.detach().float(), name).to(dtype))


@EVERY
def test_empty_and_single_values(name):
    assert fake_quantize(torch.ones(0, 32), name).shape == (0, 32)
    if name == "fp8_128x128":
        with pytest.raises(ValueError, match="two axes"):
            fake_quantize(torch.tensor(3.0), name)
        return
    for one in (torch.tensor(3.0), torch.tensor([3.0])):
        assert fake_quantize(one, name).shape == one.shape
        assert float(fake_quantize(one, name)) == pytest.approx(3.0, rel=1e-6)  # 3 = 1.5 · 2


# -- blocks that are not finite, or zero -----------------------------------------------------------


@EVERY
def test_zeros_infinity_and_nan(name):
    zeros = torch.tensor([0.0, -0.0] * 16)
    assert same(fake_quantize(zeros.expand(128, 32), name), zeros.expand(128, 32))
    x = torch.ones(256, 256)
    x[0, 0] = NAN
    found = fake_quantize(x, name)
    rows, columns = {"row": (1, 256), "tensor": (256, 256)}.get(
        BLOCK_FORMATS[name].block, BLOCK_FORMATS[name].block
    )
    if BLOCK_FORMATS[name].tensor_scale:
        rows, columns = 256, 256
    assert found[:rows, :columns].isnan().all()
    assert found[rows:].isfinite().all()
    assert found[:, columns:].isfinite().all()
    x[0, 0] = -INF
    infinite = fake_quantize(x, name)
    assert not infinite[0, 0].isfinite()
    assert torch.equal(infinite[rows:], found[rows:])
    if name in MX:
        assert infinite[0, 0] == -INF


# -- properties ------------------------------------------------------------------------------------

VALUES = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False).map(
    lambda x: x if abs(x) > 2.0**-60 else 0.0
)
ROWS = hnp.arrays(np.float32, (2, 32), elements=VALUES)
OPTIONS = [{"name": name, "scale_rounding": rule} for name in MX for rule in RULES]
OPTIONS += [{"name": n, "power_of_two": two} for n in ("fp8_row", "fp8_1x128") for two in (0, 1)]
OPTIONS += [{"name": "nvfp4"}, {"name": "nvfp4_te"}, {"name": "nvfp4", "four_over_six": True}]
FORMS = [block_format(**options) for options in OPTIONS]
NAMES = [" ".join(str(value) for value in options.values()) for options in OPTIONS]


@pytest.mark.parametrize("fmt", FORMS, ids=NAMES)
@settings(max_examples=15, deadline=None)
@given(rows=ROWS)
def test_properties(fmt, rows):
    x = torch.from_numpy(rows)
    found = quantize_blocks(x, fmt)
    assert same(quantize_blocks(-x, fmt), -found)
    if fmt.scale in ("e8m0", "fp32_power_of_two"):  # a scale without mantissa is found again
        assert same(quantize_blocks(found, fmt), found)
    width = 16 if fmt.tensor_scale else 32
    blocks, rounded = x.reshape(-1, width), found.reshape(-1, width)
    order = blocks.argsort(dim=1)
    assert (rounded.gather(1, order).diff(dim=1) >= 0).all()
    assert ((rounded.double() - blocks.double()).abs() <= bound(blocks.double(), fmt)).all()


def bound(blocks, fmt):
    """The largest error: half a unit of the value or of the smallest number, or what is clipped.

    A scale is at most ``reach`` times m / 2^E. ``clip`` is the share of m beyond M times the scale.
    """
    element, top = fmt.element, blocks.abs().amax(1, keepdim=True)
    most, half = element.max / 2.0**element.max_exponent, 2.0 ** -(element.mantissa_bits + 1)
    reach = {"floor": 1, "ceil": 2, "even": 2 / (2 - half)}.get(fmt.scale_rounding, 2 / most)
    clip = {"floor": 1 - most / 2, "even": 1 - most / (2 - half)}.get(fmt.scale_rounding, 0)
    rest = 0.0
    if fmt.scale == "fp32":
        reach = 1 / most
    if fmt.scale == "e4m3":  # rounded by 2^-4, or one of the smallest; at 4 instead of 6
        reach = (1 + 2.0**-4) * (4 / 4 if fmt.four_over_six else 4 / 6)
        rest = blocks.abs().max() * 2.0**-6 * 6 / (6 * 256)
    lowest = top * reach * 2.0 ** (element.min_subnormal_exponent - 1 - element.max_exponent)
    largest = (blocks.abs() * half).maximum(lowest).maximum(blocks.abs() * clip)
    return largest * (1 + 2.0**-20) + rest


# -- stochastic rounding ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"])
def test_the_chance_of_rounding_up_is_the_distance_from_below(name):
    fmt = block_format(name, rounding="stochastic")
    element = fmt.element
    lattice = (torch.arange(256) << 24).repeat_interleave(32).reshape(256, 32)  # all, evenly
    values = torch.tensor([k / 64 for k in range(-15, 16)])  # 31 between the element's steps
    x = torch.cat([values, torch.tensor([element.max])]).expand(256, 32)
    found = quantize_blocks(x, fmt, bits=lattice)
    assert torch.equal(found.double().mean(0), x[0].double())
    assert same(fake_quantize(found, name), found)  # the element's values


def test_stochastic_rounding_is_unbiased_and_belongs_to_the_step():
    x = torch.randn((64, 64), generator=torch.Generator().manual_seed(8))
    options = {"format": "nvfp4", "rounding": "stochastic"}
    steps = [
        fake_quantize(x, **options, generator=CounterGenerator(1, step, "w")) for step in range(400)
    ]
    mean = torch.stack(steps).double().mean(0)
    spread = torch.stack(steps).double().std(0) / 20
    inside = spread > 0  # the others are values of the format, or at its end
    z = ((mean - x) / spread)[inside & (x.abs() < x.abs().amax() / 2)]
    assert abs(float(z.mean())) < 5 / len(z) ** 0.5
    assert float((z**2).mean()) == pytest.approx(1, abs=0.1)
    again = fake_quantize(x.T.contiguous().T, **options, generator=CounterGenerator(1, 7, "w"))
    assert torch.equal(again, steps[7])
    assert not torch.equal(steps[7], steps[8])


def test_a_generator_of_torch_gives_the_seed():
    one, again, other = (
        fake_quantize(
            torch.linspace(-1, 1, 64),
            "mxfp4",
            rounding="stochastic",
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"format": "mxfp4", "rounding": "stochastic"}, ValueError, "needs generator"),
        ({"format": BLOCK_FORMATS["mxfp4"], "scale_rounding": "even"}, ValueError, "in itself"),
        ({"format": "mxfp7"}, ValueError, "choose one of"),
        ({"format": "mxfp4", "x": torch.ones(32).int()}, TypeError, "floating-point"),
    ],
)
def test_what_cannot_be_rounded_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        fake_quantize(**{"x": torch.ones(32), **options})
