"""GRPO of a LLaMA in miniature as TRL writes it: RMSNorm, rotary GQA, SwiGLU; ratios, clipping, KL."""

from copy import deepcopy

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

PAD, EOS, VOCAB, PROMPT, COMPLETION, GROUP = 0, 1, 96, 8, 12, 4


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
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids):
        freqs = position_ids[:, :, None].float() * self.inv_freq[None, None, :]
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos()[:, None], emb.sin()[:, None]


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(hidden_states, n_rep):
    batch, heads, slen, head_dim = hidden_states.shape
    hidden_states = hidden_states[:, :, None].expand(batch, heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, heads * n_rep, slen, head_dim)


class LlamaAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_key_value_heads):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.num_key_value_groups = num_heads // num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, hidden_states, cos, sin, attention_mask):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        attn_weights = attn_weights + attention_mask
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32)
        attn_weights = attn_weights.to(query_states.dtype)
        attn_output = torch.matmul(attn_weights, value_states.to(attn_weights.dtype))
        attn_output = attn_output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(attn_output)


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, num_key_value_heads, intermediate_size):
        super().__init__()
        self.self_attn = LlamaAttention(hidden_size, num_heads, num_key_value_heads)
        self.mlp = LlamaMLP(hidden_size, intermediate_size)
        self.input_layernorm = LlamaRMSNorm(hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(hidden_size)
        self.resid_dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states, cos, sin, attention_mask):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, cos, sin, attention_mask)
        hidden_states = residual + self.resid_dropout(hidden_states)
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + self.resid_dropout(hidden_states)


class LlamaForCausalLM(nn.Module):
    def __init__(self, hidden_size=64, num_layers=3, num_heads=8, num_key_value_heads=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(hidden_size, num_heads, num_key_value_heads, 160)
            for _ in range(num_layers)
        )
        self.norm = LlamaRMSNorm(hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(hidden_size // num_heads)
        self.lm_head = nn.Linear(hidden_size, VOCAB, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.data.normal_(mean=0.0, std=0.1)

    def forward(self, input_ids, attention_mask):
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        length = input_ids.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = allowed & attention_mask.bool()[:, None, None, :]
        causal_mask = torch.zeros(allowed.shape).masked_fill(~allowed, -1e4)
        cos, sin = self.rotary_emb(position_ids)
        hidden_states = self.embed_tokens(input_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, cos, sin, causal_mask)
        return self.lm_head(self.norm(hidden_states))


def per_token_logps(model, input_ids, attention_mask, temperature=0.9):
    logits = model(input_ids, attention_mask)
    logits = logits[:, :-1]
    completion_ids = input_ids[:, -COMPLETION:]
    logits = logits[:, -COMPLETION:].float() / temperature
    selected = torch.gather(logits, -1, completion_ids.unsqueeze(-1)).squeeze(-1)
    return selected - torch.logsumexp(logits, dim=-1)


def reward(completion_ids, completion_mask):
    """Even words are good, long answers are not."""
    even = ((completion_ids % 2 == 0) * completion_mask).sum(-1).float()
    return even - 0.1 * completion_mask.sum(-1)


def group_advantages(rewards):
    mean = rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True)
    return (rewards - mean) / (std + 1e-4)


def rollouts(g):
    """Prompts padded on the left, and a group of answers to each of them."""
    prompts = torch.randint(2, VOCAB, (4, 1, PROMPT), generator=g)
    prompts = prompts.expand(-1, GROUP, -1)
    padding = torch.randint(0, PROMPT - 2, (4, 1, 1), generator=g)
    prompt_mask = (torch.arange(PROMPT) >= padding).long().expand(-1, GROUP, -1)
    completions = torch.randint(2, VOCAB, (4, GROUP, COMPLETION), generator=g)
    ends = torch.randint(3, COMPLETION + 3, (4, GROUP, 1), generator=g)
    place = torch.arange(COMPLETION)
    completions = completions.masked_fill(place == ends, EOS)
    completion_mask = (place <= ends).long()
    ids = torch.cat([prompts * prompt_mask, completions * completion_mask], -1)
    return ids, torch.cat([prompt_mask, completion_mask], -1)


def drifted(model, std, seed):
    """The policy some updates away."""
    g = torch.Generator().manual_seed(seed)
    other = deepcopy(model)
    for parameter in other.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=g), alpha=std)
    return other


ref_model = LlamaForCausalLM().requires_grad_(False)
net = drifted(ref_model, 0.02, 1).requires_grad_(True)
old_policy = drifted(net, 0.01, 2).requires_grad_(False)
model = prepare(net, net.layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
epsilon_low, epsilon_high, beta = 0.2, 0.28, 0.04
for parts in batches(rollouts):
    num_items = torch.tensor(sum(int(mask[..., PROMPT:].sum()) for _, mask in parts))
    if world > 1:
        dist.all_reduce(num_items)
    for ids, mask in parts:
        completion_mask = mask[..., PROMPT:]
        rewards = reward(ids[..., PROMPT:], completion_mask)
        advantages = group_advantages(rewards).flatten()
        input_ids, attention_mask = ids.flatten(0, 1), mask.flatten(0, 1)
        completion_mask = completion_mask.flatten(0, 1)
        with autocast():
            with torch.no_grad():
                old_logps = per_token_logps(old_policy, input_ids, attention_mask)
                ref_logps = per_token_logps(ref_model, input_ids, attention_mask)
            logps = per_token_logps(model, input_ids, attention_mask)
        ratio = torch.exp(logps - old_logps)
        clipped = torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)
        surrogate = torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
        delta = ref_logps - logps
        per_token_kl = torch.exp(delta) - delta - 1
        per_token_loss = -surrogate + beta * per_token_kl
        loss = (per_token_loss * completion_mask).sum() * world / num_items
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
finish()
