"""Transformers: the callback records without a trace, ``PlanTrainer`` trains by a plan."""

import pytest
import torch
from safetensors.torch import load_file
from support import backoff
from torch import nn
from trained_by_hand import fresh, same  # noqa: F401 - a fixture

import mpdiag
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.training_log import read_log

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
bridge = pytest.importorskip("mpdiag.integrations.huggingface")
pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore"),  # Transformers', about pinned memory
]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.dtypes = set()
        self.body[0].register_forward_hook(lambda _, __, out: self.dtypes.add(out.dtype))

    def forward(self, x=None, labels=None):
        logits = self.body(x.to(self.body[0].weight.dtype))
        loss = nn.functional.cross_entropy(logits.float(), labels)
        return {"loss": loss, "logits": logits}


def data(n=48):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 8, generator=generator)
    return [{"x": row, "labels": row[:4].argmax()} for row in x]


def make(tmp_path, kind=transformers.Trainer, model=None, settings=None, **options):
    chosen = {
        "num_train_epochs": 1, "per_device_train_batch_size": 8, "max_grad_norm": 1.0,
        "learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "constant",
        "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "logging_strategy": "no",
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(tmp_path / "out"), **chosen | (settings or {}))
    return kind(model or Model(), arguments, train_dataset=data(), **options)


@pytest.mark.parametrize("half", [False, True])
def test_recording_leaves_no_trace_in_the_numbers(tmp_path, capsys, half):
    pytest.importorskip("tensorboard")
    settings = {"optim": "adamw_torch", "logging_steps": 2, "logging_strategy": "steps"}
    settings |= {"report_to": "tensorboard", "max_steps": 12}
    plain, watched = Model(), Model()
    plain, watched = (m.bfloat16() if half else m for m in (plain, watched))
    make(tmp_path, model=plain, settings=settings).train()
    capsys.readouterr()
    callback = bridge.RecordCallback(tmp_path / "run", every=1)
    trainer = make(tmp_path / "watched", model=watched, settings=settings, callbacks=[callback])
    trainer.train()
    assert same(plain, watched)
    run = mpdiag.open_run(tmp_path / "run")
    assert (run.meta["state"], run.meta["steps_recorded"]) == ("complete", 12)
    assert run.meta["optimizers"][0]["type"] == "AdamW"
    assert {"body.0", "body.2.weight"} <= set(run.frame()["name"])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mpdiag: ")]
    label = "BF16 weights and AdamW states, no FP32 masters"
    assert said[0] == f"mpdiag: {label if half else 'FP32 weights and AdamW states'}"
    assert any("exp_avg_sq in BF16" in line for line in said[1:]) == half
    assert half or len(said) == 1
    assert steps_on_board(tmp_path / "watched", "mpdiag/largest") == list(range(12))
    assert steps_on_board(tmp_path / "watched", "train/loss") == [2, 4, 6, 8, 10, 12]


def steps_on_board(folder, tag):
    """The steps that TensorBoard shows of a figure."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = []
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        steps += [e.step for e in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []
    return sorted(steps)


@pytest.mark.parametrize(("target", "every"), [("fp16", 1), ("fp16", 2), ("bf16", 1)])
def test_it_trains_by_the_plan(tmp_path, target, every):
    plan = PrecisionPlan(target=target, loss_scale=backoff(1024.0).loss_scale)
    settings = {"gradient_accumulation_steps": every}
    options = {"settings": settings, "plan_options": {"run": tmp_path / "run"}}
    trainer = make(tmp_path, bridge.PlanTrainer, plan=plan, **options)
    trainer.train()
    assert trainer.model.dtypes == {torch.float16 if target == "fp16" else torch.bfloat16}
    assert [step.scale for step in read_log(tmp_path / "run").steps] == [1024.0] * (6 // every)
    assert trainer.mp is None  # given back
    fp32 = Model()
    make(tmp_path, model=fp32, settings=settings).train()
    pairs = list(zip(trainer.model.parameters(), fp32.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in pairs)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)


def test_evaluations_of_both_sides_can_be_compared(tmp_path):
    def trained(kind, **options):
        trainer = make(tmp_path, kind, eval_dataset=data(8), **options)
        trainer.train()
        return trainer.evaluate()["eval_loss"]

    recorded = trained(
        transformers.Trainer, callbacks=[bridge.RecordCallback(tmp_path / "fp32", every=1)]
    )
    trained(bridge.PlanTrainer, plan=backoff(), plan_options={"run": tmp_path / "fp16"})
    assert read_log(tmp_path / "fp32").metric("eval_loss").value == recorded
    compared = mpdiag.compare(tmp_path / "fp32", tmp_path / "fp16", metric="eval_loss")
    assert not compared.metrics[0].higher_is_better
    assert abs(compared.metrics[0].result.difference) < 0.05


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_training_resumed_from_a_checkpoint_is_the_uninterrupted_one(tmp_path, level):
    """Bit for bit: weights, masters, and the scale, which has grown before and grows after it."""

    def trained(resume):
        trainer = make(
            tmp_path,
            bridge.PlanTrainer,
            plan=backoff(64.0, growth_interval=2),
            plan_options={"level": level, "run": tmp_path / f"run-{resume is not None}"},
            settings={
                "save_strategy": "steps",
                "save_steps": 3,
                "optim": "adamw_torch",
                "learning_rate": 0.003,
            },
        )
        trainer.train(resume_from_checkpoint=resume)
        scales = [step.scale for step in read_log(trainer.plan_options["run"]).steps]
        return trainer, scales

    whole, scales = trained(None)
    found, resumed = trained(f"{whole.args.output_dir}/checkpoint-3")
    assert scales == [64.0, 64.0, 128.0, 128.0, 256.0, 256.0]
    assert resumed == scales[3:]
    assert same(whole.model, found.model)


def test_the_best_model_is_loaded_at_the_end_and_stays(tmp_path):
    """``load_best_model_at_end`` writes into the model after the last step; nothing undoes it."""
    seen = {}

    class Worse(transformers.TrainerCallback):
        """Evaluations after the first one are made worse; notes the weights of each."""

        def on_save(self, args, state, control, model=None, **kwargs):
            path = f"{args.output_dir}/checkpoint-{state.global_step}"
            seen[path] = load_file(f"{path}/model.safetensors")

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step > 2:
                with torch.no_grad():
                    model.body[2].weight.mul_(-1.5)

    settings = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "max_steps": 6,
        "gradient_accumulation_steps": 2, "num_train_epochs": 3,
    }  # fmt: skip
    trainer = make(
        tmp_path,
        bridge.PlanTrainer,
        plan=backoff(),
        plan_options={"level": "O2"},
        settings=settings,
        eval_dataset=data(8),
        callbacks=[Worse()],
    )
    trainer.train()
    best = seen[f"{trainer.args.output_dir}/checkpoint-2"]
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    for name, value in trainer.model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, best[name].float())
