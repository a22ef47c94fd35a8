"""An LSTM language model like AWD-LSTM: state carried from chunk to chunk, tied weights, AR, TAR."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

NTOKENS, BPTT, BATCH, EMSIZE, NHID, NLAYERS = 100, 14, 8, 48, 64, 3
ALPHA, BETA, LR, CLIP = 2.0, 1.0, 4.0, 0.25


class LockedDropout(nn.Module):
    """One mask for all positions of a sequence."""

    def forward(self, x, dropout):
        if not self.training or not dropout:
            return x
        mask = torch.empty(1, x.size(1), x.size(2)).bernoulli_(1 - dropout) / (1 - dropout)
        return x * mask


class LSTMCell(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(4 * hidden_size))
        self.bias_hh = nn.Parameter(torch.empty(4 * hidden_size))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(hidden_size**-0.5), hidden_size**-0.5)

    def forward(self, x, h, c):
        gates = F.linear(x, self.weight_ih, self.bias_ih)
        gates = gates + F.linear(h, self.weight_hh, self.bias_hh)
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


class LSTMLayer(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.cell = LSTMCell(input_size, hidden_size)

    def forward(self, x, state):
        h, c = state
        outputs = []
        for step in x.unbind(0):
            h, c = self.cell(step, h, c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.lockdrop = LockedDropout()
        self.encoder = nn.Embedding(NTOKENS, EMSIZE)
        sizes = [EMSIZE, *[NHID] * (NLAYERS - 1), EMSIZE]
        self.rnns = nn.ModuleList(
            [LSTMLayer(sizes[layer], sizes[layer + 1]) for layer in range(NLAYERS)]
        )
        self.decoder = nn.Linear(EMSIZE, NTOKENS)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.3, 0.3)
        nn.init.zeros_(self.decoder.bias)

    def init_hidden(self, bsz):
        widths = [*[NHID] * (NLAYERS - 1), EMSIZE]
        return [(torch.zeros(bsz, width), torch.zeros(bsz, width)) for width in widths]

    def forward(self, input, hidden):
        """Sequences first. Returns what the last layer said before and after its dropout, too."""
        raw_output = self.lockdrop(self.encoder(input), args.dropout)
        new_hidden = []
        for layer, rnn in enumerate(self.rnns):
            raw_output, state = rnn(raw_output, hidden[layer])
            new_hidden.append(state)
            output = self.lockdrop(raw_output, args.dropout)
            if layer < NLAYERS - 1:
                raw_output = output
        return self.decoder(output), new_hidden, raw_output, output


def repackage_hidden(hidden):
    """Cuts the states from what they were computed from."""
    return [(h.detach(), c.detach()) for h, c in hidden]


def corpus():
    """A text in which a word often follows from the two before it, cut into long rows."""
    g = torch.Generator().manual_seed(31)
    table = torch.randint(0, NTOKENS, (NTOKENS,), generator=g)
    length = BPTT * args.steps + 1
    text = torch.randint(0, NTOKENS, (BATCH, length), generator=g)
    for i in range(2, length):
        follows = torch.rand(BATCH, generator=g) < 0.7
        text[:, i] = torch.where(
            follows, table[(text[:, i - 1] + text[:, i - 2]) % NTOKENS], text[:, i]
        )
    return text


text = corpus()
starts = iter(range(0, text.size(1) - 1, BPTT))


def chunk(_):
    """The rows' next words, where the chunk before ended, and the words after each."""
    i = next(starts)
    return text[:, i : i + BPTT], text[:, i + 1 : i + 1 + BPTT]


net = RNNModel()
model = prepare(net, net.rnns)
optimizer = torch.optim.SGD(net.parameters(), lr=LR, weight_decay=1.2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
hiddens = {}
for parts in batches(chunk):
    for part, (data, targets) in enumerate(parts):
        hidden = repackage_hidden(hiddens.get(part) or net.init_hidden(len(data)))
        with autocast():
            logits, hidden, raw_output, output = model(data.t(), hidden)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.t().flatten())
        loss = loss + ALPHA * output.float().pow(2).mean()
        loss = loss + BETA * (raw_output[1:] - raw_output[:-1]).float().pow(2).mean()
        scaler.scale(loss / args.accum).backward()
        hiddens[part] = hidden
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
