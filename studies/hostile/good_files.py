"""Good files of every kind that mpdiag reads, small ones, made anew."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def record_run(folder: Path) -> None:
    """A tiny recording with everything in it: two models' worth of layers, operations, a log."""
    import torch

    import mpdiag
    from mpdiag.runs.training_log import LogWriter, Metric, TrainingStep

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with mpdiag.record(model, optimizer, folder, every=1, operations=1, overwrite=True):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).exp().mean().log()
            loss.backward()
            optimizer.step()
    log = LogWriter(folder)
    for step in range(6):
        log.append(
            TrainingStep(step, 1.0 / (step + 1), 128.0, step == 2, "inf in 0", 0.5, 10**8, 0.1)
        )
    log.append(Metric("accuracy", 0.9))
    log.append({"alarm": "scale at its floor", "step_": 4})
    log.close()
    mpdiag.analyze(folder).plan.save(folder / "plan.json")
    x = torch.randn(4, 8)
    mpdiag.measure_sensitivity(model, lambda: model(x).exp().mean().log(), folder)
    skip_a_step(folder.with_name("capsule"))


def skip_a_step(folder: Path) -> None:
    """A capsule of a step that overflowed."""
    import torch

    import mpdiag
    from mpdiag.training.skips.capsule import save_capsule
    from mpdiag.training.skips.step_start import capture_random

    model, _ = capsule_model()
    facts = {
        "step": 3, "scale": 128.0, "reason": "Inf in 0", "model": "model.Net", "training": True,
        "level": "O1", "backend": "emulated", "device": "cpu",
        "plan": mpdiag.PrecisionPlan().to_json(),
    }  # fmt: skip
    batch = {"x": torch.randn(2, 4), "names": ["a", None, 1.5]}
    save_capsule(
        folder, weights=model.state_dict(), random=capture_random(), batch=batch, facts=facts
    )


def capsule_model() -> tuple[Any, Callable[[Any, Any], Any]]:
    """The capsule's model, and a loss that ignores the batch, whose content is not ours."""
    import torch

    return torch.nn.Linear(4, 2), lambda model, _batch: model(torch.ones(2, 4)).mean()


def search_state() -> bytes:
    """A search's file, as ``sensitivity.search_state`` writes it."""
    from mpdiag.sensitivity.loss_estimate import Fp32Candidate
    from mpdiag.sensitivity.search_state import Probe, SearchState

    found = [Fp32Candidate("0", "linear"), Fp32Candidate("1", "layer_norm")]
    with tempfile.TemporaryDirectory() as folder:
        state = SearchState({"level": "O1", "seeds": 2}, Path(folder) / "search.json")
        state.reference.update({0: (0.9, 1.5), 1: (0.8, 1.25)})
        state.candidates += [(c, float(i)) for i, c in enumerate(found)]
        state.probes.append(Probe(frozenset(found), (0.9, float("nan")), True, 2.5))
        state.save()
        return (Path(folder) / "search.json").read_bytes()


def baseline(run: Path) -> bytes:
    """A comparison's baseline, of a run."""
    from mpdiag.analysis.comparison.groups import read_group, save_baseline

    with tempfile.TemporaryDirectory() as folder:
        save_baseline(read_group(run), Path(folder) / "baseline.json")
        return (Path(folder) / "baseline.json").read_bytes()
