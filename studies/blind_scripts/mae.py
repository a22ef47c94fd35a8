"""A masked autoencoder: a ViT sees a quarter of a picture's patches, a small decoder the rest."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch, world

SIZE, PATCH, BATCH, MASK_RATIO = 32, 4, 16, 0.75
GRID = SIZE // PATCH
ITERS_PER_EPOCH, WARMUP_EPOCHS, EPOCHS = 4, 1, 8


def get_1d_sincos_pos_embed_from_grid(embed_dim, pos):
    omega = torch.arange(embed_dim // 2) / (embed_dim / 2.0)
    omega = 1.0 / 10000**omega
    out = pos.reshape(-1)[:, None] * omega[None, :]
    return torch.cat([torch.sin(out), torch.cos(out)], dim=1)


def get_2d_sincos_pos_embed(embed_dim, grid_size):
    """Half of the dimensions tell the row, half the column; the class token's are zeros."""
    grid = torch.arange(grid_size).float()
    grid_w, grid_h = torch.meshgrid(grid, grid, indexing="xy")
    emb_h = get_1d_sincos_pos_embed_from_grid(embed_dim // 2, grid_h)
    emb_w = get_1d_sincos_pos_embed_from_grid(embed_dim // 2, grid_w)
    pos_embed = torch.cat([emb_h, emb_w], dim=1)
    return torch.cat([torch.zeros(1, embed_dim), pos_embed]).unsqueeze(0)


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
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

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(dim, eps=1e-6)
        self.attention = SelfAttention(dim, num_heads)
        self.layernorm_after = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x):
        x = x + self.attention(self.layernorm_before(x))
        return x + self.mlp(self.layernorm_after(x))


class Embeddings(nn.Module):
    """Patches with their positions, of which each picture keeps those with the least noise."""

    def __init__(self, dim):
        super().__init__()
        self.patch_embeddings = nn.Conv2d(3, dim, PATCH, stride=PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.register_buffer("position_embeddings", get_2d_sincos_pos_embed(dim, GRID))
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.xavier_uniform_(self.patch_embeddings.weight.data.view(dim, -1))

    def random_masking(self, sequence, noise):
        N, L, D = sequence.shape
        len_keep = int(L * (1 - MASK_RATIO))
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        sequence = torch.gather(sequence, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones(N, L)
        mask[:, :len_keep] = 0
        mask = torch.gather(mask, dim=1, index=ids_restore)
        return sequence, mask, ids_restore

    def forward(self, pixel_values, noise):
        x = self.patch_embeddings(pixel_values).flatten(2).transpose(1, 2)
        x = x + self.position_embeddings[:, 1:]
        x, mask, ids_restore = self.random_masking(x, noise)
        cls_token = self.cls_token + self.position_embeddings[:, :1]
        x = torch.cat([cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x, mask, ids_restore


class Encoder(nn.Module):
    def __init__(self, dim, depth, num_heads):
        super().__init__()
        self.layer = nn.ModuleList(Layer(dim, num_heads) for _ in range(depth))

    def forward(self, x):
        for layer_module in self.layer:
            x = layer_module(x)
        return x


class ViTMAEModel(nn.Module):
    def __init__(self, dim, depth, num_heads):
        super().__init__()
        self.embeddings = Embeddings(dim)
        self.encoder = Encoder(dim, depth, num_heads)
        self.layernorm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, pixel_values, noise):
        x, mask, ids_restore = self.embeddings(pixel_values, noise)
        return self.layernorm(self.encoder(x)), mask, ids_restore


class ViTMAEDecoder(nn.Module):
    def __init__(self, dim, decoder_dim, depth, num_heads):
        super().__init__()
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.register_buffer("decoder_pos_embed", get_2d_sincos_pos_embed(decoder_dim, GRID))
        self.decoder_layers = nn.ModuleList(Layer(decoder_dim, num_heads) for _ in range(depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, PATCH**2 * 3)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, latent, ids_restore):
        x = self.decoder_embed(latent)
        mask_tokens = self.mask_token.expand(len(x), ids_restore.shape[1] + 1 - x.shape[1], -1)
        x_ = torch.cat([x[:, 1:], mask_tokens.to(x.dtype)], dim=1)
        x_ = torch.gather(x_, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1], x_], dim=1)
        x = x + self.decoder_pos_embed
        for layer_module in self.decoder_layers:
            x = layer_module(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]


class ViTMAEForPreTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = ViTMAEModel(48, depth=3, num_heads=4)
        self.decoder = ViTMAEDecoder(48, 32, depth=2, num_heads=4)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                nn.init.zeros_(m.bias)

    def patchify(self, imgs):
        x = imgs.reshape(len(imgs), 3, GRID, PATCH, GRID, PATCH)
        x = torch.einsum("nchpwq->nhwpqc", x)
        return x.reshape(len(imgs), GRID * GRID, PATCH**2 * 3)

    def forward_loss(self, imgs, pred, mask):
        """The mean squared error of the pixels that were removed, normalised by patch."""
        target = self.patchify(imgs)
        mean = target.mean(dim=-1, keepdim=True)
        var = target.var(dim=-1, keepdim=True)
        target = (target - mean) / (var + 1.0e-6) ** 0.5
        loss = (pred.float() - target) ** 2
        loss = loss.mean(dim=-1)
        return (loss * mask).sum() / mask.sum()

    def forward(self, imgs, noise):
        latent, mask, ids_restore = self.vit(imgs, noise)
        pred = self.decoder(latent, ids_restore)
        return self.forward_loss(imgs, pred, mask)


def adjust_learning_rate(optimizer, epoch, lr, min_lr=0.0):
    if epoch < WARMUP_EPOCHS:
        lr = lr * epoch / WARMUP_EPOCHS
    else:
        progress = (epoch - WARMUP_EPOCHS) / (EPOCHS - WARMUP_EPOCHS)
        lr = min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def param_groups_weight_decay(named_parameters, weight_decay):
    decay, no_decay = [], []
    for name, param in named_parameters:
        if param.ndim <= 1 or name.endswith("_token"):
            no_decay.append(param)
        else:
            decay.append(param)
    return [
        {"params": no_decay, "weight_decay": 0.0},
        {"params": decay, "weight_decay": weight_decay},
    ]


def photos(g):
    """Smooth pictures with some grain; one in two is flipped. The noise decides what is masked."""
    images = F.interpolate(torch.rand(BATCH, 3, 7, 5, generator=g), size=(SIZE, SIZE))
    images = images + 0.3 * torch.rand(BATCH, 3, SIZE, SIZE, generator=g)
    images[::2] = images[::2].flip(-1)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (images - mean) / std, torch.rand(BATCH, GRID * GRID, generator=g)


net = ViTMAEForPreTraining()
model = prepare(net, [*net.vit.encoder.layer, *net.decoder.decoder_layers])
batch_size = BATCH // args.accum // world
eff_batch_size = batch_size * args.accum * world
lr = 0.05 * eff_batch_size / 256
param_groups = param_groups_weight_decay(net.named_parameters(), weight_decay=0.05)
optimizer = torch.optim.AdamW(param_groups, lr=lr, betas=(0.9, 0.95))
for data_iter_step, parts in enumerate(batches(photos)):
    adjust_learning_rate(optimizer, (data_iter_step + 1) / ITERS_PER_EPOCH, lr)
    for samples, noise in parts:
        with autocast():
            loss = model(samples, noise)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 3.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
finish()
