"""Graphormer on molecules: degrees, shortest paths and edges along them bias the attention."""

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

GRAPHS, NODES, ATOMS, BONDS, MAX_DEGREE, FAR, HOPS = 12, 10, 9, 4, 8, 8, 3


class GraphNodeFeature(nn.Module):
    def __init__(self, hidden_dim):
        super().__init__()
        self.atom_encoder = nn.Embedding(ATOMS + 1, hidden_dim, padding_idx=0)
        self.in_degree_encoder = nn.Embedding(MAX_DEGREE + 2, hidden_dim, padding_idx=0)
        self.out_degree_encoder = nn.Embedding(MAX_DEGREE + 2, hidden_dim, padding_idx=0)
        self.graph_token = nn.Embedding(1, hidden_dim)

    def forward(self, x, in_degree, out_degree):
        node_feature = self.atom_encoder(x).sum(dim=-2)
        node_feature = (
            node_feature + self.in_degree_encoder(in_degree) + self.out_degree_encoder(out_degree)
        )
        token = self.graph_token.weight.unsqueeze(0).expand(x.size(0), -1, -1)
        return torch.cat([token, node_feature], dim=1)


class GraphAttnBias(nn.Module):
    def __init__(self, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.edge_encoder = nn.Embedding(BONDS + 1, num_heads, padding_idx=0)
        self.edge_dis_encoder = nn.Embedding(HOPS * num_heads * num_heads, 1)
        self.spatial_pos_encoder = nn.Embedding(FAR + 2, num_heads, padding_idx=0)
        self.graph_token_virtual_distance = nn.Embedding(1, num_heads)

    def forward(self, spatial_pos, edge_input):
        n_graph, n_node = spatial_pos.shape[:2]
        spatial_bias = self.spatial_pos_encoder(spatial_pos).permute(0, 3, 1, 2)
        distance = (spatial_pos - 1).clamp(1, HOPS).float()
        edges = self.edge_encoder(edge_input).permute(3, 0, 1, 2, 4)
        edges = edges.reshape(HOPS, -1, self.num_heads)
        weight = self.edge_dis_encoder.weight.view(HOPS, self.num_heads, self.num_heads)
        edges = torch.bmm(edges, weight.to(edges.dtype))
        edges = edges.view(HOPS, n_graph, n_node, n_node, self.num_heads)
        edges = edges.permute(1, 2, 3, 0, 4).sum(-2) / distance.unsqueeze(-1)
        edge_bias = edges.permute(0, 3, 1, 2)
        bias = F.pad(spatial_bias + edge_bias, (1, 0, 1, 0))
        t = self.graph_token_virtual_distance.weight.view(1, self.num_heads, 1)
        first = torch.zeros(n_node + 1)
        first[0] = 1.0
        bias = bias + t.unsqueeze(-1) * first[None, None, None, :]
        return bias + t.unsqueeze(-1) * first[None, None, :, None] * (1 - first)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout_module = nn.Dropout(args.dropout)

    def heads(self, x):
        bsz, length, _ = x.shape
        return x.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x, attn_bias, key_padding_mask):
        bsz, length, embed_dim = x.shape
        q = self.heads(self.q_proj(x)) * self.scaling
        k = self.heads(self.k_proj(x))
        v = self.heads(self.v_proj(x))
        attn_weights = torch.matmul(q, k.transpose(-2, -1))
        attn_weights = attn_weights + attn_bias
        attn_weights = attn_weights.masked_fill(key_padding_mask[:, None, None, :], -1e4)
        attn_probs = self.dropout_module(F.softmax(attn_weights.float(), dim=-1))
        attn = torch.matmul(attn_probs.type_as(v), v)
        attn = attn.transpose(1, 2).reshape(bsz, length, embed_dim)
        return self.out_proj(attn)


class GraphormerGraphEncoderLayer(nn.Module):
    def __init__(self, embed_dim, ffn_dim, num_heads):
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.self_attn = MultiheadAttention(embed_dim, num_heads)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.dropout_module = nn.Dropout(args.dropout)

    def forward(self, x, attn_bias, key_padding_mask):
        residual = x
        x = self.self_attn_layer_norm(x)
        x = self.self_attn(x, attn_bias, key_padding_mask)
        x = self.dropout_module(x)
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = F.gelu(self.fc1(x))
        x = self.dropout_module(self.fc2(x))
        return residual + x


