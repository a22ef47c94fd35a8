"""MLP-Mixer on patches: token and channel mixing, stochastic depth, label smoothing, AdamW."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

CLASSES, SIZE, PATCH, BATCH = 12, 32, 4, 12
HIDDEN, TOKENS_MLP, CHANNELS_MLP, LAYERS = 48, 32, 128, 5
SMOOTHING, BASE_LR, WARMUP, TOTAL = 0.1, 2e-3, 2, 40


class StochasticDepth(nn.Module):
    """Leaves a branch out for some rows."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        survival = 1.0 - self.p
        noise = torch.empty(x.shape[0], 1, 1).bernoulli_(survival)
        return x * noise / survival


class MlpBlock(nn.Module):
    def __init__(self, dim, mlp_dim):
        super().__init__()
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(mlp_dim, dim)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class MixerBlock(nn.Module):
    def __init__(self, num_patches, dim, tokens_mlp_dim, channels_mlp_dim, drop_path):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp_tokens = MlpBlock(num_patches, tokens_mlp_dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp_channels = MlpBlock(dim, channels_mlp_dim)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x):
        y = self.norm1(x)
        y = y.transpose(1, 2)
        y = self.mlp_tokens(y)
        y = y.transpose(1, 2)
        x = x + self.drop_path(y)
        y = self.norm2(x)
        y = self.mlp_channels(y)
        return x + self.drop_path(y)


class PatchEmbed(nn.Module):
    def __init__(self, patch, channels, dim):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)

    def forward(self, x):
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2)


class MlpMixer(nn.Module):
    def __init__(self, drop_path_rate=0.0):
        super().__init__()
        num_patches = (SIZE // PATCH) ** 2
        self.stem = PatchEmbed(PATCH, 3, HIDDEN)
        rates = torch.linspace(0, drop_path_rate, LAYERS).tolist()
        self.blocks = nn.ModuleList(
            MixerBlock(num_patches, HIDDEN, TOKENS_MLP, CHANNELS_MLP, rate) for rate in rates
        )
        self.norm = nn.LayerNorm(HIDDEN, eps=1e-6)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.init_weights()

    def init_weights(self):
        torch.manual_seed(1)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                nn.init.normal_(m.bias, std=1e-3)
        nn.init.trunc_normal_(self.head.weight, std=0.1)
        nn.init.kaiming_normal_(self.stem.proj.weight, mode="fan_in", nonlinearity="linear")
        nn.init.zeros_(self.stem.proj.bias)

    def forward_features(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x):
        x = self.forward_features(x)
        x = x.mean(dim=1)
        return self.head(x)


class LabelSmoothingCrossEntropy(nn.Module):
    def __init__(self, smoothing):
        super().__init__()
        self.smoothing, self.confidence = smoothing, 1.0 - smoothing

    def forward(self, x, target):
        logprobs = F.log_softmax(x, dim=-1)
        nll_loss = -logprobs.gather(dim=-1, index=target.unsqueeze(1)).squeeze(1)
        smooth_loss = -logprobs.mean(dim=-1)
        loss = self.confidence * nll_loss + self.smoothing * smooth_loss
        return loss.mean()


def textures(g):
    """Gratings of a class's direction, frequency and colour; flipped and cropped at random."""
    target = torch.randint(0, CLASSES, (BATCH,), generator=g)
    fixed = torch.Generator().manual_seed(9)
    directions = torch.rand(CLASSES, generator=fixed) * math.pi
    frequencies = 0.3 + 0.7 * torch.rand(CLASSES, generator=fixed)
    colours = torch.rand(CLASSES, 3, generator=fixed)
    rows, columns = torch.meshgrid(torch.arange(40.0), torch.arange(40.0), indexing="ij")
    angle = directions[target][:, None, None]
    waves = rows * angle.sin() + columns * angle.cos()
    phase = 2 * math.pi * torch.rand(BATCH, 1, 1, generator=g)
    waves = 0.5 + 0.5 * torch.sin(frequencies[target][:, None, None] * waves + phase)
    images = waves[:, None] * colours[target][:, :, None, None]
    images = (images + 0.1 * torch.randn(BATCH, 3, 40, 40, generator=g)).clamp(0, 1)
    crops = []
    for image in images:
        top, left = torch.randint(0, 40 - SIZE + 1, (2,), generator=g).tolist()
        image = image[:, top : top + SIZE, left : left + SIZE]
        crops.append(image.flip(2) if torch.rand(1, generator=g) < 0.5 else image)
    return (torch.stack(crops) - 0.5) / 0.5, target


def param_groups(net, weight_decay):
    """Biases and norms do not decay."""
    decay, no_decay = [], []
    for name, p in net.named_parameters():
        skip = name.endswith(".bias") or "norm" in name
        (no_decay if skip else decay).append(p)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


def warmup_cosine(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))


net = MlpMixer(drop_path_rate=args.dropout)
model = prepare(net, net.blocks)
optimizer = torch.optim.AdamW(param_groups(net, weight_decay=0.1), lr=BASE_LR, eps=1e-6)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)
criterion = LabelSmoothingCrossEntropy(SMOOTHING)
for parts in batches(textures):
    for images, target in parts:
        with autocast():
            output = model(images)
        loss = criterion(output.float(), target)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
