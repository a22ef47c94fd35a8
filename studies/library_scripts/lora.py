"""TRL's ``SFTTrainer`` with a LoRA adapter of PEFT: ``lora.py fp32|bf16|bf16-base``.

``bf16-base`` has a frozen base in BF16 below adapters in FP32, without autocast.
"""

import os
import sys
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
warnings.filterwarnings("ignore")

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = [f"w{i}" for i in range(60)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 60 words."""
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    whole = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def main(kind: str) -> None:
    """Train an adapter for four steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    if kind == "bf16-base":
        model.to(torch.bfloat16)
    words = torch.randint(0, len(WORDS), (32, 16)).tolist()
    data = Dataset.from_dict({"text": [" ".join(WORDS[i] for i in row) for row in words]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            bf16=kind == "bf16",
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        )
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        SFTTrainer(
            model, arguments, train_dataset=data, processing_class=tokenizer(), peft_config=adapter
        ).train()


if __name__ == "__main__":
    main(sys.argv[1])
