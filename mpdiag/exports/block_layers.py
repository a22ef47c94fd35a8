"""The layers of a block recipe in the words of libraries: exact names, or parts of names to match.

torchtitan's converters compare by substring: ``fqns`` of MXFP8 and NVFP4 include what contains one of
them (and everything if there are none), ``filter_fqns`` of Float8 exclude it. So ``layers.1.`` is
written with its dot, for ``layers.1`` is a part of ``layers.11``.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mpdiag.numerics.block_recipes import OPERANDS
from mpdiag.plan import BlockPlan


@dataclass(frozen=True)
class Substrings:
    """Parts of names that select layers by being contained in their names.

    Attributes:
        patterns: The parts.
        wrong: Layers that they treat otherwise than asked for, because one name contains the other.
    """

    patterns: tuple[str, ...]
    wrong: tuple[str, ...] = ()


def include(chosen: Collection[str], others: Collection[str]) -> Substrings:
    """Parts of names that are contained in the chosen names and in no other.

    A name that is contained in one of the others' cannot be selected: it is among ``wrong``.
    """
    patterns: list[str] = []
    wrong = [name for name in chosen if _meets(name, others)]
    for name in chosen:
        if name in wrong or any(part in name for part in patterns):
            continue
        above = [name[: dot.end()] for dot in re.finditer(r"\.", name)]
        patterns.append(next((part for part in above if not _meets(part, others)), name))
    return Substrings(tuple(patterns), tuple(wrong))


def exclude(kept: Collection[str], others: Collection[str]) -> Substrings:
    """Parts of names that are contained in every kept name; others that contain one are ``wrong``."""
    found = include(kept, others)
    patterns = (*found.patterns, *found.wrong)
    wrong = tuple(name for name in others if any(part in name for part in patterns))
    return Substrings(patterns, wrong)


def exactly(names: Iterable[str]) -> str:
    """A pattern for ``re.search`` that finds these names, behind any prefix of model and module."""
    return rf"^(?:model\.|module\.)*(?:{'|'.join(re.escape(name) for name in names)})$"


def _meets(part: str, names: Iterable[str]) -> bool:
    return any(part in name for name in names)


@dataclass(frozen=True)
class BlockLayers:
    """The layers of a plan's block recipe, by what an engine does with them.

    Attributes:
        whole: Linear layers with all three products in the block format, by name.
        wide_wgrad: Those with wgrad alone in BF16.
        experts: Parameters of grouped products, by name.
        kept: Linear layers that stay in BF16.
        others: Layers that the plan splits in a way that no library holds, or has of a kind that no
            library quantises: they stay in BF16.
    """

    whole: tuple[str, ...]
    wide_wgrad: tuple[str, ...]
    experts: tuple[str, ...]
    kept: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def quantised(self) -> tuple[str, ...]:
        """Linear layers of which something is quantised."""
        return (*self.whole, *self.wide_wgrad)


def layers_of(blocks: BlockPlan) -> BlockLayers:
    """Sort a plan's layers. A layer with several parameters is told by its parameters' names."""
    found: dict[str, list[str]] = {
        name: [] for name in ("whole", "wide_wgrad", "experts", "kept", "others")
    }
    whole = tuple(OPERANDS)
    places = {
        ("linear", whole): "whole",
        ("linear", whole[:2]): "wide_wgrad",
        ("grouped", whole): "experts",
    }
    for layer in blocks.layers:
        place = places.get((layer.kind, layer.quantised), "others")
        if place != "others" or layer.quantised:
            found[place].append(layer.name)
        if place == "others" and layer.kind == "linear":
            found["kept"].append(layer.module)
    return BlockLayers(**{name: tuple(dict.fromkeys(names)) for name, names in found.items()})