class Graphormer(nn.Module):
    def __init__(self, embed_dim=48, num_layers=4, num_heads=4):
        super().__init__()
        self.graph_node_feature = GraphNodeFeature(embed_dim)
        self.graph_attn_bias = GraphAttnBias(num_heads)
        self.layers = nn.ModuleList(
            GraphormerGraphEncoderLayer(embed_dim, 2 * embed_dim, num_heads)
            for _ in range(num_layers)
        )
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.lm_head_transform_weight = nn.Linear(embed_dim, embed_dim)
        self.layer_norm = nn.LayerNorm(embed_dim)
        self.lm_output_learned_bias = nn.Parameter(torch.zeros(1))
        self.embed_out = nn.Linear(embed_dim, 1, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.3 if "encoder" in name else 0.08)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x, in_degree, out_degree, spatial_pos, edge_input):
        padding_mask = F.pad(x[:, :, 0].eq(0), (1, 0))
        attn_bias = self.graph_attn_bias(spatial_pos, edge_input)
        x = self.graph_node_feature(x, in_degree, out_degree)
        for layer in self.layers:
            x = layer(x, attn_bias, padding_mask)
        x = self.final_layer_norm(x)
        x = self.layer_norm(F.gelu(self.lm_head_transform_weight(x)))
        x = self.embed_out(x) + self.lm_output_learned_bias
        return x[:, 0, 0]


def floyd_warshall(adj, bonds):
    """Lengths of shortest paths, and the bonds along them."""
    n = adj.size(0)
    dist_ = torch.where(adj, 1, FAR)
    dist_.fill_diagonal_(0)
    path = torch.zeros(n, n, HOPS, dtype=torch.long)
    path[:, :, 0] = bonds
    for k in range(n):
        for i in range(n):
            for j in range(n):
                through = int(dist_[i, k] + dist_[k, j])
                if through < int(dist_[i, j]):
                    dist_[i, j] = through
                    steps = [*path[i, k][: int(dist_[i, k])], *path[k, j][: int(dist_[k, j])]]
                    steps = (steps + [torch.tensor(0)] * HOPS)[:HOPS]
                    path[i, j] = torch.stack(steps)
    return dist_, path


def molecule(g):
    """A tree with one more bond: what a collator makes of it, padded with zeros."""
    n = int(torch.randint(5, NODES + 1, (1,), generator=g))
    adj, bonds = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.long)
    edges = [(i, int(torch.randint(0, i, (1,), generator=g))) for i in range(1, n)] + [(n - 1, 0)]
    for i, j in edges:
        bond = int(torch.randint(1, BONDS + 1, (1,), generator=g))
        adj[i, j] = adj[j, i] = True
        bonds[i, j] = bonds[j, i] = bond
    shortest, path = floyd_warshall(adj, bonds)
    x = torch.randint(0, ATOMS // 3, (n, 3), generator=g)
    x = x + torch.arange(3) * (ATOMS // 3) + 1
    degree = adj.long().sum(dim=1)
    pad = NODES - n
    return (
        F.pad(x, (0, 0, 0, pad)),
        F.pad(degree + 1, (0, pad)),
        F.pad(shortest.clamp(max=FAR) + 1, (0, pad, 0, pad)),
        F.pad(path, (0, 0, 0, pad, 0, pad)),
        torch.randn(1, generator=g)[0] * 2.0 + 5.0,
    )


def collator(g):
    x, degree, spatial_pos, edge_input, y = map(
        torch.stack, zip(*(molecule(g) for _ in range(GRAPHS)), strict=True)
    )
    y = (y - 5.0) / 2.0
    return x, degree, degree, spatial_pos, edge_input, y


net = Graphormer()
model = prepare(net, net.layers)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
)
warmup_updates, total_updates = 4, 20
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda step: min((step + 1) / warmup_updates, 1 - (step + 1 - warmup_updates) / total_updates),
)
for parts in batches(collator):
    sample_size = torch.tensor(sum(len(part[-1]) for part in parts))
    if world > 1:
        dist.all_reduce(sample_size)
    for x, in_degree, out_degree, spatial_pos, edge_input, y in parts:
        with autocast():
            logits = model(x, in_degree, out_degree, spatial_pos, edge_input)
        loss = F.l1_loss(logits.float(), y, reduction="sum")
        scaler.scale(loss * world / sample_size).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
