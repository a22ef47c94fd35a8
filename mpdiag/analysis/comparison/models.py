"""Whether the two sides of a comparison trained the same model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpdiag.display.wording import counted, some_of
from mpdiag.runs.run import Run
from mpdiag.tracing.fingerprint import ModelFingerprint, compare_models


@dataclass(frozen=True)
class KnownModel:
    """What is known of the model of a training.

    Attributes:
        fingerprint: Its parameters' names and shapes; None if they are not known.
        type: The name of its class; "" if not known.
        parameters: How many parameters it has; 0 if not known.
    """

    fingerprint: ModelFingerprint | None = None
    type: str = ""
    parameters: int = 0

    @classmethod
    def of_run(cls, run: Run) -> "KnownModel":
        """What a run knows of its model.

        Raises:
            DamagedRun: If its table of modules cannot be read.
        """
        about = run.meta.get("model") or {}
        return cls(
            run.model_fingerprint(), str(about.get("type") or ""), int(about.get("parameters") or 0)
        )


@dataclass(frozen=True)
class ModelRelation:
    """How the models of two sides are related.

    Attributes:
        different: Whether they are two different models, not one model or two versions of one.
        words: How they differ; "" where nothing shows that they do.
        evidence: The figures behind it.
    """

    different: bool
    words: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


def relate_models(a: KnownModel, b: KnownModel) -> ModelRelation | None:
    """How two models are related; None where too little is known of one of them.

    Without parameters' names on both sides, two models are called different only if both class and
    number of parameters differ: a wrapper changes the one, an edit the other.
    """
    if a.fingerprint is None or b.fingerprint is None:
        known = a.type and b.type and a.parameters and b.parameters
        if not known or a.type == b.type or a.parameters == b.parameters:
            return None
        sides = [f"{m.type} with {counted(m.parameters, 'parameter')}" for m in (a, b)]
        return ModelRelation(
            different=True,
            words=f"{sides[0]} and {sides[1]}",
            evidence={"a": [a.type, a.parameters], "b": [b.type, b.parameters]},
        )
    found = compare_models(a.fingerprint, b.fingerprint)
    alike = len(found.same) - len(found.changed)
    evidence: dict[str, Any] = {"same": alike, "of": found.layers}
    if found.disjoint:
        layers = [some_of(m.fingerprint.layers) for m in (a, b) if m.fingerprint is not None]
        words = (
            f"one with {layers[0]} and one with {layers[1]}; {alike} of {found.layers} layers are "
            "the same"
        )
        return ModelRelation(different=True, words=words, evidence=evidence)
    evidence |= {
        "changed": list(found.changed),
        "only_a": list(found.only_first),
        "only_b": list(found.only_second),
    }
    return ModelRelation(different=False, words=found.changes, evidence=evidence)
