"""The verdict on a block recipe: always an expectation, for nothing was trained in it."""

from collections.abc import Collection

from mpdiag.analysis.blocks.choice import BlockAnalysis
from mpdiag.display.wording import counted, percent
from mpdiag.numerics.block_recipes import OPERANDS
from mpdiag.plan import Verdict

_DIVERGES = frozenset({"non-finite-gradients", "non-finite-losses", "exploding-gradients"})


def judge_blocks(found: BlockAnalysis, codes: Collection[str], seen: int) -> Verdict:
    """The verdict.

    Args:
        found: What the recording says.
        codes: Of the analysis's findings.
        seen: The steps of the recorded training.
    """
    label, plan = found.recipe.label, found.plan
    open_questions = (
        f"a training in {label}",
        f"{max(0, seen - len(found.steps))} of {seen} steps",
        "what rounding errors add up to over the training",
        "speed",
    )
    if _DIVERGES & set(codes):
        text = "This training diverges: fix that before you change the format."
        return Verdict("cannot", text, (), open_questions)
    layers = [layer for layer in plan.layers if layer.kind in ("linear", "grouped", "experts")]
    quantised = [layer for layer in layers if layer.quantised]
    share = float(plan.evidence["flops_in_bf16"] or 0) + float(
        plan.evidence["flops_not_quantised"] or 0
    )
    if not quantised:
        text = f"No layer can train in {label}. Nothing was trained in it."
        return Verdict("cannot", text, (plan.reason,), open_questions)
    partly = sum(len(layer.quantised) < len(OPERANDS) for layer in quantised)
    text = (
        f"{len(quantised)} of {counted(len(layers), 'linear layer')} should train in {label}"
        f"{f' ({partly} with wgrad in BF16)' if partly else ''}. BF16 keeps "
        f"{percent(share)} of the matrix FLOPs. Nothing was trained in {label}. "
        f"({len(found.steps)} of {seen} steps have operands)"
    )
    return Verdict("expected", text, (plan.reason, *found.patterns()), open_questions)
