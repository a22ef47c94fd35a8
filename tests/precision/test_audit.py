"""The audit of recordings and of objects, against trainings of a known precision."""

import contextlib
import json
from collections import OrderedDict

import pytest
import torch
from audited_trainings import BF16, CASES, Masters, model, train
from torch import nn

import mpdiag
from mpdiag.errors import DamagedRun, NewerSchema, UsageError
from mpdiag.runs.precision import PRECISION, read_precision

ENTRY = {"name": "a", "numel": 1, "trainable": True, "optimizer": None, "stored": "float32"}
EMPTY = {"schema_version": 1, "step": 0, "changes": [], "settings": [], "parameters": []}


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audits")
    return {case.name: case.run(folder / case.name) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_audit_says_what_the_training_is(audits, case):
    found = audits[case.name]
    assert found.line == case.line
    assert {f.code for f in found.findings} == set(case.codes)


def test_the_dtypes_are_those_of_torch(audits):
    by_name = {p.name: p for p in audits["autocast"].parameters}
    linear, norm = by_name["3.weight"], by_name["1.weight"]
    assert (linear.stored, linear.forward, linear.set_by) == ("float32", "bfloat16", "autocast")
    assert linear.input_grad == linear.weight_grad == "bfloat16"
    # Autocast on a CPU leaves the layer norm its FP32 weight, and its gradient arrives in BF16.
    assert (norm.forward, norm.weight_grad, norm.set_by) == ("float32", "bfloat16", "default")
    first = audits["bf16"].parameters[0]
    assert first.states == {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}
    assert (first.grad, first.accumulated, first.master) == ("bfloat16", "bfloat16", None)
    assert first.set_by == "before recording"
    assert first.unknown["reduced"] == "one process: nothing is reduced"
    assert {p.master for p in audits["bf16-masters"].parameters} == {"float32"}


def test_objects_are_audited_without_a_step():
    net = model(BF16)
    found = mpdiag.audit(net, torch.optim.AdamW(net.parameters()))
    assert found.line == "BF16 weights, no FP32 masters"
    assert found.parameters[0].unknown["states"] == "the optimizer has not stepped it"
    assert {a.answer for a in found.answers} == {"no"}


def test_what_no_optimizer_holds_is_said(tmp_path):
    net = model()
    held = [p for name, p in net.named_parameters() if not name.startswith("1.")]
    found = train(net, torch.optim.SGD(held, lr=0.1), tmp_path / "run")
    (finding,) = found.findings
    assert finding.code == "precision-unheld"
    assert finding.evidence["parameters"] == ["1.weight", "1.bias"]


def test_two_optimizers_of_the_same_weights_are_both_named(tmp_path):
    """One of them was named; what the other one does was not said."""
    net = model()
    both = [torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.AdamW(net[0].parameters())]
    found = mpdiag.audit(net, both)
    by_name = {p.name: p for p in found.parameters}
    assert by_name["0.weight"].optimizer == "SGD and AdamW"
    assert by_name["3.weight"].optimizer == "SGD"
    assert by_name["0.weight"].holders == ("SGD", "AdamW")
    assert "precision-unheld" not in {f.code for f in found.findings}


def test_the_states_of_the_last_of_two_optimizers_are_not_called_the_firsts():
    net = model()
    net(torch.randn(4, 8)).sum().backward()
    first = torch.optim.SGD(net.parameters(), lr=0.1)
    last = torch.optim.AdamW(net.parameters())
    last.step()
    for state in last.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    found = mpdiag.audit(net, [first, last])
    said = [f.message for f in found.findings if f.code == "precision-narrow-state"]
    assert [words.split()[:3] for words in said] == [["AdamW", "keeps", "exp_avg"]]


def test_the_indices_of_a_sparse_gradient_are_not_its_dtype(tmp_path):
    net = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with mpdiag.record(net, optimizer, tmp_path / "run"):
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.tensor([[1, 3], [3, 5]])).square().sum().backward()
            optimizer.step()
    embedding = mpdiag.audit(tmp_path / "run").parameters[0]
    assert (embedding.forward, embedding.weight_grad) == ("float32", "float32")


def test_a_backward_pass_that_only_a_later_step_has_is_known(tmp_path):
    """The first step of a GAN shows the generator's forward pass alone."""
    nets = {"made": nn.Linear(4, 4), "judge": nn.Linear(4, 1)}
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets.values()]
    with mpdiag.record(nets, optimizers, tmp_path / "run", every=1):
        for step in range(4):
            made = nets["made"](torch.randn(8, 4))
            nets["judge"](made if step % 2 else made.detach()).mean().backward()
            optimizers[1 - step % 2].step()
    weights = [p for p in mpdiag.audit(tmp_path / "run").parameters if "weight" in p.name]
    assert [p.weight_grad for p in weights] == ["float32"] * 2


