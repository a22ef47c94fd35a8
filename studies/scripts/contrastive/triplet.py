"""Triplets that are chosen in the batch, in the shape of ``trainer.py`` and ``losses.py`` of adambielski/siamese-triplet.

Batches hold a few samples of each class; the hardest negative of each pair is picked on the embeddings
without gradients, and the loss is a hinge of squared distances.
"""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch.optim import lr_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--n-epochs", type=int, default=5)
parser.add_argument("--batches", type=int, default=30)
parser.add_argument("--margin", type=float, default=1.0)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.convnet = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.PReLU(),
            nn.MaxPool2d(2, stride=2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.PReLU(),
            nn.MaxPool2d(2, stride=2),
        )
        self.fc = nn.Sequential(nn.Linear(64 * 2 * 2, 64), nn.PReLU(), nn.Linear(64, 8))

    def forward(self, x):
        output = self.convnet(x)
        return self.fc(output.view(output.size(0), -1))

    def get_embedding(self, x):
        return self.forward(x)


def pdist(vectors):
    return (
        -2 * vectors.mm(torch.t(vectors))
        + vectors.pow(2).sum(dim=1).view(1, -1)
        + vectors.pow(2).sum(dim=1).view(-1, 1)
    )


class BalancedBatchSampler:
    """Ten classes, four samples of each."""

    def __init__(self, labels, n_batches):
        self.by_class = [np.flatnonzero(labels == c) for c in range(10)]
        self.n_batches = n_batches

    def __iter__(self):
        for _ in range(self.n_batches):
            yield np.concatenate([np.random.choice(c, 4, replace=False) for c in self.by_class])


def get_triplets(embeddings, labels, margin):
    """For each pair of a class the hardest sample of another class, where the loss is positive."""
    distances = pdist(embeddings.detach()).numpy()
    labels = labels.numpy()
    triplets = []
    for label in set(labels):
        inside = np.flatnonzero(labels == label)
        outside = np.flatnonzero(labels != label)
        for n, anchor in enumerate(inside):
            for positive in inside[n + 1 :]:
                loss = distances[anchor, positive] - distances[anchor, outside] + margin
                hardest = int(np.argmax(loss))
                if loss[hardest] > 0:
                    triplets.append([anchor, positive, outside[hardest]])
    return torch.tensor(np.array(triplets or [[0, 1, 39]]))


class OnlineTripletLoss(nn.Module):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin

    def forward(self, embeddings, target):
        triplets = get_triplets(embeddings, target, self.margin)
        ap = (embeddings[triplets[:, 0]] - embeddings[triplets[:, 1]]).pow(2).sum(1)
        an = (embeddings[triplets[:, 0]] - embeddings[triplets[:, 2]]).pow(2).sum(1)
        losses = F.relu(ap - an + self.margin)
        return losses.mean(), len(triplets)


np.random.seed(args.seed)
torch.manual_seed(args.seed)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
sampler = BalancedBatchSampler(digits.target[:1200], args.batches)

model = EmbeddingNet()
loss_fn = OnlineTripletLoss(args.margin)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5, last_epoch=-1)

for epoch in range(args.n_epochs):
    model.train()
    losses = []
    for index in sampler:
        optimizer.zero_grad()
        outputs = model(images[index])
        loss, n = loss_fn(outputs, labels[index])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(f"Epoch: {epoch + 1}/{args.n_epochs}. Average loss: {np.mean(losses):.4f} triplets: {n}")

model.eval()
with torch.no_grad():
    embedded = model.get_embedding(images).numpy()
knn = KNeighborsClassifier(5).fit(embedded[:1200], digits.target[:1200])
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"accuracy: {knn.score(embedded[1200:], digits.target[1200:]):.6f}")
