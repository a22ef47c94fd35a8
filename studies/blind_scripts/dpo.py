"""DPO of LoRA adapters on a GPT-2 in miniature; the reference is the model with its adapters off."""

import math
from contextlib import contextmanager

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

PAD, VOCAB, PROMPT, LENGTH = 0, 150, 8, 20


class LoRALinear(nn.Linear):
    def __init__(self, in_features, out_features, r=4, lora_alpha=16):
        super().__init__(in_features, out_features)
        self.scaling = lora_alpha / r
        self.lora_A = nn.Parameter(torch.empty(r, in_features))
        self.lora_B = nn.Parameter(torch.empty(out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.normal_(self.lora_B, std=0.02)
        self.lora_dropout = nn.Dropout(args.dropout)
        self.enabled = True
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)

    def forward(self, x):
        result = F.linear(x, self.weight, self.bias)
        if self.enabled:
            adapted = self.lora_dropout(x) @ self.lora_A.T @ self.lora_B.T
            result = result + adapted * self.scaling
        return result


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = LoRALinear(n_embd, 3 * n_embd)
        self.c_proj = LoRALinear(n_embd, n_embd)

    def forward(self, x, mask):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.c_fc = LoRALinear(n_embd, 4 * n_embd)
        self.c_proj = LoRALinear(4 * n_embd, n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP(n_embd)

    def forward(self, x, mask):
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, n_embd=64, n_layer=3, n_head=4):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, n_embd)
        self.wpe = nn.Embedding(LENGTH, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, VOCAB, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.1)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)

    def forward(self, input_ids, attention_mask):
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        x = self.wte(input_ids) + self.wpe(position_ids)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = causal & attention_mask.bool()[:, None, None, :]
        mask = mask | torch.eye(LENGTH, dtype=torch.bool)
        for block in self.h:
            x = block(x, mask)
        return self.lm_head(self.ln_f(x))


@contextmanager
def disable_adapter(model):
    adapted = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for module in adapted:
        module.enabled = False
    yield
    for module in adapted:
        module.enabled = True


def get_batch_logps(logits, labels):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :].float()
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (per_token * loss_mask).sum(-1)


def concatenated_forward(model, chosen, rejected, mask):
    input_ids = torch.cat([chosen, rejected], dim=0)
    attention_mask = torch.cat([mask, mask], dim=0)
    logits = model(input_ids, attention_mask)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :PROMPT] = -100
    chosen_logps, rejected_logps = get_batch_logps(logits, labels).chunk(2)
    return chosen_logps, rejected_logps


def dpo_loss(policy, reference, beta=0.2, label_smoothing=0.1):
    pi_logratios = policy[0] - policy[1]
    ref_logratios = reference[0] - reference[1]
    logits = pi_logratios - ref_logratios
    losses = (
        -F.logsigmoid(beta * logits) * (1 - label_smoothing)
        - F.logsigmoid(-beta * logits) * label_smoothing
    )
    return losses.mean()


def preferences(g):
    """Prompts are padded on the left, so that all answers start at one place."""
    chosen = torch.randint(1, VOCAB, (12, LENGTH), generator=g)
    rejected = torch.randint(1, VOCAB, (12, LENGTH), generator=g)
    rejected[:, :PROMPT] = chosen[:, :PROMPT]
    padding = torch.randint(0, PROMPT - 1, (12, 1), generator=g)
    mask = (torch.arange(LENGTH)[None] >= padding).long()
    return chosen * mask, rejected * mask, mask


net = GPT2()
model = prepare(net, net.h)
lora_A = [p for n, p in net.named_parameters() if n.endswith("lora_A")]
lora_B = [p for n, p in net.named_parameters() if n.endswith("lora_B")]
optimizer = torch.optim.AdamW(
    [{"params": lora_A, "lr": 1e-3}, {"params": lora_B, "lr": 8e-3}], weight_decay=0.01
)
for parts in batches(preferences):
    optimizer.zero_grad(set_to_none=True)
    for chosen, rejected, mask in parts:
        with autocast():
            with torch.no_grad(), disable_adapter(net):
                reference = concatenated_forward(model, chosen, rejected, mask)
            policy = concatenated_forward(model, chosen, rejected, mask)
        loss = dpo_loss(policy, reference)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
finish()
