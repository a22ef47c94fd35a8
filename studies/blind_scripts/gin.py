"""A property of small molecules: GIN with bonds, graph attention, a virtual node, gated readouts."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

GRAPHS, ATOMS, ELEMENTS, CHARGES, BONDS = 16, 12, 7, 3, 4
HIDDEN, HEADS, LAYERS = 32, 4, 3


class AtomEncoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.element = nn.Embedding(ELEMENTS, hidden)
        self.charge = nn.Embedding(CHARGES, hidden)
        self.degree = nn.Embedding(ATOMS, hidden)

    def forward(self, elements, charges, bonds):
        degrees = (bonds > 0).sum(-1)
        return self.element(elements) + self.charge(charges) + self.degree(degrees)


class GINEConv(nn.Module):
    """A bond's message depends on its type. An atom sums over its neighbours."""

    def __init__(self, hidden):
        super().__init__()
        self.bond_encoder = nn.Embedding(BONDS + 1, hidden)
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 2 * hidden),
            nn.LayerNorm(2 * hidden),
            nn.ReLU(),
            nn.Linear(2 * hidden, hidden),
        )

    def forward(self, x, bonds):
        messages = F.relu(x[:, None, :, :] + self.bond_encoder(bonds))
        adjacent = (bonds > 0).unsqueeze(-1)
        aggregated = (messages * adjacent).sum(dim=2)
        return self.mlp((1 + self.eps) * x + aggregated)


class GraphAttentionHead(nn.Module):
    """Scores a pair of atoms by what is concatenated of both. An atom attends to itself too."""

    def __init__(self, hidden, head_dim):
        super().__init__()
        self.w = nn.Linear(hidden, head_dim, bias=False)
        self.a = nn.Linear(2 * head_dim, 1, bias=False)
        self.bond_bias = nn.Embedding(BONDS + 1, 1)

    def forward(self, x, bonds, neighbours):
        h = self.w(x)
        batch, atoms, head_dim = h.shape
        h_i = h[:, :, None, :].expand(batch, atoms, atoms, head_dim)
        h_j = h[:, None, :, :].expand(batch, atoms, atoms, head_dim)
        e = F.leaky_relu(self.a(torch.cat([h_i, h_j], dim=-1)), 0.2)
        e = (e + self.bond_bias(bonds)).squeeze(-1)
        e = e.float().masked_fill(~neighbours, float("-inf"))
        attention = F.softmax(e, dim=-1)
        return torch.bmm(attention, h.float())


class GATConv(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = nn.ModuleList(
            GraphAttentionHead(hidden, hidden // heads) for _ in range(heads)
        )
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x, bonds):
        neighbours = (bonds > 0) | torch.eye(bonds.size(-1), dtype=torch.bool)
        x = torch.cat([head(x, bonds, neighbours) for head in self.heads], dim=-1)
        return self.out(F.elu(x))


class VirtualNode(nn.Module):
    """Is bound to all atoms: hears their mean, and tells each of them the same."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.update = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))

    def forward(self, x, mask):
        present = mask.unsqueeze(-1).float()
        mean = (self.norm(x) * present).sum(1) / present.sum(1)
        return self.update(mean).unsqueeze(1)


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.gine = GINEConv(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.gat = GATConv(hidden, heads)
        self.virtual = VirtualNode(hidden)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x, bonds, mask):
        x = x + self.dropout(self.gine(self.norm1(x), bonds))
        x = x + self.dropout(self.gat(self.norm2(x), bonds))
        return x + self.virtual(x, mask)


class GatedReadout(nn.Module):
    """Sums over the atoms of each molecule what a gate lets through."""

    def __init__(self, hidden):
        super().__init__()
        self.gate = nn.Linear(hidden, 1)
        self.proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, mask):
        gated = torch.sigmoid(self.gate(x)) * self.proj(x)
        return (gated * mask.unsqueeze(-1)).sum(1)


class MoleculeNet(nn.Module):
    def __init__(self, hidden=HIDDEN, heads=HEADS, layers=LAYERS):
        super().__init__()
        self.atom_encoder = AtomEncoder(hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.readouts = nn.ModuleList(GatedReadout(hidden) for _ in range(layers + 1))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, elements, charges, bonds, mask):
        x = self.atom_encoder(elements, charges, bonds)
        pooled = self.readouts[0](x, mask)
        for block, readout in zip(self.blocks, self.readouts[1:], strict=True):
            x = block(x, bonds, mask)
            pooled = pooled + readout(x, mask)
        return self.head(self.norm(pooled))


def molecules(g):
    """Trees of atoms, some with a ring. A bond counts by its type and by what it binds."""
    fixed = torch.Generator().manual_seed(23)
    by_element = torch.randn(ELEMENTS, generator=fixed)
    by_bond = torch.randn(BONDS + 1, ELEMENTS, ELEMENTS, generator=fixed)
    elements = torch.randint(0, ELEMENTS, (GRAPHS, ATOMS), generator=g)
    charges = torch.randint(0, CHARGES, (GRAPHS, ATOMS), generator=g)
    bonds = torch.zeros(GRAPHS, ATOMS, ATOMS, dtype=torch.long)
    mask = torch.zeros(GRAPHS, ATOMS, dtype=torch.bool)
    targets = torch.zeros(GRAPHS)
    for graph in range(GRAPHS):
        atoms = int(torch.randint(6, ATOMS + 1, (1,), generator=g))
        edges = [
            (i, int(torch.randint(max(0, i - 4), i, (1,), generator=g))) for i in range(1, atoms)
        ]
        if torch.rand(1, generator=g) < 0.5:
            edges.append((atoms - 1, 0))
        mask[graph, :atoms] = True
        for i, j in edges:
            kind = int(torch.randint(1, BONDS + 1, (1,), generator=g))
            bonds[graph, i, j] = bonds[graph, j, i] = kind
            targets[graph] += 0.3 * by_bond[kind, elements[graph, i], elements[graph, j]]
        targets[graph] += by_element[elements[graph, :atoms]].sum() / 3
        targets[graph] += 0.2 * (charges[graph, :atoms] - 1).sum()
    return elements, charges, bonds, mask, targets


torch.manual_seed(9)
net = MoleculeNet()
model = prepare(net, net.blocks)
no_decay = ("element", "charge", "degree", "bond")
decayed, others = [], []
for name, p in net.named_parameters():
    decays = p.ndim > 1 and not any(word in name for word in no_decay)
    (decayed if decays else others).append(p)
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], lr=3e-3
)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=3e-3, total_steps=args.steps + 20, pct_start=0.2, div_factor=5
)
for parts in batches(molecules):
    optimizer.zero_grad(set_to_none=True)
    for elements, charges, bonds, mask, y in parts:
        with autocast():
            prediction = model(elements, charges, bonds, mask)
        loss = F.smooth_l1_loss(prediction.squeeze(-1).float(), y)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
