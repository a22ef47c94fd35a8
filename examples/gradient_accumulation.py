"""Gradient accumulation: four micro-batches a step."""

import torch
from torch import nn

import mpdiag

EVERY = 4
torch.manual_seed(0)
INPUTS = torch.randn(512, 8)
TARGETS = INPUTS[:, :2].prod(1, keepdim=True)
MICRO_BATCHES = list(zip(INPUTS.split(16), TARGETS.split(16), strict=True)) * 5


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def main() -> None:
    model, optimizer = build()
    with mpdiag.record(model, optimizer, "runs/accumulated"):
        for i, (x, y) in enumerate(MICRO_BATCHES, start=1):
            (nn.functional.mse_loss(model(x), y) / EVERY).backward()
            if i % EVERY == 0:
                optimizer.step()
                optimizer.zero_grad()

    plan = mpdiag.analyze("runs/accumulated").plan
    print("loss scale:", plan.loss_scale.reason)

    model, optimizer = build()
    with mpdiag.MixedPrecision(model, optimizer, plan, run="runs/accumulated-fp16") as mp:
        for i, (x, y) in enumerate(MICRO_BATCHES, start=1):
            with mp.autocast():
                loss = nn.functional.mse_loss(model(x), y) / EVERY
            mp.backward(loss)
            if i % EVERY == 0:
                mp.step()

    print(mpdiag.compare("runs/accumulated", "runs/accumulated-fp16", margin=0.1))


if __name__ == "__main__":
    main()
