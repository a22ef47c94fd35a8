"""An encoder and a decoder with cross attention, padded sentences, Noam's learning rate."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

PAD = 0


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x, memory, mask):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q(x), self.k(memory), self.v(memory))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).to(v.dtype)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.wide = nn.Linear(dim, 2 * dim)
        self.back = nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x):
        return self.back(self.drop(F.gelu(self.wide(x))))


class EncoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn, self.feed = Attention(dim), Feed(dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attn(y, y, mask)
        return x + self.feed(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn, self.cross, self.feed = Attention(dim), Attention(dim), Feed(dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x, memory, causal, mask):
        y = self.norm1(x)
        x = x + self.attn(y, y, causal)
        x = x + self.cross(self.norm2(x), memory, mask)
        return x + self.feed(self.norm3(x))


class Embed(nn.Module):
    def __init__(self, words, dim):
        super().__init__()
        self.table = nn.Embedding(words, dim, padding_idx=PAD)
        nn.init.normal_(self.table.weight, std=dim**-0.5)

    def forward(self, words):
        x = self.table(words) * math.sqrt(self.table.embedding_dim)
        place = torch.arange(words.shape[1])[:, None]
        rate = torch.exp(torch.arange(0, x.shape[-1], 2) * (-math.log(1e4) / x.shape[-1]))
        return x + torch.cat([(place * rate).sin(), (place * rate).cos()], -1)


class Translator(nn.Module):
    def __init__(self, words=40, dim=32, layers=2):
        super().__init__()
        self.source, self.target = Embed(words, dim), Embed(words, dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(dim)
        self.decoder = nn.ModuleList(DecoderLayer(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.generator = nn.Linear(dim, words)

    def forward(self, source, target):
        mask = (source != PAD)[:, None, None, :]
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory, mask)
        memory = self.encoder_norm(memory)
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory, causal, mask)
        return self.generator(self.norm(x))


def sentences(g):
    words = torch.randint(1, 40, (12, 11), generator=g)
    lengths = torch.randint(4, 12, (12, 1), generator=g)
    words = words.masked_fill(torch.arange(11) >= lengths, PAD)
    return words, words.flip(1).roll(1, 1)[:, :9].contiguous()


model = Translator()
model = prepare(model, [*model.encoder, *model.decoder])
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.05 * min((step + 1) ** -0.5, (step + 1) * 8**-1.5)
)
for parts in batches(sentences):
    optimizer.zero_grad()
    total = torch.tensor(sum(int((target[:, 1:] != PAD).sum()) for _, target in parts))
    if world > 1:
        dist.all_reduce(total)
    for source, target in parts:
        with autocast():
            logits = model(source, target[:, :-1])
        loss = F.cross_entropy(
            logits.float().flatten(0, 1),
            target[:, 1:].flatten(),
            ignore_index=PAD,
            label_smoothing=0.1,
            reduction="sum",
        )
        scaler.scale(loss * world / total).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
