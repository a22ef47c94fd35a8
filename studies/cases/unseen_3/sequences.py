"""Text, tones and series."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import TEST, cosine, rng
from cases.unseen_3.shared import fit, manual


def next_code(model: nn.Module, rows: Tensor) -> Tensor:
    """The cross-entropy of each code after those before it."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def learns_manual(model: nn.Module, seed: int, lr: float, steps: int, length: int = 32) -> Training:
    """Next codes of the Python manual by AdamW, clipped, with a cosine of rates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    (rows,) = manual(length)
    rows = rows[:1700]
    return fit(
        model,
        optimizer,
        seed,
        (rows,),
        lambda r: next_code(model, r),
        lambda r: float(next_code(model, r)),
        train=1500,
        batch=16,
        clip_norm=1.0,
        schedule=cosine(optimizer, steps, 0.1),
    )


def turned(x: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, length, width)."""
    half = x.shape[-1] // 2
    place = torch.arange(x.shape[-2])[:, None]
    angle = place * 10_000.0 ** -(torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Gpt(nn.Module):
    """Two layers of attention and gated networks, as in Llama."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.codes = nn.Embedding(96, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(5))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(2))
        nn.init.normal_(self.codes.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        h = self.codes(codes)
        for i in range(2):
            qkv = self.qkv[i](self.norms[2 * i](h)).unflatten(-1, (3, 4, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
            h = h + self.mix[i](y.transpose(1, 2).flatten(2))
            a, b = self.gate[i](self.norms[2 * i + 1](h)).chunk(2, -1)
            h = h + self.down[i](F.silu(a) * b)
        return F.linear(self.norms[4](h), self.codes.weight)


def manual_by_gpt(seed: int) -> Training:
    """The Python manual by a small transformer with tied embeddings."""
    torch.manual_seed(seed)
    return learns_manual(Gpt(), seed, 6e-3, 120, 24)


class StateSpace(nn.Module):
    """A diagonal state space with steps that depend on the input, as in Mamba."""

    def __init__(self, width: int = 32, states: int = 8) -> None:
        super().__init__()
        self.codes, self.norm = nn.Embedding(96, width), nn.LayerNorm(width)
        self.into = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.choose = nn.Linear(width, 2 * states + 1)
        self.step = nn.Linear(1, width)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.mix, self.out = nn.Linear(width, width), nn.Linear(width, 96)
        self.states = states
        nn.init.constant_(self.step.bias, -2.0)

    def forward(self, codes: Tensor) -> Tensor:
        h = self.codes(codes)
        x, gate = self.into(self.norm(h)).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        read, write, step = self.choose(x).split([self.states, self.states, 1], -1)
        step = F.softplus(self.step(step))
        keep = torch.exp(-step[..., None] * self.decay.exp())
        add = (step * x)[..., None] * write[..., None, :]
        state, seen = torch.zeros_like(add[:, 0]), []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + add[:, t]
            seen.append((state * read[:, t, None]).sum(-1))
        y = torch.stack(seen, 1) + self.skip * x
        return self.out(h + self.mix(y * F.silu(gate)))


def manual_by_state_space(seed: int) -> Training:
    """The Python manual by a selective state space."""
    torch.manual_seed(seed)
    return learns_manual(StateSpace(), seed, 1e-2, 120, 24)


class LinearAttention(nn.Module):
    """Attention without a softmax: sums of keys and values over all codes so far."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.codes, self.place = nn.Embedding(96, width), nn.Embedding(32, width)
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.body = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.out = nn.Linear(width, 96)

    def forward(self, codes: Tensor) -> Tensor:
        h = self.codes(codes) + self.place(torch.arange(codes.shape[1]))
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 2, -1)).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        pairs = (k[..., :, None] * v[..., None, :]).cumsum(1)
        above = (q[..., :, None] * pairs).sum(-2)
        below = (q * k.cumsum(1)).sum(-1, keepdim=True)
        h = h + self.mix((above / (below + 1e-6)).flatten(2))
        return self.out(h + self.body(self.norm_2(h)))


