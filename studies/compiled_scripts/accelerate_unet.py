"""Accelerate's dynamo_backend around a U-Net, in the shape of ``train_unconditional.py`` of huggingface/diffusers."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()
set_seed(args.seed)


class ResnetBlock2D(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.time_emb_proj, self.norm2 = nn.Linear(64, cout), nn.GroupNorm(4, cout)
        self.conv2, self.conv_shortcut = (
            nn.Conv2d(cout, cout, 3, padding=1),
            nn.Conv2d(cin, cout, 1),
        )

    def forward(self, x, temb):
        h = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(F.silu(temb))[:, :, None, None]
        return self.conv_shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, n=16):
        super().__init__()
        self.time_embedding = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64))
        self.conv_in, self.conv_out = nn.Conv2d(1, n, 3, padding=1), nn.Conv2d(n, 1, 3, padding=1)
        self.down, self.mid, self.up = (
            ResnetBlock2D(n, n),
            ResnetBlock2D(n, 2 * n),
            ResnetBlock2D(3 * n, n),
        )

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(-torch.arange(8) * 1.15)
        temb = self.time_embedding(torch.cat([angles.sin(), angles.cos()], 1))
        h = self.down(self.conv_in(x), temb)
        middle = F.interpolate(self.mid(F.avg_pool2d(h, 2), temb), scale_factor=2.0)
        return self.conv_out(self.up(torch.cat([h, middle], 1), temb))


accelerator = Accelerator(cpu=True, dynamo_backend="inductor", gradient_accumulation_steps=2)
images = torch.tensor(load_digits().images).float()[:1280, None] / 8 - 1
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), 32, shuffle=True)
model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
alphas = torch.cos(torch.linspace(0.01, 1.5, 100)).square()
for (clean,) in loader:
    noise, t = torch.randn_like(clean), torch.randint(100, (len(clean),))
    a = alphas[t][:, None, None, None]
    with accelerator.accumulate(model):
        loss = F.mse_loss(model(a.sqrt() * clean + (1 - a).sqrt() * noise, t), noise)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
if args.save:
    torch.save(accelerator.unwrap_model(model, keep_torch_compile=False).state_dict(), args.save)
print(f"loss: {loss.item():.6f}")
