"""BERT on pairs of sentences: segment embeddings, post-norm layers, a pooler, three classes."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

VOCAB, MAX_LENGTH, BATCH, LABELS = 120, 32, 16, 3
PAD, CLS, SEP, FIRST = 0, 1, 2, 3
HIDDEN, HEADS, INTERMEDIATE, LAYERS = 48, 4, 128, 3


class BertEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(MAX_LENGTH, HIDDEN)
        self.token_type_embeddings = nn.Embedding(2, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=1e-12)
        self.dropout = nn.Dropout(args.dropout)
        self.register_buffer("position_ids", torch.arange(MAX_LENGTH).expand(1, -1))

    def forward(self, input_ids, token_type_ids):
        position_ids = self.position_ids[:, : input_ids.size(1)]
        embeddings = self.word_embeddings(input_ids)
        embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class BertSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_size = HIDDEN // HEADS
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(args.dropout)

    def transpose_for_scores(self, x):
        return x.view(x.size(0), x.size(1), HEADS, self.head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.head_size)
        attention_probs = F.softmax(attention_scores + attention_mask, dim=-1)
        attention_probs = self.dropout(attention_probs)
        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        return context_layer.view(hidden_states.shape)


class BertSelfOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=1e-12)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor)


class BertAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self = BertSelfAttention()
        self.output = BertSelfOutput()

    def forward(self, hidden_states, attention_mask):
        self_outputs = self.self(hidden_states, attention_mask)
        return self.output(self_outputs, hidden_states)


class BertIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, INTERMEDIATE)

    def forward(self, hidden_states):
        return F.gelu(self.dense(hidden_states))


class BertOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(INTERMEDIATE, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=1e-12)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor)


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = BertAttention()
        self.intermediate = BertIntermediate()
        self.output = BertOutput()

    def forward(self, hidden_states, attention_mask):
        attention_output = self.attention(hidden_states, attention_mask)
        intermediate_output = self.intermediate(attention_output)
        return self.output(intermediate_output, attention_output)


class BertEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer() for _ in range(LAYERS))

    def forward(self, hidden_states, attention_mask):
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states, attention_mask)
        return hidden_states


class BertPooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.activation = nn.Tanh()

    def forward(self, hidden_states):
        first_token_tensor = hidden_states[:, 0]
        return self.activation(self.dense(first_token_tensor))


class BertForSequenceClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = BertEmbeddings()
        self.encoder = BertEncoder()
        self.pooler = BertPooler()
        self.dropout = nn.Dropout(args.dropout)
        self.classifier = nn.Linear(HIDDEN, LABELS)
        torch.manual_seed(2)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.08)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.08)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()

    def forward(self, input_ids, token_type_ids, attention_mask):
        extended_attention_mask = attention_mask[:, None, None, :].float()
        extended_attention_mask = (1.0 - extended_attention_mask) * -10000.0
        embedding_output = self.embeddings(input_ids, token_type_ids)
        sequence_output = self.encoder(embedding_output, extended_attention_mask)
        pooled_output = self.dropout(self.pooler(sequence_output))
        return self.classifier(pooled_output)


def sentence_pairs(g):
    """A hypothesis repeats words of its premise: all of them, some of them, or none."""
    input_ids = torch.full((BATCH, MAX_LENGTH), PAD)
    token_type_ids = torch.zeros(BATCH, MAX_LENGTH, dtype=torch.long)
    labels = torch.randint(0, LABELS, (BATCH,), generator=g)
    for row, label in enumerate(labels.tolist()):
        n, m = (int(torch.randint(low, low + 8, (1,), generator=g)) for low in (10, 4))
        premise = torch.randint(FIRST, VOCAB, (n,), generator=g)
        hypothesis = premise[torch.randint(0, n, (m,), generator=g)]
        others = torch.randint(FIRST, VOCAB, (m,), generator=g)
        new = (torch.zeros(m), torch.arange(m) % 2, torch.ones(m))[label].bool()
        hypothesis = torch.where(new, others, hypothesis)
        cls, sep = torch.tensor([CLS]), torch.tensor([SEP])
        text = torch.cat([cls, premise, sep, hypothesis, sep])[:MAX_LENGTH]
        input_ids[row, : len(text)] = text
        token_type_ids[row, n + 2 : len(text)] = 1
    return input_ids, token_type_ids, (input_ids != PAD).long(), labels


net = BertForSequenceClassification()
model = prepare(net, net.encoder.layer)
no_decay = ("bias", "LayerNorm.weight")
decayed = [p for n, p in net.named_parameters() if not n.endswith(no_decay)]
others = [p for n, p in net.named_parameters() if n.endswith(no_decay)]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
    lr=1e-3,
    eps=1e-6,
)
warmup, total = 2, 40
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, (total - step) / (total - warmup))
)
for parts in batches(sentence_pairs):
    for input_ids, token_type_ids, attention_mask, labels in parts:
        with autocast():
            logits = model(input_ids, token_type_ids, attention_mask)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
