"""``mpdiag.mismatch``: why two forward passes of one model give different log-probabilities.

::

    found = mpdiag.mismatch(trainer, rollout, batch)         # the same weights in FP32 and BF16
    found = mpdiag.mismatch(model, (model, decode), batch)   # decode(model, batch) with a KV cache
    print(found)

To first order, a difference in a tensor changes the log-probabilities by its product with their
gradient. A module *adds* what its outputs change, less what its inputs change and what the modules
inside it add: all modules together add the whole. Random signs for the tokens (Hutchinson's estimate)
give the sum of squares over the tokens from a few backward passes of the first model.

What FP32 would take away is measured apart. Each layer runs again in FP32 on its own inputs, with the
first model's weights, and its output is rounded as the model's own.
"""

import copy
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.mismatch import Distance, LayerMismatch, Mismatch, worth_keeping
from mpdiag.errors import InputError, UsageError
from mpdiag.sensitivity.forward_passes import Call, FollowedPass, Given, Side, in_shapes_of
from mpdiag.tracing.fingerprint import compare_models
from mpdiag.tracing.names import type_name
from mpdiag.training.setup import fingerprint_of

PROBES = 16
BUDGET = 0.1


def mismatch(
    model_a: Given,
    model_b: Given,
    batch: Any,
    *,
    budget: float = BUDGET,
    probes: int = PROBES,
    recording: str | os.PathLike[str] | None = None,
) -> Mismatch:
    """Compare the log-probabilities of two forward passes, and find the layers at fault.

    Both models run in evaluation mode. Nothing in them changes, ``.grad`` included.

    Args:
        model_a: The reference, usually the trainer's model; or a pair of a model and a function of
            model and batch that returns its logits, ``(rows, tokens, vocabulary)``.
        model_b: The other one, with modules of the same names: in another dtype, with another
            attention kernel, or a pair with a function that uses a KV cache, other batches or padding.
        batch: A mapping is given to a model as keywords, a tuple as arguments, all else as one. The
            tokens are its ``labels`` (-100: none), ``input_ids``, or whole numbers of the logits'
            shape; an ``attention_mask`` leaves padding out. Without tokens the reference's most
            probable class is compared.
        budget: Largest share of the parameters to keep in FP32, 0 to 1.
        probes: Backward passes of the reference. A share is off by about 1.4/√(probes · rows).
        recording: A recording of the training, for the loss scale of FP16.

    Raises:
        UsageError: If ``budget`` or ``probes`` makes no sense, or a model returns no logits,
            or logits of another shape or that are not finite.
        InputError: If the recording cannot be read, or is of another model.
    """
    if not 0 <= budget <= 1:
        raise UsageError(f"budget must be a share from 0 to 1, not {budget!r}")
    if probes < 1:
        raise UsageError(f"probes must be 1 or more, not {probes!r}")
    a, b = Side(model_a), Side(model_b)
    plan, held = None if recording is None else analyze(recording).plan, fingerprint_of(a.model)
    if plan and plan.model and held and compare_models(plan.model, held).disjoint:
        raise InputError(f"{recording} records another model: pass a recording of this one")
    scale = None if plan is None else plan.loss_scale.init_scale
    with a.evaluated(), b.evaluated():
        wide = a.layers_in_fp32()
        first = FollowedPass(a, batch, wide, graph=True)
        second = FollowedPass(b, batch, wide)
        tokens = _Tokens(batch, first.logits.detach())
        distance = tokens.distance(first.logits.detach(), second.logits)
        layers = tuple(_layers(a, first, second, tokens, probes))
        keep = worth_keeping(layers, budget)
        kept = None
        if keep:
            passes = (FollowedPass(s, batch, wide, keep=keep, head=first.head) for s in (a, b))
            kept = tokens.distance(*(one.logits for one in passes))
        fp16, reason = _in_fp16(a, b, batch, tokens)
    found = tokens.count, distance, layers, keep, budget, kept, fp16, reason, scale
    ours, theirs = (dict(s.model.named_parameters(remove_duplicate=False)) for s in (a, b))
    unequal = (n for n in {**ours, **theirs} if not _rounded(ours.get(n), theirs.get(n)))
    return Mismatch(*found, tuple(unequal))


