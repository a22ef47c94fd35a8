"""Real processes on gloo: ranks agree on what is skipped, and reduce as the plan says."""

import textwrap

import pytest

HEAD = """
import os, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
import torch, torch.distributed as dist
from torch import nn
import mpdiag
from mpdiag.plan import LossScalePlan, PrecisionPlan, ReductionPlan
torch.set_num_threads(1)
rank, level = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
def plan(reduction=None, scale=64.0):
    return PrecisionPlan(loss_scale=LossScalePlan(method="backoff", init_scale=scale), reduction=reduction)
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
def rows(step, bad=None):
    g = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, 8, generator=g)
    if bad == rank:
        x[0, 0] = float("inf")
    return x
ddp = nn.parallel.DistributedDataParallel
def wrap(net, reduction=None, scale=64.0, rate=0.1, **options):
    sgd = torch.optim.SGD(net.parameters(), rate)
    return mpdiag.MixedPrecision(net, sgd, plan(reduction, scale), **{"level": level} | options)
def loss_of(mp, net, step, bad=None):
    with mp.autocast():
        return net(rows(step, bad)).float().square().mean()
def refused(call, *arguments):
    try:
        call(*arguments)
    except mpdiag.errors.UsageError as error:
        return str(error)
    return ""
def same_everywhere(tensor):
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor.detach().contiguous())
    return torch.equal(*parts)
"""

