"""A GAN: two models, two optimizers, one of which steps on gradients through both."""

import torch
from script_end import report, seed
from torch import nn


def make(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def main(seed):
    torch.manual_seed(seed)
    generator, critic = make(4, 2), make(2, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
    loss_of = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(150):
        real = torch.randn(64, 2) * 0.3 + torch.tensor([1.0, -0.5])
        fake = generator(torch.randn(64, 4))
        opt_c.zero_grad()
        (loss_of(critic(real), ones) + loss_of(critic(fake.detach()), zeros)).backward()
        opt_c.step()
        opt_g.zero_grad()
        loss_of(critic(fake), ones).backward()
        opt_g.step()
    with torch.no_grad():
        distance = (generator(torch.randn(512, 4)).mean(0) - torch.tensor([1.0, -0.5])).norm()
    report(nn.ModuleList([generator, critic]), distance.item())


if __name__ == "__main__":
    main(seed())
