"""T5 on corrupted spans: relative position biases, RMS norms, a gated feed-forward, a z-loss."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

VOCAB, SENTINELS, LENGTH, INPUTS, TARGETS = 96, 8, 36, 32, 20
PAD, EOS, IGNORED = 0, 1, -100


class T5LayerNorm(nn.Module):
    """No bias, and no mean is subtracted."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        hidden_states = hidden_states.float()
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states


class T5DenseGatedActDense(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.wi_0 = nn.Linear(d_model, d_ff, bias=False)
        self.wi_1 = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(args.dropout)
        self.act = nn.GELU(approximate="tanh")
        nn.init.normal_(self.wi_0.weight, std=d_model**-0.5)
        nn.init.normal_(self.wi_1.weight, std=d_model**-0.5)
        nn.init.normal_(self.wo.weight, std=d_ff**-0.5)

    def forward(self, hidden_states):
        hidden_gelu = self.act(self.wi_0(hidden_states))
        hidden_linear = self.wi_1(hidden_states)
        return self.wo(self.dropout(hidden_gelu * hidden_linear))


class T5LayerFF(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.DenseReluDense = T5DenseGatedActDense(d_model, d_ff)
        self.layer_norm = T5LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states):
        forwarded_states = self.DenseReluDense(self.layer_norm(hidden_states))
        return hidden_states + self.dropout(forwarded_states)


class T5Attention(nn.Module):
    def __init__(self, d_model, n_heads, is_decoder, has_relative_attention_bias=False):
        super().__init__()
        self.is_decoder = is_decoder
        self.n_heads, self.d_kv = n_heads, d_model // n_heads
        self.relative_attention_num_buckets, self.relative_attention_max_distance = 16, 24
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        nn.init.normal_(self.q.weight, std=(d_model * self.d_kv) ** -0.5)
        for layer in (self.k, self.v, self.o):
            nn.init.normal_(layer.weight, std=d_model**-0.5)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(
                self.relative_attention_num_buckets, n_heads
            )
            nn.init.normal_(self.relative_attention_bias.weight, std=0.5)

    @staticmethod
    def _relative_position_bucket(relative_position, bidirectional, num_buckets, max_distance):
        relative_buckets = torch.zeros_like(relative_position)
        if bidirectional:
            num_buckets //= 2
            relative_buckets = relative_buckets + (relative_position > 0).long() * num_buckets
            relative_position = torch.abs(relative_position)
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        relative_position_if_large = max_exact + (
            torch.log(relative_position.float().clamp(min=1) / max_exact)
            / math.log(max_distance / max_exact)
            * (num_buckets - max_exact)
        ).to(torch.long)
        relative_position_if_large = relative_position_if_large.clamp(max=num_buckets - 1)
        return relative_buckets + torch.where(
            is_small, relative_position, relative_position_if_large
        )

    def compute_bias(self, query_length, key_length):
        context_position = torch.arange(query_length)[:, None]
        memory_position = torch.arange(key_length)[None, :]
        relative_position = memory_position - context_position
        relative_position_bucket = self._relative_position_bucket(
            relative_position,
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        values = self.relative_attention_bias(relative_position_bucket)
        return values.permute(2, 0, 1).unsqueeze(0)

    def shape(self, states):
        return states.view(states.size(0), -1, self.n_heads, self.d_kv).transpose(1, 2)

    def forward(self, hidden_states, key_value_states, mask, position_bias):
        batch_size, seq_length, _ = hidden_states.shape
        query_states = self.shape(self.q(hidden_states))
        key_states = self.shape(self.k(key_value_states))
        value_states = self.shape(self.v(key_value_states))
        scores = torch.matmul(query_states, key_states.transpose(3, 2))
        if position_bias is None:
            position_bias = mask
            if hasattr(self, "relative_attention_bias"):
                position_bias = self.compute_bias(seq_length, key_states.size(2)) + mask
        scores = scores + position_bias
        attn_weights = F.softmax(scores.float(), dim=-1).type_as(value_states)
        attn_output = torch.matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).reshape(batch_size, seq_length, -1)
        return self.o(attn_output), position_bias


class T5LayerSelfAttention(nn.Module):
    def __init__(self, d_model, n_heads, is_decoder, has_relative_attention_bias):
        super().__init__()
        self.SelfAttention = T5Attention(d_model, n_heads, is_decoder, has_relative_attention_bias)
        self.layer_norm = T5LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states, mask, position_bias):
        normed = self.layer_norm(hidden_states)
        attention_output, position_bias = self.SelfAttention(normed, normed, mask, position_bias)
        return hidden_states + self.dropout(attention_output), position_bias


class T5LayerCrossAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.EncDecAttention = T5Attention(d_model, n_heads, is_decoder=True)
        self.layer_norm = T5LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states, key_value_states, mask):
        normed = self.layer_norm(hidden_states)
        attention_output, _ = self.EncDecAttention(normed, key_value_states, mask, None)
        return hidden_states + self.dropout(attention_output)


