"""A graph convolutional network, in the shape of ``pygcn/train.py`` of tkipf/pygcn.

The adjacency is a sparse tensor that is multiplied by ``torch.spmm``; weights are bare parameters
multiplied by ``torch.mm``; after each step the model is run again, with gradients, for validation.
The graph: each of scikit-learn's digits with its nearest neighbours; few of them are labelled.
"""

import argparse
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--epochs", type=int, default=150)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--weight_decay", type=float, default=5e-4)
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--save", default="")
args = parser.parse_args()

np.random.seed(args.seed)
torch.manual_seed(args.seed)


def load_data():
    digits = load_digits()
    graph = kneighbors_graph(digits.data, 8)
    graph = graph.maximum(graph.T).tolil()
    graph.setdiag(1)
    graph = graph.tocoo()
    degree = np.asarray(graph.sum(1)).ravel()
    values = graph.data / degree[graph.row]
    indices = np.stack([graph.row, graph.col])
    adj = torch.sparse_coo_tensor(
        torch.tensor(indices, dtype=torch.long),
        torch.tensor(values, dtype=torch.float32),
        graph.shape,
    ).coalesce()
    # as little to see as in a citation graph: every second pixel, and noise
    noisy = digits.data[:, ::2] + 4 * np.random.default_rng(0).standard_normal((1797, 32))
    features = torch.tensor(noisy / noisy.std(), dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.tensor(np.random.default_rng(1).permutation(len(labels)))
    return adj, features, labels, order[:60], order[60:360], order[360:]


def accuracy(output, labels):
    return (output.max(1)[1] == labels).double().mean()


class GraphConvolution(nn.Module):
    """Simple GCN layer, similar to https://arxiv.org/abs/1609.02907."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        stdv = 1.0 / math.sqrt(out_features)
        self.weight.data.uniform_(-stdv, stdv)
        self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        output = torch.spmm(adj, support)
        return output + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        x = self.gc2(x, adj)
        return F.log_softmax(x, dim=1)


adj, features, labels, idx_train, idx_val, idx_test = load_data()
model = GCN(features.shape[1], args.hidden, int(labels.max()) + 1, args.dropout)
optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)


def train(epoch):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    acc_train = accuracy(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()

    # Evaluate validation set performance separately, deactivates dropout during validation run.
    model.eval()
    output = model(features, adj)
    loss_val = F.nll_loss(output[idx_val], labels[idx_val])
    acc_val = accuracy(output[idx_val], labels[idx_val])
    if epoch % 20 == 0:
        print(
            f"Epoch: {epoch:04d} loss_train: {loss_train.item():.4f} acc_train: {acc_train:.4f} "
            f"loss_val: {loss_val.item():.4f} acc_val: {acc_val:.4f}"
        )


for epoch in range(args.epochs):
    train(epoch)

model.eval()
output = model(features, adj)
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"accuracy: {accuracy(output[idx_test], labels[idx_test]).item():.6f}")