@pytest.mark.parametrize("by_loop", [False, True])
def test_an_optimizer_of_copies_holds_what_it_copies(tmp_path, by_loop):
    net = model(BF16)
    net[1].float()
    optimizer = Masters(net.parameters(), lr=1e-2)
    between = optimizer.copy_back
    if by_loop:
        optimizer.copy_back = lambda: None
    found = train(net, optimizer, tmp_path / "run", between=between)
    assert {(p.stored, p.master, p.optimizer) for p in found.parameters} == {
        ("bfloat16", "float32", "Masters"),
        ("float32", "float32", "Masters"),
    }
    assert "precision-unheld" not in {f.code for f in found.findings}


class Wrapper(torch.Tensor):
    """A tensor class that says another dtype than its bytes have, as torchao's do."""

    says = BF16

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=cls.says)

    def __init__(self, codes):
        self.codes, self.scale = codes, torch.tensor([0.01])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(func)


class Packed(Wrapper):
    """One of FP32 values that shows what it holds."""

    says = torch.float32

    def __tensor_flatten__(self):
        return ["scale", "codes"], None

    def values(self):
        return self.codes.float() * self.scale


class PackedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.randint(-100, 100, (8, 8)).to(torch.int8)
        self.weight = nn.Parameter(Packed(codes), requires_grad=False)

    def forward(self, x):
        return x @ self.weight.values()


class PackedSgd(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["exp_avg_sq"] = Packed((p * 10).to(torch.uint8))


def test_what_a_tensor_class_holds_is_its_dtype(tmp_path):
    """Torchao's weights and states claim FP32."""
    net = nn.Sequential(PackedLinear(), model())
    found = train(net, PackedSgd(net[1].parameters(), lr=0.01), tmp_path / "run")
    assert mpdiag.open_run(tmp_path / "run").meta["failures"] == []
    packed, *others = found.parameters
    assert (packed.stored, packed.forward, packed.trainable) == ("int8", "float32", False)
    assert {p.stored for p in others} == {"float32"}
    assert {tuple(p.states.items()) for p in others} == {(("exp_avg_sq", "uint8"),)}
    (finding,) = found.findings
    assert finding.code == "precision-narrow-state"
    assert "in uint8, though the weights are FP32" in finding.message


def test_a_dtype_that_changes_under_way_is_noted(tmp_path):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def narrow(step):
        if step == 1:
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    changes = train(net, optimizer, tmp_path / "run", steps=4, between=narrow).facts.changes
    assert {(c["step"], c["field"]) for c in changes} == {(2, "states")}
    assert changes[0]["is"] == {"momentum_buffer": "bfloat16"}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", DamagedRun),
        ("[]", DamagedRun),
        ('{"schema_version": 1}', DamagedRun),
        ('{"schema_version": 9}', NewerSchema),
        (json.dumps(EMPTY | {"parameters": [ENTRY | {"numel": -1}]}), DamagedRun),
        (json.dumps(EMPTY | {"parameters": [ENTRY | {"states": {"a": 1}}]}), DamagedRun),
    ],
)
def test_a_damaged_document_is_one_sentence(tmp_path, content, error):
    (tmp_path / PRECISION).write_text(content)
    with pytest.raises(error) as caught:
        read_precision(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_without_it_says_what_to_do(tmp_path):
    net = model()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), tmp_path / "run")
    (tmp_path / "run" / PRECISION).unlink()
    with pytest.raises(UsageError, match="record it again"):
        mpdiag.audit(tmp_path / "run")
    with pytest.raises(UsageError, match="give audit\\(\\) the run alone"):
        mpdiag.audit(tmp_path / "run", torch.optim.SGD(net.parameters(), lr=0.1))


def codes(found):
    return [f.code for f in found.findings]


class Decays(torch.optim.Optimizer):
    """Decays what it holds, with or without a gradient; rounds to nearest."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "weight_decay": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class Rounds(torch.optim.Adam):
    """Passes its states through BF16 in every step, as a fused kernel may."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())


def test_frozen_parameters_that_move_are_said_and_those_that_stay_are_not(tmp_path):
    def frozen():
        net = model()
        net[0].requires_grad_(False)
        return net

    net = frozen()
    found = train(net, Decays(net.parameters()), tmp_path / "moves")
    assert codes(found) == ["precision-frozen-moved"]
    assert found.findings[0].evidence["parameters"] == ["0.weight", "0.bias"]
    net = frozen()
    assert codes(train(net, torch.optim.AdamW(net.parameters()), tmp_path / "stays")) == []


