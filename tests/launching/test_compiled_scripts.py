"""Scripts that compile are trained by a plan as those that do not, to the last bit."""

from script_processes import scripts

from mpdiag.plan import Fp32Choice, PrecisionPlan
from mpdiag.runs.run import open_run

SCRIPTS = scripts(__file__)

WAYS = {
    "eager": "import torch._dynamo",
    "the model": "model = torch.compile(model, backend='aot_eager', fullgraph=True)",
    "in place": "model.compile(backend='aot_eager', fullgraph=True)",
    "a layer": "model.m = torch.compile(model.m, backend='aot_eager')",
    "a function that holds the model": (
        "error = torch.compile(error, backend='aot_eager', fullgraph=True)"
    ),
    "the whole step": "step = torch.compile(step, backend='aot_eager')",
    "the optimizer's step": "update = torch.compile(update, backend='aot_eager')",
}


def trained(fork_server, folder, way, plan):
    """What a script prints, and the share of its FLOPs that ran in half precision."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPTS["head"] + SCRIPTS["step"].replace("WAY", WAYS[way]))
    plan.save(folder / "plan.json")
    words = ("train", "--plan", "plan.json", "--out", "run", "--", "script.py")
    done = fork_server("mpdiag", *words, cwd=folder)
    assert done.code == 0, (way, done.err)
    assert "the script has an autocast of its own" in done.err, way
    return done.out, open_run(folder / "run").meta["half_precision_flops"]


def test_whatever_a_script_compiles_it_trains_as_without(fork_server, tmp_path):
    choices = (Fp32Choice("Linear", "m"), Fp32Choice("linear", "b"))
    plan = PrecisionPlan(target="bf16", fp32_operations=choices)
    found = {way: trained(fork_server, tmp_path / way, way, plan) for way in WAYS}
    assert found == dict.fromkeys(WAYS, found["eager"])
    first, rest = 2 * (8 * 16), 3 * (16 * 16 + 16)
    assert found["eager"][1] == first / (first + rest)


def test_where_fp16_is_emulated_it_all_runs_eagerly(fork_server, tmp_path):
    ways = ("eager", "in place", "a function that holds the model")
    found = {way: trained(fork_server, tmp_path / way, way, PrecisionPlan()) for way in ways}
    assert found == dict.fromkeys(ways, found["eager"])
    assert found["eager"][1] == 1.0
