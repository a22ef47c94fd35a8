"""WGAN-GP, in the shape of ``implementations/wgan_gp/wgan_gp.py`` of eriklindernoren/PyTorch-GAN.

The gradient penalty differentiates the critic's input gradient (double backward), and the generator
steps once for every ``n_critic`` steps of the critic.
"""

import argparse

import numpy as np
import torch
import torch.autograd as autograd
import torch.nn as nn
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=25)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--b1", type=float, default=0.5)
parser.add_argument("--b2", type=float, default=0.999)
parser.add_argument("--latent_dim", type=int, default=16)
parser.add_argument("--img_size", type=int, default=8)
parser.add_argument("--n_critic", type=int, default=5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="")
opt = parser.parse_args()

np.random.seed(opt.seed)
torch.manual_seed(opt.seed)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()

        def block(in_feat, out_feat, normalize=True):
            layers = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.model = nn.Sequential(
            *block(opt.latent_dim, 64, normalize=False),
            *block(64, 128),
            nn.Linear(128, opt.img_size**2),
            nn.Tanh(),
        )

    def forward(self, z):
        img = self.model(z)
        return img.view(img.shape[0], 1, opt.img_size, opt.img_size)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(opt.img_size**2, 128),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(128, 64),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(64, 1),
        )

    def forward(self, img):
        return self.model(img.view(img.shape[0], -1))


lambda_gp = 10
generator = Generator()
discriminator = Discriminator()

digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
dataloader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(digits), batch_size=opt.batch_size, shuffle=True, drop_last=True
)

optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(opt.b1, opt.b2))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(opt.b1, opt.b2))


def compute_gradient_penalty(D, real_samples, fake_samples):
    """Calculates the gradient penalty loss for WGAN GP."""
    alpha = torch.tensor(np.random.random((real_samples.size(0), 1, 1, 1)), dtype=torch.float32)
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = D(interpolates)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


batches_done = 0
for epoch in range(opt.n_epochs):
    for (real_imgs,) in dataloader:
        # Train Discriminator
        optimizer_D.zero_grad()
        z = torch.tensor(
            np.random.normal(0, 1, (real_imgs.shape[0], opt.latent_dim)), dtype=torch.float32
        )
        fake_imgs = generator(z)
        real_validity = discriminator(real_imgs)
        fake_validity = discriminator(fake_imgs)
        gradient_penalty = compute_gradient_penalty(discriminator, real_imgs.data, fake_imgs.data)
        d_loss = (
            -torch.mean(real_validity) + torch.mean(fake_validity) + lambda_gp * gradient_penalty
        )
        d_loss.backward()
        optimizer_D.step()

        optimizer_G.zero_grad()
        # Train the generator every n_critic steps
        if batches_done % opt.n_critic == 0:
            fake_imgs = generator(z)
            fake_validity = discriminator(fake_imgs)
            g_loss = -torch.mean(fake_validity)
            g_loss.backward()
            optimizer_G.step()
        batches_done += 1
    if epoch % 10 == 0:
        print(f"[Epoch {epoch}] [D loss: {d_loss.item():.4f}] [G loss: {g_loss.item():.4f}]")


def moments(batch):
    flat = batch.flatten(1).double()
    return flat.mean(0), torch.cov(flat.T)


generator.eval()
with torch.no_grad():
    fakes = generator(torch.randn(1024, opt.latent_dim))
(mu_r, cov_r), (mu_f, cov_f) = moments(digits), moments(fakes)
roots = torch.linalg.eigvals(cov_r @ cov_f).real.clamp(min=0).sqrt().sum()
distance = (mu_r - mu_f).square().sum() + cov_r.trace() + cov_f.trace() - 2 * roots
if opt.save:
    torch.save({"G": generator.state_dict(), "D": discriminator.state_dict()}, opt.save)
print(f"frechet distance: {distance.item():.6f}")
