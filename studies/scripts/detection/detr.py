"""Detection as a set, in the shape of ``models/detr.py``, ``models/matcher.py`` and ``engine.py`` of facebookresearch/detr.

Queries against a transformer, predictions matched to the truth by the Hungarian algorithm without
gradients, a weight for "no object", L1 and generalised overlap of boxes, two learning rates, clipping.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--lr_backbone", type=float, default=1e-3)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--weight_decay", type=float, default=1e-4)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--clip_max_norm", type=float, default=0.5)
parser.add_argument("--num_queries", type=int, default=5)
parser.add_argument("--hidden_dim", type=int, default=48)
parser.add_argument("--eos_coef", type=float, default=0.2)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--save", default="")
args = parser.parse_args()

CLASSES, SIZE = 2, 24


def scene(rng, digits):
    """One or two digits, and their labels and boxes: centre and size from 0 to 1."""
    image, boxes, labels = 0.1 * rng.standard_normal((SIZE, SIZE)), [], []
    for half in rng.permutation(2)[: rng.integers(1, 3)]:
        label = int(rng.integers(0, CLASSES))
        x, y = int(rng.integers(0, 5)) + 12 * int(half), int(rng.integers(0, SIZE - 8))
        pixels = digits[label][rng.integers(len(digits[label]))] / 16
        image[y : y + 8, x : x + 8] += pixels
        boxes.append([(x + 4) / SIZE, (y + 4) / SIZE, 8 / SIZE, 8 / SIZE])
        labels.append(label)
    target = {"labels": torch.tensor(labels), "boxes": torch.tensor(boxes, dtype=torch.float32)}
    return torch.tensor(image[None], dtype=torch.float32), target


def box_cxcywh_to_xyxy(b):
    return torch.cat([b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2], -1)


def generalized_box_iou(a, b):
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    low, high = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    inter = (high - low).clamp(min=0).prod(2)
    union = area_a[:, None] + area_b - inter
    low, high = torch.min(a[:, None, :2], b[:, :2]), torch.max(a[:, None, 2:], b[:, 2:])
    hull = (high - low).clamp(min=0).prod(2)
    return inter / union - (hull - union) / hull


class MLP(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(dims, dims[1:]))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


class DETR(nn.Module):
    def __init__(self, hidden_dim, num_queries):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.input_proj = nn.Conv2d(32, hidden_dim, kernel_size=1)
        self.transformer = nn.Transformer(
            hidden_dim, 4, 1, 2, 96, dropout=0.0, batch_first=True, norm_first=False
        )
        self.row_embed = nn.Parameter(torch.rand(6, hidden_dim // 2))
        self.col_embed = nn.Parameter(torch.rand(6, hidden_dim // 2))
        self.query_embed = nn.Embedding(num_queries, hidden_dim)
        self.class_embed = nn.Linear(hidden_dim, CLASSES + 1)
        self.bbox_embed = MLP([hidden_dim, hidden_dim, 4])

    def forward(self, samples):
        src = self.input_proj(self.backbone(samples))
        n, _, h, w = src.shape
        rows, cols = self.row_embed[:, None].expand(-1, w, -1), self.col_embed.expand(h, -1, -1)
        pos = torch.cat([rows, cols], -1).flatten(0, 1)
        src = src.flatten(2).transpose(1, 2) + pos
        hs = self.transformer(src, self.query_embed.weight.expand(n, -1, -1))
        boxes = self.bbox_embed(hs).sigmoid()
        return {"pred_logits": self.class_embed(hs), "pred_boxes": boxes}


class HungarianMatcher(nn.Module):
    @torch.no_grad()
    def forward(self, outputs, targets):
        bs, num_queries = outputs["pred_logits"].shape[:2]
        out_prob = outputs["pred_logits"].flatten(0, 1).softmax(-1)
        out_bbox = outputs["pred_boxes"].flatten(0, 1)
        tgt_ids = torch.cat([v["labels"] for v in targets])
        tgt_bbox = torch.cat([v["boxes"] for v in targets])
        cost_class = -out_prob[:, tgt_ids]
        cost_bbox = torch.cdist(out_bbox, tgt_bbox, p=1)
        cost_giou = -generalized_box_iou(box_cxcywh_to_xyxy(out_bbox), box_cxcywh_to_xyxy(tgt_bbox))
        C = (5 * cost_bbox + cost_class + 2 * cost_giou).view(bs, num_queries, -1).cpu()
        sizes = [len(v["boxes"]) for v in targets]
        indices = [linear_sum_assignment(c[i]) for i, c in enumerate(C.split(sizes, -1))]
        return [(torch.as_tensor(i), torch.as_tensor(j)) for i, j in indices]


class SetCriterion(nn.Module):
    def __init__(self, matcher, weight_dict, eos_coef):
        super().__init__()
        self.matcher, self.weight_dict = matcher, weight_dict
        empty_weight = torch.ones(CLASSES + 1)
        empty_weight[-1] = eos_coef
        self.register_buffer("empty_weight", empty_weight)

    def forward(self, outputs, targets):
        indices = self.matcher(outputs, targets)
        num_boxes = sum(len(t["labels"]) for t in targets)
        batch = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
        idx = batch, torch.cat([src for src, _ in indices])
        classes = torch.full(outputs["pred_logits"].shape[:2], CLASSES)
        classes[idx] = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, indices)])
        src_boxes = outputs["pred_boxes"][idx]
        boxes = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, indices)])
        giou = generalized_box_iou(box_cxcywh_to_xyxy(src_boxes), box_cxcywh_to_xyxy(boxes))
        return {
            "loss_ce": F.cross_entropy(
                outputs["pred_logits"].transpose(1, 2), classes, self.empty_weight
            ),
            "loss_bbox": F.l1_loss(src_boxes, boxes, reduction="none").sum() / num_boxes,
            "loss_giou": (1 - torch.diag(giou)).sum() / num_boxes,
        }


np.random.seed(args.seed)
torch.manual_seed(args.seed)
data = load_digits()
by_class = [data.images[data.target == c] for c in range(CLASSES)]
rng = np.random.default_rng(0)
train, test = [scene(rng, by_class) for _ in range(400)], [scene(rng, by_class) for _ in range(100)]

model = DETR(args.hidden_dim, args.num_queries)
weight_dict = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
criterion = SetCriterion(HungarianMatcher(), weight_dict, args.eos_coef)
param_dicts = [
    {"params": [p for n, p in model.named_parameters() if "backbone" not in n]},
    {
        "params": [p for n, p in model.named_parameters() if "backbone" in n],
        "lr": args.lr_backbone,
    },
]
optimizer = torch.optim.AdamW(param_dicts, lr=args.lr, weight_decay=args.weight_decay)
model.train()
criterion.train()
for step in range(args.steps):
    index = np.random.randint(0, len(train), args.batch_size)
    samples, targets = torch.stack([train[i][0] for i in index]), [train[i][1] for i in index]
    outputs = model(samples)
    loss_dict = criterion(outputs, targets)
    losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict)
    if not np.isfinite(losses.item()):
        raise SystemExit(f"Loss is {losses.item()}, stopping training")
    optimizer.zero_grad()
    losses.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_max_norm)
    optimizer.step()
    if step % 50 == 0:
        print(step, {k: round(v.item(), 3) for k, v in loss_dict.items()})

model.eval()
overlaps = []
with torch.no_grad():
    samples, targets = torch.stack([s for s, _ in test]), [t for _, t in test]
    outputs = model(samples)
    for i, (src, j) in enumerate(criterion.matcher(outputs, targets)):
        found = box_cxcywh_to_xyxy(outputs["pred_boxes"][i, src])
        right = outputs["pred_logits"][i, src].argmax(-1) == targets[i]["labels"][j]
        iou = generalized_box_iou(found, box_cxcywh_to_xyxy(targets[i]["boxes"][j])).diag()
        overlaps += (right & (iou > 0.4)).tolist()
if args.save:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)
print(f"recall: {np.mean(overlaps):.6f}")
