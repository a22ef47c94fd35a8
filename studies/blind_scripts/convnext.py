"""ConvNeXt on small pictures: mixup, label smoothing, stochastic depth, rates by layer, an EMA."""

import copy
import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

CLASSES, SIZE, BATCH, SMOOTHING, DECAY = 10, 32, 12, 0.1, 0.9
DEPTHS, DIMS = (1, 1, 3, 1), (16, 32, 48, 64)


class LayerNorm2d(nn.Module):
    """Over the channels of pictures whose channels come first."""

    def __init__(self, normalized_shape, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        mask = torch.rand(x.shape[0], 1, 1, 1) < keep_prob
        return x * mask / keep_prob


class Block(nn.Module):
    def __init__(self, dim, drop_path=0.0, layer_scale_init_value=0.2):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(layer_scale_init_value * torch.ones(dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return shortcut + self.drop_path(x)


class ConvNeXt(nn.Module):
    def __init__(self, drop_path_rate=0.0):
        super().__init__()
        self.downsample_layers = nn.ModuleList()
        stem = nn.Sequential(nn.Conv2d(3, DIMS[0], kernel_size=2, stride=2), LayerNorm2d(DIMS[0]))
        self.downsample_layers.append(stem)
        for i in range(3):
            downsample_layer = nn.Sequential(
                LayerNorm2d(DIMS[i]), nn.Conv2d(DIMS[i], DIMS[i + 1], kernel_size=2, stride=2)
            )
            self.downsample_layers.append(downsample_layer)
        rates = torch.linspace(0, drop_path_rate, sum(DEPTHS)).tolist()
        self.stages = nn.ModuleList()
        for i in range(4):
            stage = nn.Sequential(*[Block(DIMS[i], rates.pop(0)) for _ in range(DEPTHS[i])])
            self.stages.append(stage)
        self.norm = nn.LayerNorm(DIMS[-1], eps=1e-6)
        self.head = nn.Linear(DIMS[-1], CLASSES)
        torch.manual_seed(3)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, nn.Conv2d | nn.Linear):
            fan_in = m.weight[0].numel()
            nn.init.trunc_normal_(m.weight, std=fan_in**-0.5)
            nn.init.zeros_(m.bias)

    def forward_features(self, x):
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = downsample(x)
            x = stage(x)
        return self.norm(x.mean([-2, -1]))

    def forward(self, x):
        return self.head(self.forward_features(x))


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        loss = torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1)
        return loss.mean()


class ModelEma:
    """A slow copy of the weights, for evaluation."""

    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, weights):
        for name, ema_v in self.module.named_parameters():
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * weights[name])


def layer_of(name):
    """0 for the stem, then one for each stage, and the last for the head."""
    if name.startswith(("downsample_layers.", "stages.")):
        return int(name.split(".")[1]) + (not name.startswith("downsample_layers.0"))
    return len(DEPTHS) + 1


def pictures(g):
    """Blobs of a class's colours. Squares are erased, and about half of the rows are mixed."""
    labels = torch.randint(0, CLASSES, (BATCH,), generator=g)
    prototypes = torch.rand(CLASSES, 3, 5, 5, generator=torch.Generator().manual_seed(11))
    x = F.interpolate(prototypes[labels], size=(SIZE, SIZE), mode="bicubic")
    x = x + 0.3 * torch.randn(BATCH, 3, SIZE, SIZE, generator=g)
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    x = (x - mean) / std
    for i in range(BATCH):
        if torch.rand(1, generator=g) < 0.25:
            top, left = torch.randint(0, SIZE - 8, (2,), generator=g).tolist()
            noise = torch.randn(3, 8, 8, generator=g)
            x[i, :, top : top + 8, left : left + 8] = noise
    off = SMOOTHING / CLASSES
    targets = torch.full((BATCH, CLASSES), off).scatter(1, labels[:, None], 1 - SMOOTHING + off)
    lam = torch.rand(BATCH, generator=g) * 0.5 + 0.5
    lam = torch.where(torch.rand(BATCH, generator=g) < 0.5, lam, torch.ones(BATCH))
    x = x * lam[:, None, None, None] + x.flip(0) * (1 - lam[:, None, None, None])
    targets = targets * lam[:, None] + targets.flip(0) * (1 - lam[:, None])
    return x, targets


net = ConvNeXt(drop_path_rate=args.dropout)
model_ema = ModelEma(net, DECAY)
model = prepare(net, net.stages)
groups = {}
for name, p in net.named_parameters():
    decays = p.ndim > 1
    group = groups.setdefault((layer_of(name), decays), {"params": []})
    group["params"].append(p)
    group["lr"] = 4e-3 * 0.8 ** (len(DEPTHS) + 1 - layer_of(name))
    group["weight_decay"] = 0.05 if decays else 0.0
optimizer = torch.optim.AdamW(list(groups.values()), eps=1e-6)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 30))
)
criterion = SoftTargetCrossEntropy()
for parts in batches(pictures):
    for samples, targets in parts:
        with autocast():
            output = model(samples)
            loss = criterion(output, targets)
        loss = loss / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
    weights = {k: getattr(v, "full_tensor", v.detach)() for k, v in net.named_parameters()}
    model_ema.update(weights)
finish()
