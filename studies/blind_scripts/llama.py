"""A Llama-like language model on packed documents: grouped queries, rotary positions, SwiGLU."""

import math

import torch.nn.functional as F
from common import autocast, batches, dist, finish, nn, prepare, scaler, torch, world

VOCAB, SEQ_LEN, BATCH, BOS, IGNORE = 128, 40, 8, 1, -100
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, THETA = 64, 160, 4, 8, 2, 10000.0


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class LlamaRotaryEmbedding(nn.Module):
    def __init__(self, dim, base=THETA):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, position_ids):
        freqs = position_ids[:, :, None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(q.dtype), k_embed.to(k.dtype)


def repeat_kv(hidden_states, n_rep):
    """Each key and value head serves ``n_rep`` query heads."""
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    hidden_states = hidden_states[:, :, None].expand(
        batch, num_key_value_heads, n_rep, slen, head_dim
    )
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.q_proj = nn.Linear(HIDDEN, HEADS * self.head_dim, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * self.head_dim, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * self.head_dim, bias=False)
        self.o_proj = nn.Linear(HEADS * self.head_dim, HIDDEN, bias=False)

    def forward(self, hidden_states, attention_mask, position_embeddings):
        bsz, q_len, _ = hidden_states.size()
        query_states = self.q_proj(hidden_states)
        key_states = self.k_proj(hidden_states)
        value_states = self.v_proj(hidden_states)
        query_states = query_states.view(bsz, q_len, HEADS, self.head_dim).transpose(1, 2)
        key_states = key_states.view(bsz, q_len, KV_HEADS, self.head_dim).transpose(1, 2)
        value_states = value_states.view(bsz, q_len, KV_HEADS, self.head_dim).transpose(1, 2)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states = repeat_kv(key_states, HEADS // KV_HEADS)
        value_states = repeat_kv(value_states, HEADS // KV_HEADS)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3))
        attn_weights = attn_weights / math.sqrt(self.head_dim)
        attn_weights = attn_weights.masked_fill(~attention_mask, float("-inf"))
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32)
        attn_weights = attn_weights.to(query_states.dtype)
        attn_output = torch.matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).contiguous().reshape(bsz, q_len, -1)
        return self.o_proj(attn_output)


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = LlamaAttention()
        self.mlp = LlamaMLP()
        self.input_layernorm = LlamaRMSNorm(HIDDEN)
        self.post_attention_layernorm = LlamaRMSNorm(HIDDEN)

    def forward(self, hidden_states, attention_mask, position_embeddings):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, attention_mask, position_embeddings)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class LlamaModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([LlamaDecoderLayer() for _ in range(LAYERS)])
        self.norm = LlamaRMSNorm(HIDDEN)
        self.rotary_emb = LlamaRotaryEmbedding(HIDDEN // HEADS)

    def forward(self, input_ids, document_ids, position_ids):
        hidden_states = self.embed_tokens(input_ids)
        length = input_ids.size(1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        attention_mask = document_ids[:, :, None] == document_ids[:, None, :]
        attention_mask = (attention_mask & causal)[:, None]
        position_embeddings = self.rotary_emb(position_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, attention_mask, position_embeddings)
        return self.norm(hidden_states)


class LlamaForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = LlamaModel()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        torch.manual_seed(42)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.1)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.5)

    def forward(self, input_ids, document_ids, position_ids):
        hidden_states = self.model(input_ids, document_ids, position_ids)
        return self.lm_head(hidden_states)


def packed(g):
    """Documents one after another in each row; a document does not see the one before it."""
    rows = []
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
    for _ in range(BATCH):
        tokens, documents, positions, document = [], [], [], 0
        while len(tokens) < SEQ_LEN + 1:
            size = int(torch.randint(6, 18, (1,), generator=g))
            words = torch.randint(2, VOCAB, (size,), generator=g).tolist()
            for i in range(1, size):
                if i % 3:
                    words[i] = int(successor[words[i - 1]])
            tokens += [BOS, *words]
            documents += [document] * (size + 1)
            positions += range(size + 1)
            document += 1
        rows.append([tokens[: SEQ_LEN + 1], documents[: SEQ_LEN + 1], positions[: SEQ_LEN + 1]])
    tokens, documents, positions = torch.tensor(rows).unbind(1)
    labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == BOS, IGNORE)
    return tokens[:, :-1], documents[:, :-1], positions[:, :-1], labels


def causal_lm_loss(logits, labels):
    log_probs = F.log_softmax(logits.float(), dim=-1)
    mask = labels != IGNORE
    picked = log_probs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(picked * mask).sum()


net = LlamaForCausalLM()
model = prepare(net, net.model.layers)
decay = [p for p in net.parameters() if p.dim() >= 2]
no_decay = [p for p in net.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
    lr=3e-3,
    betas=(0.9, 0.95),
    eps=1e-5,
)
warmup, total, floor = 2, 20, 0.1


def cosine(step):
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
for parts in batches(packed):
    num_items = torch.stack([(labels != IGNORE).sum() for *_, labels in parts]).sum()
    if world > 1:
        dist.all_reduce(num_items)
    for input_ids, document_ids, position_ids, labels in parts:
        with autocast():
            logits = model(input_ids, document_ids, position_ids)
            loss = causal_lm_loss(logits, labels)
        scaler.scale(loss * world / num_items).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
finish()
