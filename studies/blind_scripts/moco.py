"""Momentum contrast: a query encoder, a key encoder that follows it, and a queue of keys."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, planes)
        self.downsample = nn.Identity()
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.GroupNorm(4, planes)
            )

    def forward(self, x):
        identity = self.downsample(x)
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + identity)


class Encoder(nn.Module):
    def __init__(self, width=16, dim=32):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, width)
        self.layer1 = BasicBlock(width, width, 1)
        self.layer2 = BasicBlock(width, 2 * width, 2)
        self.layer3 = BasicBlock(2 * width, 4 * width, 2)
        self.fc = nn.Sequential(
            nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, dim)
        )

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean(dim=(2, 3)))


class MoCo(nn.Module):
    def __init__(self, dim=32, K=64, m=0.9, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = Encoder(dim=dim)
        self.encoder_k = Encoder(dim=dim)
        for param_q, param_k in zip(
            self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
        ):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum_update_key_encoder(self):
        for param_q, param_k in zip(
            self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
        ):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def dequeue_and_enqueue(self, keys):
        keys = gather(keys)
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1)
        logits = logits / self.T
        return logits, k


@torch.no_grad()
def gather(keys):
    """The keys of all ranks, in the order of the images."""
    if world == 1:
        return keys
    parts = [torch.zeros_like(keys) for _ in range(world)]
    dist.all_gather(parts, keys.contiguous())
    return torch.stack(parts, dim=1).flatten(0, 1)


def two_crops(g):
    images = torch.randn(16, 3, 16, 16, generator=g)
    jitter = 0.7 + 0.6 * torch.rand(2, 16, 3, 1, 1, generator=g)
    noise = 0.3 * torch.randn(2, *images.shape, generator=g)
    first = images * jitter[0] + noise[0]
    second = images.flip(-1) * jitter[1] + noise[1]
    return first, second


moco = MoCo()
model = prepare(moco)
optimizer = torch.optim.SGD(moco.encoder_q.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * step / 20))
)
criterion = nn.CrossEntropyLoss()
for parts in batches(two_crops):
    moco.momentum_update_key_encoder()
    optimizer.zero_grad()
    keys = []
    for im_q, im_k in parts:
        with autocast():
            logits, k = model(im_q, im_k)
            loss = criterion(logits, torch.zeros(len(logits), dtype=torch.long))
        keys.append(k.float())
        scaler.scale(loss / args.accum).backward()
    moco.dequeue_and_enqueue(torch.cat(keys))
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
