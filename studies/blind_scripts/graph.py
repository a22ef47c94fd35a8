"""A graph network: messages along edges are summed by index_add, nodes are averaged per graph."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

NODES, EDGES = 7, 12


class Conv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.message = nn.Linear(2 * dim + 2, dim)
        self.root = nn.Linear(dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, source, target, edge):
        m = F.relu(self.message(torch.cat([x[source], x[target], edge], -1))).float()
        total = torch.zeros(x.shape[0], m.shape[-1]).index_add(0, target, m)
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(len(target)))
        mean = total / degree.clamp(min=1)[:, None]
        return F.relu(self.norm(self.root(x) + mean)) + x


class GraphNet(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.enter = nn.Linear(5, dim)
        self.convs = nn.ModuleList(Conv(dim) for _ in range(3))
        self.readout = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, nodes, edges, edge):
        graphs = nodes.shape[0]
        x = self.enter(nodes.flatten(0, 1))
        first = torch.arange(graphs)[:, None] * NODES
        source, target = ((edges[:, side] + first).flatten() for side in (0, 1))
        for conv in self.convs:
            x = conv(x, source, target, edge.flatten(0, 1))
        member = torch.arange(graphs).repeat_interleave(NODES)
        mean = torch.zeros(graphs, x.shape[-1]).index_add(0, member, x.float()) / NODES
        top = x.float().view(graphs, NODES, -1).amax(1)
        return self.readout(torch.cat([mean, top], -1)).squeeze(-1)


def graphs(g):
    nodes = torch.randn(12, NODES, 5, generator=g)
    edges = torch.randint(0, NODES, (12, 2, EDGES), generator=g)
    return nodes, edges, torch.rand(12, EDGES, 2, generator=g), nodes[..., 0].sum(-1)


model = GraphNet()
model = prepare(model, model.convs)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9, momentum=0.5)
for parts in batches(graphs):
    optimizer.zero_grad()
    for nodes, edges, edge, y in parts:
        with autocast():
            guess = model(nodes, edges, edge)
        loss = F.mse_loss(guess.float(), y)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    norms = [p.grad.norm() for p in model.parameters()]
    size = torch.stack([n.full_tensor() if args.fsdp else n for n in norms]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, 2.0 / (float(size) + 1e-6)))
    scaler.step(optimizer)
    scaler.update()
finish()
