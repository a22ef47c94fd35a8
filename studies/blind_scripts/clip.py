"""Two towers, images and captions, drawn together by a contrastive loss with a temperature."""

import math

import torch.distributed.nn.functional as distnn
import torch.nn.functional as F
from common import autocast, batches, finish, nn, prepare, scaler, torch, world


class Image(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.place = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.layer = nn.TransformerEncoderLayer(
            dim, 4, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        return self.norm(self.layer(x)).mean(1)


class Text(nn.Module):
    def __init__(self, dim, words=30):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, words):
        x, _ = self.gru(self.embed(words))
        return self.norm(x)[torch.arange(len(words)), words.argmax(-1)]


class Clip(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image, self.text = Image(dim), Text(dim)
        self.image_proj = nn.Linear(dim, dim, bias=False)
        self.text_proj = nn.Linear(dim, dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, words):
        a = F.normalize(self.image_proj(self.image(images)), dim=-1)
        b = F.normalize(self.text_proj(self.text(words)), dim=-1)
        return a, b, self.logit_scale.exp()


def together(x):
    return torch.stack(distnn.all_gather(x), 1).flatten(0, 1) if world > 1 else x


def pairs(g):
    words = torch.randint(1, 28, (8, 6), generator=g)
    words[torch.arange(8), torch.randint(1, 6, (8,), generator=g)] = 29
    return torch.randn(8, 3, 16, 16, generator=g), words


model = prepare(Clip())
plain = [p for n, p in model.named_parameters() if p.dim() > 1]
free = [p for n, p in model.named_parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": plain, "weight_decay": 0.2}, {"params": free, "weight_decay": 0.0}],
    lr=1e-3,
    betas=(0.9, 0.98),
    eps=1e-6,
)
for parts in batches(pairs):
    for images, words in parts:
        with autocast():
            a, b, scale = model(images, words)
        a, b = together(a.float()), together(b.float())
        logits = scale * a @ b.T
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("logit_scale"):
                value.clamp_(0, math.log(100))
finish()
