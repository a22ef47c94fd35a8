"""DINO: a student learns from an averaged teacher over several crops; centring and sharpening."""

import math
from copy import deepcopy

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

GLOBAL, LOCAL, N_LOCAL, PATCH, OUT_DIM, EPOCH = 24, 16, 3, 4, 48, 20


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.proj = nn.Conv2d(3, embed_dim, kernel_size=PATCH, stride=PATCH)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    def __init__(self, embed_dim=48, depth=3, num_heads=3):
        super().__init__()
        self.grid = GLOBAL // PATCH
        self.patch_embed = PatchEmbed(embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid**2 + 1, embed_dim))
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=0.2)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def interpolate_pos_encoding(self, x, h, w):
        if h == self.grid and w == self.grid:
            return self.pos_embed
        class_pos_embed = self.pos_embed[:, :1]
        patch_pos_embed = self.pos_embed[:, 1:].reshape(1, self.grid, self.grid, -1)
        patch_pos_embed = F.interpolate(
            patch_pos_embed.permute(0, 3, 1, 2), size=(h, w), mode="bilinear", align_corners=False
        )
        patch_pos_embed = patch_pos_embed.permute(0, 2, 3, 1).flatten(1, 2)
        return torch.cat((class_pos_embed, patch_pos_embed), dim=1)

    def forward(self, x):
        h, w = x.shape[2] // PATCH, x.shape[3] // PATCH
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.interpolate_pos_encoding(x, h, w)
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x)[:, 0]


class NormalizedLinear(nn.Module):
    """weight_norm with its gain fixed at 1."""

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.weight_v = nn.Parameter(torch.empty(out_dim, in_dim))
        nn.init.trunc_normal_(self.weight_v, std=0.02)

    def forward(self, x):
        weight = self.weight_v / self.weight_v.norm(dim=1, keepdim=True)
        return F.linear(x, weight)


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim, hidden_dim=64, bottleneck_dim=24):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, bottleneck_dim),
        )
        self.last_layer = NormalizedLinear(bottleneck_dim, out_dim)

    def forward(self, x):
        x = self.mlp(x)
        x = F.normalize(x, dim=-1, p=2)
        return self.last_layer(x)


class MultiCropWrapper(nn.Module):
    """Runs the backbone once for each resolution, and the head once for all crops."""

    def __init__(self):
        super().__init__()
        self.backbone = VisionTransformer()
        self.head = DINOHead(48, OUT_DIM)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.1)
                nn.init.zeros_(module.bias)

    def forward(self, crops):
        sizes = [crop.shape[-1] for crop in crops]
        output, start = [], 0
        while start < len(crops):
            end = start + sizes.count(sizes[start])
            output.append(self.backbone(torch.cat(crops[start:end])))
            start = end
        return self.head(torch.cat(output))


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops, student_temp=0.1, teacher_temp=0.04, center_momentum=0.9):
        super().__init__()
        self.ncrops = ncrops
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        student_out = student_output.float() / self.student_temp
        student_out = student_out.chunk(self.ncrops)
        teacher_out = F.softmax((teacher_output.float() - self.center) / self.teacher_temp, dim=-1)
        teacher_out = teacher_out.detach().chunk(2)
        total_loss, n_loss_terms = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                loss = torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1)
                total_loss += loss.mean()
                n_loss_terms += 1
        return total_loss / n_loss_terms

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output.float(), dim=0, keepdim=True)
        count = len(teacher_output)
        if world > 1:
            dist.all_reduce(batch_center)
            count = count * world
        batch_center = batch_center / count
        self.center.mul_(self.center_momentum).add_(batch_center * (1 - self.center_momentum))


def get_params_groups(model):
    regularized, not_regularized = [], []
    for name, param in model.named_parameters():
        if name.endswith(".bias") or param.ndim == 1:
            not_regularized.append(param)
        else:
            regularized.append(param)
    return [{"params": regularized}, {"params": not_regularized, "weight_decay": 0.0}]


@torch.no_grad()
def clip_gradients(model, clip):
    """Clips the gradient of each parameter by its own norm."""
    for p in model.parameters():
        if p.grad is not None:
            norm = torch.as_tensor(full(p.grad).norm())
            clip_coef = clip / (norm + 1e-6)
            if clip_coef < 1:
                p.grad.mul_(clip_coef)


def cancel_gradients_last_layer(epoch, model, freeze_last_layer):
    if epoch >= freeze_last_layer:
        return
    for name, p in model.named_parameters():
        if "last_layer" in name:
            p.grad = None


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def cosine(base, final, step):
    return final + 0.5 * (base - final) * (1 + math.cos(math.pi * step / (2 * EPOCH)))


def augment(g):
    """Two large crops and some small ones of each picture, their colours jittered."""
    images = torch.rand(8, 3, 32, 32, generator=g)
    images = images + 0.5 * F.interpolate(torch.rand(8, 3, 4, 4, generator=g), scale_factor=8)
    crops = []
    for size in [GLOBAL] * 2 + [LOCAL] * N_LOCAL:
        top, left = torch.randint(0, 32 - size + 1, (2,), generator=g).tolist()
        crop = images[:, :, top : top + size, left : left + size]
        colour = 0.6 + 0.8 * torch.rand(8, 3, 1, 1, generator=g)
        crops.append(((crop * colour) - 0.75) / 0.4)
    return tuple(crops)


student = MultiCropWrapper()
teacher = deepcopy(student).requires_grad_(False).eval()
model = prepare(student, student.backbone.blocks)
dino_loss = DINOLoss(OUT_DIM, 2 + N_LOCAL)
params_groups = get_params_groups(student)
optimizer = torch.optim.AdamW(params_groups, lr=0.0)
for it, parts in enumerate(batches(augment)):
    for i, param_group in enumerate(optimizer.param_groups):
        param_group["lr"] = cosine(1e-3, 1e-5, it)
        if i == 0:
            param_group["weight_decay"] = cosine(0.04, 0.4, it)
    optimizer.zero_grad()
    teacher_outputs = []
    for crops in parts:
        with autocast():
            with torch.no_grad():
                teacher_output = teacher(crops[:2])
            student_output = model(crops)
        loss = dino_loss(student_output, teacher_output)
        teacher_outputs.append(teacher_output)
        scaler.scale(loss / args.accum).backward()
    dino_loss.update_center(torch.cat(teacher_outputs))
    scaler.unscale_(optimizer)
    clip_gradients(student, 0.3)
    cancel_gradients_last_layer(it // EPOCH, student, freeze_last_layer=1)
    scaler.step(optimizer)
    scaler.update()
    m = cosine(0.9, 1.0, it)
    with torch.no_grad():
        for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
            param_k.mul_(m).add_((1 - m) * full(param_q.detach()))
finish()
