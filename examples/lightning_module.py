"""Lightning: a callback that records, and a plugin that trains by the plan."""

import lightning
import torch
from torch import nn

import mpdiag
from mpdiag.integrations.lightning import PlanPrecision, RecordCallback

torch.manual_seed(0)
LABELS = torch.arange(512) % 4
INPUTS = torch.randn(512, 16) + 2 * nn.functional.one_hot(LABELS, 16)
BATCHES = list(zip(INPUTS.split(32), LABELS.split(32), strict=True))


class Classifier(lightning.LightningModule):
    """A small network, as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), 1e-3)


def fit(**options: object) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", **quiet, **options)
    trainer.fit(Classifier(), torch.utils.data.DataLoader(BATCHES, batch_size=None))


def main() -> None:
    fit(callbacks=[RecordCallback("runs/lightning")])
    plan = mpdiag.analyze("runs/lightning").plan
    print("loss scale:", plan.loss_scale.reason)
    fit(plugins=PlanPrecision(plan, run="runs/lightning-fp16"))
    print(mpdiag.compare("runs/lightning", "runs/lightning-fp16", margin=0.1))


if __name__ == "__main__":
    main()
