"""Precision that was asked for, by a policy of FSDP, and that the training does not have."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from mpdiag.analysis.findings import Finding, info, warning
from mpdiag.display.wording import spoken_parameters
from mpdiag.runs.precision import HALF, LABELS, POLICIES, ParameterPrecision, PrecisionFacts


def policy_findings(
    facts: PrecisionFacts, parameters: Sequence[ParameterPrecision]
) -> Iterator[Finding]:
    """Policies that nothing applies, that autocast overrides, or that have no FP32 weights under them.

    Args:
        facts: What was read of the objects: ``forward`` is what a policy says.
        parameters: The same with what was recorded: ``forward`` is what the products read.
    """
    computed = sorted({LABELS.get(p.forward, p.forward) for p in parameters if p.forward})
    for one in (one for one in facts.observed if one.kind == "policy-not-applied"):
        does = f"; the model computes in {'/'.join(computed)}" if computed else ""
        yield warning(
            code="precision-policy-not-applied",
            message=f"the script makes {' and '.join(one.names)}, but no FSDP wrapper of the "
            f"recorded models has it{does}",
            evidence={"policies": list(one.names)},
            fix="give it to fully_shard or FullyShardedDataParallel, or remove it",
        )
    overridden: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    without: dict[tuple[str, str], list[str]] = defaultdict(list)
    for asked, found in zip(facts.parameters, parameters, strict=True):
        policy = str(asked.set_by)
        if policy.endswith(POLICIES) and asked.forward and found.set_by == "autocast":
            overridden[policy, asked.forward, str(found.forward)].append(asked.name)
        if policy.endswith(POLICIES) and asked.stored in HALF and asked.master is None:
            without[policy, asked.stored].append(asked.name)
    for (policy, says, computes), names in overridden.items():
        yield warning(
            code="precision-policy-not-applied",
            message=f"{policy} says {LABELS[says]}, but autocast computes in {LABELS[computes]} "
            f"with {spoken_parameters(names)}",
            evidence={"policies": [policy], "parameters": names[:20]},
            fix="leave out autocast, or ask for its dtype in the policy",
        )
    for (policy, stored), names in without.items():
        yield info(
            code="precision-policy-without-masters",
            message=f"{policy} has {LABELS[stored]} weights under it, and no FP32 copy of "
            f"{spoken_parameters(names)}",
            evidence={"policies": [policy], "parameters": names[:20]},
            fix="call model.float() before you wrap it; the policy casts its copies",
        )
