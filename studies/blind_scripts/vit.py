"""A vision transformer as timm writes it: class token, layer scale, drop path, layer-wise rates, mixup."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

MEAN, STD, CLASSES = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 10


def drop_path(x, drop_prob, training):
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep_prob)
    return x * mask.div_(keep_prob)


class DropPath(nn.Module):
    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)


class PatchEmbed(nn.Module):
    def __init__(self, img_size=24, patch_size=4, in_chans=3, embed_dim=64):
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class LayerScale(nn.Module):
    def __init__(self, dim, init_values):
        super().__init__()
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        return x * self.gamma


class Attention(nn.Module):
    def __init__(self, dim, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x):
        return self.fc2(self.drop(self.act(self.fc1(x))))


class Block(nn.Module):
    def __init__(self, dim, init_values=0.1, path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim)
        self.ls1 = LayerScale(dim, init_values)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim)
        self.ls2 = LayerScale(dim, init_values)
        self.drop_path = DropPath(path)

    def forward(self, x):
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        x = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        return x


class VisionTransformer(nn.Module):
    def __init__(self, embed_dim=64, depth=4):
        super().__init__()
        self.patch_embed = PatchEmbed(embed_dim=embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches + 1, embed_dim))
        self.blocks = nn.Sequential(*(Block(embed_dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, CLASSES)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.2)
        nn.init.trunc_normal_(self.head.weight, std=0.02)

    def _pos_embed(self, x):
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x + self.pos_embed

    def forward_features(self, x):
        x = self._pos_embed(self.patch_embed(x))
        return self.norm(self.blocks(x))

    def forward_head(self, x):
        return self.head(x[:, 0])

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def mixup(images, labels, lam):
    target = F.one_hot(labels, CLASSES).float() * 0.9 + 0.1 / CLASSES
    mixed = images * lam + images.flip(0) * (1.0 - lam)
    return mixed, target * lam + target.flip(0) * (1.0 - lam)


def loader(g):
    images = torch.randint(0, 256, (16, 3, 24, 24), generator=g, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (16,), generator=g)
    images = images.float() / 255 + labels[:, None, None, None] / 20
    images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return mixup(images, labels, lam=0.3)


def layer_id(name, depth):
    if name in ("cls_token", "pos_embed") or name.startswith("patch_embed"):
        return 0
    if name.startswith("blocks"):
        return int(name.split(".")[1]) + 1
    return depth + 1


def param_groups(model, lr, weight_decay=0.05, decay=0.65):
    depth, groups = len(model.blocks), []
    for name, p in model.named_parameters():
        no_decay = p.ndim <= 1 or name in ("cls_token", "pos_embed")
        scale = decay ** (depth + 1 - layer_id(name, depth))
        groups.append(
            {"params": [p], "lr": lr * scale, "weight_decay": 0.0 if no_decay else weight_decay}
        )
    return groups


net = VisionTransformer()
model = prepare(net, net.blocks)
optimizer = torch.optim.AdamW(param_groups(net, 1e-3))
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 10))
)
for parts in batches(loader):
    for images, targets in parts:
        with autocast():
            output = model(images)
            loss = torch.sum(-targets * F.log_softmax(output.float(), dim=-1), dim=-1).mean()
        scaler.scale(loss / args.accum).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
finish()
