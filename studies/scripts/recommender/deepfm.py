"""Click prediction, in the shape of ``examples/main.py``, ``torchfm/layer.py`` and ``torchfm/model/dfm.py`` of rixwew/pytorch-fm.

Embeddings of two fields in one table with offsets, a factorisation machine that takes the difference of
two near-equal sums, an MLP with dropout and batch norm, early stopping by the AUC. The clicks follow a
hidden model of low rank.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epoch", type=int, default=10)
parser.add_argument("--learning_rate", type=float, default=0.01)
parser.add_argument("--batch_size", type=int, default=256)
parser.add_argument("--weight_decay", type=float, default=1e-5)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")


class FeaturesLinear(torch.nn.Module):
    def __init__(self, field_dims, output_dim=1):
        super().__init__()
        self.fc = torch.nn.Embedding(sum(field_dims), output_dim)
        self.bias = torch.nn.Parameter(torch.zeros((output_dim,)))
        self.offsets = np.array((0, *np.cumsum(field_dims)[:-1]), dtype=np.int64)

    def forward(self, x):
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        return torch.sum(self.fc(x), dim=1) + self.bias


class FeaturesEmbedding(torch.nn.Module):
    def __init__(self, field_dims, embed_dim):
        super().__init__()
        self.embedding = torch.nn.Embedding(sum(field_dims), embed_dim)
        self.offsets = np.array((0, *np.cumsum(field_dims)[:-1]), dtype=np.int64)
        torch.nn.init.xavier_uniform_(self.embedding.weight.data)

    def forward(self, x):
        return self.embedding(x + x.new_tensor(self.offsets).unsqueeze(0))


class FactorizationMachine(torch.nn.Module):
    def forward(self, x):
        square_of_sum = torch.sum(x, dim=1) ** 2
        sum_of_square = torch.sum(x**2, dim=1)
        return 0.5 * torch.sum(square_of_sum - sum_of_square, dim=1, keepdim=True)


class MultiLayerPerceptron(torch.nn.Module):
    def __init__(self, input_dim, embed_dims, dropout):
        super().__init__()
        layers = []
        for embed_dim in embed_dims:
            layers.append(torch.nn.Linear(input_dim, embed_dim))
            layers.append(torch.nn.BatchNorm1d(embed_dim))
            layers.append(torch.nn.ReLU())
            layers.append(torch.nn.Dropout(p=dropout))
            input_dim = embed_dim
        layers.append(torch.nn.Linear(input_dim, 1))
        self.mlp = torch.nn.Sequential(*layers)

    def forward(self, x):
        return self.mlp(x)


class DeepFactorizationMachineModel(torch.nn.Module):
    def __init__(self, field_dims, embed_dim, mlp_dims, dropout):
        super().__init__()
        self.linear = FeaturesLinear(field_dims)
        self.fm = FactorizationMachine()
        self.embedding = FeaturesEmbedding(field_dims, embed_dim)
        self.embed_output_dim = len(field_dims) * embed_dim
        self.mlp = MultiLayerPerceptron(self.embed_output_dim, mlp_dims, dropout)

    def forward(self, x):
        embed_x = self.embedding(x)
        x = self.linear(x) + self.fm(embed_x) + self.mlp(embed_x.view(-1, self.embed_output_dim))
        return torch.sigmoid(x.squeeze(1))


class EarlyStopper:
    def __init__(self, num_trials, save_path):
        self.num_trials, self.save_path = num_trials, save_path
        self.trial_counter, self.best_accuracy = 0, 0

    def is_continuable(self, model, accuracy):
        if accuracy > self.best_accuracy:
            self.best_accuracy, self.trial_counter = accuracy, 0
            torch.save(model.state_dict(), self.save_path)
            return True
        self.trial_counter += 1
        return self.trial_counter < self.num_trials


def clicks(users=200, items=150, n=20000):
    rng = np.random.default_rng(0)
    p, q = rng.standard_normal((users, 4)), rng.standard_normal((items, 4))
    u, i = rng.integers(0, users, n), rng.integers(0, items, n)
    score = 1.2 * (p[u] * q[i]).sum(1)
    y = rng.random(n) < 1 / (1 + np.exp(-score))
    return (users, items), torch.tensor(np.stack([u, i], 1)), torch.tensor(y, dtype=torch.float32)


def train(model, optimizer, data_loader, criterion):
    model.train()
    total_loss = 0
    for fields, target in data_loader:
        y = model(fields)
        loss = criterion(y, target.float())
        model.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    print(f"loss {total_loss / len(data_loader):.4f}")


def test(model, data_loader):
    model.eval()
    targets, predicts = [], []
    with torch.no_grad():
        for fields, target in data_loader:
            targets.extend(target.tolist())
            predicts.extend(model(fields).tolist())
    return roc_auc_score(targets, predicts)


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    field_dims, x, y = clicks()
    train_loader = DataLoader(TensorDataset(x[:14000], y[:14000]), args.batch_size, shuffle=True)
    valid_loader = DataLoader(TensorDataset(x[14000:16000], y[14000:16000]), 1000)
    test_loader = DataLoader(TensorDataset(x[16000:], y[16000:]), 1000)
    model = DeepFactorizationMachineModel(field_dims, 16, mlp_dims=(32, 32), dropout=0.2)
    criterion = torch.nn.BCELoss()
    optimizer = torch.optim.Adam(
        params=model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay
    )
    best = Path(tempfile.mkdtemp()) / "dfm.pt"
    early_stopper = EarlyStopper(num_trials=2, save_path=best)
    for epoch_i in range(args.epoch):
        train(model, optimizer, train_loader, criterion)
        auc = test(model, valid_loader)
        print(f"epoch: {epoch_i} validation: auc: {auc:.4f}")
        if not early_stopper.is_continuable(model, auc):
            break
    model.load_state_dict(torch.load(best))
    if args.save:
        torch.save(model.state_dict(), args.save)
    print(f"auc: {test(model, test_loader):.6f}")


if __name__ == "__main__":
    main()
