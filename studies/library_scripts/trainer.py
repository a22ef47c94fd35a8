"""Hugging Face's ``Trainer`` on a small GPT-2: ``trainer.py fp32|bf16|auto``.

``auto`` loads a checkpoint that was saved in BF16, with ``dtype="auto"``.
"""

import os
import sys
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
warnings.filterwarnings("ignore")

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)


def main(kind: str) -> None:
    """Train for four steps of two micro-batches."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 64, (32, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        if kind == "auto":
            model.to(torch.bfloat16).save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        arguments = TrainingArguments(
            folder,
            bf16=kind == "bf16",
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        )
        Trainer(model, arguments, train_dataset=data).train()


if __name__ == "__main__":
    main(sys.argv[1])
