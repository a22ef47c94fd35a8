"""DistilBERT: masked words of a student taught by a deeper teacher's logits and hidden states."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

VOCAB, LENGTH, BATCH = 120, 32, 8
PAD, CLS, SEP, MASK, FIRST, IGNORED = 0, 1, 2, 3, 4, -100
DIM, N_HEADS, HIDDEN_DIM = 48, 4, 128
TEMPERATURE, ALPHA_CE, ALPHA_MLM, ALPHA_COS = 2.0, 5.0, 2.0, 1.0


def create_sinusoidal_embeddings(n_pos, dim, out):
    position = torch.arange(n_pos).float()[:, None]
    rates = torch.pow(10000.0, -2 * torch.arange(dim // 2).float() / dim)
    out.requires_grad = False
    out[:, 0::2] = torch.sin(position * rates)
    out[:, 1::2] = torch.cos(position * rates)


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(LENGTH, DIM)
        create_sinusoidal_embeddings(LENGTH, DIM, self.position_embeddings.weight)
        self.LayerNorm = nn.LayerNorm(DIM, eps=1e-12)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, input_ids):
        position_ids = torch.arange(input_ids.size(1)).unsqueeze(0).expand_as(input_ids)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class MultiHeadSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(args.dropout)
        self.q_lin = nn.Linear(DIM, DIM)
        self.k_lin = nn.Linear(DIM, DIM)
        self.v_lin = nn.Linear(DIM, DIM)
        self.out_lin = nn.Linear(DIM, DIM)

    def forward(self, query, key, value, mask):
        bs, dim_per_head = query.size(0), DIM // N_HEADS

        def shape(x):
            return x.view(bs, -1, N_HEADS, dim_per_head).transpose(1, 2)

        def unshape(x):
            return x.transpose(1, 2).contiguous().view(bs, -1, N_HEADS * dim_per_head)

        q = shape(self.q_lin(query))
        k = shape(self.k_lin(key))
        v = shape(self.v_lin(value))
        q = q / math.sqrt(dim_per_head)
        scores = torch.matmul(q, k.transpose(2, 3))
        mask = (mask == 0).view(bs, 1, 1, -1).expand_as(scores)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        weights = self.dropout(F.softmax(scores, dim=-1))
        context = torch.matmul(weights.to(v.dtype), v)
        return self.out_lin(unshape(context))


class FFN(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(args.dropout)
        self.lin1 = nn.Linear(DIM, HIDDEN_DIM)
        self.lin2 = nn.Linear(HIDDEN_DIM, DIM)
        self.activation = nn.GELU()

    def forward(self, x):
        return self.dropout(self.lin2(self.activation(self.lin1(x))))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = MultiHeadSelfAttention()
        self.sa_layer_norm = nn.LayerNorm(DIM, eps=1e-12)
        self.ffn = FFN()
        self.output_layer_norm = nn.LayerNorm(DIM, eps=1e-12)

    def forward(self, x, attn_mask):
        sa_output = self.attention(x, x, x, attn_mask)
        sa_output = self.sa_layer_norm(sa_output + x)
        ffn_output = self.ffn(sa_output)
        return self.output_layer_norm(ffn_output + sa_output)


class Transformer(nn.Module):
    def __init__(self, n_layers):
        super().__init__()
        self.layer = nn.ModuleList(TransformerBlock() for _ in range(n_layers))

    def forward(self, x, attn_mask):
        for layer_module in self.layer:
            x = layer_module(x, attn_mask)
        return x


class DistilBertModel(nn.Module):
    def __init__(self, n_layers):
        super().__init__()
        self.embeddings = Embeddings()
        self.transformer = Transformer(n_layers)

    def forward(self, input_ids, attention_mask):
        return self.transformer(self.embeddings(input_ids), attention_mask)


class DistilBertForMaskedLM(nn.Module):
    def __init__(self, n_layers):
        super().__init__()
        self.distilbert = DistilBertModel(n_layers)
        self.vocab_transform = nn.Linear(DIM, DIM)
        self.vocab_layer_norm = nn.LayerNorm(DIM, eps=1e-12)
        self.vocab_projector = nn.Linear(DIM, VOCAB)
        self.activation = nn.GELU()
        self.vocab_projector.weight = self.distilbert.embeddings.word_embeddings.weight

    def init_weights(self, seed, std):
        torch.manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
        return self

    def forward(self, input_ids, attention_mask):
        hidden_states = self.distilbert(input_ids, attention_mask)
        prediction = self.activation(self.vocab_transform(hidden_states))
        return self.vocab_projector(self.vocab_layer_norm(prediction)), hidden_states


def extract(teacher, student):
    """The student starts from every other layer of its teacher."""
    compressed = {}
    for key, value in teacher.state_dict().items():
        layer = key.split(".")[3] if ".layer." in key else "0"
        if int(layer) % 2 == 0:
            name = key.replace(f".layer.{layer}.", f".layer.{int(layer) // 2}.")
            compressed[name] = value.clone()
    student.load_state_dict(compressed)


def step(student, teacher, input_ids, attention_mask, lm_labels):
    """The sum of the losses of all masked words."""
    s_logits, s_hidden_states = student(input_ids, attention_mask)
    with torch.no_grad():
        t_logits, t_hidden_states = teacher(input_ids, attention_mask)
    mask = (lm_labels != IGNORED).unsqueeze(-1).expand_as(s_logits)
    s_logits_slct = torch.masked_select(s_logits, mask).view(-1, VOCAB)
    t_logits_slct = torch.masked_select(t_logits, mask).view(-1, VOCAB)
    s_log_probs = F.log_softmax(s_logits_slct / TEMPERATURE, dim=-1)
    t_probs = F.softmax(t_logits_slct / TEMPERATURE, dim=-1)
    loss_ce = F.kl_div(s_log_probs, t_probs, reduction="sum") * TEMPERATURE**2
    loss_mlm = F.cross_entropy(
        s_logits.view(-1, VOCAB), lm_labels.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
    dim_mask = (lm_labels != IGNORED).unsqueeze(-1).expand_as(s_hidden_states)
    s_hidden_slct = torch.masked_select(s_hidden_states, dim_mask).view(-1, DIM)
    t_hidden_slct = torch.masked_select(t_hidden_states, dim_mask).view(-1, DIM)
    same = torch.ones(s_hidden_slct.size(0))
    loss_cos = F.cosine_embedding_loss(s_hidden_slct, t_hidden_slct, same, reduction="sum")
    return ALPHA_CE * loss_ce + ALPHA_MLM * loss_mlm + ALPHA_COS * loss_cos


def masked_sentences(g):
    """Rare words are masked more often; of ten, eight are hidden, one is another and one stays."""
    lengths = torch.randint(14, LENGTH + 1, (BATCH, 1), generator=g)
    at = torch.arange(LENGTH).expand(BATCH, LENGTH)
    frequency = 1.0 / torch.arange(1, VOCAB - FIRST + 1)
    words = torch.multinomial(frequency, BATCH * LENGTH, replacement=True, generator=g)
    ids = words.view(BATCH, LENGTH) + FIRST
    ids = ids.masked_fill(at == 0, CLS).masked_fill(at == lengths - 1, SEP)
    ids = ids.masked_fill(at >= lengths, PAD)
    rarity = F.pad(frequency, (FIRST, 0), value=math.inf) ** -0.3
    chosen = torch.rand(BATCH, LENGTH, generator=g) < 0.12 * rarity[ids]
    labels = ids.masked_fill(~chosen, IGNORED)
    draw = torch.rand(BATCH, LENGTH, generator=g)
    other = torch.randint(FIRST, VOCAB, (BATCH, LENGTH), generator=g)
    ids = torch.where(chosen & (draw < 0.8), torch.full_like(ids, MASK), ids)
    ids = torch.where(chosen & (draw > 0.9), other, ids)
    return ids, (at < lengths).long(), labels


teacher = DistilBertForMaskedLM(n_layers=4).init_weights(seed=9, std=0.12).eval()
net = DistilBertForMaskedLM(n_layers=2)
extract(teacher, net)
student = prepare(net, net.distilbert.transformer.layer)
named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
no_decay = ("bias", "LayerNorm.weight", "layer_norm.weight")
optimizer_grouped_parameters = [
    {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=1e-3, eps=1e-6, betas=(0.9, 0.98))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 3, 1.0))
torch.manual_seed(56)
for parts in batches(masked_sentences):
    n_masked = torch.stack([(labels != IGNORED).sum() for _, _, labels in parts]).sum()
    if world > 1:
        dist.all_reduce(n_masked)
    for input_ids, attention_mask, lm_labels in parts:
        with autocast():
            loss = step(student, teacher, input_ids, attention_mask, lm_labels)
        loss = loss * world / n_masked
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(student.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
