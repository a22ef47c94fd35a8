"""DETR on small scenes: a frozen-norm backbone, fixed queries, losses after every decoder layer."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

CLASSES, SIZE, GRID, BATCH = 5, 48, 3, 8
QUERIES, EOS_COEF, L1_COST, GIOU_COST = GRID * GRID, 0.2, 5.0, 2.0


class FrozenBatchNorm2d(nn.Module):
    """Its statistics and its affine parameters are those of a pretrained backbone."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", 0.8 + 0.4 * torch.rand(channels))
        self.register_buffer("bias", 0.1 * torch.randn(channels))
        self.register_buffer("running_mean", 0.1 * torch.randn(channels))
        self.register_buffer("running_var", 0.5 + torch.rand(channels))

    def forward(self, x):
        x = x - self.running_mean[:, None, None]
        x = x / (self.running_var[:, None, None] + self.eps).sqrt()
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = FrozenBatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = FrozenBatchNorm2d(planes)
        self.downsample = nn.Conv2d(inplanes, planes, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


def sine_position_embedding(height, width, dim, temperature=20.0):
    """Half of the channels code the row, the other half the column; (height * width, dim)."""
    scale, half = 2 * math.pi, dim // 2
    y = (torch.arange(height) + 0.5) / height * scale
    x = (torch.arange(width) + 0.5) / width * scale
    dim_t = temperature ** (2 * (torch.arange(half) // 2) / half)
    pos_y, pos_x = y[:, None] / dim_t, x[:, None] / dim_t
    pos_y = torch.stack((pos_y[:, 0::2].sin(), pos_y[:, 1::2].cos()), dim=2).flatten(1)
    pos_x = torch.stack((pos_x[:, 0::2].sin(), pos_x[:, 1::2].cos()), dim=2).flatten(1)
    rows, columns = pos_y[:, None].expand(-1, width, -1), pos_x[None].expand(height, -1, -1)
    return torch.cat((rows, columns), dim=-1).reshape(height * width, dim)


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.nhead, self.head_dim = nhead, d_model // nhead
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(layer.weight)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, query, key, value):
        bsz, tgt_len, d_model = query.shape
        q = self.q_proj(query).view(bsz, tgt_len, self.nhead, self.head_dim).transpose(1, 2)
        k = self.k_proj(key).view(bsz, -1, self.nhead, self.head_dim).transpose(1, 2)
        v = self.v_proj(value).view(bsz, -1, self.nhead, self.head_dim).transpose(1, 2)
        attn = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        attn = self.dropout(attn.softmax(dim=-1))
        out = torch.matmul(attn, v).transpose(1, 2).reshape(bsz, tgt_len, d_model)
        return self.out_proj(out)


class TransformerEncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, nhead)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, src, pos):
        q = k = src + pos
        src = self.norm1(src + self.dropout(self.self_attn(q, k, src)))
        src2 = self.linear2(self.dropout(F.relu(self.linear1(src))))
        return self.norm2(src + self.dropout(src2))


class TransformerDecoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, nhead)
        self.multihead_attn = MultiHeadAttention(d_model, nhead)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, tgt, memory, pos, query_pos):
        q = k = tgt + query_pos
        tgt = self.norm1(tgt + self.dropout(self.self_attn(q, k, tgt)))
        tgt2 = self.multihead_attn(tgt + query_pos, memory + pos, memory)
        tgt = self.norm2(tgt + self.dropout(tgt2))
        tgt2 = self.linear2(self.dropout(F.relu(self.linear1(tgt))))
        return self.norm3(tgt + self.dropout(tgt2))


