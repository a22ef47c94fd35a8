"""Lightning's ``Trainer``: ``lightning_fit.py bf16-true|bf16-mixed|32-true``."""

import logging
import sys
import warnings

import lightning as L
import torch
from torch import nn

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Classifier(L.LightningModule):
    """A small network with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """The loss."""
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(precision: str) -> None:
    """Train for eight steps."""
    L.seed_everything(0, verbose=False)
    x = torch.randn(256, 16)
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        precision=precision,
        **dict.fromkeys(shown, False),
    )
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, 32))


if __name__ == "__main__":
    main(sys.argv[1])
