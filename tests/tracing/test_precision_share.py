"""The share of FLOPs in half precision, against a count by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.errors import InputError
from mpdiag.hardware.cpu_instructions import CpuInstructions
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log
from mpdiag.tracing import precision_share
from mpdiag.tracing.precision_share import DENSE, PrecisionShare, is_counted, operand_format

FORWARD = 2 * 32 * 8 * 16, 2 * 32 * 16 * 1
"""FLOPs of the two layers; a backward pass has two such products, the first layer's only one."""
ALL = 2 * FORWARD[0] + 3 * FORWARD[1]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def test_the_first_steps_and_one_of_each_octave_are_counted():
    counted = [step for step in range(1 << 14) if is_counted(step)]
    assert counted[:DENSE] == list(range(DENSE))
    assert [step.bit_length() for step in counted[DENSE:]] == list(range(4, 15))
    odd = [step % 2 for step in counted[DENSE:]]
    assert 0 < sum(odd) < len(odd)  # of models that take turns, each is met


def test_products_of_forward_and_backward_passes_are_counted_by_dtype():
    share = PrecisionShare(everywhere=True)
    model, x = net(), torch.randn(32, 8)
    share.begin()
    with torch.no_grad():
        model(x)  # evaluation is no part of training
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model[0](x)
    model[2](torch.tanh(hidden).float()).mean().backward()
    with share.paused():
        x @ torch.zeros(8, 8, requires_grad=True)
    share.step_ended()
    share.stop()
    for _ in range(3):  # what was stopped stays so
        share.step_ended()
    x @ torch.zeros(8, 8, requires_grad=True)
    assert (share.flops, share.products) == (ALL, 5)
    assert (share.low_flops, share.low_products) == (2 * FORWARD[0], 2)
    assert share.share == 2 * FORWARD[0] / ALL
    assert share.to_json() == {
        "half_precision_flops": share.share,
        "products": 5,
        "half_precision_products": 2,
        "counted_steps": [0],
        "not_counted_because": "",
        "message": "84.2 % of FLOPs in half precision (2 of 5 products, counted in 1 steps)",
    }


