"""Sequence to sequence, in the shape of ``1 - Sequence to Sequence Learning with Neural Networks.ipynb`` of bentrevett/pytorch-seq2seq.

An encoder LSTM and a decoder LSTM that is called once for each token; the truth or the own guess is
fed by a coin (teacher forcing), so that steps differ in what they run; padding is ignored. The task is
to write a number in words.
"""

import argparse
import random

import torch
import torch.nn as nn
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=50)
parser.add_argument("--hid-dim", type=int, default=64)
parser.add_argument("--emb-dim", type=int, default=24)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--teacher-forcing-ratio", type=float, default=0.7)
parser.add_argument("--seed", type=int, default=1234)
parser.add_argument("--save", default="")
args = parser.parse_args()

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen".split()
)
ONES += "fifteen sixteen seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
WORDS = ["<pad>", "<sos>", "<eos>", "hundred", *ONES, *TENS]


def in_words(n):
    if n >= 100:
        return [ONES[n // 100], "hundred", *(in_words(n % 100) if n % 100 else [])]
    if n < 20:
        return [ONES[n]]
    return [TENS[n // 10 - 2], *([ONES[n % 10]] if n % 10 else [])]


class Encoder(nn.Module):
    def __init__(self, input_dim, emb_dim, hid_dim):
        super().__init__()
        self.embedding = nn.Embedding(input_dim, emb_dim)
        self.rnn = nn.LSTM(emb_dim, hid_dim, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, src):
        _, (hidden, cell) = self.rnn(self.dropout(self.embedding(src)))
        return hidden, cell


class Decoder(nn.Module):
    def __init__(self, output_dim, emb_dim, hid_dim):
        super().__init__()
        self.output_dim = output_dim
        self.embedding = nn.Embedding(output_dim, emb_dim)
        self.rnn = nn.LSTM(emb_dim, hid_dim, 1)
        self.fc_out = nn.Linear(hid_dim, output_dim)

    def forward(self, input, hidden, cell):
        embedded = self.embedding(input.unsqueeze(0))
        output, (hidden, cell) = self.rnn(embedded, (hidden, cell))
        return self.fc_out(output.squeeze(0)), hidden, cell


class Seq2Seq(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        outputs = torch.zeros(trg.shape[0], trg.shape[1], self.decoder.output_dim)
        hidden, cell = self.encoder(src)
        input = trg[0, :]
        for t in range(1, trg.shape[0]):
            output, hidden, cell = self.decoder(input, hidden, cell)
            outputs[t] = output
            teacher_force = random.random() < teacher_forcing_ratio
            input = trg[t] if teacher_force else output.argmax(1)
        return outputs


def init_weights(m):
    for param in m.parameters():
        nn.init.uniform_(param.data, -0.15, 0.15)


def tensors(numbers):
    src = torch.tensor([[int(c) for c in f"{n:03d}"] for n in numbers]).T
    trg = torch.zeros(6, len(numbers), dtype=torch.long)
    for column, n in enumerate(numbers):
        words = ["<sos>", *in_words(n), "<eos>"]
        trg[: len(words), column] = torch.tensor([WORDS.index(w) for w in words])
    return src, trg


random.seed(args.seed)
torch.manual_seed(args.seed)
numbers = random.Random(0).sample(range(1000), 1000)
train_numbers, test_numbers = numbers[:800], numbers[800:]
model = Seq2Seq(
    Encoder(10, args.emb_dim, args.hid_dim), Decoder(len(WORDS), args.emb_dim, args.hid_dim)
)
model.apply(init_weights)
optimizer = optim.Adam(model.parameters(), lr=args.lr)
criterion = nn.CrossEntropyLoss(ignore_index=0)

for epoch in range(args.epochs):
    model.train()
    random.shuffle(train_numbers)
    epoch_loss = 0
    for start in range(0, 800, args.batch_size):
        src, trg = tensors(train_numbers[start : start + args.batch_size])
        optimizer.zero_grad()
        output = model(src, trg, args.teacher_forcing_ratio)
        loss = criterion(output[1:].view(-1, output.shape[-1]), trg[1:].view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        epoch_loss += loss.item()
    print(f"Epoch: {epoch + 1:02} Train Loss: {epoch_loss / (800 / args.batch_size):.3f}")

model.eval()
with torch.no_grad():
    src, trg = tensors(test_numbers)
    guess = model(src, trg, 0)[1:].argmax(-1)
    right = (guess == trg[1:])[trg[1:] != 0]
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"accuracy: {right.double().mean().item():.6f}")