def manual_by_linear_attention(seed: int) -> Training:
    """The Python manual by linear attention with running sums."""
    torch.manual_seed(seed)
    return learns_manual(LinearAttention(), seed, 1e-2, 120, 24)


class Experts(nn.Module):
    """A recurrent network before four experts, of which one answers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.codes = nn.Embedding(96, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.router = nn.Linear(width, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, width, 64) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, 64, width) / 8)
        self.out = nn.Linear(width, 96)
        self.balance = torch.zeros(())

    def forward(self, codes: Tensor) -> Tensor:
        h = self.body(self.codes(codes))[0]
        p = self.router(h).softmax(-1)
        share, chosen = p.max(-1)
        hot = F.one_hot(chosen, 4).to(p.dtype)
        self.balance = 4 * (hot.mean((0, 1)) * p.mean((0, 1))).sum()
        y = torch.relu(torch.einsum("bth,ehk->betk", h, self.up))
        y = torch.einsum("betk,ekh->bteh", y, self.down)
        return self.out(h + share[..., None] * (hot[..., None] * y).sum(2))


def manual_by_experts(seed: int) -> Training:
    """The Python manual by a switched mixture of experts with a balancing loss."""
    torch.manual_seed(seed)
    model = Experts()
    (rows,) = manual(24)
    rows = rows[:1700]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(r: Tensor) -> Tensor:
        return next_code(model, r) + 0.01 * model.balance

    return fit(
        model,
        optimizer,
        seed,
        (rows,),
        loss,
        lambda r: float(next_code(model, r)),
        train=1500,
        batch=16,
        clip_norm=1.0,
    )


def words_of_the_manual(seed: int) -> Training:
    """Word vectors by skip-grams with five negative samples, by plain SGD of a high rate."""
    from pydoc_data import topics

    torch.manual_seed(seed)
    text = " ".join(topics.topics[name] for name in sorted(topics.topics)).lower().split()
    counts: dict[str, int] = {}
    for word in text:
        counts[word] = counts.get(word, 0) + 1
    common = sorted(counts, key=lambda w: (-counts[w], w))[:500]
    index = {word: i for i, word in enumerate(common)}
    codes = torch.tensor([index[w] for w in text if w in index])
    weight = torch.tensor([float(counts[w]) for w in common]).pow(0.75)
    model = nn.ModuleDict({"word": nn.Embedding(500, 32), "near": nn.Embedding(500, 32)})
    nn.init.uniform_(model["word"].weight, -1 / 64, 1 / 64)
    nn.init.zeros_(model["near"].weight)

    def error(places: Tensor, g: torch.Generator) -> Tensor:
        shift = torch.randint(1, 4, places.shape, generator=g)
        others = torch.multinomial(weight, 5 * len(places), True, generator=g).view(-1, 5)
        word = model["word"](codes[places])
        true = (word * model["near"](codes[places + shift])).sum(-1)
        false = (word[:, None] * model["near"](others)).sum(-1)
        return -(F.logsigmoid(true) + F.logsigmoid(-false).sum(-1)).mean()

    def loss(step: int) -> Tensor:
        g = rng(seed, step)
        return error(torch.randint(0, 25_000, (512,), generator=g), g)

    return Training(
        model,
        torch.optim.SGD(model.parameters(), lr=8.0),
        loss,
        lambda: float(error(torch.arange(25_000, 30_000), rng(TEST))),
    )


class Listener(nn.Module):
    """A recurrent network that reads a spectrogram both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(12, 24, 3, padding=1)
        self.body = nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.front(x.transpose(1, 2))).transpose(1, 2)
        return self.out(self.body(h)[0]).log_softmax(-1)


