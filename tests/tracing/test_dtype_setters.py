"""Who gave a parameter its dtype, as a recording notes it."""

import re

import pytest
import script_loops as loops
import torch
from torch import nn

import mpdiag

BF16 = torch.bfloat16
PLAIN = {name: vars(nn.Module)[name] for name in ("to", "type", "half", "bfloat16", "float")}


class Pretrained(nn.Linear):
    """Loads as a library does: a checkpoint's dtype, by a parameter of its own."""

    @classmethod
    def from_pretrained(cls):
        model = cls(4, 2)
        model.weight = nn.Parameter(model.weight.detach().bfloat16())
        model.bias = nn.Parameter(model.bias.detach().bfloat16())
        return model


def by_default_dtype():
    torch.set_default_dtype(BF16)
    try:
        return nn.Linear(4, 2)
    finally:
        torch.set_default_dtype(torch.float32)


def without_a_call():
    model = nn.Linear(4, 2)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    return model


LINE = r" at tests/tracing/test_dtype_setters\.py:\d+"
CASES = {
    "bfloat16": (lambda: nn.Linear(4, 2).bfloat16(), r"Linear\.bfloat16\(\)" + LINE),
    "to": (lambda: nn.Linear(4, 2).to("cpu", BF16), r"Linear\.to\(torch\.bfloat16\)" + LINE),
    "the last": (lambda: nn.Linear(4, 2).half().to(BF16), r"Linear\.to\(torch\.bfloat16\)" + LINE),
    "dtype=": (lambda: nn.Linear(4, 2, dtype=BF16), "made in half precision" + LINE),
    "default": (by_default_dtype, "made in half precision" + LINE),
    "from_pretrained": (Pretrained.from_pretrained, "from_pretrained" + LINE),
    "upcast": (lambda: nn.Linear(4, 2).bfloat16().float(), r"Linear\.float\(\)" + LINE),
    "not seen": (without_a_call, "before recording"),
    "nothing": (lambda: nn.Linear(4, 2), "default"),
}


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(3, 4).to(next(model.parameters()).dtype)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_told_apart_by_who_set_its_dtype(name, tmp_path, capsys):
    make, expected = CASES[name]
    with loops.recording(tmp_path / "run"):
        train(make())
    audit = mpdiag.audit(tmp_path / "run")
    assert {vars(nn.Module)[name] for name in PLAIN} == set(PLAIN.values())
    for parameter in audit.parameters:
        assert re.fullmatch(expected, parameter.set_by), parameter.set_by
    kind = "BF16" if audit.parameters[0].stored == "bfloat16" else "FP32"
    assert audit.line == f"{kind} weights" + (", no FP32 masters" if kind == "BF16" else "")
    assert audit.line in capsys.readouterr().err


def test_in_code_a_cast_counts_from_the_start_of_recording_on(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2))
    with mpdiag.record(model, None, tmp_path / "run"):
        model[1].bfloat16()
        train(model)
    first, second = (p for p in mpdiag.audit(tmp_path / "run").parameters if "weight" in p.name)
    assert first.set_by == "before recording"
    assert second.set_by.startswith("Linear.bfloat16() at tests/tracing/test_dtype_setters.py:")


POLICY = "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    ("dtype", "dropped", "said"),
    [(None, False, ""), (BF16, False, re.escape(POLICY)), (BF16, True, re.escape(POLICY) + LINE)],
)
def test_a_policy_that_no_wrapper_has_is_found(tmp_path, dtype, dropped, said):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plain = MixedPrecisionPolicy.__init__
    made = (
        [] if dropped else [MixedPrecisionPolicy(param_dtype=dtype)]
    )  # a library's plugin holds it
    with loops.recording(tmp_path / "run"):
        model = nn.Linear(4, 2)
        if dropped:
            MixedPrecisionPolicy(param_dtype=dtype)
        train(model)
    found = [f for f in mpdiag.audit(tmp_path / "run").findings if "not-applied" in f.code]
    policies = [policy for f in found for policy in f.evidence["policies"]]
    assert [re.fullmatch(said, policy) is not None for policy in policies] == [True] * bool(said)
    assert MixedPrecisionPolicy.__init__ is plain
    assert len(made) == 1 - dropped