def test_a_factor_without_effect_is_seen_in_an_optimizer_of_ones_own(tmp_path):
    net = model(BF16)
    found = train(net, Decays(net.parameters()), tmp_path / "run")
    assert "precision-decay-without-effect" in codes(found)
    net = model()
    assert codes(train(net, Decays(net.parameters()), tmp_path / "fp32")) == []


def test_equal_parameters_that_part_are_said(tmp_path):
    for tied, said in ((True, []), (False, ["precision-equal-parted"] * 2)):
        torch.manual_seed(0)
        up, down = nn.Linear(8, 8), nn.Linear(8, 8)
        net = nn.Sequential(OrderedDict(up=up, relu=nn.ReLU(), down=down))
        if tied:
            down.weight = up.weight
        else:
            down.load_state_dict(up.state_dict())
        found = train(net, torch.optim.SGD(net.parameters(), 0.1), tmp_path / str(tied))
        assert codes(found) == said


def test_states_that_hold_bf16_numbers_alone_are_said(tmp_path):
    for kind, said in ((Rounds, ["precision-narrow-values"]), (torch.optim.Adam, [])):
        net = model()
        assert codes(train(net, kind(net.parameters()), tmp_path / kind.__name__)) == said


@pytest.mark.parametrize(("scaled", "said"), [(False, ["precision-no-loss-scale"]), (True, [])])
def test_fp16_autocast_without_a_scale_is_said(tmp_path, scaled, said):
    net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with mpdiag.record(net, optimizer, tmp_path / "run", every=1):
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = net(torch.randn(12, 8)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert codes(mpdiag.audit(tmp_path / "run")) == said


def test_what_an_optimizer_multiplies_in_is_said(tmp_path):
    net = nn.Linear(8, 16, bias=False)
    found = train(net, torch.optim.Muon(net.parameters(), lr=0.01), tmp_path / "run")
    assert codes(found) == ["precision-optimizer-products"]
    assert found.findings[0].evidence["dtype"] == "bfloat16"


@pytest.mark.parametrize(("beta", "foreach", "said"), [
    (0.997, False, True), (0.997, True, False), (0.999, True, True),
])  # fmt: skip
def test_what_foreach_rounds_is_not_called_stuck(tmp_path, beta, foreach, said):
    net = model(BF16)
    settings = {"betas": (0.9, beta), "foreach": foreach, "weight_decay": 0.0}
    found = train(net, torch.optim.AdamW(net.parameters(), **settings), tmp_path / "run")
    assert ("precision-stuck-state" in codes(found)) == said


@pytest.mark.parametrize(("make", "words"), [
    (torch.optim.Adagrad, "sum in BF16 stops growing after 256 to 383 equal squares"),
    (torch.optim.Adafactor, "row_var in BF16 cannot fall from step 2,436 on"),
])  # fmt: skip
def test_sums_and_slowing_averages_are_proved_stuck(tmp_path, make, words):
    net = model(BF16)
    found = train(net, make(net.parameters()), tmp_path / "half")
    stuck = [f for f in found.findings if f.code == "precision-stuck-state"]
    assert any(words in f.message for f in stuck)
    assert {f.severity for f in stuck} == {"info"}  # not in three steps
    net = model()
    assert codes(train(net, make(net.parameters()), tmp_path / "fp32")) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("steady", [False, True])
def test_a_stuck_second_moment_is_measured_beside_fp32(tmp_path, fused, steady):
    torch.manual_seed(0)
    net = nn.Linear(16, 16, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-6, weight_decay=0.0, fused=fused)
    always = torch.randn(16, 16)
    exact = torch.zeros(16, 16, dtype=torch.float64)
    with mpdiag.record(net, optimizer, tmp_path / "run", every=1, operations=0):
        for _ in range(400):
            gradient = (always if steady else torch.randn(16, 16)).bfloat16()
            (net.weight * gradient).sum().backward()
            optimizer.step()
            exact = 0.999 * exact + 0.001 * gradient.double() ** 2
            optimizer.zero_grad()
    (shadow,) = mpdiag.audit(tmp_path / "run").facts.shadows
    ratios = (optimizer.state[net.weight]["exp_avg_sq"].double() / exact).flatten()
    # The last recorded step is not the last one of all: the ratio has moved on a little since.
    assert shadow.median == pytest.approx(float(ratios.median()), rel=0.1)
    assert shadow.steps > 350


class Params4bit(torch.nn.Parameter):
    """A stand-in for bitsandbytes' class: two values to a byte, once it was quantized."""

    def __new__(cls, data, quant_type="nf4"):
        parameter = super().__new__(cls, data, requires_grad=False)
        parameter.quant_type, parameter.quant_state = quant_type, None
        return parameter


class LoRA(torch.nn.Module):
    """A layer of 4-bit weights with adapters, whose names are peft's."""

    def __init__(self, weight):
        super().__init__()
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(8, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 8, bias=False)})
        self.base_layer = torch.nn.Module()
        self.base_layer.weight = weight
        self.base_layer.bias = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16), False)

    def forward(self, x):
        base = self.base_layer.weight
        if not base.is_floating_point():  # 16 levels around 0, as a kernel would read them
            packed = base.view(8, 4)
            base = (torch.cat([packed >> 4, packed & 15], 1).float() - 7.5) / 8
        y = x @ base.float().T + self.base_layer.bias.float()
        return y + self.lora_B["default"](self.lora_A["default"](x))


