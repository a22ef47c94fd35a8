"""ALBERT on packed pairs: shared layers, factorized embeddings, n-gram masks, sentence order, LAMB."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

VOCAB, EMBEDDING, HIDDEN, HEADS, FEEDFORWARD = 120, 20, 48, 4, 120
LAYERS, GROUPS, INNER, LENGTH, PREDICTIONS, BATCH = 4, 2, 2, 40, 6, 12
PAD, CLS, SEP, MASK, FIRST = 0, 1, 2, 3, 4


def gelu_new(x):
    """The smooth approximation that BERT was trained with."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3))))


class AlbertEmbeddings(nn.Module):
    """Narrower than the layers; the encoder maps them to its own width."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, EMBEDDING, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(LENGTH, EMBEDDING)
        self.token_type_embeddings = nn.Embedding(2, EMBEDDING)
        self.LayerNorm = nn.LayerNorm(EMBEDDING, eps=1e-12)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, input_ids, token_type_ids):
        position_ids = torch.arange(input_ids.size(1), device=input_ids.device)
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class AlbertAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_head_size = HIDDEN // HEADS
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)
        self.attention_dropout = nn.Dropout(args.dropout)
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.output_dropout = nn.Dropout(args.dropout)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=1e-12)

    def transpose_for_scores(self, x):
        return x.view(x.size(0), x.size(1), HEADS, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        attention_scores = attention_scores + attention_mask
        attention_probs = self.attention_dropout(F.softmax(attention_scores, dim=-1))
        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = context_layer.transpose(2, 1).flatten(2)
        projected = self.output_dropout(self.dense(context_layer))
        return self.LayerNorm(hidden_states + projected)


class AlbertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = AlbertAttention()
        self.ffn = nn.Linear(HIDDEN, FEEDFORWARD)
        self.ffn_output = nn.Linear(FEEDFORWARD, HIDDEN)
        self.dropout = nn.Dropout(args.dropout)
        self.full_layer_layer_norm = nn.LayerNorm(HIDDEN, eps=1e-12)

    def forward(self, hidden_states, attention_mask):
        attention_output = self.attention(hidden_states, attention_mask)
        ffn_output = gelu_new(self.ffn(attention_output))
        ffn_output = self.dropout(self.ffn_output(ffn_output))
        return self.full_layer_layer_norm(ffn_output + attention_output)


class AlbertLayerGroup(nn.Module):
    def __init__(self):
        super().__init__()
        self.albert_layers = nn.ModuleList(AlbertLayer() for _ in range(INNER))

    def forward(self, hidden_states, attention_mask):
        for albert_layer in self.albert_layers:
            hidden_states = albert_layer(hidden_states, attention_mask)
        return hidden_states


class AlbertTransformer(nn.Module):
    """More layers than groups: those of a group have the same weights."""

    def __init__(self):
        super().__init__()
        self.embedding_hidden_mapping_in = nn.Linear(EMBEDDING, HIDDEN)
        self.albert_layer_groups = nn.ModuleList(AlbertLayerGroup() for _ in range(GROUPS))

    def forward(self, embeddings, attention_mask):
        hidden_states = self.embedding_hidden_mapping_in(embeddings)
        for i in range(LAYERS):
            group_idx = i // (LAYERS // GROUPS)
            hidden_states = self.albert_layer_groups[group_idx](hidden_states, attention_mask)
        return hidden_states


class AlbertModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = AlbertEmbeddings()
        self.encoder = AlbertTransformer()
        self.pooler = nn.Linear(HIDDEN, HIDDEN)
        self.pooler_activation = nn.Tanh()

    def forward(self, input_ids, token_type_ids):
        extended = (input_ids != PAD)[:, None, None, :].float()
        attention_mask = (1.0 - extended) * -1e4
        sequence_output = self.encoder(self.embeddings(input_ids, token_type_ids), attention_mask)
        return sequence_output, self.pooler_activation(self.pooler(sequence_output[:, 0]))


class AlbertMLMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, EMBEDDING)
        self.LayerNorm = nn.LayerNorm(EMBEDDING, eps=1e-12)
        self.decoder = nn.Linear(EMBEDDING, VOCAB)

    def forward(self, hidden_states):
        return self.decoder(self.LayerNorm(gelu_new(self.dense(hidden_states))))


class AlbertForPreTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.albert = AlbertModel()
        self.predictions = AlbertMLMHead()
        self.sop_classifier = nn.Sequential(nn.Dropout(args.dropout), nn.Linear(HIDDEN, 2))
        self.apply(self._init_weights)
        self.predictions.decoder.weight = self.albert.embeddings.word_embeddings.weight

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias, std=0.02)

    def forward(self, input_ids, token_type_ids, masked_positions):
        sequence_output, pooled_output = self.albert(input_ids, token_type_ids)
        index = masked_positions.unsqueeze(-1).expand(-1, -1, HIDDEN)
        masked_output = sequence_output.gather(1, index)
        return self.predictions(masked_output), self.sop_classifier(pooled_output)


class Lamb(torch.optim.Optimizer):
    """Adam, but each parameter moves in proportion to its own norm."""

    def __init__(self, params, lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @staticmethod
    def norm(tensor):
        total = tensor.norm()
        return getattr(total, "full_tensor", total.detach)().item()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m_hat = state["m"] / (1 - beta1 ** state["step"])
                v_hat = state["v"] / (1 - beta2 ** state["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"])
                ratio = 1.0
                if decay > 0:
                    update = update + decay * p
                    p_norm, update_norm = self.norm(p), self.norm(update)
                    ratio = p_norm / update_norm if p_norm > 0 and update_norm > 0 else 1.0
                p.sub_(update, alpha=group["lr"] * ratio)


def packed_pairs(g):
    """Two segments of one text, swapped in half of the rows. Whole n-grams of them are masked."""
    rows = []
    for _ in range(BATCH):
        first, second = (int(n) for n in torch.randint(10, 19, (2,), generator=g))
        text = (torch.randn(first + second, generator=g).cumsum(0) * 6).long() % (VOCAB - FIRST)
        a, b = (text + FIRST).split([first, second])
        swapped = int(torch.rand(1, generator=g) < 0.5)
        a, b = (b, a) if swapped else (a, b)
        ids = torch.tensor([CLS, *a.tolist(), SEP, *b.tolist(), SEP])
        types = torch.tensor([0] * (len(a) + 2) + [1] * (len(b) + 1))
        masked = set()
        while len(masked) < PREDICTIONS:
            n = min(int(torch.randint(1, 4, (1,), generator=g)), PREDICTIONS - len(masked))
            start = int(torch.randint(1, len(ids) - n, (1,), generator=g))
            masked |= {i for i in range(start, start + n) if ids[i] != SEP}
        positions = torch.tensor(sorted(masked))
        labels = ids[positions]
        random_words = torch.randint(FIRST, VOCAB, (PREDICTIONS,), generator=g)
        dice = torch.rand(PREDICTIONS, generator=g)
        corrupted = torch.where(dice < 0.8, MASK, torch.where(dice < 0.9, random_words, labels))
        ids = ids.scatter(0, positions, corrupted)
        ids, types = (F.pad(x, (0, LENGTH - len(x)), value=PAD) for x in (ids, types))
        rows.append((ids, types, positions, labels, torch.tensor(swapped)))
    return tuple(map(torch.stack, zip(*rows, strict=True)))


net = AlbertForPreTraining()
model = prepare(net, net.albert.encoder.albert_layer_groups)
no_decay = ("bias", "LayerNorm.weight", "layer_norm.weight")
named = list(net.named_parameters())
optimizer = Lamb(
    [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ],
    lr=2e-2,
)
warmup, total = 2, 40
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, (total - step) / (total - warmup))
)
for parts in batches(packed_pairs):
    for input_ids, token_type_ids, masked_positions, masked_labels, order_labels in parts:
        with autocast():
            prediction_scores, sop_scores = model(input_ids, token_type_ids, masked_positions)
            log_probs = F.log_softmax(prediction_scores.float(), dim=-1)
            masked_lm_loss = -log_probs.gather(-1, masked_labels.unsqueeze(-1)).mean()
            sentence_order_loss = F.cross_entropy(sop_scores.float(), order_labels)
            loss = (masked_lm_loss + sentence_order_loss) / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
