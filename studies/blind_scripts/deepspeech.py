"""DeepSpeech 2: masked convolutions over spectrograms, bidirectional GRUs, CTC."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

LABELS, BLANK, BANDS, FRAMES, BATCH = 14, 0, 32, 48, 8
CHANNELS, HIDDEN, LAYERS = 8, 40, 3


class MaskConv(nn.Module):
    """Applies its layers in turn, and silences what lies behind the end of each utterance."""

    def __init__(self, seq_module):
        super().__init__()
        self.seq_module = seq_module

    def forward(self, x, lengths):
        for module in self.seq_module:
            x = module(x)
            mask = torch.zeros(x.shape, dtype=torch.bool)
            for i, length in enumerate(lengths.tolist()):
                mask[i, :, :, length:] = True
            x = x.masked_fill(mask, 0)
        return x


class SequenceNorm(nn.Module):
    """Normalizes each frame, in FP32."""

    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        x = x.float()
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + self.eps) * self.weight + self.bias


class BatchRNN(nn.Module):
    """A bidirectional GRU on packed utterances. Its two directions are added."""

    def __init__(self, input_size, hidden_size, norm=True):
        super().__init__()
        self.hidden_size = hidden_size
        self.norm = SequenceNorm(input_size) if norm else None
        self.rnn = nn.GRU(input_size, hidden_size, bidirectional=True)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x, output_lengths):
        total_length, batch, _ = x.shape
        if self.norm is not None:
            x = self.norm(x)
        packed = nn.utils.rnn.pack_padded_sequence(x, output_lengths, enforce_sorted=False)
        hidden, _ = self.rnn(packed)
        x, _ = nn.utils.rnn.pad_packed_sequence(hidden, total_length=total_length)
        x = x.view(total_length, batch, 2, self.hidden_size).sum(2)
        return self.dropout(x)


class Classifier(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm = SequenceNorm(hidden_size)
        self.fc = nn.Linear(hidden_size, LABELS, bias=False)

    def forward(self, x):
        return self.fc(self.norm(x))


class DeepSpeech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = MaskConv(
            nn.Sequential(
                nn.Conv2d(1, CHANNELS, (11, 7), stride=(2, 2), padding=(5, 3), bias=False),
                nn.GroupNorm(2, CHANNELS),
                nn.Hardtanh(0, 20),
                nn.Conv2d(CHANNELS, CHANNELS, (7, 7), stride=(2, 1), padding=(3, 3), bias=False),
                nn.GroupNorm(2, CHANNELS),
                nn.Hardtanh(0, 20),
            )
        )
        input_size = CHANNELS * (BANDS // 4)
        self.rnns = nn.ModuleList([BatchRNN(input_size, HIDDEN, norm=False)])
        for _ in range(LAYERS - 1):
            self.rnns.append(BatchRNN(HIDDEN, HIDDEN))
        self.classifier = Classifier(HIDDEN)

    def get_seq_lens(self, input_lengths):
        """Frames that the convolutions leave of each utterance."""
        return (input_lengths + 1) // 2

    def forward(self, spectrograms, lengths):
        output_lengths = self.get_seq_lens(lengths)
        x = self.conv(spectrograms.unsqueeze(1), output_lengths)
        batch, channels, bands, frames = x.shape
        x = x.view(batch, channels * bands, frames)
        x = x.permute(2, 0, 1).contiguous()
        for rnn in self.rnns:
            x = rnn(x, output_lengths)
        return self.classifier(x), output_lengths


def spec_augment(spectrogram, g):
    """Bands and frames are silenced, as in SpecAugment."""
    band = int(torch.randint(0, BANDS - 4, (1,), generator=g))
    frame = int(torch.randint(0, spectrogram.shape[1] - 4, (1,), generator=g))
    spectrogram[band : band + 4] = 0
    spectrogram[:, frame : frame + 4] = 0
    return spectrogram


def utterances(g):
    """Each letter has a spectrum that moves while it is spoken, for four to six frames."""
    voices = torch.rand(LABELS, BANDS, 2, generator=torch.Generator().manual_seed(17))
    spectrograms = torch.zeros(BATCH, BANDS, FRAMES)
    targets = torch.zeros(BATCH, 8, dtype=torch.long)
    lengths, target_lengths = [], []
    for row in range(BATCH):
        count = int(torch.randint(4, 8, (1,), generator=g))
        letters = torch.randint(1, LABELS, (count,), generator=g)
        pieces = []
        for letter in letters.tolist():
            duration = int(torch.randint(4, 7, (1,), generator=g))
            way = torch.linspace(0, 1, duration)
            start, end = voices[letter].unbind(-1)
            pieces.append(start[:, None] * (1 - way) + end[:, None] * way)
        spoken = torch.cat(pieces, dim=1)
        spoken = spoken + 0.2 * torch.randn(spoken.shape, generator=g)
        spoken = (spoken - spoken.mean()) / spoken.std()
        spectrograms[row, :, : spoken.shape[1]] = spec_augment(spoken, g)
        targets[row, :count] = letters
        lengths.append(spoken.shape[1])
        target_lengths.append(count)
    return spectrograms, torch.tensor(lengths), targets, torch.tensor(target_lengths)


torch.manual_seed(7)
net = DeepSpeech()
model = prepare(net, net.rnns)
criterion = nn.CTCLoss(blank=BLANK, reduction="mean", zero_infinity=True)
optimizer = torch.optim.SGD(
    net.parameters(), lr=3e-2, momentum=0.9, nesterov=True, weight_decay=1e-5
)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1 / 1.1)
for parts in batches(utterances):
    for spectrograms, lengths, targets, target_lengths in parts:
        with autocast():
            out, output_lengths = model(spectrograms, lengths)
        log_probs = F.log_softmax(out.float(), dim=-1)
        loss = criterion(log_probs, targets, output_lengths, target_lengths)
        loss = loss / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
