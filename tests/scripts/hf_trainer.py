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
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=8,
    )
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=4,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=seed,
            dataloader_pin_memory=False,
        )
        result = Trainer(model, arguments, train_dataset=Pairs(256)).train()
    report(model, result.training_loss)


if __name__ == "__main__":
    main(seed())
