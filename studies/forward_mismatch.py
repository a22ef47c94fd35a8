"""Does the ranking of ``mpdiag.mismatch`` agree with a measured ablation, one layer in FP32 at a time?

::

    python studies/forward_mismatch.py llama gpt2 mixtral gemma

Each model is small, trained for some steps and cast to BF16. The ablation casts one layer of the BF16
model to FP32 by hand and measures the mean square of the log-probabilities' differences again. It is
done twice: from the whole BF16 model, and from one whose head is in FP32, where the head hides nothing.
Other layers round differently then, so the ablation itself has an error. It is repeated with
the weights of later steps, which round otherwise. Two layers are told apart where their gains differ by
more than three standard errors over these repetitions; ``same order`` is the share of the pairs that the
ranking orders alike. ``llama`` and ``gpt2`` were used while the measurement was built, the others not.
"""

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import mpdiag

SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 160, "num_hidden_layers": 4}
ROWS, LENGTH, REPETITIONS = 48, 48, 4


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


def trained(model: nn.Module, steps: int) -> Iterator[nn.Module]:
    """Copies of the model after some steps of AdamW in FP32, and after each of a few more."""
    adam = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(steps + REPETITIONS):
        if step >= steps:
            yield copy.deepcopy(model).eval()
        tokens = rows(step, 8)
        adam.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        adam.step()


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


def same_order(foretold: Tensor, measured: Tensor) -> tuple[int, int]:
    """Pairs that the ablation tells apart, and how many of them the ranking orders alike.

    Both are given by repetition and layer.
    """
    apart = alike = 0
    for i in range(measured.shape[1]):
        for j in range(i):
            difference = measured[:, i] - measured[:, j]
            error = float(difference.std()) / len(difference) ** 0.5
            if abs(float(difference.mean())) > 3 * error:
                apart += 1
                more = bool((foretold[:, i] - foretold[:, j]).mean() > 0)
                alike += more == bool(difference.mean() > 0)
    return apart, alike


def ranked(wide: nn.Module, kept: list[str]) -> tuple[list[str], list[float], list[float]]:
    """Layers, what FP32 in each is said to take away, and what it does.

    Args:
        wide: The model in FP32.
        kept: Layers that are in FP32 from the start.
    """
    narrow = copy.deepcopy(wide).bfloat16()
    start, tokens = in_fp32(narrow, wide, kept, "lm_head"), rows(-2)
    found = mpdiag.mismatch(wide, start, {"input_ids": rows(-1)})
    layers = [x for x in found.layers if x.removable is not None and x.name not in kept]
    base = float(squares(start, wide, tokens).mean())
    left = [
        float(squares(in_fp32(narrow, wide, [*kept, x.name], "lm_head"), wide, tokens).mean())
        for x in layers
    ]
    names, foretold = [x.name for x in layers], [float(x.removable or 0.0) for x in layers]
    return names, foretold, [1 - x / base for x in left]


def summary(model: str, kept: list[str], found: Sequence[Any]) -> dict[str, Any]:
    """What a line says of all repetitions."""
    names = found[0][0]
    foretold, measured = (torch.tensor([one[i] for one in found]) for i in (1, 2))
    apart, alike = same_order(foretold, measured)
    means = foretold.mean(0).tolist(), measured.mean(0).tolist()
    top = [
        [(names[i], round(x[i], 3)) for i in sorted(range(len(x)), key=lambda i: -x[i])[:3]]
        for x in means
    ]
    return {
        "model": model,
        "kept": kept,
        "layers": len(names),
        "pairs told apart": apart,
        "same order": round(alike / max(1, apart), 3),
        "spearman": round(spearman(*means), 3),
        "top 3 foretold": top[0],
        "top 3 measured": top[1],
    }


def main() -> None:
    """Print a line of JSON for each model and each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        weights = list(trained(small(name), options.steps))
        for kept in ([], ["lm_head"]):
            line = summary(name, kept, [ranked(wide, kept) for wide in weights])
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
