"""Waves continued by LSTM cells and L-BFGS, in the shape of ``time_sequence_prediction/train.py`` of pytorch/examples.

Two LSTM cells stepped by a loop, L-BFGS with a closure over the whole set, and every tensor in double
precision, as it is there.
"""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


class Sequence(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.hidden = hidden
        self.lstm1 = nn.LSTMCell(1, hidden)
        self.lstm2 = nn.LSTMCell(hidden, hidden)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = torch.zeros(input.size(0), self.hidden, dtype=torch.double)
        c_t = torch.zeros(input.size(0), self.hidden, dtype=torch.double)
        h_t2 = torch.zeros(input.size(0), self.hidden, dtype=torch.double)
        c_t2 = torch.zeros(input.size(0), self.hidden, dtype=torch.double)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):  # if we should predict the future
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8, help="steps to run")
    parser.add_argument("--length", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default="")
    opt = parser.parse_args()
    np.random.seed(opt.seed)
    torch.manual_seed(opt.seed)
    starts = np.random.default_rng(0).integers(-80, 80, (40, 1))
    waves = np.sin((np.arange(opt.length + 20) + starts) / 5.0).astype("float64")
    data = torch.from_numpy(waves)
    input, target = data[3:, : opt.length - 1], data[3:, 1 : opt.length]
    test_input = data[:3, : opt.length - 1]

    seq = Sequence().double()
    criterion = nn.MSELoss()
    # use LBFGS as optimizer since we can load the whole data to train
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8)
    for i in range(opt.steps):

        def closure():
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        print(f"STEP: {i} loss: {loss.item():.6f}")

    with torch.no_grad():
        pred = seq(test_input, future=20)
        error = criterion(pred[:, opt.length - 1 :], data[:3, opt.length :])
    if opt.save:
        torch.save(seq.state_dict(), opt.save)
    print(f"future mse: {error.item():.6f}")
