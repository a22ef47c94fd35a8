"""Speech to text, in the shape of ``deepspeech_pytorch/model.py`` of SeanNaren/deepspeech.pytorch.

Masked convolutions over spectrograms, bidirectional GRUs over packed sequences, batch norm over the
flattened sequence, CTC, and Nesterov SGD over clipped gradients. The utterances are tones, one of a few
for each letter, of lengths that differ, in noise.
"""

import argparse

import numpy as np
import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--hidden-size", type=int, default=48)
parser.add_argument("--learning-rate", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--learning-anneal", type=float, default=0.8)
parser.add_argument("--max-norm", type=float, default=10.0)
parser.add_argument("--seed", type=int, default=123456)
parser.add_argument("--save", default="")

LETTERS = "_abcdefgh"


class SequenceWise(nn.Module):
    """Collapses input of dim T*N*H to (T*N)*H, and applies to a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        t, n = x.size(0), x.size(1)
        return self.module(x.reshape(t * n, -1)).view(t, n, -1)


class MaskConv(nn.Module):
    def __init__(self, seq_module):
        super().__init__()
        self.seq_module = seq_module

    def forward(self, x, lengths):
        for module in self.seq_module:
            x = module(x)
            mask = torch.zeros(x.size(), dtype=torch.bool)
            for i, length in enumerate(lengths.tolist()):
                if mask[i].size(2) - length > 0:
                    mask[i].narrow(2, length, mask[i].size(2) - length).fill_(True)
            x = x.masked_fill(mask, 0)
        return x


class BatchRNN(nn.Module):
    def __init__(self, input_size, hidden_size, batch_norm=True):
        super().__init__()
        self.batch_norm = SequenceWise(nn.BatchNorm1d(input_size)) if batch_norm else None
        self.rnn = nn.GRU(input_size, hidden_size, bidirectional=True)

    def forward(self, x, output_lengths):
        if self.batch_norm is not None:
            x = self.batch_norm(x)
        x = nn.utils.rnn.pack_padded_sequence(x, output_lengths)
        x, _ = self.rnn(x)
        x, _ = nn.utils.rnn.pad_packed_sequence(x)
        return x.view(x.size(0), x.size(1), 2, -1).sum(2)


class DeepSpeech(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.conv = MaskConv(
            nn.Sequential(
                nn.Conv2d(1, 8, kernel_size=(5, 5), stride=(2, 2), padding=(2, 2)),
                nn.BatchNorm2d(8),
                nn.Hardtanh(0, 20, inplace=True),
                nn.Conv2d(8, 8, kernel_size=(5, 5), stride=(2, 1), padding=(2, 2)),
                nn.BatchNorm2d(8),
                nn.Hardtanh(0, 20, inplace=True),
            )
        )
        self.rnns = nn.ModuleList(
            [
                BatchRNN(8 * 6, hidden_size, batch_norm=False),
                BatchRNN(hidden_size, hidden_size),
            ]
        )
        fully_connected = nn.Sequential(
            nn.BatchNorm1d(hidden_size), nn.Linear(hidden_size, len(LETTERS), bias=False)
        )
        self.fc = nn.Sequential(SequenceWise(fully_connected))

    def forward(self, x, lengths):
        output_lengths = (lengths - 1) // 2 + 1
        x = self.conv(x, output_lengths)
        sizes = x.size()
        x = x.view(sizes[0], sizes[1] * sizes[2], sizes[3])
        x = x.transpose(1, 2).transpose(0, 1).contiguous()  # TxNxH
        for rnn in self.rnns:
            x = rnn(x, output_lengths)
        return self.fc(x), output_lengths


def speak(rng):
    """A word, and its spectrogram of 24 bands."""
    word = rng.integers(1, len(LETTERS), rng.integers(2, 6))
    frames = []
    for letter in word:
        tone = np.exp(-0.5 * ((np.arange(24) - 2.6 * letter) / 1.5) ** 2)
        frames += [tone] * rng.integers(5, 9) + [np.zeros(24)] * 2
    spectrogram = np.array(frames).T + 0.2 * rng.standard_normal((24, len(frames)))
    return torch.tensor(spectrogram, dtype=torch.float32), torch.tensor(word)


def collate(batch):
    batch = sorted(batch, key=lambda sample: sample[0].size(1), reverse=True)
    inputs = torch.zeros(len(batch), 1, 24, batch[0][0].size(1))
    for x, (spectrogram, _) in zip(inputs, batch):
        x[0, :, : spectrogram.size(1)] = spectrogram
    lengths = torch.tensor([s.size(1) for s, _ in batch])
    return inputs, lengths, [t for _, t in batch]


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(0)
    train, test = [speak(rng) for _ in range(320)], [speak(rng) for _ in range(100)]
    model = DeepSpeech(args.hidden_size)
    criterion = nn.CTCLoss(reduction="sum", zero_infinity=True)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.learning_rate / 10, momentum=args.momentum, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=args.learning_anneal)

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for index in torch.randperm(len(train)).split(args.batch_size):
            inputs, lengths, targets = collate([train[i] for i in index])
            out, output_lengths = model(inputs, lengths)
            sizes = torch.tensor([len(t) for t in targets])
            loss = criterion(out.log_softmax(-1), torch.cat(targets), output_lengths, sizes)
            loss = loss / inputs.size(0)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
            total += loss.item()
        scheduler.step()
        print(f"Epoch {epoch + 1} average loss {total / (len(train) / args.batch_size):.3f}")

    model.eval()
    errors = letters = 0
    with torch.no_grad():
        inputs, lengths, targets = collate(test)
        out, output_lengths = model(inputs, lengths)
        for best, length, target in zip(out.argmax(-1).T, output_lengths, targets):
            path = torch.unique_consecutive(best[:length])
            errors += distance(path[path != 0].tolist(), target.tolist())
            letters += len(target)
    if args.save:
        torch.save(model.state_dict(), args.save)
    print(f"character error rate: {errors / letters:.6f}")


if __name__ == "__main__":
    main()
