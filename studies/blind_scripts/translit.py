"""Names spelled in another script: a GRU encoder and decoder with Bahdanau's attention, maxout."""

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SOURCE, TARGET, BATCH = 32, 40, 12
PAD, SOS, EOS = 0, 1, 2
LONGEST, STEPS = 12, 12


class Encoder(nn.Module):
    """Encodes a sequence of letters, in both directions."""

    def __init__(self, embed_size, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(SOURCE, embed_size, padding_idx=PAD)
        self.dropout = nn.Dropout(args.dropout)
        self.rnn = nn.GRU(embed_size, hidden_size, batch_first=True, bidirectional=True)

    def forward(self, src, src_lengths):
        embedded = self.dropout(self.embedding(src))
        packed = pack_padded_sequence(embedded, src_lengths, batch_first=True, enforce_sorted=False)
        output, final = self.rnn(packed)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=src.size(1))
        fwd_final, bwd_final = final[0], final[1]
        return output, torch.cat([fwd_final, bwd_final], dim=-1)


class BahdanauAttention(nn.Module):
    """Implements Bahdanau (MLP) attention."""

    def __init__(self, hidden_size):
        super().__init__()
        self.key_layer = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.query_layer = nn.Linear(hidden_size, hidden_size, bias=False)
        self.energy_layer = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, query, proj_key, value, mask):
        """A query is [B, D], keys are [B, M, D], values are [B, M, 2D] and the mask is [B, M]."""
        query = self.query_layer(query).unsqueeze(1)
        scores = self.energy_layer(torch.tanh(query + proj_key))
        scores = scores.squeeze(2)
        scores = scores.float().masked_fill(~mask, float("-inf"))
        alphas = F.softmax(scores, dim=-1)
        context = torch.bmm(alphas.unsqueeze(1).to(value.dtype), value)
        return context.squeeze(1), alphas


class Maxout(nn.Module):
    """The larger one of each pair of units."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.out_features = out_features
        self.linear = nn.Linear(in_features, 2 * out_features)

    def forward(self, x):
        x = self.linear(x)
        x = x.view(*x.shape[:-1], self.out_features, 2)
        return x.max(dim=-1).values


class Decoder(nn.Module):
    """A conditional RNN decoder with attention."""

    def __init__(self, embed_size, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(TARGET, embed_size, padding_idx=PAD)
        self.dropout = nn.Dropout(args.dropout)
        self.attention = BahdanauAttention(hidden_size)
        self.rnn = nn.GRUCell(embed_size + 2 * hidden_size, hidden_size)
        self.bridge = nn.Linear(2 * hidden_size, hidden_size)
        self.pre_output = Maxout(3 * hidden_size + embed_size, hidden_size)

    def init_hidden(self, encoder_final):
        return torch.tanh(self.bridge(encoder_final))

    def forward(self, trg, encoder_hidden, encoder_final, src_mask):
        """Unrolls the decoder over the right letters (teacher forcing)."""
        hidden = self.init_hidden(encoder_final)
        proj_key = self.attention.key_layer(encoder_hidden)
        trg_embed = self.dropout(self.embedding(trg))
        pre_output_vectors = []
        for i in range(trg.size(1)):
            prev_embed = trg_embed[:, i]
            context, _ = self.attention(hidden, proj_key, encoder_hidden, src_mask)
            rnn_input = torch.cat([prev_embed, context.to(prev_embed.dtype)], dim=-1)
            hidden = self.rnn(rnn_input, hidden)
            pre_output = torch.cat([prev_embed, hidden, context], dim=-1)
            pre_output_vectors.append(self.pre_output(pre_output))
        return self.dropout(torch.stack(pre_output_vectors, dim=1))


class Generator(nn.Module):
    """A linear layer and a log-softmax."""

    def __init__(self, hidden_size):
        super().__init__()
        self.proj = nn.Linear(hidden_size, TARGET)

    def forward(self, x):
        return F.log_softmax(self.proj(x).float(), dim=-1)


class EncoderDecoder(nn.Module):
    def __init__(self, embed_size=24, hidden_size=40):
        super().__init__()
        self.encoder = Encoder(embed_size, hidden_size)
        self.decoder = Decoder(embed_size, hidden_size)
        self.generator = Generator(hidden_size)
        self.init_parameters()

    def init_parameters(self):
        torch.manual_seed(14)
        for name, p in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(p)
            elif "rnn.weight_hh" in name:
                for gate in p.data.chunk(3):
                    nn.init.orthogonal_(gate)
            else:
                nn.init.normal_(p, std=0.15)
        for embedding in (self.encoder.embedding, self.decoder.embedding):
            nn.init.zeros_(embedding.weight.data[PAD])

    def forward(self, src, src_lengths, trg):
        src_mask = src != PAD
        encoder_hidden, encoder_final = self.encoder(src, src_lengths)
        decoded = self.decoder(trg, encoder_hidden, encoder_final, src_mask)
        return self.generator(decoded)


def names(g):
    """Names of syllables. Some pairs of letters become one, others become two after a vowel."""
    spelling = torch.randint(3, TARGET, (SOURCE, 3), generator=torch.Generator().manual_seed(6))
    sources, targets, lengths = [], [], []
    for _ in range(BATCH):
        letters, spelled = [], [SOS]
        for _ in range(int(torch.randint(2, 5, (1,), generator=g))):
            consonant = int(torch.randint(8, SOURCE, (1,), generator=g))
            vowel = int(torch.randint(3, 8, (1,), generator=g))
            doubled = len(letters) > 0 and bool(torch.rand(1, generator=g) < 0.3)
            letters += [consonant] * doubled + [consonant, vowel]
            spelled.append(int(spelling[consonant, int(vowel > 5)]))
            if vowel != 3:  # the first vowel is not written
                spelled.append(int(spelling[vowel, int(doubled)]))
            if doubled:
                spelled.append(int(spelling[consonant, 2]))
        letters, spelled = letters[: LONGEST - 1] + [EOS], spelled[:STEPS] + [EOS]
        sources.append(F.pad(torch.tensor(letters), (0, LONGEST - len(letters)), value=PAD))
        targets.append(F.pad(torch.tensor(spelled), (0, STEPS + 1 - len(spelled)), value=PAD))
        lengths.append(len(letters))
    return torch.stack(sources), torch.tensor(lengths), torch.stack(targets)


net = EncoderDecoder()
model = prepare(net, [net.encoder, net.decoder])
criterion = nn.NLLLoss(reduction="sum", ignore_index=PAD)
optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0, rho=0.95, eps=1e-6)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
for parts in batches(names):
    ntokens = torch.stack([(trg[:, 1:] != PAD).sum() for _, _, trg in parts]).sum()
    if world > 1:
        dist.all_reduce(ntokens)
    for src, src_lengths, trg in parts:
        with autocast():
            out = model(src, src_lengths, trg[:, :-1])
        loss = criterion(out.reshape(-1, TARGET), trg[:, 1:].reshape(-1))
        loss = loss * world / ntokens
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
