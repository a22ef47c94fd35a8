"""A GAN: two models and two optimizers, stepped one at a time."""

import torch
from torch import nn

import mpdiag

ONES, ZEROS, TARGET = torch.ones(64, 1), torch.zeros(64, 1), torch.tensor([1.0, -0.5])
LOSS = nn.BCEWithLogitsLoss()
STEPS = 40


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def build():
    torch.manual_seed(0)
    models = [network(4, 2), network(2, 1)]
    return models, [torch.optim.Adam(m.parameters(), 5e-3, betas=(0.5, 0.9)) for m in models]


def distance(generator):
    with torch.no_grad():
        return (generator(torch.randn(512, 4)).mean(0) - TARGET).norm().item()


def main() -> None:
    (generator, critic), (opt_g, opt_c) = build()
    with mpdiag.record({"generator": generator, "critic": critic}, [opt_g, opt_c], "runs/gan"):
        for _ in range(STEPS):
            fake, real = generator(torch.randn(64, 4)), TARGET + 0.3 * torch.randn(64, 2)
            opt_c.zero_grad()
            (LOSS(critic(real), ONES) + LOSS(critic(fake.detach()), ZEROS)).backward()
            opt_c.step()
            opt_g.zero_grad()
            LOSS(critic(fake), ONES).backward()
            opt_g.step()
        mpdiag.log_metric("distance", distance(generator), higher_is_better=False)

    plan = mpdiag.analyze("runs/gan").plan
    print("loss scale:", plan.loss_scale.reason)

    models, optimizers = (generator, critic), (opt_g, opt_c) = build()
    with mpdiag.MixedPrecision(models, optimizers, plan, run="runs/gan-fp16") as mp:
        for _ in range(STEPS):
            with mp.autocast():
                fake, real = generator(torch.randn(64, 4)), TARGET + 0.3 * torch.randn(64, 2)
                loss = LOSS(critic(real), ONES) + LOSS(critic(fake.detach()), ZEROS)
            mp.step(loss, optimizer=opt_c)
            with mp.autocast():
                loss = LOSS(critic(fake), ONES)
            mp.step(loss, optimizer=opt_g)
        mpdiag.log_metric("distance", distance(generator), higher_is_better=False)

    print(mpdiag.compare("runs/gan", "runs/gan-fp16", margin=0.2))


if __name__ == "__main__":
    main()