class T5Block(nn.Module):
    def __init__(self, d_model, d_ff, n_heads, is_decoder, has_relative_attention_bias):
        super().__init__()
        self.is_decoder = is_decoder
        self.layer = nn.ModuleList()
        self.layer.append(
            T5LayerSelfAttention(d_model, n_heads, is_decoder, has_relative_attention_bias)
        )
        if is_decoder:
            self.layer.append(T5LayerCrossAttention(d_model, n_heads))
        self.layer.append(T5LayerFF(d_model, d_ff))

    def forward(self, hidden_states, mask, position_bias, encoder_states=None, encoder_mask=None):
        hidden_states, position_bias = self.layer[0](hidden_states, mask, position_bias)
        if self.is_decoder:
            hidden_states = self.layer[1](hidden_states, encoder_states, encoder_mask)
        return self.layer[-1](hidden_states), position_bias


class T5Stack(nn.Module):
    def __init__(self, d_model, d_ff, n_heads, num_layers, is_decoder):
        super().__init__()
        self.block = nn.ModuleList(
            T5Block(d_model, d_ff, n_heads, is_decoder, has_relative_attention_bias=i == 0)
            for i in range(num_layers)
        )
        self.final_layer_norm = T5LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, inputs_embeds, mask, encoder_states=None, encoder_mask=None):
        hidden_states, position_bias = self.dropout(inputs_embeds), None
        for layer_module in self.block:
            hidden_states, position_bias = layer_module(
                hidden_states, mask, position_bias, encoder_states, encoder_mask
            )
        return self.dropout(self.final_layer_norm(hidden_states))


class T5ForConditionalGeneration(nn.Module):
    def __init__(self, d_model=48, d_ff=96, n_heads=4, num_layers=3):
        super().__init__()
        self.model_dim = d_model
        self.shared = nn.Embedding(VOCAB, d_model)
        nn.init.normal_(self.shared.weight, std=1.0)
        self.encoder = T5Stack(d_model, d_ff, n_heads, num_layers, is_decoder=False)
        self.decoder = T5Stack(d_model, d_ff, n_heads, num_layers, is_decoder=True)
        self.lm_head = nn.Linear(d_model, VOCAB, bias=False)
        self.lm_head.weight = self.shared.weight

    def _shift_right(self, labels):
        shifted = F.pad(labels[:, :-1], (1, 0), value=PAD)
        return shifted.masked_fill(shifted == IGNORED, PAD)

    def forward(self, input_ids, attention_mask, labels):
        decoder_input_ids = self._shift_right(labels)
        seq = torch.arange(labels.size(1))
        causal = (seq[None, :] > seq[:, None])[None, None].float() * -1e4
        padding = (1.0 - attention_mask[:, None, None, :].float()) * -1e4
        hidden_states = self.encoder(self.shared(input_ids), padding)
        sequence_output = self.decoder(
            self.shared(decoder_input_ids), causal, hidden_states, padding
        )
        sequence_output = sequence_output * self.model_dim**-0.5
        return self.lm_head(sequence_output)


def span_corruption(g):
    """Spans of a text give way to sentinels; the targets are the sentinels, each with its span."""
    rows = []
    for _ in range(12):
        words = torch.randint(2, VOCAB - SENTINELS, (LENGTH,), generator=g).tolist()
        words = words[: int(torch.randint(LENGTH - 12, LENGTH + 1, (1,), generator=g))]
        inputs, targets, at, sentinel = [], [], 0, VOCAB - 1
        while at < len(words):
            kept = int(torch.randint(2, 8, (1,), generator=g))
            span = int(torch.randint(1, 4, (1,), generator=g))
            inputs += [*words[at : at + kept], sentinel]
            targets += [sentinel, *words[at + kept : at + kept + span]]
            at, sentinel = at + kept + span, max(sentinel - 1, VOCAB - SENTINELS)
        inputs, targets = [*inputs[: INPUTS - 1], EOS], [*targets[: TARGETS - 1], EOS]
        inputs += [PAD] * (INPUTS - len(inputs))
        targets += [IGNORED] * (TARGETS - len(targets))
        rows.append((torch.tensor(inputs), torch.tensor(targets)))
    input_ids, labels = map(torch.stack, zip(*rows, strict=True))
    return input_ids, (input_ids != PAD).long(), labels


def compute_loss(logits, labels, z_loss=1e-2):
    """Sums over the targets: the cross entropy, and the square of the logarithm of its divisor."""
    logits = logits.float()
    log_z = torch.logsumexp(logits, dim=-1)
    mask = (labels != IGNORED).float()
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = (log_z - picked) * mask
    return loss.sum() + z_loss * (log_z.square() * mask).sum()


net = T5ForConditionalGeneration()
model = prepare(net, [*net.encoder.block, *net.decoder.block])
no_decay = ["layer_norm.weight", "relative_attention_bias"]
named = list(net.named_parameters())
optimizer_grouped_parameters = [
    {
        "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
        "weight_decay": 0.1,
    },
    {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=5e-3, betas=(0.9, 0.99))
warmup_steps = 2
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 1.0 / math.sqrt(max(step + 1, warmup_steps))
)
for parts in batches(span_corruption):
    num_tokens = torch.stack([(labels != IGNORED).sum() for _, _, labels in parts]).sum()
    if world > 1:
        dist.all_reduce(num_tokens)
    for input_ids, attention_mask, labels in parts:
        with autocast():
            logits = model(input_ids, attention_mask, labels)
        loss = compute_loss(logits, labels) * world / num_tokens
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
