"""Applies shape advice to a model, mechanically: each module is made again with the advised sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpdiag.plan import ShapeAdvice

_RENAMED = {"normalized_shape": "normalized_shape"}


def resize(model: nn.Module, advice: Iterable[ShapeAdvice]) -> None:
    """Give a model the advised sizes, and nothing else.

    Raises:
        ValueError: If the advice says two things of one size.
    """
    wanted: dict[str, dict[str, int]] = {}
    for one in advice:
        if one.dimension in ("batch", "sequence"):
            continue
        sizes = wanted.setdefault(one.module, {})
        if sizes.setdefault(one.dimension, one.padded) != one.padded:
            message = (
                f"{one.module}.{one.dimension} should be {sizes[one.dimension]} and {one.padded}"
            )
            raise ValueError(message)
    tied = _tied(model)
    for name, sizes in wanted.items():
        _resize(model, name, sizes)
    for first, *others in tied:
        for other in others:
            _put(model, other, model.get_parameter(first))


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def _put(model: nn.Module, name: str, value: Any) -> None:
    owner, _, leaf = name.rpartition(".")
    place = model.get_submodule(owner)
    if isinstance(place, (nn.ModuleList, nn.Sequential)) and leaf.isdecimal():
        place[int(leaf)] = value
    else:
        setattr(place, leaf, value)


def _resize(model: nn.Module, name: str, sizes: dict[str, int]) -> None:
    module = model.get_submodule(name)
    own = {d: n for d, n in sizes.items() if d.endswith("]")}
    for leaf in {d.partition("[")[0] for d in own}:
        parameter = getattr(module, leaf)
        shape = [own.get(f"{leaf}[{i}]", n) for i, n in enumerate(parameter.shape)]
        setattr(module, leaf, nn.Parameter(0.1 * torch.randn(shape)))
    rest = {d: n for d, n in sizes.items() if d not in own}
    if rest:
        _put(model, name, type(module)(**_settings(module) | rest))


def _settings(module: nn.Module) -> dict[str, Any]:
    """What a module was made with."""
    names = {
        nn.Linear: "in_features out_features",
        nn.Bilinear: "in1_features in2_features out_features",
        nn.Embedding: "num_embeddings embedding_dim padding_idx",
        nn.EmbeddingBag: "num_embeddings embedding_dim mode",
        nn.LayerNorm: "normalized_shape elementwise_affine",
        nn.GroupNorm: "num_groups num_channels",
        nn.MultiheadAttention: "embed_dim num_heads batch_first",
        nn.RNNBase: "input_size hidden_size num_layers batch_first bidirectional proj_size",
        nn.RNNCellBase: "input_size hidden_size",
    }
    for kind, words in names.items():
        if isinstance(module, kind):
            found = {w: getattr(module, w) for w in words.split()}
            if isinstance(module, (nn.Linear, nn.Bilinear)):
                found["bias"] = module.bias is not None
            if isinstance(module, nn.RNNBase) and not isinstance(module, nn.LSTM):
                del found["proj_size"]
            return found
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return {"num_features": module.num_features, "affine": module.affine}
    words = "in_channels out_channels kernel_size stride padding dilation groups padding_mode"
    found = {w: getattr(module, w) for w in words.split()}
    if "Transpose" in type(module).__name__:
        found["output_padding"] = getattr(module, "output_padding")  # noqa: B009
    return found | {"bias": module.bias is not None}