def tones_in_a_row(seed: int) -> Training:
    """Four tones of six in a noisy generated spectrogram, without their times: CTC."""
    torch.manual_seed(seed)
    g = rng(TEST)
    y = torch.randint(1, 7, (800, 4), generator=g)
    lengths = 4 + torch.randint(0, 3, (800, 4), generator=g)
    time = torch.arange(28)
    note = (time[None, :, None] >= lengths.cumsum(1)[:, None]).sum(-1)
    heard = torch.where(note < 4, y.gather(1, note.clamp(max=3)), 0)
    x = torch.randn(7, 12, generator=g)[heard] + 0.7 * torch.randn(800, 28, 12, generator=g)
    model = Listener()

    def ctc(x: Tensor, y: Tensor) -> Tensor:
        n = len(x)
        out = model(x).transpose(0, 1)
        return F.ctc_loss(out, y, torch.full((n,), 28), torch.full((n,), 4), zero_infinity=True)

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, y),
        ctc,
        lambda x, y: float(ctc(x, y)),
        train=600,
        batch=24,
        clip_norm=5.0,
    )


class Causal(nn.Module):
    """Dilated convolutions that see only the past."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv1d(3, 20, 1)
        self.layers = nn.ModuleList(nn.Conv1d(20, 20, 2, dilation=2**i) for i in range(5))
        self.out = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for i, layer in enumerate(self.layers):
            h = h + F.leaky_relu(layer(F.pad(h, (2**i, 0))), 0.1)
        return self.out(h[..., -1])


def power_of_a_town(seed: int) -> Training:
    """The tenth, the half and nine tenths of the next hour's power, of a generated town."""
    torch.manual_seed(seed)
    g = rng(TEST)
    hour = torch.arange(6000.0)
    noise = torch.randn(6000, generator=g)
    drift = torch.zeros(6000)
    for i in range(1, 6000):
        drift[i] = 0.9 * drift[i - 1] + 0.1 * noise[i]
    day, week = 2 * math.pi * hour / 24, 2 * math.pi * hour / 168
    power = 1 + 0.4 * torch.sin(day) + 0.2 * torch.sin(week) + drift
    series = torch.stack([(power - 1) / 0.4, day.sin(), day.cos()])
    x = series.unfold(1, 33, 1).transpose(0, 1)[:, :, :-1]
    y = series[0].unfold(0, 33, 1)[:, -1:]
    model = Causal()
    levels = torch.tensor([0.1, 0.5, 0.9])

    def pinball(x: Tensor, y: Tensor) -> Tensor:
        over = y - model(x)
        return torch.maximum(levels * over, (levels - 1) * over).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, y),
        pinball,
        lambda x, y: float(pinball(x, y)),
        train=4800,
        batch=48,
    )


CASES = (
    Case(
        "manual_by_gpt",
        "The Python manual by a small transformer.",
        120,
        manual_by_gpt,
        "NLL",
        False,
        0.1,
    ),
    Case(
        "manual_by_state_space",
        "The Python manual by a selective state space.",
        120,
        manual_by_state_space,
        "NLL",
        False,
        0.05,
    ),
    Case(
        "manual_by_linear_attention",
        "The Python manual by linear attention.",
        120,
        manual_by_linear_attention,
        "NLL",
        False,
        0.04,
    ),
    Case(
        "manual_by_experts",
        "The Python manual by a mixture of experts.",
        120,
        manual_by_experts,
        "NLL",
        False,
        0.04,
    ),
    Case(
        "words_of_the_manual",
        "Word vectors by skip-grams.",
        300,
        words_of_the_manual,
        "NLL",
        False,
        0.02,
    ),
    Case(
        "tones_in_a_row",
        "Tones in a row by CTC.",
        90,
        tones_in_a_row,
        "CTC loss",
        False,
        0.05,
    ),
    Case(
        "power_of_a_town",
        "Quantiles of a town's power by dilated convolutions.",
        150,
        power_of_a_town,
        "pinball loss",
        False,
        0.005,
    ),
)
