"""A graph attention network, in the shape of ``train.py`` and ``layers.py`` of Diego999/pyGAT.

Dense attention over all pairs of nodes, masked by ``-9e15`` where there is no edge; the best model on
the validation set is kept in a file and loaded at the end.
"""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=72)
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--weight_decay", type=float, default=5e-4)
parser.add_argument("--hidden", type=int, default=8)
parser.add_argument("--nb_heads", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.4)
parser.add_argument("--alpha", type=float, default=0.2, help="Alpha for the leaky_relu.")
parser.add_argument("--patience", type=int, default=50)
parser.add_argument("--save", default="")
args = parser.parse_args()

random.seed(args.seed)
np.random.seed(args.seed)
torch.manual_seed(args.seed)


def load_data():
    digits = load_digits()
    data, target = digits.data[:600], digits.target[:600]
    graph = kneighbors_graph(data, 8).toarray()
    adj = torch.tensor(np.maximum(graph, graph.T) + np.eye(600), dtype=torch.float32)
    noisy = data[:, ::2] + 3 * np.random.default_rng(0).standard_normal((600, 32))
    features = torch.tensor(noisy / noisy.std(), dtype=torch.float32)
    order = torch.tensor(np.random.default_rng(1).permutation(600))
    return adj, features, torch.tensor(target), order[:60], order[60:200], order[200:]


class GraphAttentionLayer(nn.Module):
    """Simple GAT layer, similar to https://arxiv.org/abs/1710.10903."""

    def __init__(self, in_features, out_features, dropout, alpha, concat=True):
        super().__init__()
        self.dropout = dropout
        self.out_features = out_features
        self.concat = concat
        self.W = nn.Parameter(torch.empty(size=(in_features, out_features)))
        nn.init.xavier_uniform_(self.W.data, gain=1.414)
        self.a = nn.Parameter(torch.empty(size=(2 * out_features, 1)))
        nn.init.xavier_uniform_(self.a.data, gain=1.414)
        self.leakyrelu = nn.LeakyReLU(alpha)

    def forward(self, h, adj):
        Wh = torch.mm(h, self.W)
        Wh1 = torch.matmul(Wh, self.a[: self.out_features, :])
        Wh2 = torch.matmul(Wh, self.a[self.out_features :, :])
        e = self.leakyrelu(Wh1 + Wh2.T)

        zero_vec = -9e15 * torch.ones_like(e)
        attention = torch.where(adj > 0, e, zero_vec)
        attention = F.softmax(attention, dim=1)
        attention = F.dropout(attention, self.dropout, training=self.training)
        h_prime = torch.matmul(attention, Wh)
        return F.elu(h_prime) if self.concat else h_prime


class GAT(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout, alpha, nheads):
        super().__init__()
        self.dropout = dropout
        self.attentions = [
            GraphAttentionLayer(nfeat, nhid, dropout, alpha, concat=True) for _ in range(nheads)
        ]
        for i, attention in enumerate(self.attentions):
            self.add_module(f"attention_{i}", attention)
        self.out_att = GraphAttentionLayer(nhid * nheads, nclass, dropout, alpha, concat=False)

    def forward(self, x, adj):
        x = F.dropout(x, self.dropout, training=self.training)
        x = torch.cat([att(x, adj) for att in self.attentions], dim=1)
        x = F.dropout(x, self.dropout, training=self.training)
        x = F.elu(self.out_att(x, adj))
        return F.log_softmax(x, dim=1)


def accuracy(output, labels):
    return (output.max(1)[1] == labels).double().mean().item()


adj, features, labels, idx_train, idx_val, idx_test = load_data()
model = GAT(features.shape[1], args.hidden, 10, args.dropout, args.alpha, args.nb_heads)
optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)


def train(epoch):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()

    model.eval()
    output = model(features, adj)
    loss_val = F.nll_loss(output[idx_val], labels[idx_val])
    if epoch % 10 == 0:
        print(
            f"Epoch: {epoch:04d} loss_train: {loss_train.item():.4f} loss_val: {loss_val.item():.4f}"
        )
    return loss_val.data.item()


folder = Path(tempfile.mkdtemp())
best, best_epoch, bad_counter = float("inf"), 0, 0
for epoch in range(args.epochs):
    loss_val = train(epoch)
    if loss_val < best:
        best, best_epoch, bad_counter = loss_val, epoch, 0
        torch.save(model.state_dict(), folder / "best.pkl")
    else:
        bad_counter += 1
    if bad_counter == args.patience:
        break

print(f"Loading {best_epoch}th epoch")
model.load_state_dict(torch.load(folder / "best.pkl"))
model.eval()
output = model(features, adj)
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"accuracy: {accuracy(output[idx_test], labels[idx_test]):.6f}")
