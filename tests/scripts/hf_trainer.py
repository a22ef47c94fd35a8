"""Hugging Face's Trainer on a tiny BERT made on the spot."""

import os
import sys
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
warnings.filterwarnings("ignore")

import torch
from script_end import report, seed

try:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
except ImportError:
    sys.exit("this script needs transformers")
try:
    import accelerate  # noqa: F401
except ImportError:
    sys.exit("this script needs accelerate")


class Pairs(torch.utils.data.Dataset):
    """Whether a token occurs."""

    def __init__(self, size):
        self.tokens = torch.randint(1, 20, (size, 6))
        self.labels = (self.tokens == 7).any(1).long()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


def main(seed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    model = BertForSequenceClassification(BertConfig(**sizes, **layers))
    with tempfile.TemporaryDirectory() as folder:
        rates = {"num_train_epochs": 4, "per_device_train_batch_size": 16, "learning_rate": 3e-3}
        quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no"}
        here = {"disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
        arguments = TrainingArguments(folder, seed=seed, **rates, **quiet, **here)
        result = Trainer(model, arguments, train_dataset=Pairs(256)).train()
    report(model, result.training_loss)


if __name__ == "__main__":
    main(seed())
