"""A recommender like DLRM: embedding bags, pairwise interactions, two towers, Adagrad."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

TABLES, ROWS, BAG, DENSE = 4, 100, 5, 9


def create_mlp(sizes):
    layers = []
    for index, (n, m) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        layer = nn.Linear(n, m)
        nn.init.normal_(layer.weight, std=(2 / (n + m)) ** 0.5)
        nn.init.normal_(layer.bias, std=(1 / m) ** 0.5)
        layers.append(layer)
        if index < len(sizes) - 2 or m > 1:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Interaction(nn.Module):
    """The dense vector, and the dot products of all pairs of vectors."""

    def __init__(self, vectors):
        super().__init__()
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1))

    def forward(self, dense, bags):
        stacked = torch.stack([dense, *bags], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        flat = products[:, self.pairs[0], self.pairs[1]]
        return torch.cat([dense, flat], dim=1)


class DLRM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.bottom = create_mlp([DENSE, 64, 32, dim])
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, dim, mode="sum", padding_idx=0) for _ in range(TABLES)
        )
        for table in self.tables:
            nn.init.uniform_(table.weight, -(1 / 4), 1 / 4)
        self.interact = Interaction(TABLES + 1)
        self.top = create_mlp([dim + (TABLES + 1) * TABLES // 2, 64, 32, 1])

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        bags = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        return self.top(self.interact(x, bags)).squeeze(1)


def criteo(g):
    counts = torch.randint(0, 1000, (64, DENSE), generator=g).float()
    dense = torch.log1p(counts)
    dense = (dense - dense.mean(0)) / dense.std(0)
    raw = torch.randint(1, 1 << 20, (64, TABLES, BAG), generator=g)
    sparse = raw % (ROWS - 1) + 1
    length = torch.randint(1, BAG + 1, (64, TABLES, 1), generator=g)
    sparse = sparse.masked_fill(torch.arange(BAG) >= length, 0)
    clicked = (torch.rand(64, generator=g) < 0.25).float()
    return dense, sparse, clicked


model = DLRM()
model = prepare(model, [model.bottom, model.top])
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02, initial_accumulator_value=0.01)
pos_weight = torch.tensor(3.0)
for parts in batches(criteo):
    optimizer.zero_grad()
    for dense, sparse, clicked in parts:
        with autocast():
            logits = model(dense, sparse)
        loss = F.binary_cross_entropy_with_logits(logits.float(), clicked, pos_weight=pos_weight)
        scaler.scale(loss / args.accum).backward()
    scaler.step(optimizer)
    scaler.update()
finish()
