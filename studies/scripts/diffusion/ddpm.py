"""A denoising diffusion model with a moving average of its weights.

In the shape of ``denoising_diffusion_pytorch.py`` of lucidrains/denoising-diffusion-pytorch: the
diffusion is a module around the U-Net whose ``forward`` returns the loss, gradients are accumulated
over two batches and clipped, and an EMA copy follows the model, from which samples are drawn.
"""

import argparse
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--train-num-steps", type=int, default=150)
parser.add_argument("--train-batch-size", type=int, default=24)
parser.add_argument("--gradient-accumulate-every", type=int, default=2)
parser.add_argument("--train-lr", type=float, default=2e-3)
parser.add_argument("--ema-decay", type=float, default=0.95)
parser.add_argument("--timesteps", type=int, default=100)
parser.add_argument("--dim", type=int, default=16)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim, theta=10000):
        super().__init__()
        self.dim, self.theta = dim, theta

    def forward(self, x):
        half_dim = self.dim // 2
        emb = math.log(self.theta) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim) * -emb)
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self, dim, dim_out):
        super().__init__()
        self.proj = nn.Conv2d(dim, dim_out, 3, padding=1)
        self.norm = nn.GroupNorm(4, dim_out)
        self.act = nn.SiLU()

    def forward(self, x, scale_shift=None):
        x = self.norm(self.proj(x))
        if scale_shift is not None:
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return self.act(x)


class ResnetBlock(nn.Module):
    def __init__(self, dim, dim_out, time_emb_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out * 2))
        self.block1 = Block(dim, dim_out)
        self.block2 = Block(dim_out, dim_out)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time_emb):
        time_emb = self.mlp(time_emb)[:, :, None, None]
        h = self.block1(x, scale_shift=time_emb.chunk(2, dim=1))
        return self.block2(h) + self.res_conv(x)


class Unet(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.init_conv = nn.Conv2d(1, dim, 3, padding=1)
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(dim), nn.Linear(dim, dim * 2), nn.GELU(), nn.Linear(dim * 2, dim * 2)
        )
        self.down1 = ResnetBlock(dim, dim, dim * 2)
        self.down = nn.Conv2d(dim, dim * 2, 4, 2, 1)
        self.mid = ResnetBlock(dim * 2, dim * 2, dim * 2)
        self.up = nn.ConvTranspose2d(dim * 2, dim, 4, 2, 1)
        self.up1 = ResnetBlock(dim * 2, dim, dim * 2)
        self.final_conv = nn.Conv2d(dim, 1, 1)

    def forward(self, x, time):
        x = self.init_conv(x)
        t = self.time_mlp(time)
        h = self.down1(x, t)
        x = self.mid(self.down(h), t)
        x = self.up1(torch.cat((self.up(x), h), dim=1), t)
        return self.final_conv(x)


def extract(a, t, x_shape):
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps):
        super().__init__()
        self.model = model
        self.num_timesteps = timesteps
        steps = torch.linspace(0, timesteps, timesteps + 1, dtype=torch.float64) / timesteps
        alphas_cumprod = torch.cos((steps + 0.008) / 1.008 * math.pi * 0.5) ** 2
        alphas_cumprod = alphas_cumprod / alphas_cumprod[0]
        betas = torch.clip(1 - (alphas_cumprod[1:] / alphas_cumprod[:-1]), 0, 0.999)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.register_buffer("betas", betas.float())
        self.register_buffer("alphas_cumprod", alphas_cumprod.float())
        self.register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod).float())
        self.register_buffer("sqrt_one_minus", torch.sqrt(1.0 - alphas_cumprod).float())

    def q_sample(self, x_start, t, noise):
        return (
            extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + extract(self.sqrt_one_minus, t, x_start.shape) * noise
        )

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 1, 8, 8)
        for i in reversed(range(self.num_timesteps)):
            t = torch.full((n,), i, dtype=torch.long)
            noise = self.model(x, t)
            beta, total = self.betas[i], self.alphas_cumprod[i]
            x = (x - beta / (1 - total).sqrt() * noise) / (1 - beta).sqrt()
            if i > 0:
                x = x + beta.sqrt() * torch.randn_like(x)
        return x.clamp(-1, 1)

    def forward(self, img):
        t = torch.randint(0, self.num_timesteps, (img.shape[0],)).long()
        noise = torch.randn_like(img)
        model_out = self.model(self.q_sample(img, t, noise), t)
        loss = F.mse_loss(model_out, noise, reduction="none")
        return loss.mean(dim=(1, 2, 3)).mean()


class EMA:
    def __init__(self, model, beta):
        self.model, self.beta = model, beta
        self.ema_model = copy.deepcopy(model)
        self.ema_model.requires_grad_(False)

    @torch.no_grad()
    def update(self):
        for ema, current in zip(self.ema_model.parameters(), self.model.parameters()):
            ema.data.lerp_(current.data, 1.0 - self.beta)


class Trainer:
    def __init__(self, diffusion_model, images, args):
        self.model = diffusion_model
        self.images = images
        self.args = args
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.train_lr, betas=(0.9, 0.99))
        self.ema = EMA(self.model, args.ema_decay)
        self.step = 0

    def batch(self):
        return self.images[torch.randint(len(self.images), (self.args.train_batch_size,))]

    def train(self):
        while self.step < self.args.train_num_steps:
            total_loss = 0.0
            for _ in range(self.args.gradient_accumulate_every):
                loss = self.model(self.batch())
                loss = loss / self.args.gradient_accumulate_every
                total_loss += loss.item()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if self.step % 25 == 0:
                print(f"step {self.step} loss: {total_loss:.4f}")
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.ema.update()


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    diffusion = GaussianDiffusion(Unet(args.dim), args.timesteps)
    trainer = Trainer(diffusion, digits, args)
    trainer.train()

    torch.manual_seed(1234)
    trainer.ema.ema_model.eval()
    with torch.no_grad():  # what noise the averaged model leaves, over the same draws for everyone
        losses = [trainer.ema.ema_model(digits[i::8]) for i in range(8)]
    samples = trainer.ema.ema_model.sample(16)
    print(f"samples: mean {samples.mean():.3f} std {samples.std():.3f}")
    if args.save:
        torch.save(
            {"model": diffusion.state_dict(), "ema": trainer.ema.ema_model.state_dict()}, args.save
        )
    print(f"noise loss: {torch.stack(losses).mean().item():.6f}")


if __name__ == "__main__":
    main()