@pytest.mark.parametrize("low", [False, True])
def test_recurrent_layers_and_attention_have_formulas(low):
    share = PrecisionShare(everywhere=True)
    lstm = nn.LSTM(8, 16)
    share.begin()
    out, _ = lstm(torch.randn(5, 4, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        out = F.scaled_dot_product_attention(*[out.view(1, 4, 5, 16)] * 3)
    out.float().mean().backward()
    share.stop()
    recurrent = 2 * 20 * (64 * 8 + 64 * 16)
    assert not share.unknown
    assert share.flops >= 3 * recurrent + 2 * 2 * 4 * 5 * 5 * 16 - 2 * 20 * 64 * 8
    assert (share.low_flops > 0) == low


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize(
    ("product", "columns", "passes"),
    [
        (lambda a, x: a @ x, 3, 2),
        (lambda a, x: torch.sparse.mm(a, x), 3, 2),
        (lambda a, x: torch.sparse.addmm(x[:4], a, x), 3, 2),
        (lambda a, x: x.mT @ a.transpose(0, 1), 3, 2),
        (lambda a, x: a @ x[:, 0], 1, 2),
    ],
)
def test_of_a_sparse_matrix_what_it_stores_is_counted(layout, product, columns, passes):
    a = torch.tensor([[0, 1.0, 0, 0, 2], [0] * 5, [3, 0, 0, 4, 0], [0, 0, 0, 5, 0]])
    a = a.to_sparse(layout=layout)
    share = PrecisionShare(everywhere=True)
    share.begin()
    product(a, torch.randn(5, 3, requires_grad=True)).sum().backward()
    share.stop()
    assert (share.products, share.flops) == (passes, passes * 2 * 5 * columns)


def test_a_share_is_never_rounded_to_nothing_or_all():
    share = PrecisionShare()
    told = []
    for share.flops, share.low_flops in ((10**6, 1), (10**6, 10**6 - 1), (8, 8), (8, 1), (8, 0)):
        told.append(share.percent)
    assert told == ["less than 0.1 %", "more than 99.9 %", "100 %", "12.5 %", "0 %"]


def test_what_has_no_products_has_no_share():
    share = PrecisionShare(everywhere=True)
    share.begin()
    torch.randn(4, requires_grad=True).exp().sum().backward()
    share.stop()
    assert share.share is None
    assert share.message.endswith("is unknown: no matrix product or convolution ran")


def trained(folder, *, inside: bool, level: str = "O1", model=None):
    model = model or net()
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    plan = mpdiag.PrecisionPlan()
    with mpdiag.MixedPrecision(model, optimizer, plan, level=level, run=folder) as mp:
        for _ in range(10):
            with mp.autocast():
                out = model(x) if inside else None
            mp.step(F.mse_loss(model(x) if out is None else out, y))
    return open_run(folder).meta["half_precision_flops"]


def test_a_loop_is_counted_in_autocast_and_in_backward_passes(tmp_path):
    assert trained(tmp_path / "a", inside=True) == 1.0
    assert trained(tmp_path / "b", inside=False) == 0.0
    (note,) = (n for n in read_log(tmp_path / "a").notes if "half_precision_flops" in n)
    assert note["half_precision_flops"] == 1.0
    assert note["counted_steps"] == [*range(DENSE), *filter(is_counted, range(DENSE, 10))]


def test_the_emulated_lstm_is_counted(tmp_path):
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x[None])[0][0]

    assert trained(tmp_path / "run", inside=True, model=Last(8, 1)) == 1.0


def test_a_comparison_refuses_half_precision_in_which_nothing_ran(tmp_path):
    trained(tmp_path / "plain", inside=True, level="O0")
    trained(tmp_path / "again", inside=True, level="O0")
    trained(tmp_path / "claimed" / "seed0", inside=False)
    compare = mpdiag.compare
    assert compare(tmp_path / "plain", tmp_path / "again").verdict != "different"  # a fair question
    with pytest.raises(InputError, match=r"seed0 claims fp16, and none of its .* ran in it"):
        compare(tmp_path / "plain", tmp_path / "claimed")
    with pytest.raises(InputError, match="FP32 with FP32"):
        compare(tmp_path / "claimed" / "seed0", tmp_path / "plain")


ATEN = torch.ops.aten


def of(op, device="cuda", dtype=torch.float32):
    return operand_format(op.default, [SimpleNamespace(dtype=dtype, device=torch.device(device))])


@pytest.fixture
def card(monkeypatch):
    """Settings of torch on a card that has TF32; no card is asked."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    kinds = {"matmul": "none", "conv": "tf32", "rnn": "tf32"}  # torch's defaults
    said = {kind: SimpleNamespace(fp32_precision=value) for kind, value in kinds.items()}
    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace(matmul=said["matmul"]))
    monkeypatch.setattr(torch.backends, "cudnn", SimpleNamespace(**said))
    return said


def test_products_on_a_card_may_use_tf32_as_the_setting_of_their_kind_says(card):
    assert [of(op) for op in (ATEN.mm, ATEN.convolution, ATEN._cudnn_rnn)] == ["", "tf32", "tf32"]
    card["matmul"].fp32_precision, card["conv"].fp32_precision = "tf32", "ieee"
    assert [of(op) for op in (ATEN.addmm, ATEN.convolution_backward)] == ["tf32", ""]
    assert [of(ATEN.exp), of(ATEN.mm, dtype=torch.bfloat16), of(ATEN.mm, "xpu")] == ["", "", ""]
    assert operand_format(ATEN.mm.default, []) == ""


@pytest.mark.parametrize("without", ["capability", "version"])
def test_a_card_without_tf32_rounds_nothing(without, card, monkeypatch):
    if without == "capability":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    else:
        monkeypatch.setattr(torch.version, "cuda", None)  # AMD's
    assert of(ATEN.convolution) == ""


def test_before_torch_2_9_settings_say_yes_or_no(card, monkeypatch):
    no, yes = SimpleNamespace(allow_tf32=False), SimpleNamespace(allow_tf32=True)
    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace(matmul=no))
    cudnn = SimpleNamespace(allow_tf32=True, rnn=SimpleNamespace())  # a module of torch's
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    operations = ATEN.mm, ATEN.convolution, ATEN._cudnn_rnn
    assert [of(op) for op in operations] == ["", "tf32", "tf32"]
    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace(matmul=yes))
    cudnn.allow_tf32 = False
    assert [of(op) for op in operations] == ["tf32", "", ""]


@pytest.mark.parametrize(
    ("setting", "has", "found"),
    [
        ("none", "amx_bf16", ""),
        ("bf16", "amx_bf16", "bf16"),
        ("bf16", "bf16", "bf16"),
        ("bf16", "avx512_bf16", ""),  # oneDNN rounds nothing for vector units of x86
        ("tf32", "amx_bf16", ""),
        ("tf32", "amx_fp16", "tf32"),
    ],
)
def test_a_cpu_rounds_operands_if_it_has_the_instructions(setting, has, found, monkeypatch):
    known = CpuInstructions(frozenset({has}))
    monkeypatch.setattr(precision_share, "_instructions", lambda: known)
    said = SimpleNamespace(matmul=SimpleNamespace(fp32_precision=setting))
    monkeypatch.setattr(torch.backends, "mkldnn", said)
    assert of(ATEN.addmm, "cpu") == found
    assert of(ATEN.convolution, "cpu") == ""  # before torch 2.9 there is no such setting


def test_torch_s_own_settings_are_read(monkeypatch):
    """By the names that this version of torch gives them."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    for allowed in (True, False):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            assert of(ATEN.convolution) == ("tf32" if allowed else "")
    assert (of(ATEN.mm), of(ATEN.mm, "cpu")) == ("", "")