# A process group's threads may outlive it and abort the interpreter's own end: nothing of ours.
TAIL = """
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def run(fork_server, tmp_path):
    """Runs a script in two processes; returns their standard outputs."""

    def run(body: str, *arguments: str) -> list[str]:
        code = HEAD + textwrap.dedent(body) + TAIL
        ended = fork_server.ranks("python", "-c", code, *arguments, cwd=tmp_path)
        for done in ended:
            assert done.code == 0, done.err[-2000:]
        return [done.out for done in ended]

    return run


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_infinity_on_one_rank_skips_on_all_with_ddp(run, level):
    outputs = run(
        """
        inner = model()
        mp, net = wrap(inner), ddp(inner)
        for step in range(3):
            result = mp.step(loss_of(mp, net, step, 1 if step == 1 else None), clip_norm=1.0)
            assert result.skipped == (step == 1), result
            print(result.next_scale, result.reason)
        assert all(same_everywhere(p) for p in net.parameters())
        """,
        level,
    )
    assert [line.split()[0] for line in outputs[0].splitlines()] == ["64.0", "32.0", "32.0"]
    assert outputs[0].splitlines()[1].split()[0] == outputs[1].splitlines()[1].split()[0]


def test_accumulation_and_an_overflow_on_one_rank_as_torch_does_it(run):
    """Under DDP, in BF16: ours beside torch.amp in one loop."""
    run(
        """
        def trained(backward, step, autocast, net):
            scales = []
            for i in range(4):
                for part in range(2):
                    net.require_backward_grad_sync = part == 1
                    with autocast():
                        output = net(rows(10 * i + part, bad=1 if (i, part) == (1, 0) else None))
                    backward(output.float().square().mean() / 2)
                scales.append(step())
            return scales, [p.detach().clone() for p in net.parameters()]

        def peer():
            net = ddp(model())
            sgd = torch.optim.SGD(net.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            def step():
                scaler.step(sgd)
                scaler.update()
                sgd.zero_grad()
                return scaler.get_scale()
            autocast = lambda: torch.autocast("cpu", torch.bfloat16)
            return trained(lambda loss: scaler.scale(loss).backward(), step, autocast, net)

        def ours():
            net = ddp(model())
            overrides = mpdiag.PrecisionOverrides(
                dtype="bf16", loss_scale={"method": "backoff", "init_scale": 64.0, "growth_interval": 2}
            )
            with wrap(net, overrides=overrides) as mp:
                return trained(mp.backward, lambda: mp.step().next_scale, mp.autocast, net)

        (theirs, expected), (scales, found) = peer(), ours()
        assert scales == theirs == [64.0, 32.0, 32.0, 64.0], (scales, theirs)
        assert all(map(torch.equal, found, expected))
        assert all(map(same_everywhere, found))
        """,
        "O1",
    )


@pytest.mark.parametrize("views", [False, True])
def test_micro_batches_under_no_sync_add_up_in_fp32_and_are_reduced(run, views):
    run(
        """
        inner = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(inner.weight)
        overrides = mpdiag.PrecisionOverrides(dtype="bf16", loss_scale=1.0)
        mp = wrap(inner, rate=1.0, level="O2", overrides=overrides)
        net = ddp(inner, gradient_as_bucket_view=sys.argv[1] == "True")
        for step in range(2):
            exact, before = torch.zeros(8, dtype=torch.float64), inner.weight.detach().clone()
            for part in range(128):
                x = rows(part)[:1].abs() / 128
                net.require_backward_grad_sync = part == 127
                with mp.autocast():
                    loss = net(x).float().sum()
                mp.backward(loss)
                exact += x[0].bfloat16().double()
            mp.step()
            dist.all_reduce(exact)
            (master,) = mp.master_parameters()
            found = -(master.detach()[0] + step * exact / 2)
            # The sum of a rank is rounded once, and once more where ranks are added.
            torch.testing.assert_close(found.double(), exact / 2, rtol=2**-7, atol=0)
            assert same_everywhere(inner.weight)
        """,
        str(views),
    )


def test_infinity_on_one_rank_of_a_model_without_ddp_skips_on_all_and_names_the_rank(run):
    outputs = run(
        """
        net = model()
        mp = wrap(net)
        mp.backward(loss_of(mp, net, 0, bad=1))
        result = mp.step()
        assert result.skipped and result.rank == rank
        print(result.reason)
        """,
        "O1",
    )
    assert "rank 1" in outputs[0]
    assert "NaN in the forward pass: the loss" in outputs[1]


def test_a_model_distributed_already_is_refused_where_its_weights_must_be_cast(run):
    run(
        """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        cpu = torch.device("cpu")
        for net in (
            ddp(model()),
            nn.Sequential(ddp(model()), nn.Linear(4, 4)),
            FSDP(model(), device_id=cpu),
            FSDP(model(), device_id=cpu, use_orig_params=True),
            nn.Sequential(FSDP(model(), device_id=cpu), nn.Linear(4, 4)),
        ):
            for low in ("O2", "O3"):
                assert "before they are distributed" in refused(lambda: wrap(net, level=low))
        net = model()  # sharded only afterwards, with the parameters that have masters
        mp = wrap(net, level="O2")
        net = FSDP(net, device_id=cpu, use_orig_params=True)
        assert "before they are distributed" in refused(lambda: mp.step(net(rows(0)).square().mean()))
        """,
        "O2",
    )


def test_zero_redundancy_is_named_at_o2_and_trains_at_o1(run):
    """Its optimizer inside holds the tensors that masters replaced."""
    run(
        """
        from torch.distributed.optim import ZeroRedundancyOptimizer
        for level in ("O2", "O1"):
            net = model()
            optimizer = ZeroRedundancyOptimizer(
                net.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2)
            mp = mpdiag.MixedPrecision(net, optimizer, plan(), level=level)
            outer = ddp(net)
            before = [p.detach().clone() for p in net.parameters()]
            said = refused(lambda: [mp.step(loss_of(mp, outer, step)) for step in range(3)])
            moved = [not torch.equal(p, q) for p, q in zip(net.parameters(), before)]
            if level == "O2":
                assert "ZeroRedundancyOptimizer updates weight" in said and not any(moved), said
            else:
                assert not said and all(moved), said
            mp.close()
        """,
        "both",
    )


def test_ranks_that_scale_differently_are_told(run):
    outputs = run(
        """
        net = model()
        mp = wrap(net, scale=64.0 * (rank + 1))
        print(refused(lambda: mp.step(net(rows(0)).square().mean())))
        """,
        "O1",
    )
    assert all("rank 0 scales its loss by 64, rank 1 by 128" in o for o in outputs)


def test_gradients_are_reduced_in_the_plans_dtype_divided_before_the_sum(run):
    """FP16 sums of two ranks' 40000 overflow, unless each is halved first (pytorch#106395)."""
    outputs = run(
        """
        def result(reduction, later=False):
            torch.manual_seed(0)
            inner = nn.Linear(1, 1, bias=False)
            net = inner if later else ddp(inner)
            mp = wrap(net, reduction, 1.0, 1e-5)
            if later:
                net = ddp(net)
                mp.apply_reduction(net)
            loss = net(torch.full((1, 1), 40000.0 + 10 * rank)).sum()
            mp.backward(loss)
            gradient = net.module.weight.grad.item()
            mp.step()
            mp.close()
            return gradient
        print(result(None))
        print(result(ReductionPlan("fp32")))
        print(result(ReductionPlan("fp16", pre_divide=True)))
        print(result(ReductionPlan("fp16", pre_divide=False)))
        print(result(ReductionPlan("fp16", pre_divide=False), later=True))
        """,
        "O0",
    )
    plain, fp32, divided, summed, later = (float(line) for line in outputs[0].split())
    assert plain == fp32 == 40005.0
    assert abs(divided - 40005.0) <= 16
    assert summed == later == float("inf")


SHARD = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, fully_shard
way = sys.argv[2]
def shard(net):
    if way == "fsdp2":
        return fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    strategy = ShardingStrategy.NO_SHARD if way == "whole" else ShardingStrategy.FULL_SHARD
    return FSDP(net, device_id=torch.device("cpu"), use_orig_params=way != "flat", sharding_strategy=strategy)
def full(net):
    if way == "fsdp2":
        return [p.detach().full_tensor() for p in net.parameters()]
    with FSDP.summon_full_params(net):
        return [p.detach().clone() for p in net.parameters()]
"""
WAYS = ["fsdp2", "flat", "original", "whole"]
"""FSDP2, and FSDP1 with flat, with original and with unsharded parameters."""


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*")
@pytest.mark.parametrize(
    ("level", "way"), [("O0", "fsdp2"), ("O0", "flat"), *(("O1", way) for way in WAYS)]
)
def test_sharded_models_clip_by_the_norm_of_whole_gradients(run, level, way):
    outputs = run(
        SHARD
        + """
net = shard(model())
plain = ddp(model())
mp, other = wrap(net), wrap(plain)
for step in range(3):
    bad = 0 if step == 1 else None
    losses = loss_of(mp, net, step, bad), loss_of(other, plain, step, bad)
    a, b = (one.step(loss, clip_norm=0.01) for one, loss in zip((mp, other), losses))
    assert a.skipped == b.skipped == (step == 1)
    if not a.skipped:
        assert abs(a.gradient_norm - b.gradient_norm) < 2e-3 * b.gradient_norm, (a, b)
    print(a.gradient_norm)
flat, whole_ones = (torch.cat([p.detach().reshape(-1) for p in ps]) for ps in (full(net), plain.parameters()))
torch.testing.assert_close(flat[: len(whole_ones)], whole_ones, rtol=0, atol=1e-4)
""",
        level,
        way,
    )
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "flat"])
def test_a_capsule_has_whole_weights_and_the_batch_of_each_rank(run, way):
    outputs = run(
        SHARD
        + """
from mpdiag.training.skips.capsule import load_capsule
from mpdiag.training.skips.capsule_replay import replay_capsule
plain, net = model(), model()
net = ddp(net) if way == "ddp" else shard(net)
mp = wrap(net.module if way == "ddp" else net, run=f"run-{way}")
x = rows(0) * (1e5 if rank == 1 else 1)
with mp.autocast():
    loss = net(x).float().square().mean()
assert mp.step(loss, batch=x).skipped
mp.close()
dist.barrier()
for name in ("step000000", "step000000-rank00001"):
    capsule = load_capsule(f"run-{way}/capsules/{name}")
    assert all(torch.equal(capsule.tensors[f"model.{n}"], p) for n, p in plain.named_parameters())
    print(torch.equal(capsule.batch, x))
if rank == 0:
    again = replay_capsule(f"run-{way}/capsules/step000000", lambda: (model(), lambda m, b: m(b).sum()))
    print(again.first.rank, again.first.op, again.first.inputs[0].highest > 65504)
""",
        "O1",
        way,
    )
    assert [lines.split() for lines in outputs] == [
        ["True", "False", "1", "_to_copy", "True"],
        ["False", "True"],
    ]


@pytest.mark.parametrize("way", ["flat", "original"])
def test_a_scale_by_the_largest_gradient_is_one_on_all_shards_some_of_them_empty(run, way):
    """Of one weight, FSDP1's second rank holds nothing; with original parameters, no gradient either."""
    outputs = run(
        SHARD
        + """
net = shard(nn.Linear(1, 1, bias=False))
overrides = mpdiag.PrecisionOverrides(loss_scale={"method": "lognormal", "init_scale": 8.0})
mp = wrap(net, overrides=overrides)
for step in range(4):
    with mp.autocast():
        loss = net(torch.full((1, 1), 3.0 + rank)).float().sum()
    result = mp.step(loss)
    print(result.next_scale, result.gradient_norm)
print(refused(mp.step).startswith("step() found no gradient"))
""",
        "O1",
        way,
    )
    assert outputs[0] == outputs[1]
    first, *_, refused = outputs[0].splitlines()
    assert first.split()[1] == "3.5"
    assert refused == "True"


@pytest.mark.parametrize("clip", ["clip_norm", "clip_value"])
def test_partial_gradients_of_sequence_parallelism_are_summed_before_they_are_judged(run, clip):
    outputs = run(
        """
        import copy
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.ln, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
            def forward(self, x):
                return self.b(torch.tanh(self.a(self.ln(x))))
        torch.manual_seed(0)
        net = Net()
        plain = copy.deepcopy(net)
        parallelize_module(net, init_device_mesh("cpu", (2,)), {
            "ln": SequenceParallel(sequence_dim=1),
            "a": ColwiseParallel(input_layouts=Shard(1)),
            "b": RowwiseParallel(output_layouts=Replicate())})
        limit = {sys.argv[2]: 0.02}
        mp = wrap(net)
        sgd = torch.optim.SGD(plain.parameters(), 0.1)
        for step in range(3):
            x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
            with mp.autocast():
                loss = net(x.chunk(2, 1)[rank]).square().mean() * 10
            norm = mp.step(loss, **limit).gradient_norm
            sgd.zero_grad()
            (plain(x).square().mean() * 10).backward()
            if sys.argv[2] == "clip_norm":
                want = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.02))
            else:
                want = float(nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
                nn.utils.clip_grad_value_(plain.parameters(), 0.02)
            sgd.step()
            assert abs(norm - want) < 1e-5 * want, (norm, want)
            print(norm)
        for p, q in zip(net.parameters(), plain.parameters()):
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            torch.testing.assert_close(whole.detach(), q.detach(), rtol=0, atol=1e-6)
        print(net.b.bias.to_local().tolist(), net.ln.weight.to_local().tolist())
        """,
        "O0",
        clip,
    )
    assert outputs[0] == outputs[1]


def test_an_expert_without_a_token_on_one_rank_keeps_no_other_waiting(run):
    outputs = run(
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (2,))
        net = nn.Module()
        net.experts = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        net.own = nn.Parameter(torch.zeros(3))
        mp = wrap(net)
        for step in range(2):
            with mp.autocast():
                loss = net.own.sum()
                if rank == step:
                    loss = loss + 2 * net.experts.to_local().sum()
            print(mp.step(loss).gradient_norm)
        """,
        "O0",
    )
    # Six values of 2 in one rank's experts, seen by both; three of 1 beside them.
    assert outputs[0] == outputs[1]
    assert [float(norm) for norm in outputs[0].split()] == pytest.approx([27**0.5] * 2)


def test_a_rank_without_gradients_keeps_no_other_waiting(run):
    """Without DDP only the trainers exchange anything; every rank learns what is wrong, and goes on."""
    outputs = run(
        """
        net = model()
        mp = wrap(net)
        for step in range(3):
            if rank == 0 or step != 1:
                mp.backward(net(rows(step)).float().square().mean())
            if said := refused(mp.step):
                print(step, said)
                net.zero_grad()
        print(refused(mp.step))
        print(mp.steps)
        """,
        "O1",
    )
    for out in outputs:
        lines = out.splitlines()
        assert lines[0].startswith("1 rank 1 has no gradient, others have: no rank steps")
        assert lines[1].startswith("step() found no gradient")
        assert lines[2] == "2"


def test_a_forward_pass_that_is_not_finite_ends_every_rank_and_a_script_may_abstain(run):
    outputs = run(
        """
        from mpdiag.training.judgement import Ranks, judge_without_gradients
        net = model()
        mp = wrap(net, scale=2.0**16, options=mpdiag.TrainerOptions(max_skips=3))
        try:
            while True:
                mp.step(loss_of(mp, net, 0, bad=1))
        except mpdiag.errors.TrainingDiverged as error:
            print(mp.steps, mp.loss_scale, error)
        alone = Ranks(torch.device("cpu"))
        print(judge_without_gradients(1.0, alone))
        if rank == 0:
            print(judge_without_gradients(64.0, alone))
        else:
            mp = wrap(other := model())
            print(mp.step(other(rows(0)).float().square().mean()).skipped)
        """,
        "O1",
    )
    for out in outputs:
        lines = out.splitlines()
        assert lines[0].startswith(
            "3 8192.0 training stopped at step 2: 3 steps in a row had a loss"
        )
        assert lines[1] == "None"
    assert "finite=True" in outputs[0].splitlines()[2]
    assert outputs[1].splitlines()[2] == "False"
