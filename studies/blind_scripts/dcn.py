"""Clicks: a mixture of low-rank cross networks, factorization machine and deep part, Adam."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

FIELDS = {
    "user": 60,
    "item": 50,
    "category": 12,
    "device": 5,
    "country": 20,
    "hour": 24,
    "slot": 8,
}
DENSE_FEATURES = ("clicks", "impressions", "price", "age_days", "dwell")
HISTORY, BATCH, EMBEDDING = 10, 32, 10
CROSS_LAYERS, EXPERTS, LOW_RANK, HIDDEN_UNITS = 3, 3, 12, (64, 48, 32)
CLICK_RATE = 0.3


class FeatureEmbedding(nn.Module):
    """One vector for each field, for the items clicked before, and for each dense feature."""

    def __init__(self, dim, std):
        super().__init__()
        self.sparse = nn.ModuleDict({f: nn.Embedding(n, dim) for f, n in FIELDS.items()})
        self.dense = nn.ModuleDict({f: nn.Linear(1, dim, bias=False) for f in DENSE_FEATURES})
        for layer in [*self.sparse.values(), *self.dense.values()]:
            nn.init.normal_(layer.weight, std=std)

    def pooled_history(self, history, history_mask):
        vectors = self.sparse["item"](history) * history_mask.unsqueeze(-1)
        return vectors.sum(dim=1) / history_mask.sum(dim=1, keepdim=True).clamp(min=1.0)

    def forward(self, sparse, dense, history, history_mask):
        vectors = []
        for i, field in enumerate(FIELDS):
            vectors.append(self.sparse[field](sparse[:, i]))
        vectors.append(self.pooled_history(history, history_mask))
        for i, feature in enumerate(DENSE_FEATURES):
            vectors.append(self.dense[feature](dense[:, i : i + 1]))
        return torch.stack(vectors, dim=1)


class FirstOrder(nn.Module):
    """A weight for each value of each field, and a linear model of the dense features."""

    def __init__(self):
        super().__init__()
        self.sparse = nn.ModuleDict({f: nn.Embedding(n, 1) for f, n in FIELDS.items()})
        self.dense = nn.Linear(len(DENSE_FEATURES), 1)
        for embedding in self.sparse.values():
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, sparse, dense):
        logit = self.dense(dense)
        for i, field in enumerate(FIELDS):
            logit = logit + self.sparse[field](sparse[:, i])
        return logit


class FactorizationMachine(nn.Module):
    """The sum of the products of all pairs of vectors."""

    def forward(self, vectors):
        square_of_sum = vectors.sum(dim=1).pow(2)
        sum_of_square = vectors.pow(2).sum(dim=1)
        return 0.5 * (square_of_sum - sum_of_square).sum(dim=1, keepdim=True)


class CrossExpert(nn.Module):
    """A cross layer of low rank, with nonlinearities in the small space."""

    def __init__(self, in_features, rank):
        super().__init__()
        self.v = nn.Linear(in_features, rank, bias=False)
        self.c = nn.Linear(rank, rank, bias=False)
        self.u = nn.Linear(rank, in_features, bias=False)
        for layer in (self.v, self.c, self.u):
            nn.init.xavier_normal_(layer.weight)

    def forward(self, x):
        x = torch.tanh(self.v(x))
        x = torch.tanh(self.c(x))
        return self.u(x)


class CrossLayerMix(nn.Module):
    def __init__(self, in_features, rank, num_experts):
        super().__init__()
        self.experts = nn.ModuleList(CrossExpert(in_features, rank) for _ in range(num_experts))
        self.gates = nn.ModuleList(
            nn.Linear(in_features, 1, bias=False) for _ in range(num_experts)
        )
        self.bias = nn.Parameter(torch.zeros(in_features))

    def forward(self, x_0, x_l):
        outputs, scores = [], []
        for expert, gate in zip(self.experts, self.gates, strict=True):
            scores.append(gate(x_l))
            outputs.append(x_0 * (expert(x_l) + self.bias))
        outputs = torch.stack(outputs, dim=2)
        weights = F.softmax(torch.stack(scores, dim=1), dim=1)
        return torch.matmul(outputs, weights).squeeze(2) + x_l


class CrossNetMix(nn.Module):
    def __init__(self, in_features):
        super().__init__()
        self.layers = nn.ModuleList(
            CrossLayerMix(in_features, LOW_RANK, EXPERTS) for _ in range(CROSS_LAYERS)
        )

    def forward(self, x_0):
        x_l = x_0
        for layer in self.layers:
            x_l = layer(x_0, x_l)
        return x_l


class DNN(nn.Module):
    def __init__(self, in_features, hidden_units):
        super().__init__()
        sizes = [in_features, *hidden_units]
        self.linears = nn.ModuleList(
            nn.Linear(n, m) for n, m in zip(sizes[:-1], sizes[1:], strict=True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(n) for n in hidden_units)
        self.activations = nn.ModuleList(nn.PReLU() for _ in hidden_units)
        self.dropout = nn.Dropout(args.dropout)
        for linear in self.linears:
            nn.init.kaiming_normal_(linear.weight)

    def forward(self, x):
        for linear, norm, activation in zip(
            self.linears, self.norms, self.activations, strict=True
        ):
            x = self.dropout(activation(norm(linear(x))))
        return x


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = FeatureEmbedding(EMBEDDING, std=0.3)
        self.first_order = FirstOrder()
        self.fm = FactorizationMachine()
        in_features = (len(FIELDS) + 1 + len(DENSE_FEATURES)) * EMBEDDING
        self.cross = CrossNetMix(in_features)
        self.deep = DNN(in_features, HIDDEN_UNITS)
        self.head = nn.Linear(in_features + HIDDEN_UNITS[-1], 1, bias=False)
        self.bias = nn.Parameter(torch.logit(torch.tensor([CLICK_RATE])))

    def forward(self, sparse, dense, history, history_mask):
        vectors = self.embedding(sparse, dense, history, history_mask)
        flat = vectors.flatten(start_dim=1)
        stacked = torch.cat([self.cross(flat), self.deep(flat)], dim=-1)
        logit = self.first_order(sparse, dense) + self.fm(vectors) / EMBEDDING
        logit = logit + self.head(stacked) + self.bias
        return logit.squeeze(1)


def impressions(g):
    """Users see items; popular values are frequent. A hidden model of two fields says who clicks."""
    columns = []
    for size in FIELDS.values():
        popularity = 1.0 / torch.arange(1, size + 1).float()
        columns.append(torch.multinomial(popularity, BATCH, replacement=True, generator=g))
    sparse = torch.stack(columns, dim=1)
    dense = torch.randn(BATCH, len(DENSE_FEATURES), generator=g).exp() * 4
    dense = (torch.log1p(dense) - 1.6) / 0.7
    history = torch.randint(0, FIELDS["item"], (BATCH, HISTORY), generator=g)
    lengths = torch.randint(0, HISTORY + 1, (BATCH, 1), generator=g)
    history_mask = (torch.arange(HISTORY) < lengths).float()
    hidden = torch.Generator().manual_seed(17)
    taste = torch.randn(FIELDS["user"], 4, generator=hidden)
    theme = torch.randn(FIELDS["item"], 4, generator=hidden)
    logits = (taste[sparse[:, 0]] * theme[sparse[:, 1]]).sum(1) + 0.5 * dense[:, 0] - 0.8
    clicked = torch.bernoulli(torch.sigmoid(logits), generator=g)
    return sparse, dense, history, history_mask, clicked


net = ClickModel()
model = prepare(net, [*net.cross.layers, net.deep])
tables = [p for n, p in net.named_parameters() if n.startswith(("embedding.", "first_order."))]
others = [p for n, p in net.named_parameters() if not n.startswith(("embedding.", "first_order."))]
optimizer = torch.optim.Adam(
    [{"params": tables, "lr": 1e-2, "weight_decay": 1e-4}, {"params": others}], lr=3e-3
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
for parts in batches(impressions):
    for sparse, dense, history, history_mask, clicked in parts:
        with autocast():
            logits = model(sparse, dense, history, history_mask)
            loss = F.binary_cross_entropy_with_logits(logits, clicked) / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
