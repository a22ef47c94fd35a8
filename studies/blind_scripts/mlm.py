"""BERT in miniature: masked words and next sentence, padded pairs of sentences, a tied decoder."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

PAD, CLS, SEP, MASK, VOCAB, LENGTH = 0, 1, 2, 3, 200, 24


class BertEmbeddings(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, hidden, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(LENGTH + 8, hidden)
        self.token_type_embeddings = nn.Embedding(2, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(args.dropout)
        self.register_buffer("position_ids", torch.arange(LENGTH + 8)[None])

    def forward(self, input_ids, token_type_ids):
        position_ids = self.position_ids[:, : input_ids.shape[1]]
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class BertSelfAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.num_heads, self.head_size = heads, hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(args.dropout)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        scores = scores / math.sqrt(self.head_size)
        scores = scores + attention_mask
        probs = self.dropout(nn.functional.softmax(scores, dim=-1))
        context = torch.matmul(probs, value_layer).permute(0, 2, 1, 3).contiguous()
        return context.view(*context.shape[:-2], -1)


class BertSelfOutput(nn.Module):
    def __init__(self, inner, hidden):
        super().__init__()
        self.dense = nn.Linear(inner, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor)


class BertAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.self = BertSelfAttention(hidden, heads)
        self.output = BertSelfOutput(hidden, hidden)

    def forward(self, hidden_states, attention_mask):
        return self.output(self.self(hidden_states, attention_mask), hidden_states)


class BertIntermediate(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.dense = nn.Linear(hidden, intermediate)

    def forward(self, hidden_states):
        return F.gelu(self.dense(hidden_states))


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, intermediate):
        super().__init__()
        self.attention = BertAttention(hidden, heads)
        self.intermediate = BertIntermediate(hidden, intermediate)
        self.output = BertSelfOutput(intermediate, hidden)

    def forward(self, hidden_states, attention_mask):
        attention_output = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(attention_output), attention_output)


class BertPooler(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, hidden_states):
        return torch.tanh(self.dense(hidden_states[:, 0]))


class BertLMPredictionHead(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.decoder = nn.Linear(hidden, VOCAB)

    def forward(self, hidden_states):
        return self.decoder(self.LayerNorm(F.gelu(self.dense(hidden_states))))


class BertForPreTraining(nn.Module):
    def __init__(self, hidden=64, layers=3, heads=4, intermediate=256):
        super().__init__()
        self.embeddings = BertEmbeddings(hidden)
        self.layer = nn.ModuleList(BertLayer(hidden, heads, intermediate) for _ in range(layers))
        self.pooler = BertPooler(hidden)
        self.predictions = BertLMPredictionHead(hidden)
        self.seq_relationship = nn.Linear(hidden, 2)
        self.apply(self._init_weights)
        self.predictions.decoder.weight = self.embeddings.word_embeddings.weight

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.05)
        if isinstance(module, nn.Linear):
            module.bias.data.zero_()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()

    def forward(self, input_ids, attention_mask, token_type_ids):
        hidden_states = self.embeddings(input_ids, token_type_ids)
        extended_mask = attention_mask[:, None, None, :].to(hidden_states.dtype)
        extended_mask = (1.0 - extended_mask) * -10000.0
        for layer in self.layer:
            hidden_states = layer(hidden_states, extended_mask)
        relationship = self.seq_relationship(self.pooler(hidden_states))
        return self.predictions(hidden_states), relationship


def collate(g):
    """Two sentences a row, padded to one length; 15 % of the words are to be predicted."""
    ids = torch.randint(4, VOCAB, (16, LENGTH), generator=g)
    first = torch.randint(5, 10, (16, 1), generator=g)
    total = torch.randint(14, LENGTH + 1, (16, 1), generator=g)
    place = torch.arange(LENGTH)[None]
    attention_mask = (place < total).long()
    token_type_ids = ((place > first) & (place < total)).long()
    ids = ids.masked_fill((place == first) | (place == total - 1), SEP)
    ids = ids.masked_fill(place == 0, CLS).masked_fill(place >= total, PAD)
    masked = (torch.rand(ids.shape, generator=g) < 0.15) & (ids > MASK)
    masked[:, 1] = True
    labels = ids.masked_fill(~masked, -100)
    kind = torch.rand(ids.shape, generator=g)
    random_words = torch.randint(4, VOCAB, ids.shape, generator=g)
    ids = torch.where(masked & (kind < 0.8), MASK, ids)
    ids = torch.where(masked & (kind >= 0.9), random_words, ids)
    return ids, attention_mask, token_type_ids, labels, torch.randint(0, 2, (16,), generator=g)


model = BertForPreTraining()
model = prepare(model, model.layer)
no_decay = ("bias", "LayerNorm.weight")
groups = [
    {"params": [], "weight_decay": 0.01},
    {"params": [], "weight_decay": 0.0},
]
for name, parameter in model.named_parameters():
    groups[any(part in name for part in no_decay)]["params"].append(parameter)
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-6)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 5, (50 - step) / 45)
)
model.train()
for parts in batches(collate):
    num_items = torch.tensor(sum(int((part[3] != -100).sum()) for part in parts))
    if world > 1:
        dist.all_reduce(num_items)
    for input_ids, attention_mask, token_type_ids, labels, next_sentence in parts:
        with autocast():
            scores, relationship = model(input_ids, attention_mask, token_type_ids)
            lm_loss = F.cross_entropy(scores.view(-1, VOCAB), labels.reshape(-1), reduction="sum")
            lm_loss = lm_loss * world / num_items
            nsp_loss = F.cross_entropy(relationship, next_sentence)
            loss = lm_loss + nsp_loss / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    model.zero_grad()
finish()
