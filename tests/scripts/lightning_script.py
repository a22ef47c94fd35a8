"""PyTorch Lightning: the loop is its own, and steps with a closure."""

import logging
import sys
import warnings

import torch
from script_end import report, seed
from torch import nn

try:
    import lightning as L
except ImportError:
    sys.exit("this script needs lightning")

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _index):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def main(seed):
    L.seed_everything(seed, verbose=False)
    x = torch.randn(256, 8)
    y = x[:, :2].prod(1, keepdim=True) + x[:, 2:3]
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
    model = Regressor()
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(shown, False)
    trainer = L.Trainer(max_epochs=8, accelerator="cpu", devices=1, gradient_clip_val=5.0, **quiet)
    trainer.fit(model, loader, torch.utils.data.DataLoader(data, 64))
    with torch.no_grad():
        metric = nn.functional.mse_loss(model(x), y).item()
    report(model, metric)


if __name__ == "__main__":
    main(seed())
