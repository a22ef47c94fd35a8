"""Flow matching with a moving average, as ``examples/images/cifar10/train_cifar10.py`` of atong01/conditional-flow-matching.

A velocity field between noise and digits, a learning rate that warms up, clipped gradients, and an EMA
copy that is updated over the state dicts and integrated by Euler steps at the end.
"""

import argparse
import copy

import torch
import torch.nn as nn
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--total_steps", type=int, default=700)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--warmup", type=int, default=100)
parser.add_argument("--grad_clip", type=float, default=1.0)
parser.add_argument("--ema_decay", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()


class VelocityNet(nn.Module):
    def __init__(self, dim=64, width=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim + 1, width),
            nn.SELU(),
            nn.Linear(width, width),
            nn.SELU(),
            nn.Linear(width, width),
            nn.SELU(),
            nn.Linear(width, dim),
        )

    def forward(self, t, x):
        return self.net(torch.cat([x, t[:, None]], dim=1))


def warmup_lr(step):
    return min(step, args.warmup) / args.warmup


def ema(source, target, decay):
    source_dict, target_dict = source.state_dict(), target.state_dict()
    for key in source_dict:
        target_dict[key].data.copy_(
            target_dict[key].data * decay + source_dict[key].data * (1 - decay)
        )


@torch.no_grad()
def generate_samples(model, n, steps=40):
    x = torch.randn(n, 64)
    for i in range(steps):
        x = x + model(torch.full((n,), i / steps), x) / steps
    return x


def moments(batch):
    flat = batch.double()
    return flat.mean(0), torch.cov(flat.T)


torch.manual_seed(args.seed)
dataset = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
net_model = VelocityNet()
ema_model = copy.deepcopy(net_model)
optim = torch.optim.Adam(net_model.parameters(), lr=args.lr)
sched = torch.optim.lr_scheduler.LambdaLR(optim, lr_lambda=warmup_lr)

for step in range(args.total_steps):
    optim.zero_grad()
    x1 = dataset[torch.randint(len(dataset), (args.batch_size,))]
    x0 = torch.randn_like(x1)
    t = torch.rand(args.batch_size)
    xt = (1 - t[:, None]) * x0 + t[:, None] * x1
    ut = x1 - x0
    vt = net_model(t, xt)
    loss = torch.mean((vt - ut) ** 2)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net_model.parameters(), args.grad_clip)
    optim.step()
    sched.step()
    ema(net_model, ema_model, args.ema_decay)
    if step % 200 == 0:
        print(f"step {step} loss {loss.item():.4f}")

torch.manual_seed(1234)
fakes = generate_samples(ema_model, 1024)
(mu_r, cov_r), (mu_f, cov_f) = moments(dataset), moments(fakes)
roots = torch.linalg.eigvals(cov_r @ cov_f).real.clamp(min=0).sqrt().sum()
distance = (mu_r - mu_f).square().sum() + cov_r.trace() + cov_f.trace() - 2 * roots
if args.save:
    state = {
        "net": net_model.state_dict(),
        "ema": ema_model.state_dict(),
        "optim": optim.state_dict(),
    }
    torch.save(state, args.save)
print(f"frechet distance: {distance.item():.6f}")
