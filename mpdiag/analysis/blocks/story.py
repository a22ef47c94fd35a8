"""One module in a block recipe, as ``mpdiag why RUN LAYER --target`` tells it."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import Any

from mpdiag.analysis.analyzer import Analysis, analyze
from mpdiag.analysis.blocks.choice import BlockAnalysis
from mpdiag.display.wording import some_of
from mpdiag.errors import LayerNotFound

SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class BlockStory:
    """A module in a block recipe.

    Attributes:
        module: Its name.
        analysis: The run's analysis for the recipe.
        blocks: That of its operands.
    """

    module: str
    analysis: Analysis
    blocks: BlockAnalysis

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag why RUN LAYER --target NAME --json``."""
        plan = self.analysis.plan.to_json()["blocks"]
        return {
            "schema_version": SCHEMA_VERSION,
            "layer": self.module,
            "target": self.blocks.recipe.target,
            "formats": plan["formats"],
            "choices": [layer for layer in plan["layers"] if layer["module"] == self.module],
            "blocks": [row for row in self.blocks.to_json() if row["module"] == self.module],
            "worst": self.blocks.worst()[:6],
        }


def explain_blocks(run: str | os.PathLike[str], layer: str | None, target: str) -> BlockStory:
    """Collect what is known of a module in a block recipe.

    Args:
        run: The run folder.
        layer: The module; None for the one that raises the loss most.
        target: The recipe.

    Raises:
        LayerNotFound: If no operand of such a module was recorded; the message suggests names.
        InputError: If the run cannot be read, or has no operands.
    """
    analysis = analyze(run, target)
    found = analysis.blocks
    assert found is not None
    owners = {one.operand.parameter: one.operand.module or "" for one in found.operands}
    owners |= {choice.name: choice.module for choice in found.plan.layers}
    names = list(dict.fromkeys(owners.values()))
    if layer is None:
        layer = next(iter(found.worst()), None)
    if layer is None:
        raise LayerNotFound("no layer's effect on the loss is known: name one")
    layer = layer if layer in names else owners.get(layer, layer)
    if layer not in names:
        near = difflib.get_close_matches(layer, names, n=3, cutoff=0.3)
        known = some_of([name for name in names if name], shown=5)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {known}"
        raise LayerNotFound(f"no operand of a layer {layer!r} was recorded: {hint}")
    return BlockStory(layer, analysis, found)
