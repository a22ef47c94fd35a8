"""LBFGS: an optimizer that evaluates a closure several times a step."""

import torch
from torch import nn

import mpdiag

torch.manual_seed(0)
LABELS = torch.arange(300) % 3
INPUTS = torch.randn(300, 4) + 1.5 * nn.functional.one_hot(LABELS, 4)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    return model, torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")


def main() -> None:
    model, optimizer = build()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(INPUTS), LABELS)
        loss.backward()
        return loss

    with mpdiag.record(model, optimizer, "runs/lbfgs"):
        for _ in range(6):
            optimizer.step(closure)

    plan = mpdiag.analyze("runs/lbfgs").plan
    print("loss scale:", plan.loss_scale.reason)

    model, optimizer = build()
    with mpdiag.MixedPrecision(model, optimizer, plan, run="runs/lbfgs-fp16") as mp:

        def loss_alone() -> torch.Tensor:
            with mp.autocast():
                return nn.functional.cross_entropy(model(INPUTS), LABELS)

        for _ in range(6):
            mp.step(closure=loss_alone)

    print(mpdiag.compare("runs/lbfgs", "runs/lbfgs-fp16", margin=0.1))


if __name__ == "__main__":
    main()
