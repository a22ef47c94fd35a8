"""Products of a model's parameters are cast wherever a script computes them, and counted."""

import shutil
import textwrap

import pytest
from script_processes import scripts
from support import constant

from mpdiag.plan import Fp32Choice, PrecisionPlan
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log

SCRIPTS = scripts(__file__)

FIRST, SECOND = 2 * (2 * 32 * 8 * 16), 3 * (2 * 32 * 16 * 1)
"""FLOPs of a step in the two layers: the first has no gradient of its input."""
MODEL = f"""
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
x, y = torch.randn(32, 8), torch.randn(32, 1)
{SCRIPTS["model"]}"""
WAYS = {
    "the module": "model(x)",
    "its forward": "model.forward(x)",
    "another method": "model.predict(x)",
    "layers one by one": "model.b(torch.tanh(model.a(x)))",
    "layers' forward": "model.b.forward(torch.tanh(model.a.forward(x)))",
    "functions": "F.linear(torch.tanh(F.linear(x, w)), v)",
    "views": "torch.tanh(x @ w.T) @ v.view(1, 16).t()",
    "einsum": "torch.einsum('bi,oi->bo', torch.tanh(torch.addmm(model.a.bias, x, w.T)), v)",
    "a compiled function": "torch.compile(lambda x: model(x))(x)",
    "under a default device": "on_cpu(lambda: model.predict(x))",
}
LOOP = SCRIPTS["loop"]


@pytest.fixture
def train(fork_server, tmp_path):
    def call(way, plan: PrecisionPlan | None = None, body=LOOP):
        script = MODEL + textwrap.dedent(body).replace("WAY", way)
        (tmp_path / "script.py").write_text(script)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (plan or constant(256.0)).save(tmp_path / "plan.json")
        words = ("train", "--plan", "plan.json", "--out", "run", "--", "script.py")
        done = fork_server("mpdiag", *words, cwd=tmp_path)
        assert done.code == 0, done.err
        return done, open_run(tmp_path / "run").meta["half_precision_flops"]

    return call


@pytest.mark.parametrize("way", WAYS)
def test_however_a_model_is_computed_it_is_cast(train, tmp_path, way):
    done, share = train(WAYS[way])
    assert share == 1.0, done.err
    assert "4 steps in fp16" in done.err
    assert "100 % of FLOPs in fp16" in done.err
    note = read_log(tmp_path / "run").notes[-1]
    assert note["half_precision_flops"] == 1.0
    assert note["half_precision_products"] == note["products"] == 5 * 4
    assert note["counted_steps"] == [0, 1, 2, 3]


def test_products_without_parameters_are_cast_in_a_models_code_and_not_in_the_scripts(train):
    _, share = train("model.attend(x)")
    assert share == 1.0
    _, share = train("(model(x) @ model(x).T).mean(1)[:, None]")
    assert 0 < share < 1


@pytest.mark.parametrize("way", ["the module", "its forward", "functions", "layers' forward"])
def test_what_the_plan_keeps_in_fp32_stays_there(train, way):
    choice = Fp32Choice(op="Linear", module="a", reason="", evidence={"overflow": 1})
    done, share = train(WAYS[way], PrecisionPlan(fp32_modules=(choice,)))
    assert share == SECOND / (FIRST + SECOND)
    assert "15.8 % of FLOPs in fp16" in done.err
    choice = Fp32Choice(op="linear", module="a", reason="", evidence={"overflow": 1})
    _, share = train(WAYS[way], PrecisionPlan(fp32_operations=(choice,)))
    assert share == SECOND / (FIRST + SECOND)


def test_nothing_in_half_precision_is_said_and_not_compared(train, fork_server, tmp_path):
    """The script switches casts off; its own recording lies beside the run."""
    record = ("record", "--out", "plain", "--", "script.py")
    body = LOOP.replace("out = WAY", 'with torch.autocast("cpu", enabled=False): out = WAY')
    (tmp_path / "script.py").write_text(MODEL + body.replace("WAY", WAYS["functions"]))
    assert fork_server("mpdiag", *record, cwd=tmp_path).code == 0
    done, share = train(WAYS["functions"], PrecisionPlan(run="plain"), body)
    assert share == 0.0
    assert "4 steps by the plan, none of them in fp16: 0 of 20 products ran in it" in done.err
    assert "mpdiag compare" not in done.err
    compared = fork_server("mpdiag", "compare", "plain", "run", cwd=tmp_path)
    assert compared.code == 3
    assert "claims fp16, and none of its matrix products ran in it" in compared.err
    assert compared.err.count("\n") == 1


def test_a_compiled_model_is_counted(train):
    compiled = "model = torch.compile(model, backend='aot_eager')\n" + LOOP
    done, share = train("model(x)", PrecisionPlan(target="bf16"), compiled)
    assert share == 1.0
    assert "(20 of 20 products, counted in 4 of 4 steps)" in done.err


def test_a_failed_training_names_no_comparison(fork_server, tmp_path):
    body = LOOP.replace("WAY", "model(x)")
    (tmp_path / "script.py").write_text(MODEL + body)
    record = ("record", "--out", "plain", "--", "script.py")
    assert fork_server("mpdiag", *record, cwd=tmp_path).code == 0
    (tmp_path / "script.py").write_text(MODEL + body + "\nraise ValueError('no disk')\n")
    PrecisionPlan(run="plain").save(tmp_path / "plan.json")
    words = ("train", "--plan", "plan.json", "--out", "run", "--", "script.py")
    done = fork_server("mpdiag", *words, cwd=tmp_path)
    assert done.code == 1
    assert "ValueError: no disk" in done.err
    assert "4 steps in fp16" in done.err
    assert "next:" not in done.err


def test_a_traced_model_and_a_hook_compute_in_fp32(train):
    body = LOOP.replace("out = WAY", "out = model.forward(x)") + textwrap.dedent(
        SCRIPTS["a traced model and a hook"]
    )
    train("", None, body)


CHECKPOINTED = {
    "functions": "checkpoint(lambda x: torch.tanh(F.linear(x, w)), x, use_reentrant=REENTRANT)",
    "a layer's forward": "torch.tanh(checkpoint(model.a.forward, x, use_reentrant=REENTRANT))",
    "another method": "checkpoint(model.hidden, x, use_reentrant=REENTRANT)",
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", CHECKPOINTED)
def test_what_checkpointing_computes_again_is_cast_again(train, way, reentrant):
    """``loss.backward()`` is passed to modes, and torch takes them off for it."""
    body = """
from torch.utils.checkpoint import checkpoint
Net.hidden = lambda self, x: torch.tanh(x @ self.a.weight.T)
x.requires_grad_()
""" + LOOP.replace("out = WAY", f"out = model.b({CHECKPOINTED[way]})")
    _, share = train("", None, body.replace("REENTRANT", str(reentrant)))
    assert share == 1.0


def test_a_functions_own_backward_pass_computes_as_written_where_it_is_differentiated(train):
    body = SCRIPTS["a function's own backward pass"]
    _, share = train("", None, body)
    assert 0 < share < 1
