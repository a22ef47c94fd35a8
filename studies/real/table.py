"""The table of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the docs."""
    head = (
        "| script | shape of | steps | recorded = alone | verdict | loss scale "
        "| in FP32 beyond the lists | in FP16 | skipped | metric | FP32 | by the plan | compare |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in rows:
        repository, _, file = row["source"].partition(": ")
        better = "more" if row["higher_is_better"] else "less"
        cells = [
            f"`{row['script']}`",
            f"{repository}: {file}",
            _or_dash(row["steps"]),
            "yes" if row["identical"] else "**no**",
            row["verdict"]["level"] if row["verdict"] else "–",
            _scale(row["scale"]),
            ", ".join(row["stays_fp32"]) or "–",
            _or_dash(row["half_precision_flops"], "{:.0%}"),
            _or_dash(sum(row["skipped"]) if row["skipped"] else None),
            f"{row['metric']}, {better} is better",
            _figures(row["fp32"]),
            _figures(row["by_plan"]),
            f"{row['compare']} (margin {row['margin']:g})" if row["compare"] else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _or_dash(value: Any, form: str = "{}") -> str:
    return "–" if value is None else form.format(value)


def _scale(scale: dict[str, Any] | None) -> str:
    if scale is None:
        return "–"
    if scale["recommended"] is None:
        return "none fits"
    return f"{scale['recommended']:g}, {'needed' if scale['needed'] else 'not needed'}"


def _figures(values: Sequence[float | None]) -> str:
    return " ".join("–" if value is None else f"{value:.4g}" for value in values) or "–"