def packed(dtype=torch.uint8):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (32,), generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(
    ("weight", "stored", "quantized", "numel", "words"),
    [
        (lambda: Params4bit(packed()), "uint8", "4-bit NF4", 64, "4-bit NF4/BF16"),
        (lambda: Params4bit(packed(), "fp4"), "uint8", "4-bit FP4", 64, "4-bit FP4/BF16"),
        (lambda: Params4bit(torch.ones(8, 8)), "float32", None, 64, "FP32/BF16"),
        (lambda: torch.nn.Parameter(packed(), False), "uint8", None, 32, "uint8/BF16"),
    ],
    ids=["nf4", "fp4", "not yet quantized", "bytes of no known class"],
)
def test_adapters_and_quantized_weights_are_named(
    tmp_path, weight, stored, quantized, numel, words
):
    torch.manual_seed(0)
    net = LoRA(weight())
    trained = [p for p in net.parameters() if p.requires_grad]
    found = train(net, torch.optim.AdamW(trained), tmp_path / "run")
    assert found.line == f"FP32 LoRA weights and AdamW states; frozen weights in {words}"
    base = next(p for p in found.parameters if p.name == "base_layer.weight")
    assert (base.stored, base.quantized, base.numel) == (stored, quantized, numel)
    assert quantized is None or quantized in {row["stored"] for row in found.table}
    assert mpdiag.open_run(tmp_path / "run").meta["failures"] == []
    assert found.findings == ()


def test_a_packed_weight_in_another_dtype_is_known_by_its_state():
    """As FSDP shards 4-bit weights, which it can only do in a floating-point dtype."""
    weight = Params4bit(packed(torch.bfloat16))
    weight.quant_state = object()
    net = LoRA(weight)
    found = mpdiag.audit(net, torch.optim.AdamW(p for p in net.parameters() if p.requires_grad))
    base = next(p for p in found.parameters if p.name == "base_layer.weight")
    assert (base.stored, base.quantized, base.numel) == ("bfloat16", "4-bit NF4", 64)


def test_full_finetuning_beside_frozen_layers_is_said_as_ever(tmp_path):
    net = model()
    net[0].requires_grad_(False)
    found = train(net, torch.optim.AdamW(net[3].parameters()), tmp_path / "run")
    assert found.line == "FP32 weights and AdamW states"


def test_repeated_layers_that_begin_alike_are_not_tied(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].load_state_dict(net[0].state_dict())
    assert codes(train(net, torch.optim.SGD(net.parameters(), 0.1), tmp_path / "run")) == []


