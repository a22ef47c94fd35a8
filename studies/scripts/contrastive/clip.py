"""Images and their captions in one space, in the shape of ``main.py`` of moein-shariatnia/OpenAI-CLIP.

An image and a text encoder, each with a projection head; soft targets from both similarities;
AdamW over groups with rates of their own, chained from the modules' parameters.
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--head_lr", type=float, default=2e-3)
parser.add_argument("--image_encoder_lr", type=float, default=2e-3)
parser.add_argument("--text_encoder_lr", type=float, default=2e-3)
parser.add_argument("--weight_decay", type=float, default=1e-3)
parser.add_argument("--temperature", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()

NAMES = "zero one two three four five six seven eight nine".split()
FORMS = ["a picture of a {}", "the digit {}", "someone wrote {} by hand", "this is a {}"]


def tokenize(texts, length=28):
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    for row, text in zip(tokens, texts):
        row[: len(text)] = torch.tensor([ord(c) - 96 if c != " " else 27 for c in text])
    return tokens


class ImageEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 64),
        )

    def forward(self, x):
        return self.model(x)


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(28, 32, padding_idx=0)
        self.position = nn.Parameter(0.1 * torch.randn(28, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        x = self.model(x, src_key_padding_mask=tokens == 0)
        keep = (tokens != 0).float()[..., None]
        return (x * keep).sum(1) / keep.sum(1)


class ProjectionHead(nn.Module):
    def __init__(self, embedding_dim, projection_dim=32, dropout=0.1):
        super().__init__()
        self.projection = nn.Linear(embedding_dim, projection_dim)
        self.gelu = nn.GELU()
        self.fc = nn.Linear(projection_dim, projection_dim)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(projection_dim)

    def forward(self, x):
        projected = self.projection(x)
        x = self.dropout(self.fc(self.gelu(projected)))
        return self.layer_norm(x + projected)


class CLIPModel(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.image_encoder = ImageEncoder()
        self.text_encoder = TextEncoder()
        self.image_projection = ProjectionHead(64)
        self.text_projection = ProjectionHead(32)
        self.temperature = temperature

    def forward(self, batch):
        image_embeddings = self.image_projection(self.image_encoder(batch["image"]))
        text_embeddings = self.text_projection(self.text_encoder(batch["caption"]))
        logits = (text_embeddings @ image_embeddings.T) / self.temperature
        images_similarity = image_embeddings @ image_embeddings.T
        texts_similarity = text_embeddings @ text_embeddings.T
        targets = F.softmax((images_similarity + texts_similarity) / 2 * self.temperature, dim=-1)
        texts_loss = cross_entropy(logits, targets)
        images_loss = cross_entropy(logits.T, targets.T)
        return ((images_loss + texts_loss) / 2.0).mean()


def cross_entropy(preds, targets):
    return (-targets * F.log_softmax(preds, dim=-1)).sum(1)


torch.manual_seed(args.seed)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
captions = [FORMS[i % 4].format(NAMES[t]) for i, t in enumerate(digits.target)]
tokens = tokenize(captions)
model = CLIPModel(args.temperature)
params = [
    {"params": model.image_encoder.parameters(), "lr": args.image_encoder_lr},
    {"params": model.text_encoder.parameters(), "lr": args.text_encoder_lr},
    {
        "params": itertools.chain(
            model.image_projection.parameters(), model.text_projection.parameters()
        ),
        "lr": args.head_lr,
        "weight_decay": args.weight_decay,
    },
]
optimizer = torch.optim.AdamW(params, weight_decay=0.0)
lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.8)

for epoch in range(args.epochs):
    model.train()
    order = torch.randperm(1300)
    total = 0.0
    for index in order.split(args.batch_size):
        batch = {"image": images[index], "caption": tokens[index]}
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(index)
    lr_scheduler.step(total / 1300)
    print(f"Epoch: {epoch + 1} loss {total / 1300:.4f}")

model.eval()
with torch.no_grad():  # which of the ten captions fits an image best
    prompts = tokenize([f"the digit {name}" for name in NAMES])
    text = F.normalize(model.text_projection(model.text_encoder(prompts)), dim=-1)
    image = F.normalize(model.image_projection(model.image_encoder(images[1300:])), dim=-1)
    right = (image @ text.T).argmax(1) == torch.tensor(digits.target[1300:])
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"accuracy: {right.double().mean().item():.6f}")
