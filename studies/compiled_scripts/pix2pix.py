"""Two compiled models that train against each other, in the shape of ``train.py`` of junyanz/pytorch-CycleGAN-and-pix2pix."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=47)
parser.add_argument("--save", default="")
args = parser.parse_args()
torch.manual_seed(args.seed)
real = torch.tensor(load_digits().images).float()[:, None] / 8 - 1
edges = torch.sign(real - F.avg_pool2d(real, 3, 1, 1))


def initialise_weights(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2))
        self.down2 = nn.Sequential(nn.Conv2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.up1 = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.Dropout(0.5), nn.ReLU()
        )
        self.up2 = nn.ConvTranspose2d(32, 1, 4, 2, 1)

    def forward(self, x):
        d1 = self.down1(x)
        return torch.tanh(self.up2(torch.cat([self.up1(self.down2(d1)), d1], 1)))


def patch_discriminator():
    first = [nn.Conv2d(2, 16, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(
        *first,
        nn.Conv2d(16, 32, 3, 1, 1),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 3),
    )


generator, discriminator = (
    Generator().apply(initialise_weights),
    patch_discriminator().apply(initialise_weights),
)
generator, discriminator = torch.compile(generator), torch.compile(discriminator)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
adversarial, l1 = nn.BCEWithLogitsLoss(), nn.L1Loss()
for index in torch.randperm(len(real))[:1280].split(32):
    fake = generator(edges[index])
    optimizer_D.zero_grad()
    on_fake = discriminator(torch.cat([edges[index], fake.detach()], 1))
    on_real = discriminator(torch.cat([edges[index], real[index]], 1))
    loss_D = (
        adversarial(on_fake, torch.zeros_like(on_fake))
        + adversarial(on_real, torch.ones_like(on_real))
    ) / 2
    loss_D.backward()
    optimizer_D.step()
    for p in discriminator.parameters():
        p.requires_grad_(False)
    optimizer_G.zero_grad()
    on_fake = discriminator(torch.cat([edges[index], fake], 1))
    loss_L1 = l1(fake, real[index])
    (adversarial(on_fake, torch.ones_like(on_fake)) + 100 * loss_L1).backward()
    optimizer_G.step()
    for p in discriminator.parameters():
        p.requires_grad_(True)
if args.save:
    torch.save([generator.state_dict(), discriminator.state_dict()], args.save)
print(f"absolute error: {loss_L1.item():.6f}")
