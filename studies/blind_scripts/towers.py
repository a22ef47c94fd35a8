"""Two towers: users and items meet in a dot product, the other items of a batch are negatives."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

USERS, ITEMS, HISTORY, BATCH = 400, 250, 12, 48
GENDERS, AGES, COUNTRIES, CATEGORIES, BRANDS = 3, 8, 20, 16, 30
DIM, SMALL, HIDDEN, OUTPUT, TEMPERATURE = 32, 8, (96, 64), 32, 0.1
PADDING = 0


class HistoryEncoder(nn.Module):
    """The items a user has seen, weighted by what they say to a learned query."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(DIM, DIM)
        self.score = nn.Linear(DIM, 1, bias=False)

    def forward(self, embedded, mask):
        scores = self.score(torch.tanh(self.key(embedded))).squeeze(-1)
        scores = scores.float().masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return (weights.unsqueeze(-1) * embedded).sum(dim=1)


class UserFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_embedding = nn.Embedding(USERS, DIM)
        self.gender_embedding = nn.Embedding(GENDERS, SMALL)
        self.age_embedding = nn.Embedding(AGES, SMALL)
        self.country_embedding = nn.Embedding(COUNTRIES, SMALL)
        self.history_encoder = HistoryEncoder()
        self.width = 2 * DIM + 3 * SMALL

    def forward(self, user, profile, history, mask):
        features = [
            self.user_embedding(user),
            self.history_encoder(history, mask),
            self.gender_embedding(profile[:, 0]),
            self.age_embedding(profile[:, 1]),
            self.country_embedding(profile[:, 2]),
        ]
        return torch.cat(features, dim=-1)


class ItemFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.category_embedding = nn.Embedding(CATEGORIES, SMALL)
        self.brand_embedding = nn.Embedding(BRANDS, SMALL)
        self.price_projection = nn.Linear(2, SMALL)
        self.width = DIM + 3 * SMALL

    def forward(self, item, attributes, price):
        numbers = torch.stack([price.log1p(), price.sqrt()], dim=-1)
        features = [
            item,
            self.category_embedding(attributes[:, 0]),
            self.brand_embedding(attributes[:, 1]),
            F.relu(self.price_projection(numbers)),
        ]
        return torch.cat(features, dim=-1)


class Layer(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.LayerNorm(out_features)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x):
        return self.dropout(F.relu(self.norm(self.linear(x))))


class Tower(nn.Module):
    def __init__(self, in_features):
        super().__init__()
        self.layers = nn.ModuleList()
        for width in HIDDEN:
            self.layers.append(Layer(in_features, width))
            in_features = width
        self.output = nn.Linear(in_features, OUTPUT)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.output(x), dim=-1)


class TwoTowerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.item_embedding = nn.Embedding(ITEMS, DIM, padding_idx=PADDING)
        self.user_features = UserFeatures()
        self.item_features = ItemFeatures()
        self.user_tower = Tower(self.user_features.width)
        self.item_tower = Tower(self.item_features.width)
        torch.manual_seed(7)
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module):
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx].detach())
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, user, profile, history, item, attributes, price):
        seen = self.item_embedding(history)
        users = self.user_features(user, profile, seen, history != PADDING)
        items = self.item_features(self.item_embedding(item), attributes, price)
        return self.user_tower(users), self.item_tower(items)


class InBatchSoftmaxLoss(nn.Module):
    """Popular items are drawn more often as negatives; the logarithm of how often is subtracted."""

    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, users, items, item_ids, log_frequency):
        logits = torch.matmul(users, items.t()).float() / self.temperature
        logits = logits - log_frequency[None, :]
        same = item_ids[:, None] == item_ids[None, :]
        accidental = same & ~torch.eye(len(item_ids), dtype=torch.bool)
        logits = logits.masked_fill(accidental, float("-inf"))
        log_probs = F.log_softmax(logits, dim=-1)
        return -log_probs.diagonal().mean()


def interactions(g):
    """Users like a group of items. Items with low ids are popular."""
    weights = 1.0 / torch.arange(1, ITEMS).float().sqrt()
    user = torch.randint(0, USERS, (BATCH,), generator=g)
    profile = torch.stack([user % GENDERS, user // 3 % AGES, user // 7 % COUNTRIES], dim=-1)
    liked = (torch.arange(1, ITEMS)[None] % 10 == user[:, None] % 10).float() * 20 + 1
    drawn = torch.multinomial(liked * weights, HISTORY + 1, generator=g) + 1
    item, history = drawn[:, 0], drawn[:, 1:]
    lengths = torch.randint(3, HISTORY + 1, (BATCH, 1), generator=g)
    history = torch.where(torch.arange(HISTORY) < lengths, history, PADDING)
    attributes = torch.stack([item % CATEGORIES, item * 7 % BRANDS], dim=-1)
    price = 1 + (item * 13 % 97).float() + torch.rand(BATCH, generator=g)
    log_frequency = (weights / weights.sum()).log()[item - 1]
    return user, profile, history, item, attributes, price, log_frequency


net = TwoTowerModel()
model = prepare(net, [net.user_tower, net.item_tower])
criterion = InBatchSoftmaxLoss(TEMPERATURE)
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05, initial_accumulator_value=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.95)
for parts in batches(interactions):
    optimizer.zero_grad(set_to_none=True)
    for user, profile, history, item, attributes, price, log_frequency in parts:
        with autocast():
            users, items = model(user, profile, history, item, attributes, price)
        loss = criterion(users, items, item, log_frequency)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
