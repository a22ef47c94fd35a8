"""A Swin transformer as timm writes it, distilled from a ConvNeXt with temperature."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

CLASSES, SIZE, WINDOW = 10, 32, 4


def window_partition(x, window_size):
    B, H, W, C = x.shape
    x = x.view(B, H // window_size, window_size, W // window_size, window_size, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window_size * window_size, C)


def window_reverse(windows, window_size, H, W):
    C = windows.shape[-1]
    x = windows.view(-1, H // window_size, W // window_size, window_size, window_size, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, H, W, C)


def relative_position_index(size):
    coords = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"))
    coords = coords.flatten(1)
    relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += size - 1
    relative[:, :, 1] += size - 1
    relative[:, :, 0] *= 2 * size - 1
    return relative.sum(-1)


class WindowAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * WINDOW - 1) ** 2, num_heads)
        )
        self.register_buffer("relative_position_index", relative_position_index(WINDOW))
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.3)

    def _get_rel_pos_bias(self):
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        bias = bias.view(WINDOW * WINDOW, WINDOW * WINDOW, -1)
        return bias.permute(2, 0, 1).contiguous().unsqueeze(0)

    def forward(self, x, mask):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn + self._get_rel_pos_bias()
        if mask is not None:
            num_win = mask.shape[0]
            attn = attn.view(-1, num_win, self.num_heads, N, N)
            attn = attn + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.drop = nn.Dropout(args.dropout)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.fc2(self.drop(self.act(self.fc1(x))))


class SwinTransformerBlock(nn.Module):
    def __init__(self, dim, resolution, num_heads, shift_size):
        super().__init__()
        self.shift_size = shift_size
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)
        self.register_buffer("attn_mask", self.make_mask(resolution) if shift_size else None)

    def make_mask(self, resolution):
        img_mask = torch.zeros(1, resolution, resolution, 1)
        cnt = 0
        slices = (
            slice(0, -WINDOW),
            slice(-WINDOW, -self.shift_size),
            slice(-self.shift_size, None),
        )
        for h in slices:
            for w in slices:
                img_mask[:, h, w, :] = cnt
                cnt += 1
        windows = window_partition(img_mask, WINDOW).squeeze(-1)
        different = windows.unsqueeze(1) - windows.unsqueeze(2)
        return different.masked_fill(different != 0, -100.0)

    def _attn(self, x):
        _, H, W, _ = x.shape
        if self.shift_size:
            x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        windows = self.attn(window_partition(x, WINDOW), self.attn_mask)
        x = window_reverse(windows, WINDOW, H, W)
        if self.shift_size:
            x = torch.roll(x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        return x

    def forward(self, x):
        x = x + self._attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x):
        B, H, W, C = x.shape
        x = x.reshape(B, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


class SwinTransformer(nn.Module):
    def __init__(self, embed_dim=32, depths=(2, 2), num_heads=(2, 4)):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, embed_dim, 2, stride=2)
        self.patch_norm = nn.LayerNorm(embed_dim)
        self.layers = nn.ModuleList()
        dim, resolution = embed_dim, SIZE // 2
        for i, depth in enumerate(depths):
            layer = []
            if i > 0:
                layer.append(PatchMerging(dim))
                dim, resolution = dim * 2, resolution // 2
            for j in range(depth):
                shift_size = 0 if j % 2 == 0 else WINDOW // 2
                layer.append(SwinTransformerBlock(dim, resolution, num_heads[i], shift_size))
            self.layers.append(nn.Sequential(*layer))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x):
        x = self.patch_norm(self.patch_embed(x).permute(0, 2, 3, 1))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x).mean(dim=(1, 2))
        return self.head(x)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 0.5))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.drop(self.pwconv2(F.gelu(self.pwconv1(self.norm(x)))))
        return shortcut + (self.gamma * x).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """The teacher."""

    def __init__(self, dim=32):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 4, stride=4)
        self.blocks = nn.Sequential(ConvNeXtBlock(dim), ConvNeXtBlock(dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)
        nn.init.normal_(self.head.weight, std=1.0)

    def forward(self, x):
        x = self.blocks(self.stem(x)).mean((-2, -1))
        return self.head(self.norm(x))


def distillation_loss(student, teacher, T=4.0):
    soft_student = F.log_softmax(student / T, dim=-1)
    soft_teacher = F.log_softmax(teacher / T, dim=-1)
    kl = F.kl_div(soft_student, soft_teacher, reduction="batchmean", log_target=True)
    return kl * T**2


def loader(g):
    """Half of a picture's rows come from another one (CutMix), in its share of the target."""
    images = torch.rand(12, 3, SIZE, SIZE, generator=g)
    labels = torch.randint(0, CLASSES, (12,), generator=g)
    images = images + labels[:, None, None, None] / 20
    images = (images - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / 0.225
    rows = int(torch.randint(4, 20, (1,), generator=g))
    lam = 1.0 - rows / SIZE
    images[:, :, :rows] = images.flip(0)[:, :, :rows]
    targets = F.one_hot(labels, CLASSES).float()
    targets = targets * lam + targets.flip(0) * (1.0 - lam)
    return images, targets


def soft_target_cross_entropy(logits, targets):
    return torch.sum(-targets * F.log_softmax(logits, dim=-1), dim=-1).mean()


teacher = ConvNeXt().eval().requires_grad_(False)
net = SwinTransformer()
model = prepare(net, net.layers)
decay, no_decay = [], []
for name, parameter in net.named_parameters():
    skipped = parameter.ndim == 1 or "relative_position_bias_table" in name
    (no_decay if skipped else decay).append(parameter)
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3
)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * step / 20))
)
for parts in batches(loader):
    optimizer.zero_grad()
    for images, targets in parts:
        with autocast():
            with torch.no_grad():
                teacher_logits = teacher(images)
            logits = model(images)
        hard = soft_target_cross_entropy(logits.float(), targets)
        soft = distillation_loss(logits.float(), teacher_logits.float())
        loss = (0.3 * hard + 0.7 * soft) / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
