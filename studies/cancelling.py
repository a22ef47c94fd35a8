"""Why a slope over 1e-4 needs FP32 gradients of weights: what of FP16 does the harm, one at a time.

    python studies/cancelling.py [--json studies/results/cancelling.json]

The gallery's ``finite_difference`` calls one network at x + h and at x − h. Each weight's gradient is
the sum of what the two calls give it. Trained in FP32, with one thing at a time rounded to FP16:
the weights in the forward pass, or the weight gradient of each call before the two are added.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import exhibits as gallery

SEEDS = (0, 1, 2)
H = 1e-4
CLIP = 5.0
WAYS = {
    "FP32": (False, False),
    "weights rounded to FP16": (True, False),
    "weight gradient of each call rounded to FP16": (False, True),
    "both": (True, True),
}


class Rounded(torch.autograd.Function):
    """A weight as one call sees it: itself or its gradient rounded to FP16, or neither."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, forward: bool, backward: bool) -> Tensor:
        """The weight."""
        ctx.backward_too = backward
        return weight.half().float() if forward else weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The gradient."""
        (g,) = grads
        return (g.half().float() if ctx.backward_too else g), None, None


def train(forward: bool, backward: bool, seed: int) -> tuple[float, float]:
    """The held-out loss; and the largest ‖sum of two calls' weight gradients‖ / ‖one of them‖."""
    exhibit = gallery.load("finite_difference")
    torch.manual_seed(seed)
    model = cast("Any", exhibit.model())
    optimizer = exhibit.optimizer(model)
    largest = 0.0
    for x, y in exhibit.batches(seed):
        step = torch.zeros_like(x)
        step[:, 0] = H
        calls, outs = [], []
        for place in (x + step, x - step):
            weights = {
                name: cast("Any", Rounded).apply(p, forward, backward)
                for name, p in model.potential.named_parameters()
            }
            for weight in weights.values():
                weight.retain_grad()
            calls.append(weights)
            outs.append(functional_call(model.potential, weights, (place,)))
        loss = (model.slope(*outs, H).squeeze(-1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for name, weight in calls[0].items():
            both = weight.grad + calls[1][name].grad
            largest = max(largest, float(both.norm() / weight.grad.norm()))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return exhibit.evaluate(model.state_dict()), largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"date": date.today().isoformat(), "torch": torch.__version__}
    for way, rounded in WAYS.items():
        found = [train(*rounded, seed) for seed in SEEDS]
        results[way] = {"losses": [loss for loss, _ in found], "left": max(r for _, r in found)}
        losses = " ".join(f"{loss:.4f}" for loss, _ in found)
        print(f"{way}: held-out loss {losses}; of a call's weight gradient the sum of both leaves at "
              f"most {results[way]['left']:.2g}", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
