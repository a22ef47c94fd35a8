"""A Pythia-like GPT-NeoX: attention and MLP in parallel, partial rotary positions, an untied head."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

VOCAB, CONTEXT, BATCH = 128, 48, 8
HIDDEN, HEADS, LAYERS, ROTARY_PCT = 64, 4, 3, 0.25


class GPTNeoXRotaryEmbedding(nn.Module):
    def __init__(self, dim, max_position_embeddings, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        t = torch.arange(max_position_embeddings).float()
        freqs = torch.outer(t, inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos()[None, None], persistent=False)
        self.register_buffer("sin_cached", emb.sin()[None, None], persistent=False)

    def forward(self, seq_len):
        return self.cos_cached[:, :, :seq_len], self.sin_cached[:, :, :seq_len]


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class GPTNeoXAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.rotary_ndims = int(self.head_size * ROTARY_PCT)
        self.norm_factor = self.head_size**-0.5
        mask = torch.tril(torch.ones(CONTEXT, CONTEXT, dtype=torch.bool))
        self.register_buffer("bias", mask[None, None], persistent=False)
        self.rotary_emb = GPTNeoXRotaryEmbedding(self.rotary_ndims, CONTEXT)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states):
        qkv = self.query_key_value(hidden_states)
        # [batch, seq, heads * 3 * head] --> [batch, heads, seq, head] of each
        qkv = qkv.view(*qkv.shape[:-1], self.num_attention_heads, 3 * self.head_size)
        query = qkv[..., : self.head_size].permute(0, 2, 1, 3)
        key = qkv[..., self.head_size : 2 * self.head_size].permute(0, 2, 1, 3)
        value = qkv[..., 2 * self.head_size :].permute(0, 2, 1, 3)
        query_rot = query[..., : self.rotary_ndims]
        query_pass = query[..., self.rotary_ndims :]
        key_rot = key[..., : self.rotary_ndims]
        key_pass = key[..., self.rotary_ndims :]
        cos, sin = self.rotary_emb(hidden_states.size(1))
        query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, cos, sin)
        query = torch.cat((query_rot, query_pass), dim=-1)
        key = torch.cat((key_rot, key_pass), dim=-1)
        attn_output = self._attn(query, key, value)
        attn_output = attn_output.permute(0, 2, 1, 3).contiguous()
        attn_output = attn_output.view(hidden_states.shape)
        return self.dense(attn_output)

    def _attn(self, query, key, value):
        batch_size, heads, length, head_size = query.size()
        query = query.reshape(batch_size * heads, length, head_size)
        key = key.reshape(batch_size * heads, length, head_size)
        attn_scores = torch.zeros(batch_size * heads, length, length, dtype=query.dtype)
        attn_scores = torch.baddbmm(
            attn_scores, query, key.transpose(1, 2), beta=1.0, alpha=self.norm_factor
        )
        attn_scores = attn_scores.view(batch_size, heads, length, length)
        mask_value = torch.finfo(attn_scores.dtype).min
        causal_mask = self.bias[:, :, :length, :length]
        attn_scores = attn_scores.masked_fill(~causal_mask, mask_value)
        attn_weights = F.softmax(attn_scores, dim=-1).to(value.dtype)
        attn_weights = self.attention_dropout(attn_weights)
        return torch.matmul(attn_weights, value)


class GPTNeoXMLP(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden_size, 4 * hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * hidden_size, hidden_size)
        self.act = nn.GELU()

    def forward(self, hidden_states):
        hidden_states = self.dense_h_to_4h(hidden_states)
        hidden_states = self.act(hidden_states)
        return self.dense_4h_to_h(hidden_states)


class GPTNeoXLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.post_attention_dropout = nn.Dropout(args.dropout)
        self.post_mlp_dropout = nn.Dropout(args.dropout)
        self.attention = GPTNeoXAttention(hidden_size, num_attention_heads)
        self.mlp = GPTNeoXMLP(hidden_size)

    def forward(self, hidden_states):
        attn_output = self.attention(self.input_layernorm(hidden_states))
        attn_output = self.post_attention_dropout(attn_output)
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        mlp_output = self.post_mlp_dropout(mlp_output)
        return mlp_output + attn_output + hidden_states


class GPTNeoXModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_in = nn.Embedding(VOCAB, HIDDEN)
        self.emb_dropout = nn.Dropout(args.dropout)
        self.layers = nn.ModuleList(GPTNeoXLayer(HIDDEN, HEADS) for _ in range(LAYERS))
        self.final_layer_norm = nn.LayerNorm(HIDDEN)

    def forward(self, input_ids):
        hidden_states = self.emb_dropout(self.embed_in(input_ids))
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.final_layer_norm(hidden_states)


class GPTNeoXForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.gpt_neox = GPTNeoXModel()
        self.embed_out = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """What reads the residual stream starts small, what writes it smaller still."""
        torch.manual_seed(20)
        small_init = math.sqrt(2 / (5 * HIDDEN))
        wang_init = 2 / LAYERS / math.sqrt(HIDDEN)
        nn.init.normal_(self.gpt_neox.embed_in.weight, std=small_init)
        nn.init.normal_(self.embed_out.weight, std=small_init)
        for layer in self.gpt_neox.layers:
            nn.init.normal_(layer.attention.query_key_value.weight, std=small_init)
            nn.init.normal_(layer.attention.dense.weight, std=wang_init)
            nn.init.normal_(layer.mlp.dense_h_to_4h.weight, std=small_init)
            nn.init.normal_(layer.mlp.dense_4h_to_h.weight, std=wang_init)
            nn.init.zeros_(layer.attention.query_key_value.bias)
            nn.init.zeros_(layer.attention.dense.bias)
            nn.init.zeros_(layer.mlp.dense_h_to_4h.bias)
            nn.init.zeros_(layer.mlp.dense_4h_to_h.bias)

    def forward(self, input_ids):
        hidden_states = self.gpt_neox(input_ids)
        return self.embed_out(hidden_states)


def gpt_loss(lm_logits, labels):
    """Each token is predicted from the ones before it."""
    shift_logits = lm_logits[:, :-1, :].float()
    shift_labels = labels[:, 1:]
    return F.cross_entropy(shift_logits.reshape(-1, VOCAB), shift_labels.reshape(-1))


def pile(g):
    """Text of a Markov chain: a few words are likely after each word."""
    chain = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
    probabilities = F.softmax(3.0 * chain, dim=-1)
    words = [torch.randint(VOCAB, (BATCH,), generator=g)]
    for _ in range(CONTEXT - 1):
        words.append(torch.multinomial(probabilities[words[-1]], 1, generator=g).squeeze(1))
    return (torch.stack(words, dim=1),)


def get_params_for_weight_decay(module):
    """Neither biases nor norms decay."""
    decay, no_decay = [], []
    for child in module.modules():
        for name, p in child.named_parameters(recurse=False):
            norm = isinstance(child, nn.LayerNorm)
            (no_decay if norm or name.endswith("bias") else decay).append(p)
    return [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]


def annealing(step, warmup=2, total=40, floor=0.1):
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


net = GPTNeoXForCausalLM()
model = prepare(net, net.gpt_neox.layers)
optimizer = torch.optim.AdamW(
    get_params_for_weight_decay(net), lr=2e-3, betas=(0.9, 0.95), eps=1e-8
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, annealing)
for parts in batches(pile):
    for (input_ids,) in parts:
        with autocast():
            lm_logits = model(input_ids)
        loss = gpt_loss(lm_logits, input_ids) / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
