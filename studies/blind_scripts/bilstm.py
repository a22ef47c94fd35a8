"""Texts classified by a bidirectional LSTM: casing features, a highway, attention in several hops."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

VOCAB, CASINGS, CLASSES, LENGTH, BATCH = 120, 4, 5, 22, 16
WORD_DIM, CASING_DIM, DIM, HIDDEN, LAYERS = 32, 8, 40, 24, 2
ATTENTION_DIM, HOPS, PENALTY = 20, 3, 0.1
PAD = 0


class TokenEmbedder(nn.Module):
    """Words and how they are written, side by side, then a highway layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WORD_DIM, padding_idx=PAD)
        self.casings = nn.Embedding(CASINGS, CASING_DIM)
        self.transform = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, tokens, casings):
        embedded = torch.cat([self.words(tokens), self.casings(casings)], dim=-1)
        gate = torch.sigmoid(self.gate(embedded))
        highway = gate * torch.relu(self.transform(embedded)) + (1 - gate) * embedded
        return self.dropout(highway)


def reverse_padded(states, lengths):
    """Reverses the tokens of each row and leaves its padding at the end."""
    steps = torch.arange(states.shape[1])
    index = lengths[:, None] - 1 - steps
    index = torch.where(index >= 0, index, steps)
    return states.gather(1, index[:, :, None].expand_as(states))


class BiLSTMLayer(nn.Module):
    """One LSTM reads from the left, one from the right. A residual connection, then a norm."""

    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.forward_lstm = nn.LSTM(input_size, hidden_size, batch_first=True)
        self.backward_lstm = nn.LSTM(input_size, hidden_size, batch_first=True)
        self.shortcut = nn.Linear(input_size, 2 * hidden_size, bias=False)
        self.norm = nn.LayerNorm(2 * hidden_size)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, states, lengths, mask):
        from_left, _ = self.forward_lstm(states)
        from_right, _ = self.backward_lstm(reverse_padded(states, lengths))
        from_right = reverse_padded(from_right, lengths)
        encoded = torch.cat([from_left, from_right], dim=-1) * mask[:, :, None]
        return self.norm(self.shortcut(states) + self.dropout(encoded))


class SelfAttentivePooling(nn.Module):
    """Lin et al., 2017: each hop weighs the tokens; hops that look at the same ones are punished."""

    def __init__(self, size):
        super().__init__()
        self.w_s1 = nn.Linear(size, ATTENTION_DIM, bias=False)
        self.w_s2 = nn.Linear(ATTENTION_DIM, HOPS, bias=False)

    def forward(self, states, mask):
        scores = self.w_s2(torch.tanh(self.w_s1(states))).transpose(1, 2)
        scores = scores.masked_fill(~mask[:, None, :], -1e4)
        attention = F.softmax(scores, dim=-1)
        pooled = torch.bmm(attention, states)
        overlap = torch.bmm(attention, attention.transpose(1, 2)) - torch.eye(HOPS)
        return pooled.flatten(1), overlap.float().pow(2).sum(dim=(1, 2))


class Classifier(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.dense = nn.Linear(input_size, hidden_size)
        self.dropout = nn.Dropout(args.dropout)
        self.out_proj = nn.Linear(hidden_size, CLASSES)

    def forward(self, features):
        return self.out_proj(self.dropout(torch.relu(self.dense(features))))


class TextClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedder = TokenEmbedder()
        sizes = [DIM] + [2 * HIDDEN] * LAYERS
        self.encoder = nn.ModuleList(BiLSTMLayer(sizes[i], HIDDEN) for i in range(LAYERS))
        self.pooling = SelfAttentivePooling(2 * HIDDEN)
        self.classifier = Classifier(HOPS * 2 * HIDDEN, 48)
        torch.manual_seed(1)
        for layer in self.encoder:
            for lstm in (layer.forward_lstm, layer.backward_lstm):
                self._init_lstm(lstm)

    @staticmethod
    @torch.no_grad()
    def _init_lstm(lstm):
        """Gates keep what they have at first."""
        nn.init.xavier_uniform_(lstm.weight_ih_l0)
        for gate in lstm.weight_hh_l0.chunk(4):
            nn.init.orthogonal_(gate)
        nn.init.zeros_(lstm.bias_ih_l0)
        nn.init.zeros_(lstm.bias_hh_l0)
        lstm.bias_ih_l0[HIDDEN : 2 * HIDDEN] = 1.0

    def forward(self, tokens, casings):
        mask = tokens != PAD
        lengths = mask.sum(dim=1)
        states = self.embedder(tokens, casings)
        for layer in self.encoder:
            states = layer(states, lengths, mask)
        features, penalty = self.pooling(states, mask)
        return self.classifier(features), penalty


def texts(g):
    """Topics prefer words. Some sentences shout, and names have capitals."""
    labels = torch.randint(0, CLASSES, (BATCH,), generator=g)
    taste = 2 * torch.randn(CLASSES, VOCAB, generator=torch.Generator().manual_seed(7))
    taste[:, PAD] = -math.inf
    tokens = torch.multinomial(taste[labels].softmax(-1), LENGTH, replacement=True, generator=g)
    casings = 1 + (torch.rand(BATCH, LENGTH, generator=g) < 0.2).long()
    casings[torch.rand(BATCH, generator=g) < 0.15] = 3
    lengths = torch.randint(6, LENGTH + 1, (BATCH, 1), generator=g)
    padding = torch.arange(LENGTH) >= lengths
    return tokens.masked_fill(padding, PAD), casings.masked_fill(padding, 0), labels


net = TextClassifier()
model = prepare(net, net.encoder)
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-6)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=5e-3, total_steps=30, pct_start=0.2, cycle_momentum=False
)
for parts in batches(texts):
    for tokens, casings, labels in parts:
        with autocast():
            logits, penalty = model(tokens, casings)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.1)
        loss = (loss + PENALTY * penalty.mean()) / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
finish()
