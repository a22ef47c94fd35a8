"""Does the ranking of ``mpdiag.mismatch`` agree with a measured ablation, one layer in FP32 at a time?

::

    python studies/forward_mismatch.py llama gpt2 mixtral gemma

Each model is small, trained for some steps and cast to BF16. The ablation casts one layer of the BF16
model to FP32 by hand and measures the mean square of the log-probabilities' differences again. It is
done twice: from the whole BF16 model, and from one whose head is in FP32, where the head hides nothing.
Other layers round anew when one layer changes, so the ablation itself has an error. Two layers are told
apart where their gains differ by more than two standard errors over the rows; ``same order`` is the share
of these pairs that the ranking orders alike. ``llama`` and ``gpt2`` were used while the measurement was
built; the others were not.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import mpdiag

SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 160, "num_hidden_layers": 4}
ROWS, LENGTH = 48, 48
MEASURED = 256
"""Rows of the ablation."""


def small(name: str) -> nn.Module:
    """A small model of a family."""
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": 256, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64}
        config = transformers.GPT2Config(**sizes)
    elif name == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
        config = transformers.MixtralConfig(**LLAMA | experts | {"num_hidden_layers": 3})
    elif name == "gemma":
        config = transformers.GemmaConfig(**LLAMA, head_dim=16)
    elif name == "qwen":
        config = transformers.Qwen3Config(**LLAMA, head_dim=16)
    else:
        config = transformers.LlamaConfig(**LLAMA)
    return transformers.AutoModelForCausalLM.from_config(config)


def rows(seed: int, count: int = ROWS) -> Tensor:
    """Sequences whose second half follows from the first."""
    first = torch.randint(
        0, 64, (count, LENGTH // 2), generator=torch.Generator().manual_seed(seed + 10)
    )
    return torch.cat([first, (first * 3 + 7) % 256], 1)


def trained(model: nn.Module, steps: int) -> nn.Module:
    """The model after some steps of AdamW in FP32."""
    adam = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(steps):
        tokens = rows(step, 8)
        adam.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        adam.step()
    return model.eval()


def in_fp32(narrow: nn.Module, wide: nn.Module, names: Sequence[str], head: str) -> nn.Module:
    """A copy of the BF16 model with some layers in FP32; all but the head round their outputs."""
    model = copy.deepcopy(narrow)

    def cast(nest: Any, dtype: torch.dtype) -> Any:
        return tree_map(
            lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, nest
        )

    for name in names:
        parent, _, child = name.rpartition(".")
        layer = copy.deepcopy(wide.get_submodule(name))  # its weights may be tied in the model
        layer.register_forward_pre_hook(
            lambda _m, a, k: cast((a, k), torch.float32), with_kwargs=True
        )
        if name != head:
            layer.register_forward_hook(lambda _m, _a, output: cast(output, torch.bfloat16))
        setattr(model.get_submodule(parent), child, layer)
    return model


def squares(model: nn.Module, wide: nn.Module, tokens: Tensor) -> Tensor:
    """Squared difference of each row's log-probabilities, in the mean over its tokens."""
    with torch.no_grad():
        a, b = (
            torch.log_softmax(m(input_ids=tokens).logits[:, :-1].double(), -1).gather(
                -1, tokens[:, 1:, None]
            )
            for m in (wide, model)
        )
    return (b - a)[..., 0].square().mean(1)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation."""
    ranks = [torch.tensor(x).argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def same_order(foretold: Sequence[float], gains: Tensor) -> tuple[int, int]:
    """Pairs that the ablation tells apart, and how many of them the ranking orders alike.

    Args:
        foretold: By layer.
        gains: By layer and row.
    """
    apart = alike = 0
    for i in range(len(foretold)):
        for j in range(i):
            difference = gains[i] - gains[j]
            error = float(difference.std()) / len(difference) ** 0.5
            if abs(float(difference.mean())) > 2 * error:
                apart += 1
                alike += (foretold[i] > foretold[j]) == bool(difference.mean() > 0)
    return apart, alike


def ranked(narrow: nn.Module, wide: nn.Module, kept: list[str]) -> dict[str, Any]:
    """Both rankings of one model; ``kept`` are layers that are in FP32 from the start."""
    start = in_fp32(narrow, wide, kept, "lm_head")
    found = mpdiag.mismatch(wide, start, {"input_ids": rows(-1)}, budget=0.5)
    tokens = rows(-2, MEASURED)
    layers = [layer for layer in found.ranking if layer.name not in kept]
    base = squares(start, wide, tokens)
    gains = torch.stack(
        [
            base - squares(in_fp32(narrow, wide, [*kept, x.name], "lm_head"), wide, tokens)
            for x in layers
        ]
    )
    measured = gains.mean(1)
    foretold = [float(x.removable or 0.0) for x in layers]
    apart, alike = same_order(foretold, gains)
    best = sorted(range(len(layers)), key=lambda i: -float(measured[i]))[:3]
    return {
        "layers": len(layers),
        "mean": found.distance.mean,
        "spearman": spearman(foretold, measured.tolist()),
        "pairs told apart": apart,
        "same order": round(alike / max(1, apart), 3),
        "top 3 foretold": [(x.name, round(float(x.removable or 0), 4)) for x in layers[:3]],
        "top 3 measured": [
            (layers[i].name, round(float(measured[i] / base.mean()), 4)) for i in best
        ],
        "keep": found.keep,
        "kept": found.kept and found.kept.mean,
        "fp16": found.fp16 and found.fp16.mean,
    }


def main() -> None:
    """Print a line of JSON for each model and each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        wide = trained(small(name), options.steps)
        narrow = copy.deepcopy(wide).bfloat16()
        for kept in ([], ["lm_head"]):
            print(json.dumps({"model": name, "kept": kept} | ranked(narrow, wide, kept)))


if __name__ == "__main__":
    main()
