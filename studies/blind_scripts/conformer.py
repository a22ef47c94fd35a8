"""A Conformer with CTC as NeMo and torchaudio write it: subsampling, relative positions, InterCTC."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

BLANK, VOCAB, FRAMES, MELS, LABELS = 0, 32, 80, 32, 10


def subsampled(lengths):
    for _ in range(2):
        lengths = torch.div(lengths - 3, 2, rounding_mode="floor") + 1
    return lengths


class ConvSubsampling(nn.Module):
    def __init__(self, d_model, channels=16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, stride=2)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=2)
        self.out = nn.Linear(channels * (((MELS - 1) // 2 - 1) // 2), d_model)

    def forward(self, x):
        x = F.relu(self.conv1(x.unsqueeze(1)))
        x = F.relu(self.conv2(x))
        x = x.permute(0, 2, 1, 3).flatten(2)
        return self.out(x)


class RelPositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=64):
        super().__init__()
        self.d_model = d_model
        positions = torch.arange(max_len - 1, -max_len, -1, dtype=torch.float32).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe = torch.zeros(positions.size(0), d_model)
        pe[:, 0::2] = torch.sin(positions * div_term)
        pe[:, 1::2] = torch.cos(positions * div_term)
        self.register_buffer("pe", pe.unsqueeze(0), persistent=False)

    def forward(self, x):
        x = x * math.sqrt(self.d_model)
        center = self.pe.size(1) // 2
        return x, self.pe[:, center - x.size(1) + 1 : center + x.size(1)]


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.linear1 = nn.Linear(d_model, d_ff)
        self.activation = nn.SiLU()
        self.dropout = nn.Dropout(args.dropout)
        self.linear2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class RelPositionMultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.h, self.d_k = n_head, d_model // n_head
        self.linear_q = nn.Linear(d_model, d_model)
        self.linear_k = nn.Linear(d_model, d_model)
        self.linear_v = nn.Linear(d_model, d_model)
        self.linear_out = nn.Linear(d_model, d_model)
        self.linear_pos = nn.Linear(d_model, d_model, bias=False)
        self.pos_bias_u = nn.Parameter(torch.randn(self.h, self.d_k) * 0.1)
        self.pos_bias_v = nn.Parameter(torch.randn(self.h, self.d_k) * 0.1)

    def rel_shift(self, x):
        b, h, qlen, pos_len = x.size()
        x = F.pad(x, pad=(1, 0))
        x = x.view(b, h, -1, qlen)
        return x[:, :, 1:].view(b, h, qlen, pos_len)

    def forward(self, x, pos_emb, pad_mask):
        n_batch, length, _ = x.shape
        q = self.linear_q(x).view(n_batch, length, self.h, self.d_k)
        k = self.linear_k(x).view(n_batch, length, self.h, self.d_k).transpose(1, 2)
        v = self.linear_v(x).view(n_batch, length, self.h, self.d_k).transpose(1, 2)
        p = self.linear_pos(pos_emb).view(1, -1, self.h, self.d_k).transpose(1, 2)
        q_with_bias_u = (q + self.pos_bias_u).transpose(1, 2)
        q_with_bias_v = (q + self.pos_bias_v).transpose(1, 2)
        matrix_ac = torch.matmul(q_with_bias_u, k.transpose(-2, -1))
        matrix_bd = self.rel_shift(torch.matmul(q_with_bias_v, p.transpose(-2, -1)))
        matrix_bd = matrix_bd[:, :, :, :length]
        scores = (matrix_ac + matrix_bd) / math.sqrt(self.d_k)
        scores = scores.masked_fill(pad_mask[:, None, None, :], -10000.0)
        attn = torch.softmax(scores, dim=-1).masked_fill(pad_mask[:, None, None, :], 0.0)
        x = torch.matmul(attn, v).transpose(1, 2).reshape(n_batch, length, self.h * self.d_k)
        return self.linear_out(x)


class ConvolutionModule(nn.Module):
    def __init__(self, d_model, kernel_size=7):
        super().__init__()
        self.pointwise_conv1 = nn.Conv1d(d_model, 2 * d_model, 1)
        self.depthwise_conv = nn.Conv1d(
            d_model, d_model, kernel_size, padding=(kernel_size - 1) // 2, groups=d_model
        )
        self.norm = nn.LayerNorm(d_model)
        self.pointwise_conv2 = nn.Conv1d(d_model, d_model, 1)

    def forward(self, x, pad_mask):
        x = self.pointwise_conv1(x.transpose(1, 2))
        x = F.glu(x, dim=1)
        x = x.masked_fill(pad_mask.unsqueeze(1), 0.0)
        x = self.depthwise_conv(x)
        x = F.silu(self.norm(x.transpose(1, 2))).transpose(1, 2)
        return self.pointwise_conv2(x).transpose(1, 2)


class ConformerLayer(nn.Module):
    def __init__(self, d_model, d_ff, n_head):
        super().__init__()
        self.fc_factor = 0.5
        self.norm_feed_forward1 = nn.LayerNorm(d_model)
        self.feed_forward1 = FeedForward(d_model, d_ff)
        self.norm_self_att = nn.LayerNorm(d_model)
        self.self_attn = RelPositionMultiHeadAttention(d_model, n_head)
        self.norm_conv = nn.LayerNorm(d_model)
        self.conv = ConvolutionModule(d_model)
        self.norm_feed_forward2 = nn.LayerNorm(d_model)
        self.feed_forward2 = FeedForward(d_model, d_ff)
        self.norm_out = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x, pos_emb, pad_mask):
        residual = x
        x = self.norm_feed_forward1(x)
        x = self.feed_forward1(x)
        residual = residual + self.dropout(x) * self.fc_factor
        x = self.norm_self_att(residual)
        x = self.self_attn(x, pos_emb, pad_mask)
        residual = residual + self.dropout(x)
        x = self.norm_conv(residual)
        x = self.conv(x, pad_mask)
        residual = residual + self.dropout(x)
        x = self.norm_feed_forward2(residual)
        x = self.feed_forward2(x)
        residual = residual + self.dropout(x) * self.fc_factor
        return self.norm_out(residual)


class Conformer(nn.Module):
    def __init__(self, d_model=48, n_layers=3, n_head=4, interctc=(1,)):
        super().__init__()
        self.interctc = interctc
        self.pre_encode = ConvSubsampling(d_model)
        self.pos_enc = RelPositionalEncoding(d_model)
        self.layers = nn.ModuleList(
            ConformerLayer(d_model, 4 * d_model, n_head) for _ in range(n_layers)
        )
        self.decoder = nn.Linear(d_model, VOCAB)
        self.condition = nn.Linear(VOCAB, d_model)

    def forward(self, audio_signal, length):
        x = self.pre_encode(audio_signal)
        length = subsampled(length)
        pad_mask = torch.arange(x.size(1))[None, :] >= length[:, None]
        x, pos_emb = self.pos_enc(x)
        intermediate = []
        for index, layer in enumerate(self.layers):
            x = layer(x, pos_emb, pad_mask)
            if index in self.interctc:
                probabilities = self.decoder(x).float().log_softmax(-1)
                intermediate.append(probabilities)
                x = x + self.condition(probabilities.exp())
        return self.decoder(x).float().log_softmax(-1), intermediate, length


def ctc(log_probs, targets, length, target_length):
    return F.ctc_loss(
        log_probs.transpose(0, 1),
        targets,
        length,
        target_length,
        blank=BLANK,
        reduction="sum",
        zero_infinity=True,
    )


def spec_augment(features, g):
    start = torch.randint(0, MELS - 6, (features.shape[0], 1, 1), generator=g)
    bins = torch.arange(MELS)[None, None, :]
    features = features.masked_fill((bins >= start) & (bins < start + 6), 0.0)
    start = torch.randint(0, 50, (features.shape[0], 1, 1), generator=g)
    frames = torch.arange(FRAMES)[None, :, None]
    return features.masked_fill((frames >= start) & (frames < start + 8), 0.0)


def collate(g):
    features = torch.randn(8, FRAMES, MELS, generator=g) * 3 - 5
    length = torch.randint(60, FRAMES + 1, (8,), generator=g)
    length[0] = FRAMES
    valid = (torch.arange(FRAMES)[None] < length[:, None]).unsqueeze(-1)
    count = length[:, None, None]
    mean = (features * valid).sum(1, keepdim=True) / count
    variance = ((features - mean).square() * valid).sum(1, keepdim=True) / (count - 1)
    features = (features - mean) / (variance.sqrt() + 1e-5)
    features = spec_augment(features, g) * valid
    targets = torch.randint(1, VOCAB, (8, LABELS), generator=g)
    target_length = torch.randint(4, LABELS + 1, (8,), generator=g)
    targets = targets.masked_fill(torch.arange(LABELS)[None] >= target_length[:, None], BLANK)
    return features, length, targets, target_length


net = Conformer()
model = prepare(net, net.layers)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=2.0, betas=(0.9, 0.98), eps=1e-9, weight_decay=1e-3
)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda step: 48**-0.5 * min((step + 1) ** -0.5, (step + 1) * 100**-1.5),
)
for parts in batches(collate):
    optimizer.zero_grad()
    tokens = torch.tensor(sum(int(part[3].sum()) for part in parts))
    if world > 1:
        dist.all_reduce(tokens)
    for features, length, targets, target_length in parts:
        with autocast():
            log_probs, intermediate, encoded = model(features, length)
        loss = ctc(log_probs, targets, encoded, target_length)
        inter = sum(ctc(probs, targets, encoded, target_length) for probs in intermediate)
        loss = 0.7 * loss + 0.3 * inter / len(intermediate)
        loss = loss * world / tokens
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