class Counts(torch.optim.AdamW):
    """Counts its steps in the parameters' dtype, as ``torch.tensor(0.0)`` does under a default dtype."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["step"] = state["step"].to(BF16)


def test_a_counter_in_half_precision_is_said_with_where_it_stops(tmp_path):
    net = model()
    found = train(net, Counts(net.parameters()), tmp_path / "run")
    (finding,) = found.findings
    assert finding.code == "precision-narrow-counter"
    assert finding.evidence == {"state": "step", "dtype": "bfloat16", "value": 3.0, "limit": 256}
    assert float(torch.tensor(256, dtype=BF16) + 1) == 256
    assert f"{1 - 0.999**256:.2g}" in finding.message


class Decaying(nn.Module):
    """Decays of 8 channels, one of which its logarithm holds at 1."""

    def __init__(self, lowest):
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(8, 8)
        self.A_log = nn.Parameter(torch.cat((torch.tensor([lowest]), torch.zeros(7))))

    def forward(self, x):
        return self.mix(x) * (-self.A_log.exp()).exp()


@pytest.mark.parametrize(("lowest", "said"), [(-torch.inf, [(["A_log"], 1)]), (-9.0, [])])
def test_weights_that_are_infinite_from_the_start_are_counted(lowest, said, tmp_path):
    net = Decaying(lowest)
    found = train(net, torch.optim.SGD(net.parameters(), 0.1), tmp_path / "run").findings
    assert [(f.evidence["parameters"], f.evidence["elements"]) for f in found] == said
    assert (float(net.A_log[0].detach()) == lowest) == bool(said)


class Muon(torch.optim.Optimizer):
    """Momentum and decay; orthogonalizes, or takes for granted that something else has."""

    def __init__(self, parameters, *, orthogonalizes):
        super().__init__(parameters, {"lr": 0.02, "weight_decay": 0.1})
        self.orthogonalizes = orthogonalizes

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for p in group["params"]:
            update = self.state[p].setdefault("buffer", torch.zeros_like(p)).mul_(0.95).add_(p.grad)
            if self.orthogonalizes:
                u, _, vh = torch.linalg.svd(update, full_matrices=False)
                update = u @ vh
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def orthogonal(net):
    """A loss whose gradient by the weights is orthogonal already."""
    return net.weight[:, :8].trace()


def squared(net):
    return net(torch.randn(32, 8, generator=torch.Generator().manual_seed(1))).square().mean()


@pytest.mark.parametrize(
    ("make", "loss", "said"),
    [
        (lambda p: Muon(p, orthogonalizes=False), squared, True),
        (lambda p: Muon(p, orthogonalizes=True), squared, False),
        (lambda p: Muon(p, orthogonalizes=False), orthogonal, False),
        (lambda p: torch.optim.Muon(p, lr=0.02), squared, False),
        (lambda p: torch.optim.SGD(p, 0.1), squared, False),
    ],
)
def test_an_optimizer_named_muon_that_takes_steps_of_sgd_is_said(make, loss, said, tmp_path):
    weights = []
    for recorded in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(8, 16, bias=False)
        optimizer = make(net.parameters())
        recorder = mpdiag.record(net, optimizer, tmp_path / str(recorded), every=1, operations=0)
        with recorder if recorded else contextlib.nullcontext():
            for _ in range(2):
                loss(net).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(net.weight.detach())
        assert recorder.failures == []
    assert torch.equal(*weights)
    found = mpdiag.audit(tmp_path / "True").findings
    assert ("precision-no-orthogonalization" in {f.code for f in found}) == said


def test_states_that_are_rounded_are_followed_in_fp32(tmp_path):
    torch.manual_seed(0)
    net = nn.Linear(16, 16, bias=False)
    optimizer = Rounds(net.parameters(), 1e-6)
    with mpdiag.record(net, optimizer, tmp_path / "run", operations=0, every=1):
        for step in range(120):
            (net.weight * torch.randn(16, 16)).sum().backward()
            if step >= 60:
                net.weight.grad.mul_(1e-3)
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = mpdiag.audit(tmp_path / "run").findings
    assert "exp_avg_sq cannot fall by its factor 0.999; after 1" in finding.message


def test_parameters_that_never_moved_are_named(tmp_path):
    net = model(BF16)
    found = train(net, torch.optim.AdamW(net.parameters(), 1e-4, (0.9, 0.95)), tmp_path / "run")
    (finding,) = [f for f in found.findings if f.code == "precision-updates-rounded-away"]
    assert finding.evidence["unmoved"] == ("1.weight",)
    assert bool((net[1].weight == 1).all())


@pytest.mark.parametrize(
    ("kind", "quantized"),
    [
        ("Int8Tensor", "8-bit"),
        ("NF4Tensor", "4-bit"),
        ("Float8Tensor", "8-bit"),
        ("WeightWithDynamicFloat8CastTensor", None),  # BF16 until it is multiplied
    ],
)
def test_tensor_classes_that_quantize_are_known_by_their_names(kind, quantized):
    net = nn.Module()
    weight = type(kind, (Wrapper,), {})(torch.zeros(4, 4, dtype=torch.int8))
    net.weight = nn.Parameter(weight, requires_grad=False)
    (found,) = mpdiag.audit(net).parameters
    assert (found.stored, found.quantized, found.numel) == ("bfloat16", quantized, 16)
    words = f"{quantized} weights" if quantized else "BF16 weights, no FP32 masters"
    assert mpdiag.audit(net).line == words
