"""DCGAN, in the shape of ``dcgan/main.py`` of pytorch/examples.

Two models, two optimizers, three backward passes a step: the discriminator on real digits, on fakes
that are detached, and then the generator through the discriminator, in the graph that was built
before the discriminator's step.
"""

import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--nz", type=int, default=32, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=16)
parser.add_argument("--ndf", type=int, default=16)
parser.add_argument("--niter", type=int, default=7, help="number of epochs to train for")
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--beta1", type=float, default=0.5, help="beta1 for adam")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="", help="where to save the models")
opt = parser.parse_args()

torch.manual_seed(opt.seed)

images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
images = nn.functional.interpolate(images, size=16, mode="bilinear")
dataloader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images), batch_size=opt.batch_size, shuffle=True
)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1)


netG = Generator(opt.nz, opt.ngf)
netG.apply(weights_init)
netD = Discriminator(opt.ndf)
netD.apply(weights_init)

criterion = nn.BCELoss()
fixed_noise = torch.randn(512, opt.nz, 1, 1)
real_label, fake_label = 1.0, 0.0

optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

for epoch in range(opt.niter):
    for i, (real,) in enumerate(dataloader):
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        batch_size = real.size(0)
        label = torch.full((batch_size,), real_label)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(batch_size, opt.nz, 1, 1)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()

        if i % 20 == 0:
            print(
                f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] Loss_D: {errD.item():.4f} "
                f"Loss_G: {errG.item():.4f} D(x): {D_x:.4f}"
            )


def moments(batch):
    flat = batch.flatten(1).double()
    return flat.mean(0), torch.cov(flat.T)


# Fréchet distance between the pixels of real and generated digits
netG.eval()
with torch.no_grad():
    fakes = netG(fixed_noise)
(mu_r, cov_r), (mu_f, cov_f) = moments(images), moments(fakes)
roots = torch.linalg.eigvals(cov_r @ cov_f).real.clamp(min=0).sqrt().sum()
distance = (mu_r - mu_f).square().sum() + cov_r.trace() + cov_f.trace() - 2 * roots
if opt.save:
    torch.save({"netG": netG.state_dict(), "netD": netD.state_dict()}, opt.save)
print(f"frechet distance: {distance.item():.6f}")
