"""A plain training loop: record it in FP32, analyze, train by the plan, compare."""

import torch
from torch import nn

import mpdiag

torch.manual_seed(0)
LABELS = torch.arange(512) % 4
INPUTS = torch.randn(512, 16) + 2 * nn.functional.one_hot(LABELS, 16)
BATCHES = list(zip(INPUTS.split(64), LABELS.split(64), strict=True)) * 10


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)  # both trainings begin alike
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return (model(INPUTS).argmax(1) == LABELS).float().mean().item()


def main() -> None:
    model, optimizer = build()
    with mpdiag.record(model, optimizer, "runs/plain"):  # the FP32 loop stays as it is
        for x, y in BATCHES:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        mpdiag.log_metric("accuracy", accuracy(model))

    plan = mpdiag.analyze("runs/plain").plan
    print("loss scale:", plan.loss_scale.reason)

    model, optimizer = build()
    with mpdiag.MixedPrecision(model, optimizer, plan, run="runs/plain-fp16") as mp:
        for x, y in BATCHES:
            with mp.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            mp.step(loss, clip_norm=1.0)
        mpdiag.log_metric("accuracy", accuracy(model))

    comparison = mpdiag.compare("runs/plain", "runs/plain-fp16", margin=0.1)
    for metric in comparison.metrics:
        print(metric.metric, metric.a, metric.b, metric.result.verdict)


if __name__ == "__main__":
    main()