class MLP(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:], strict=False))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class DETR(nn.Module):
    def __init__(self, hidden_dim=32, nhead=4, dim_feedforward=64, encoders=2, decoders=3):
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 16, 5, 2, 2, bias=False), nn.ReLU())
        self.backbone = nn.Sequential(stem, BasicBlock(16, 24, 2), BasicBlock(24, 32, 2))
        self.input_proj = nn.Conv2d(32, hidden_dim, kernel_size=1)
        sizes = (hidden_dim, nhead, dim_feedforward)
        self.encoder = nn.ModuleList(TransformerEncoderLayer(*sizes) for _ in range(encoders))
        self.decoder = nn.ModuleList(TransformerDecoderLayer(*sizes) for _ in range(decoders))
        self.decoder_norm = nn.LayerNorm(hidden_dim)
        self.query_embed = nn.Embedding(QUERIES, hidden_dim)
        self.class_embed = nn.Linear(hidden_dim, CLASSES + 1)
        self.bbox_embed = MLP([hidden_dim, hidden_dim, hidden_dim, 4])
        side = SIZE // 8
        self.register_buffer("pos", sine_position_embedding(side, side, hidden_dim))

    def forward(self, images):
        features = self.input_proj(self.backbone(images))
        memory = features.flatten(2).transpose(1, 2)
        for layer in self.encoder:
            memory = layer(memory, self.pos)
        query_pos = self.query_embed.weight
        tgt = torch.zeros_like(query_pos).expand(images.size(0), -1, -1)
        outputs = []
        for layer in self.decoder:
            tgt = layer(tgt, memory, self.pos, query_pos)
            hs = self.decoder_norm(tgt)
            outputs.append((self.class_embed(hs), self.bbox_embed(hs).sigmoid()))
        return outputs


def box_cxcywh_to_xyxy(boxes):
    cx, cy, w, h = boxes.unbind(-1)
    return torch.stack((cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h), dim=-1)


def generalized_box_iou(a, b):
    """Of each box with the one at the same place."""
    inter = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0)
    hull = torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])
    inter, hull = inter[..., 0] * inter[..., 1], hull[..., 0] * hull[..., 1]
    area_a = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    area_b = (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])
    union = area_a + area_b - inter
    return inter / union - (hull - union) / hull


def set_criterion(outputs, labels, boxes, num_boxes):
    """Each query has its target; queries without an object are to say so."""
    weight = torch.ones(CLASSES + 1)
    weight[-1] = EOS_COEF
    has_object = (labels != CLASSES).float()
    total = 0.0
    for logits, pred_boxes in outputs:
        logits, pred_boxes = logits.float(), pred_boxes.float()
        loss_ce = F.cross_entropy(logits.transpose(1, 2), labels, weight, reduction="none").mean()
        loss_bbox = ((pred_boxes - boxes).abs().sum(-1) * has_object).sum() / num_boxes
        giou = generalized_box_iou(box_cxcywh_to_xyxy(pred_boxes), box_cxcywh_to_xyxy(boxes))
        loss_giou = ((1 - giou) * has_object).sum() / num_boxes
        total = total + loss_ce + L1_COST * loss_bbox + GIOU_COST * loss_giou
    return total


def scenes(g):
    """Boxes of a class's colour on noise. The cell of a box's centre is the query that it gets."""
    colours = torch.rand(CLASSES, 3, generator=torch.Generator().manual_seed(5)) * 2 - 1
    images = 0.2 * torch.randn(BATCH, 3, SIZE, SIZE, generator=g)
    labels = torch.full((BATCH, QUERIES), CLASSES)
    boxes = torch.full((BATCH, QUERIES, 4), 0.5)
    for image, label, box in zip(images, labels, boxes, strict=True):
        count = int(torch.randint(2, 6, (1,), generator=g))
        for cell in torch.randperm(QUERIES, generator=g)[:count].tolist():
            offset, size = torch.rand(2, 2, generator=g)
            centre = (torch.tensor([cell % GRID, cell // GRID]) + offset) / GRID
            size = 0.1 + 0.3 * size
            label[cell] = torch.randint(0, CLASSES, (1,), generator=g)
            box[cell] = torch.cat((centre, size))
            low = ((centre - size / 2).clamp(min=0) * SIZE).long()
            high = ((centre + size / 2).clamp(max=1) * SIZE).long() + 1
            image[:, low[1] : high[1], low[0] : high[0]] = colours[label[cell]][:, None, None]
    return images, labels, boxes


net = DETR()
model = prepare(net, [*net.encoder, *net.decoder])
param_dicts = [
    {"params": [p for n, p in net.named_parameters() if not n.startswith("backbone")]},
    {"params": net.backbone.parameters(), "lr": 2e-4},
]
optimizer = torch.optim.AdamW(param_dicts, lr=1e-3, weight_decay=1e-4)
lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.1)
for parts in batches(scenes):
    num_boxes = torch.stack([(labels != CLASSES).sum() for _, labels, _ in parts]).sum()
    if world > 1:
        dist.all_reduce(num_boxes)
    num_boxes = num_boxes / (world * args.accum)
    for images, labels, boxes in parts:
        with autocast():
            outputs = model(images)
        loss = set_criterion(outputs, labels, boxes, num_boxes) / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    lr_scheduler.step()
    optimizer.zero_grad()
finish()
