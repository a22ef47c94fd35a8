"""The verdict on a block recipe: an expectation, until a training by the plan shows more."""

from collections.abc import Collection

from mpdiag.analysis.blocks.choice import BlockAnalysis
from mpdiag.analysis.verdict.evidence import UNTRIED
from mpdiag.analysis.verdict.judgement import how_ended, outcome
from mpdiag.display.wording import counted, percent
from mpdiag.numerics.block_recipes import OPERANDS
from mpdiag.plan import Verdict
from mpdiag.runs.results import StoredComparison

_DIVERGES = frozenset({"non-finite-gradients", "non-finite-losses", "exploding-gradients"})


def judge_blocks(
    found: BlockAnalysis,
    codes: Collection[str],
    seen: int,
    trained: StoredComparison | None = None,
    likelihood: bool = True,
    probed: bool = False,
) -> Verdict:
    """The verdict.

    Args:
        found: What the recording says.
        codes: Of the analysis's findings.
        seen: The steps of the recorded training.
        trained: What a comparison said of emulated trainings by this very plan; None without one.
        likelihood: Whether the loss is a negative log-likelihood, for which the estimate holds.
        probed: Whether the first steps were trained by it.
    """
    label, plan = found.recipe.label, found.plan
    untrained = f"{UNTRIED} training in {label}", "what rounding errors add up to over the training"
    open_questions = (
        *(untrained if trained is None else ()),
        f"{max(0, seen - len(found.steps))} of {seen} steps",
        *(() if likelihood else ("how far the loss rises (the estimate is for a cross-entropy)",)),
        "speed",
    )
    if _DIVERGES & set(codes):
        text = "This training diverges: fix that before you change the format."
        return Verdict("cannot", text, (), open_questions)
    layers = [layer for layer in plan.layers if layer.kind in ("linear", "grouped", "experts")]
    quantised = [layer for layer in layers if layer.quantised]
    share = sum(plan.evidence[name] or 0.0 for name in ("flops_in_bf16", "flops_not_quantised"))
    if not quantised:
        text = f"No layer can train in {label}."
        return Verdict("cannot", text, (plan.reason,), open_questions)
    evidence = (plan.reason, *found.patterns())
    if trained is not None and trained.verdict == "different":
        text = (
            f"{label} does not work with this plan: {how_ended(trained)}, which differs from FP32."
        )
        return Verdict("cannot", text, evidence, open_questions)
    shown = trained is not None and trained.verdict == "equivalent"
    partly = sum(len(layer.quantised) < len(OPERANDS) for layer in quantised)
    how = "trained" if shown else "should train"
    text = (
        f"{len(quantised)} of {counted(len(layers), 'linear layer')} {how} in {label}"
        f"{f' ({partly} with wgrad in BF16)' if partly else ''}. BF16 keeps {percent(share)} of the "
        f"{'recorded ' if plan.evidence.get('not_recorded') else ''}matrix FLOPs."
    )
    if trained is None:
        text += "" if probed else f" Nothing was trained in {label}."
    elif shown:
        text += f" Shown by emulated training: {how_ended(trained)}, equivalent to FP32."
    else:
        text += f" {outcome(trained)}."
    text += f" ({len(found.steps)} of {seen} steps have operands)"
    return Verdict("shown" if shown else "expected", text, evidence, open_questions)
