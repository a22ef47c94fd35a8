"""An FT-Transformer on a table: every feature becomes a token, rare classes weigh more."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

ROWS, NUMERICAL, CARDINALITIES, CLASSES = 48, 7, (5, 3, 11, 2), 6
FREQUENCIES = torch.tensor([0.35, 0.25, 0.2, 0.1, 0.06, 0.04])


class NumericalFeatureTokenizer(nn.Module):
    def __init__(self, n_features, d_token):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_features, d_token))
        self.bias = nn.Parameter(torch.empty(n_features, d_token))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(d_token**-0.5), d_token**-0.5)

    def forward(self, x):
        x = self.weight[None] * x[..., None]
        return x + self.bias[None]


class CategoricalFeatureTokenizer(nn.Module):
    def __init__(self, cardinalities, d_token):
        super().__init__()
        category_offsets = torch.tensor([0, *cardinalities[:-1]]).cumsum(0)
        self.register_buffer("category_offsets", category_offsets)
        self.embeddings = nn.Embedding(sum(cardinalities), d_token)
        self.bias = nn.Parameter(torch.empty(len(cardinalities), d_token))
        for parameter in (self.embeddings.weight, self.bias):
            nn.init.uniform_(parameter, -(d_token**-0.5), d_token**-0.5)

    def forward(self, x):
        x = self.embeddings(x + self.category_offsets[None])
        return x + self.bias[None]


class FeatureTokenizer(nn.Module):
    def __init__(self, d_token):
        super().__init__()
        self.num_tokenizer = NumericalFeatureTokenizer(NUMERICAL, d_token)
        self.cat_tokenizer = CategoricalFeatureTokenizer(CARDINALITIES, d_token)

    def forward(self, x_num, x_cat):
        return torch.cat([self.num_tokenizer(x_num), self.cat_tokenizer(x_cat)], dim=1)


class CLSToken(nn.Module):
    """The last token, from which the head reads."""

    def __init__(self, d_token):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_token))
        nn.init.uniform_(self.weight, -(d_token**-0.5), d_token**-0.5)

    def forward(self, x):
        return torch.cat([x, self.weight.view(1, 1, -1).expand(len(x), 1, -1)], dim=1)


class MultiheadAttention(nn.Module):
    def __init__(self, d_token, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.W_q = nn.Linear(d_token, d_token)
        self.W_k = nn.Linear(d_token, d_token)
        self.W_v = nn.Linear(d_token, d_token)
        self.W_out = nn.Linear(d_token, d_token)
        for m in (self.W_q, self.W_k, self.W_v):
            nn.init.xavier_uniform_(m.weight, gain=1 / math.sqrt(2))
            nn.init.normal_(m.bias, std=0.02)

    def _reshape(self, x):
        batch_size, n_tokens, d = x.shape
        return x.reshape(batch_size, n_tokens, self.n_heads, d // self.n_heads).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)
        d_head_key = k.shape[-1] // self.n_heads
        q, k, v = self._reshape(q), self._reshape(k), self._reshape(v)
        attention_logits = q @ k.transpose(-1, -2) / math.sqrt(d_head_key)
        attention_probs = F.softmax(attention_logits, dim=-1)
        x = (attention_probs @ v).transpose(1, 2).flatten(2)
        return self.W_out(x)


class ReGLU(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        return a * F.relu(b)


class FFN(nn.Module):
    def __init__(self, d_token, d_hidden):
        super().__init__()
        self.linear_first = nn.Linear(d_token, 2 * d_hidden)
        self.activation = ReGLU()
        self.dropout = nn.Dropout(args.dropout)
        self.linear_second = nn.Linear(d_hidden, d_token)

    def forward(self, x):
        return self.linear_second(self.dropout(self.activation(self.linear_first(x))))


class Block(nn.Module):
    """Norms come first, but not before the first attention."""

    def __init__(self, d_token, n_heads, layer_idx):
        super().__init__()
        if layer_idx > 0:
            self.attention_normalization = nn.LayerNorm(d_token)
        self.attention = MultiheadAttention(d_token, n_heads)
        self.attention_residual_dropout = nn.Dropout(args.dropout)
        self.ffn_normalization = nn.LayerNorm(d_token)
        self.ffn = FFN(d_token, int(d_token * 4 / 3))

    def forward(self, x):
        residual = x
        if hasattr(self, "attention_normalization"):
            residual = self.attention_normalization(residual)
        residual = self.attention(residual)
        x = x + self.attention_residual_dropout(residual)
        residual = self.ffn(self.ffn_normalization(x))
        return x + residual


class Head(nn.Module):
    def __init__(self, d_token, d_out):
        super().__init__()
        self.normalization = nn.LayerNorm(d_token)
        self.linear = nn.Linear(d_token, d_out)

    def forward(self, x):
        x = x[:, -1]
        return self.linear(F.relu(self.normalization(x)))


class Transformer(nn.Module):
    def __init__(self, d_token, n_blocks, n_heads, d_out):
        super().__init__()
        self.blocks = nn.ModuleList(Block(d_token, n_heads, i) for i in range(n_blocks))
        self.head = Head(d_token, d_out)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FTTransformer(nn.Module):
    def __init__(self, d_token=48, n_blocks=3, n_heads=4):
        super().__init__()
        self.feature_tokenizer = FeatureTokenizer(d_token)
        self.cls_token = CLSToken(d_token)
        self.transformer = Transformer(d_token, n_blocks, n_heads, CLASSES)

    def optimization_param_groups(self):
        no_wd_names = ["feature_tokenizer", "normalization", ".bias"]

        def needs_wd(name):
            return all(x not in name for x in no_wd_names)

        return [
            {"params": [p for n, p in self.named_parameters() if needs_wd(n)]},
            {
                "params": [p for n, p in self.named_parameters() if not needs_wd(n)],
                "weight_decay": 0.0,
            },
        ]

    def forward(self, x_num, x_cat):
        x = self.feature_tokenizer(x_num, x_cat)
        x = self.cls_token(x)
        return self.transformer(x)


def table(g):
    """Rows of a table; its skewed columns are logarithms, all are standardised."""
    x_num = torch.rand(ROWS, NUMERICAL, generator=g) * (torch.arange(NUMERICAL) + 1) * 20
    x_num[:, ::2] = torch.log1p(x_num[:, ::2])
    x_num = (x_num - x_num.mean(dim=0)) / x_num.std(dim=0)
    x_cat = torch.stack([torch.randint(0, c, (ROWS,), generator=g) for c in CARDINALITIES], 1)
    y = torch.multinomial(FREQUENCIES, ROWS, replacement=True, generator=g)
    return x_num, x_cat, y


def weighted_cross_entropy(logits, y, smoothing=0.1):
    """Each row's loss with smoothed labels, and its weight: the balanced one of its class."""
    class_weight = 1.0 / (CLASSES * FREQUENCIES)
    log_prob = F.log_softmax(logits, dim=-1)
    nll = -log_prob.gather(1, y[:, None]).squeeze(1)
    smooth = -log_prob.mean(dim=-1)
    loss = (1.0 - smoothing) * nll + smoothing * smooth
    return loss, class_weight[y]


net = FTTransformer()
model = prepare(net, net.transformer.blocks)
optimizer = torch.optim.AdamW(net.optimization_param_groups(), lr=3e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=3e-3, total_steps=12, pct_start=0.25, div_factor=4.0
)
for parts in batches(table):
    optimizer.zero_grad()
    total_weight = sum((1.0 / (CLASSES * FREQUENCIES))[y].sum() for _, _, y in parts)
    if world > 1:
        dist.all_reduce(total_weight)
    for x_num, x_cat, y in parts:
        with autocast():
            logits = model(x_num, x_cat)
        loss, weight = weighted_cross_entropy(logits.float(), y)
        loss = (loss * weight).sum() * world / total_weight
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
