"""A RetNet language model: retention in parallel form, decays by head, group norms, SwiGLU."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

VOCAB, LENGTH, BATCH = 80, 48, 8
DIM, HEADS, LAYERS, FFN_DIM = 48, 4, 3, 96
WARMUP_STEPS, TOTAL_STEPS = 2, 40


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_every_two(x):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def theta_shift(x, sin, cos):
    return x * cos + rotate_every_two(x) * sin


class RetNetRelPos(nn.Module):
    """Angles of the positions, and how much each head forgets between two of them."""

    def __init__(self, head_dim):
        super().__init__()
        angle = 1.0 / (1000 ** torch.linspace(0, 1, head_dim // 2))
        angle = angle.unsqueeze(-1).repeat(1, 2).flatten()
        decay = torch.log(1 - 2.0 ** (-2 - torch.arange(HEADS, dtype=torch.float)))
        self.register_buffer("angle", angle)
        self.register_buffer("decay", decay)

    def forward(self, slen):
        index = torch.arange(slen).float()
        sin = torch.sin(index[:, None] * self.angle[None, :])
        cos = torch.cos(index[:, None] * self.angle[None, :])
        distance = index[:, None] - index[None, :]
        mask = torch.exp(distance.clamp(min=0) * self.decay[:, None, None])
        mask = mask.masked_fill(distance < 0, 0.0)
        mask = mask / mask.sum(dim=-1, keepdim=True).sqrt()
        return sin, cos, mask


class MultiScaleRetention(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.head_dim = embed_dim // HEADS
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.g_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.group_norm = nn.GroupNorm(HEADS, embed_dim, eps=1e-5)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.g_proj):
            nn.init.xavier_uniform_(layer.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)

    def forward(self, x, rel_pos):
        bsz, tgt_len, embed_dim = x.size()
        sin, cos, inner_mask = rel_pos
        q = self.q_proj(x)
        k = self.k_proj(x) * self.scaling
        v = self.v_proj(x)
        g = self.g_proj(x)
        q = q.view(bsz, tgt_len, HEADS, self.head_dim).transpose(1, 2)
        k = k.view(bsz, tgt_len, HEADS, self.head_dim).transpose(1, 2)
        v = v.view(bsz, tgt_len, HEADS, self.head_dim).transpose(1, 2)
        qr, kr = theta_shift(q, sin, cos), theta_shift(k, sin, cos)
        qk_mat = torch.matmul(qr, kr.transpose(-1, -2))
        qk_mat = qk_mat * inner_mask
        output = torch.matmul(qk_mat, v).transpose(1, 2)
        output = self.group_norm(output.reshape(bsz * tgt_len, embed_dim))
        output = output.view(bsz, tgt_len, embed_dim)
        return self.out_proj(F.silu(g) * output)


class GLU(nn.Module):
    def __init__(self, embed_dim, ffn_dim):
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, ffn_dim, bias=False)
        self.gate = nn.Linear(embed_dim, ffn_dim, bias=False)
        self.fc2 = nn.Linear(ffn_dim, embed_dim, bias=False)
        self.activation_dropout = nn.Dropout(args.dropout)
        for layer in (self.fc1, self.gate, self.fc2):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x):
        g = F.silu(self.gate(x))
        x = self.fc1(x) * g
        return self.fc2(self.activation_dropout(x))


class DecoderLayer(nn.Module):
    def __init__(self, embed_dim, ffn_dim):
        super().__init__()
        self.retention = MultiScaleRetention(embed_dim)
        self.retention_layer_norm = RMSNorm(embed_dim)
        self.ffn = GLU(embed_dim, ffn_dim)
        self.final_layer_norm = RMSNorm(embed_dim)
        self.dropout_module = nn.Dropout(args.dropout)

    def forward(self, x, retention_rel_pos):
        residual = x
        x = self.retention_layer_norm(x)
        x = self.retention(x, retention_rel_pos)
        x = residual + self.dropout_module(x)
        residual = x
        x = self.final_layer_norm(x)
        x = self.ffn(x)
        return residual + self.dropout_module(x)


class RetNetDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.embed_tokens.weight, std=DIM**-0.5)
        self.layernorm_embedding = RMSNorm(DIM)
        self.retnet_rel_pos = RetNetRelPos(DIM // HEADS)
        self.layers = nn.ModuleList(DecoderLayer(DIM, FFN_DIM) for _ in range(LAYERS))
        self.layer_norm = RMSNorm(DIM)
        self.output_projection = nn.Linear(DIM, VOCAB, bias=False)
        nn.init.normal_(self.output_projection.weight, std=DIM**-0.5)
        self.dropout_module = nn.Dropout(args.dropout)

    def forward(self, prev_output_tokens):
        x = self.layernorm_embedding(self.embed_tokens(prev_output_tokens))
        x = self.dropout_module(x)
        rel_pos = self.retnet_rel_pos(prev_output_tokens.size(1))
        for layer in self.layers:
            x = layer(x, rel_pos)
        return self.output_projection(self.layer_norm(x))


def sentences(g):
    """A chain of words: each has a few likely successors, and an earlier stretch comes again."""
    successors = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(2))
    words = torch.randint(0, VOCAB, (BATCH,), generator=g)
    text = [words]
    for _ in range(LENGTH):
        chosen = successors[words, torch.randint(0, 4, (BATCH,), generator=g)]
        surprise = torch.randint(0, VOCAB, (BATCH,), generator=g)
        words = torch.where(torch.rand(BATCH, generator=g) < 0.1, surprise, chosen)
        text.append(words)
    text = torch.stack(text, dim=1)
    text[:, 32:44] = text[:, 8:20]
    return text[:, :-1], text[:, 1:]


def rate(step):
    """Rises linearly, then falls linearly to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return max(0.0, (TOTAL_STEPS - step) / (TOTAL_STEPS - WARMUP_STEPS))


net = RetNetDecoder()
model = prepare(net, net.layers)
matrices = [p for p in net.parameters() if p.ndim > 1]
vectors = [p for p in net.parameters() if p.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
    lr=3e-3,
    betas=(0.9, 0.98),
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
for parts in batches(sentences):
    for tokens, targets in parts:
        with autocast():
            logits = model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / math.log(2)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
