"""Trainer with torch_compile=True on a small Llama, in the shape of ``run_clm.py`` of huggingface/transformers."""

import argparse
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()
set_seed(args.seed)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
    attn_implementation="sdpa",
)
model = LlamaForCausalLM(config)
tokens = (torch.randint(64, (256, 1)) + torch.randint(1, 4, (256, 1)) * torch.arange(24)) % 64
with tempfile.TemporaryDirectory() as folder:
    training_args = TrainingArguments(
        folder,
        torch_compile=True,
        use_cpu=True,
        max_steps=30,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        seed=args.seed,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, training_args, train_dataset=data[:224], eval_dataset=data[224:])
    trainer.train()
    metrics = trainer.evaluate()
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"eval loss: {metrics['eval_loss']:.6f}")
