"""A BiLSTM-CRF tagger: a GRU over characters, packed sentences, and a hand-written CRF."""

from common import args, autocast, batches, finish, nn, prepare, scaler, torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PAD, WORDS, CHARS, TAGS, LENGTH = 0, 120, 30, 7, 14


class CharEncoder(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.embed = nn.Embedding(CHARS, dim, padding_idx=PAD)
        self.gru = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)

    def forward(self, chars):
        B, T, L = chars.shape
        _, hidden = self.gru(self.embed(chars.reshape(B * T, L)))
        return torch.cat([hidden[0], hidden[1]], dim=-1).view(B, T, -1)


class WordEncoder(nn.Module):
    def __init__(self, dim, hidden, layers=2):
        super().__init__()
        self.lstm = nn.LSTM(
            dim, hidden, layers, batch_first=True, bidirectional=True, dropout=args.dropout
        )
        for name, parameter in self.lstm.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(parameter)
            if "bias_ih" in name:
                parameter.data[hidden : 2 * hidden].fill_(1.0)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return out


class CRF(nn.Module):
    """Negative log-likelihood of a linear-chain CRF."""

    def __init__(self, tags):
        super().__init__()
        self.start = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
        self.end = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
        self.transitions = nn.Parameter(torch.empty(tags, tags).uniform_(-0.1, 0.1))

    def score(self, emissions, tags, mask):
        gathered = emissions.gather(2, tags[..., None]).squeeze(2)
        score = self.start[tags[:, 0]] + gathered[:, 0]
        for t in range(1, tags.shape[1]):
            step = self.transitions[tags[:, t - 1], tags[:, t]] + gathered[:, t]
            score = score + step * mask[:, t]
        last = mask.long().sum(1) - 1
        return score + self.end[tags.gather(1, last[:, None]).squeeze(1)]

    def normalizer(self, emissions, mask):
        alpha = self.start + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            step = alpha[:, :, None] + self.transitions + emissions[:, t, None, :]
            alpha = torch.where(mask[:, t, None], torch.logsumexp(step, 1), alpha)
        return torch.logsumexp(alpha + self.end, 1)

    def forward(self, emissions, tags, mask):
        return self.normalizer(emissions, mask) - self.score(emissions, tags, mask)


class Tagger(nn.Module):
    def __init__(self, dim=48, chars=16, hidden=40):
        super().__init__()
        self.words = nn.Embedding(WORDS, dim, padding_idx=PAD)
        self.chars = CharEncoder(chars, chars)
        self.drop = nn.Dropout(args.dropout)
        self.encoder = WordEncoder(dim + 2 * chars, hidden)
        self.hidden2tag = nn.Linear(2 * hidden, TAGS)
        self.crf = CRF(TAGS)

    def forward(self, words, chars, lengths, tags):
        x = torch.cat([self.words(words), self.chars(chars)], dim=-1)
        x = self.encoder(self.drop(x), lengths)
        emissions = self.hidden2tag(self.drop(x)).float()
        return self.crf(emissions, tags, words != PAD)


def sentences(g):
    lengths = torch.randint(5, LENGTH + 1, (12,), generator=g)
    padding = torch.arange(LENGTH)[None] >= lengths[:, None]
    words = torch.randint(1, WORDS, (12, LENGTH), generator=g).masked_fill(padding, PAD)
    chars = torch.randint(1, CHARS, (12, LENGTH, 6), generator=g)
    chars = chars.masked_fill(padding[..., None], PAD)
    tags = (words % TAGS + words.roll(1, 1) % 2) % TAGS
    return words, chars, lengths, tags


model = Tagger()
model = prepare(model, [model.chars, model.encoder])
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4
)
for parts in batches(sentences):
    optimizer.zero_grad()
    for words, chars, lengths, tags in parts:
        with autocast():
            nll = model(words, chars, lengths, tags)
        scaler.scale(nll.mean() / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    scaler.step(optimizer)
    scaler.update()
finish()
