"""A gated state-space model: a causal convolution, then a scan over time in a loop."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch


class Scan(nn.Module):
    def __init__(self, dim, states=4):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, groups=dim)
        self.to_dt = nn.Linear(dim, dim)
        self.to_b = nn.Linear(dim, states, bias=False)
        self.to_c = nn.Linear(dim, states, bias=False)
        self.log_a = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(dim, 1))
        self.skip = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = F.silu(self.conv(F.pad(x.transpose(1, 2), (2, 0)))).transpose(1, 2)
        dt = F.softplus(self.to_dt(x)).float()
        b, c = self.to_b(x).float(), self.to_c(x).float()
        decay = torch.exp(-dt[..., None] * self.log_a.exp())
        drive = (dt * x)[..., None] * b[:, :, None]
        state, outputs = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            outputs.append((state * c[:, t, None]).sum(-1))
        return torch.stack(outputs, 1) + self.skip * x


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.enter = nn.Linear(dim, 4 * dim)
        self.scan = Scan(2 * dim)
        self.leave = nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x):
        y, gate = self.enter(self.norm(x)).chunk(2, -1)
        return x + self.drop(self.leave(self.scan(y) * F.silu(gate)))


class SSM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.lift = nn.Linear(3, dim)
        self.layers = nn.ModuleList(Mixer(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.predict = nn.Linear(dim, 3)

    def forward(self, x):
        x = self.lift(x)
        for layer in self.layers:
            x = layer(x)
        return self.predict(self.norm(x))


def waves(g):
    phase = torch.rand(8, 1, 3, generator=g) * 6
    t = torch.arange(15.0)[None, :, None]
    return [torch.sin(phase + t * torch.tensor([0.3, 0.5, 0.9]))]


model = SSM()
model = prepare(model, model.layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-8, weight_decay=0.01)
for parts in batches(waves):
    optimizer.zero_grad()
    for (series,) in parts:
        with autocast():
            guess = model(series[:, :-1])
        loss = F.smooth_l1_loss(guess.float(), series[:, 1:])
        scaler.scale(loss / args.accum).backward()
    scaler.step(optimizer)
    scaler.update()
finish()