def _rounded(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether one is the other, rounded once to the coarser dtype of both."""
    if x is None or y is None or x.shape != y.shape:
        return False
    if not (x.is_floating_point() and y.is_floating_point()):
        return False
    coarse = max(torch.finfo(x.dtype), torch.finfo(y.dtype), key=lambda one: one.eps)
    x, y = x.detach().float(), y.detach().to(x.device).float()
    return bool(((x - y).abs() <= coarse.eps * (x.abs() + coarse.tiny)).all())


class _Tokens:
    """Which log-probabilities are compared."""

    def __init__(self, batch: Any, logits: Tensor) -> None:
        given = batch if isinstance(batch, Mapping) else {}
        shape = logits.shape[:-1]
        whole = [
            t
            for t in (given.get("labels"), given.get("input_ids"), *tree_leaves(batch))
            if isinstance(t, Tensor) and t.shape == shape and not t.is_floating_point()
        ]
        tokens = whole[0].long() if whole else logits.argmax(-1)
        mask = given.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != shape:
            mask = torch.ones_like(tokens)
        real = (tokens >= 0) & mask.bool()
        self._shifted = bool(whole) and logits.dim() > 2  # the logits before a token foretell it
        if self._shifted:
            tokens, real = tokens[..., 1:], real[..., 1:] & mask[..., :-1].bool()
        self._tokens, self._real = tokens[real][:, None], real
        self.count = len(self._tokens)
        if not self.count:
            raise UsageError("the batch has no token to compare: check labels and attention_mask")

    def of_classes(self, logits: Tensor) -> Tensor:
        """Log-probabilities of the whole vocabulary at each token, in FP64."""
        logits = logits[..., :-1, :] if self._shifted else logits
        return torch.log_softmax(logits.to(self._real.device)[self._real].double(), -1)

    def of_tokens(self, classes: Tensor) -> Tensor:
        """Log-probabilities of the tokens, out of those of the vocabulary."""
        return classes.gather(-1, self._tokens)[:, 0]

    def distance(self, a: Tensor, b: Tensor) -> Distance:
        """Of two passes, by their logits.

        Raises:
            UsageError: If their shapes differ, or they are not finite.
        """
        if a.shape != b.shape:
            raise UsageError(
                f"the models' logits have shapes {list(a.shape)} and {list(b.shape)}: give a pair "
                "(model, function) that returns those of the batch"
            )
        if not (a.isfinite().all() and b.isfinite().all()):
            raise UsageError("logits are not finite: mpdiag.find_nonfinite names the operation")
        all_a, all_b = self.of_classes(a), self.of_classes(b)
        of_a, of_b = self.of_tokens(all_a), self.of_tokens(all_b)
        moved, chance = (of_b - of_a).abs(), (of_b.exp() - of_a.exp()).abs()
        kl = (all_a.exp() * (all_a - all_b)).sum(-1).mean()
        values = moved.mean(), moved.max(), kl, chance.mean(), chance.max()
        return Distance(*map(float, values))


# -- the layers ----------------------------------------------------------------------------------

_Key = tuple[int, str]
"""A call by its ``id``, and what of it."""
WHAT = ("inputs", "outputs", "errors", "rounding")
_Gaps = Mapping[_Key, list[tuple[Tensor, Tensor]]]
"""Tensors of the first pass that gradients reach, with what the second has more, in FP64."""


def _layers(
    a: Side, first: FollowedPass, second: FollowedPass, tokens: _Tokens, probes: int
) -> Iterator[LayerMismatch]:
    tried = tokens.of_tokens(tokens.of_classes(first.logits))
    if not tried.requires_grad:
        raise UsageError("the first model runs without gradients: remove torch.no_grad from it")
    result = 0, "outputs"
    gaps = {result: _gap([first.logits], [second.logits]), **dict(_gaps(first, second))}
    changes = _changes(gaps, tried, probes, len(first.logits))

    def passed(call: Call) -> Tensor:
        """What a call adds with all inside it. One that cannot be compared counts for its caller."""
        out, into = ((id(call), what) for what in ("outputs", "inputs"))
        if out in changes and into in changes:
            return _less(changes[out], changes[into])
        return _sum(map(passed, call.inside))

    whole = float(changes[result].square().sum()) or 1.0  # by the same random signs as the shares
    for name, calls in first.calls.items():
        module = a.model.get_submodule(name)
        own = _sum(_less(passed(call), _sum(map(passed, call.inside))) for call in calls)
        found = [pair for call in calls for pair in gaps.get((id(call), "outputs"), ())]
        gap, size = (
            math.sqrt(sum(float(pair[i].detach().double().square().sum()) for pair in found))
            for i in (1, 0)
        )
        errors, rounding = (
            [changes[key] for call in calls if (key := (id(call), what)) in changes]
            for what in WHAT[2:]
        )
        left = _sum(errors).square().sum() - _sum(rounding).square().sum()
        yield LayerMismatch(
            name=name,
            kind=type_name(module),
            numel=sum(p.numel() for p in module.parameters(recurse=False)),
            difference=gap / size if size else None,
            added=float(own.square().sum()) / whole,
            removable=float(left) / whole if errors else None,
        )


def _gaps(
    first: FollowedPass, second: FollowedPass
) -> Iterator[tuple[_Key, list[tuple[Tensor, Tensor]]]]:
    for name, calls in first.calls.items():
        others = second.calls.get(name, [])
        for what in WHAT:
            ours, theirs = (
                [_part(c, what, name == first.head) for c in cs] for cs in (calls, others)
            )
            for call, mine, same in zip(calls, ours, in_shapes_of(ours, theirs), strict=True):
                if same is not None and (mine or what == "inputs"):
                    reached = call.inputs if what == "inputs" else call.outputs
                    yield (id(call), what), _gap(reached, same, mine)


def _gap(
    reached: list[Tensor], theirs: list[Tensor], ours: list[Tensor] | None = None
) -> list[tuple[Tensor, Tensor]]:
    pairs = zip(theirs, reached if ours is None else ours, strict=True)
    more = [t.to(o.device).double() - o.detach().double() for t, o in pairs]
    return list(zip(reached, more, strict=True))


def _part(call: Call, what: str, head: bool) -> list[Tensor]:
    """Tensors of a call; ``errors`` and ``rounding`` are empty where it did not run in FP32.

    ``errors`` is what the layer's own arithmetic changes, ``rounding`` what its outputs lose when its
    FP32 results are rounded as they are; the head's are not.
    """
    if what in WHAT[:2]:
        found: list[Tensor] = getattr(call, what)
        return found
    pairs = zip(call.outputs, call.wide, strict=False)
    if what == "errors":
        return [own.detach().double() - wide.double() for own, wide in pairs]
    return [(wide if head else wide.to(own.dtype)).double() - wide.double() for own, wide in pairs]


def _changes(gaps: _Gaps, tried: Tensor, probes: int, rows: int) -> dict[_Key, Tensor]:
    """What each difference changes in sums of the log-probabilities with random signs.

    Returns:
        Sums of shape ``(probes, rows)``, or ``(probes, 1)`` where a tensor has no batch in front.
    """
    held = [t for pairs in gaps.values() for t, _ in pairs if t.requires_grad]
    signs = torch.Generator().manual_seed(0)
    found: dict[_Key, list[Tensor]] = {key: [] for key in gaps}
    for _ in range(probes):
        drawn = torch.randint(0, 2, tried.shape, generator=signs, device="cpu").to(tried) * 2 - 1
        gradients = iter(
            torch.autograd.grad(tried, held, drawn, retain_graph=True, allow_unused=True)
        )
        for key, pairs in gaps.items():
            parts = [_moved(gap, next(gradients), rows) for t, gap in pairs if t.requires_grad]
            found[key].append(_sum(parts))
    return {key: torch.stack(sums) for key, sums in found.items()}


def _moved(gap: Tensor, gradient: Tensor | None, rows: int) -> Tensor:
    if gradient is None:
        return torch.zeros(1, dtype=torch.float64, device="cpu")
    product = (gap * gradient.double()).cpu()
    return product.flatten(1).sum(1) if gap.dim() > 1 and len(gap) == rows else product.sum()[None]


def _sum(parts: Iterable[Tensor]) -> Tensor:
    total = torch.zeros(1, dtype=torch.float64, device="cpu")
    for part in parts:
        total = _less(total, -part)
    return total


def _less(a: Tensor, b: Tensor) -> Tensor:
    """A difference, over all rows together where these are not apart in both."""
    if a.shape[-1] != b.shape[-1]:
        a, b = (x.sum(-1, keepdim=True) for x in (a, b))
    return a - b


# -- what helps ----------------------------------------------------------------------------------


def _in_fp16(a: Side, b: Side, batch: Any, tokens: _Tokens) -> tuple[Distance | None, str]:
    """The distance with FP16 copies of the models that are in BF16, of the first one's weights."""
    if not _in_bf16(b):
        return None, "the second model holds no BF16 weights"
    logits = []
    for side in (a, b):
        model = side.model
        if _in_bf16(side):
            model = copy.deepcopy(model).half()
            model.load_state_dict(a.model.state_dict(), strict=False)
        try:
            with torch.no_grad():
                logits.append(Side((model, side.forward)).logits(batch))
        except UsageError as error:
            return None, f"in FP16 {error}"
    if not all(one.isfinite().all() for one in logits):
        return None, "the logits overflow in FP16"
    return tokens.distance(*logits), ""


def _in_bf16(side: Side) -> bool:
    return any(p.dtype == torch.bfloat16 for p in side.model.parameters())
