"""Lightning's Trainer on a compiled LightningModule, in the shape of ``compile.rst`` of Lightning-AI/pytorch-lightning."""

import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()
L.seed_everything(args.seed, verbose=False)


class LitViT(L.LightningModule):
    def __init__(self, n=32):
        super().__init__()
        self.patches, self.cls = nn.Conv2d(1, n, 2, 2), nn.Parameter(torch.zeros(1, 1, n))
        self.position = nn.Parameter(torch.randn(1, 17, n) / 50)
        layer = nn.TransformerEncoderLayer(n, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(n), nn.Linear(n, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.encoder(x))[:, 0])

    def training_step(self, batch, _):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)]


digits = load_digits()
images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
train = torch.utils.data.TensorDataset(images[:1280], labels[:1280])
held_out = torch.utils.data.TensorDataset(images[1280:], labels[1280:])
shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, gradient_clip_val=1.0, **dict.fromkeys(shown, False)
)
model = LitViT()
compiled = torch.compile(model)
loaders = (
    torch.utils.data.DataLoader(train, 64, shuffle=True),
    torch.utils.data.DataLoader(held_out, 512),
)
trainer.fit(compiled, *loaders)
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"accuracy: {trainer.callback_metrics['accuracy'].item():.6f}")
