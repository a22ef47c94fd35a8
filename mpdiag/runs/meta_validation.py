"""Whether ``meta.json`` and the table of modules hold what a recorder writes there.

They are checked once, when a run is opened, so that nothing that shows or uses them has to check.
By hand and without numpy: listing runs stays quick, and a machine that records, analyzes and trains
needs no library for it. What other documents hold is checked by ``documents.converted``.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

COUNT = "count"
LARGEST = 1 << 53
_SEEN = tuple(
    f"{what}{seen}"
    for what in ("parameters", "gradients", "modules", "activation_gradients")
    for seen in ("", "_seen")
)
_HALVES = ("half_parameters", "half_parameter_count_total", "half_modules", "widened_parameters")
_META: dict[str, Any] = {
    **dict.fromkeys(("mpdiag", "state", "created", "updated", "script", "verdict"), str),
    **dict.fromkeys(("steps_seen", "steps_recorded", "rows", "rank", "world_size"), COUNT),
    "argv": [str],
    "launcher": [str],
    "device": {"type": str, "name": str, "compute_capability": str},
    "versions": {},
    "seeds": {"torch": int},
    "model": {"type": str, "parameters": COUNT},
    "optimizers": [
        {"type": str, **dict.fromkeys(("steps_taken", "steps_recorded", "evaluations"), COUNT)}
    ],
    "cadence": {
        "every": COUNT,
        "max_steps": COUNT,
        "include": str,
        "exclude": str,
        "dense": {"until": COUNT, "reason": str},
    },
    "operations": {"steps": [COUNT], "reason": str, "fix": str},
    "coverage": {
        "not_recorded": [{}],
        "seen": dict.fromkeys(_SEEN, COUNT),
        "compiled": dict.fromkeys(
            (
                *("modules", "parameters_hidden", "flops_hidden", "flops", "inductor"),
                *("gradients_due", "gradients"),
            ),
            COUNT,
        ),
    },
    "precision": {
        "autocast": [str],
        "autocast_off": bool,
        "switched_off": [str],
        "not_switched_off": [str],
        **dict.fromkeys(_HALVES, COUNT),
    },
    "answers": [{"question": str, "answer": str, "reason": str}],
    "failures": [{"step": COUNT, "where": str, "error": str}],
    "training": {},
    "margins": {},
}


def refuse_odd_meta(meta: Mapping[str, Any]) -> None:
    """Check the types of the fields of ``meta.json``; any of them may be missing.

    Raises:
        ValueError: Naming the first field of another type.
    """
    for name, kind in _META.items():
        if not _fits(meta.get(name), kind):
            raise ValueError(f"its field {name!r} holds a value that mpdiag never writes there")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a kind: a type, ``COUNT``, [the kind of each item], {of fields}."""
    if value is None:
        return True
    if kind == COUNT:
        return type(value) is int and 0 <= value <= LARGEST
    if isinstance(kind, list):
        if not isinstance(value, list) or None in value:
            return False
        return all(_fits(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_fits(value.get(k), v) for k, v in kind.items())
    return type(value) is kind


def refuse_odd_modules(rows: Iterable[Mapping[str, Any]]) -> None:
    """Check rows of the table of modules: names, kinds, sizes, and JSON where JSON stands.

    Raises:
        ValueError: Naming the first column that is not sound.
    """
    for row in rows:
        wrong = next((name for name in ("name", "what", "type") if row[name] is None), None)
        sizes = [row["numel"] or 0, *(row["shape"] or ())]
        if any(size is None or not 0 <= size <= LARGEST for size in sizes):
            wrong = "shape"
        for name in ("input_shapes", "output_shapes", "settings"):
            if not _is_json(row[name]):
                wrong = name
        if wrong is not None:
            raise ValueError(f"the column {wrong!r} holds a value that mpdiag never writes there")


def _is_json(text: str | None) -> bool:
    try:
        return text is None or json.loads(text) is not False
    except (ValueError, RecursionError):
        return False
