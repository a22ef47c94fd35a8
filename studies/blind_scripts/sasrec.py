"""SASRec: what a user clicks next. A causal Transformer, one sampled negative for each position."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

USERS, ITEMS, GENRES, MAXLEN = 16, 120, 8, 24
HIDDEN, HEADS, BLOCKS = 32, 2, 3


class MultiHeadAttention(nn.Module):
    """Queries are normed, keys and values are not. A position sees itself and the ones before."""

    def __init__(self, hidden_units, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_units // num_heads
        self.query = nn.Linear(hidden_units, hidden_units, bias=False)
        self.key = nn.Linear(hidden_units, hidden_units, bias=False)
        self.value = nn.Linear(hidden_units, hidden_units, bias=False)
        self.out = nn.Linear(hidden_units, hidden_units, bias=False)
        self.dropout = nn.Dropout(args.dropout)

    def split_heads(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, queries, keys, attention_mask):
        q = self.split_heads(self.query(queries))
        k = self.split_heads(self.key(keys))
        v = self.split_heads(self.value(keys))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(attention_mask, float("-inf"))
        weights = self.dropout(F.softmax(scores, dim=-1))
        context = torch.matmul(weights, v).transpose(1, 2)
        return self.out(context.reshape(queries.shape))


class PointWiseFeedForward(nn.Module):
    def __init__(self, hidden_units):
        super().__init__()
        self.conv1 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, inputs):
        outputs = self.conv2(self.relu(self.conv1(inputs.transpose(-1, -2))))
        outputs = self.dropout(outputs.transpose(-1, -2).contiguous())
        return outputs + inputs


class SASRecBlock(nn.Module):
    def __init__(self, hidden_units, num_heads):
        super().__init__()
        self.attention_layernorm = nn.LayerNorm(hidden_units, eps=1e-8)
        self.attention_layer = MultiHeadAttention(hidden_units, num_heads)
        self.forward_layernorm = nn.LayerNorm(hidden_units, eps=1e-8)
        self.forward_layer = PointWiseFeedForward(hidden_units)

    def forward(self, seqs, attention_mask, timeline_mask):
        queries = self.attention_layernorm(seqs)
        seqs = queries + self.attention_layer(queries, seqs, attention_mask)
        seqs = self.forward_layernorm(seqs)
        seqs = self.forward_layer(seqs)
        return seqs * ~timeline_mask.unsqueeze(-1)


class SASRec(nn.Module):
    def __init__(self, hidden_units=HIDDEN, num_heads=HEADS, num_blocks=BLOCKS):
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS + 1, hidden_units, padding_idx=0)
        self.pos_emb = nn.Embedding(MAXLEN, hidden_units)
        self.emb_dropout = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(SASRecBlock(hidden_units, num_heads) for _ in range(num_blocks))
        self.last_layernorm = nn.LayerNorm(hidden_units, eps=1e-8)
        torch.manual_seed(5)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        for name, param in self.named_parameters():
            if param.dim() > 1:
                nn.init.xavier_normal_(param)
            elif name.endswith("bias"):
                nn.init.zeros_(param)
        self.item_emb.weight[0].zero_()

    def log2feats(self, log_seqs):
        seqs = self.item_emb(log_seqs) * self.item_emb.embedding_dim**0.5
        positions = torch.arange(log_seqs.size(1)).expand_as(log_seqs)
        seqs = self.emb_dropout(seqs + self.pos_emb(positions))
        timeline_mask = log_seqs == 0
        seqs = seqs * ~timeline_mask.unsqueeze(-1)
        length = log_seqs.size(1)
        attention_mask = ~torch.tril(torch.ones(length, length, dtype=torch.bool))
        for block in self.blocks:
            seqs = block(seqs, attention_mask, timeline_mask)
        return self.last_layernorm(seqs)

    def forward(self, log_seqs, pos_seqs, neg_seqs):
        log_feats = self.log2feats(log_seqs)
        pos_embs = self.item_emb(pos_seqs)
        neg_embs = self.item_emb(neg_seqs)
        pos_logits = (log_feats * pos_embs).sum(dim=-1)
        neg_logits = (log_feats * neg_embs).sum(dim=-1)
        return pos_logits, neg_logits


def histories(g):
    """Users stay in a genre for a while. Items of a genre follow each other; 0 pads on the left."""
    lengths = torch.randint(8, MAXLEN + 2, (USERS,), generator=g).tolist()
    genres = torch.randint(0, GENRES, (USERS, MAXLEN + 1), generator=g).tolist()
    changes = (torch.rand(USERS, MAXLEN + 1, generator=g) < 0.15).tolist()
    popularity = torch.rand(USERS, MAXLEN + 1, generator=g).square() * (ITEMS // GENRES)
    ranks = popularity.long().tolist()
    draws = torch.randint(1, ITEMS + 1, (USERS, 40 * MAXLEN), generator=g).tolist()
    rows = []
    for user, length in enumerate(lengths):
        genre, history = genres[user][0], []
        for click in range(length):
            genre = genres[user][click] if changes[user][click] else genre
            history.append(1 + genre + GENRES * ranks[user][click])
        seen = set(history)
        unseen = [item for item in draws[user] if item not in seen]
        padding = [0] * (MAXLEN - length + 1)
        clicked, following = padding + history[:-1], padding + history[1:]
        rows.append((clicked, following, padding + unseen[: length - 1]))
    seqs, poss, negs = torch.tensor(rows).unbind(1)
    return seqs, poss, negs


net = SASRec()
model = prepare(net, net.blocks)
bce_criterion = nn.BCEWithLogitsLoss(reduction="sum")
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3, betas=(0.9, 0.98))
warmup_steps, total_steps = 2, 40
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda step: min((step + 1) / warmup_steps, (total_steps - step) / total_steps),
)
for parts in batches(histories):
    clicks = torch.stack([(pos != 0).sum() for _, pos, _ in parts]).sum()
    if world > 1:
        dist.all_reduce(clicks)
    optimizer.zero_grad()
    for seq, pos, neg in parts:
        with autocast():
            pos_logits, neg_logits = model(seq, pos, neg)
        indices = pos != 0
        pos_labels = torch.ones(int(indices.sum()))
        neg_labels = torch.zeros(int(indices.sum()))
        loss = bce_criterion(pos_logits[indices].float(), pos_labels)
        loss = loss + bce_criterion(neg_logits[indices].float(), neg_labels)
        loss = loss * world / clicks
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
