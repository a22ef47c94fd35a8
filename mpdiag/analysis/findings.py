"""Findings: what the analysis found, each with its evidence and its fix."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast, get_args

from mpdiag.display.explanations import command_for

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem or observation.

    Attributes:
        severity: ``error``: training in the target format is expected to fail without the fix;
            ``warning``: it may; ``info``: good to know.
        code: A stable name, for scripts.
        message: What was found; after a semicolon, what else is known of it.
        evidence: The numbers behind it.
        fix: What to do, in one sentence.
    """

    severity: Severity
    code: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""

    @property
    def headline(self) -> str:
        """The message's first clause: what was found, in at most 100 characters and what it names."""
        return self.message.partition("; ")[0]

    def to_json(self) -> dict[str, Any]:
        """An entry of ``findings`` in JSON documents."""
        explained = command_for(self.code)
        return {**vars(self), "evidence": dict(self.evidence), "explained": explained}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Finding":
        """A finding from a stored document; what is missing is empty, an unknown severity a note."""
        known = entry.get("severity") in get_args(Severity)
        return cls(
            severity=cast("Severity", entry["severity"]) if known else "info",
            code=str(entry.get("code") or ""),
            message=str(entry.get("message") or ""),
            evidence=dict(entry.get("evidence") or {}),
            fix=str(entry.get("fix") or ""),
        )


info = partial(Finding, severity="info")
warning = partial(Finding, severity="warning")
error = partial(Finding, severity="error")
"""Findings of each severity."""


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes; otherwise in the order given."""
    order = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(findings, key=lambda f: order[f.severity]))
