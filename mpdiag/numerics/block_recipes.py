"""Recipes of training in block formats: what quantises each operand of a layer's three matrix products.

``BLOCK_RECIPES`` has them by the name that ``mpdiag analyze --target`` takes.

Sources: TransformerEngine 2.20, ``common/recipe/__init__.py``; torchao 0.18, ``float8/config.py``,
``prototype/moe_training`` and ``prototype/blockwise_fp8_training``; arXiv 2509.25149, section 4 (NVFP4:
16 × 16 weights, stochastic rounding of output gradients, rotation of wgrad's operands).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpdiag.numerics.block_formats import Rounding, block_format
from mpdiag.numerics.formats import FORMATS

PAR = {
    ("fp8_tensor", ""): (31.56, 28.52),
    ("fp8_e5m2", ""): (25.57, 22.53),
    ("fp8_row", ""): (31.58, 28.55),  # of long rows
    ("fp8_1x128", ""): (31.80, 28.78),
    ("fp8_128x128", ""): (31.55, 28.53),
    ("mxfp8_e4m3", ""): (31.51, 28.50),
    ("mxfp6_e3m2", ""): (25.55, 22.50),
    ("mxfp4", ""): (18.75, 15.66),
    ("nvfp4", ""): (20.43, 17.25),
    ("nvfp4", "16x16"): (19.06, 15.97),
}
"""SQNR of a format and shape of blocks on Gaussian values in dB, to nearest and stochastically.

A rotation leaves Gaussian values Gaussian, and this alike. tests/numerics/test_block_recipes.py
measures them again.
"""
OPERANDS: Mapping[str, tuple[str, str]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
"""The matrix products of a layer, and what each multiplies."""
WIDE = "bf16"
"""What a product computes in that a recipe leaves alone."""
EMULATED = "is emulated here, in FP32: a step takes 1.5 to 15 times as long as in BF16"
"""Of a training in a block format on a CPU, measured on small models."""
BUDGET = 0.15
"""Share of the matrix FLOPs that may stay in BF16, as rules of thumb spend it (torchtitan, NVIDIA)."""


@dataclass(frozen=True)
class OperandFormat:
    """How an operand is quantised.

    Attributes:
        format: A name of ``block_formats.BLOCK_FORMATS``.
        block: Another shape of blocks, such as ``16x16``; "" for the format's own.
        rounding: Of values.
        rotated: Whether 16 neighbours along a line are rotated first (Hadamard).
    """

    format: str
    block: str = ""
    rounding: Rounding = "nearest"
    rotated: bool = False

    @classmethod
    def read(cls, words: str) -> OperandFormat:
        """The inverse of ``str``.

        Raises:
            ValueError: If there is no such format, or a word is not known.
        """
        name, *rest = words.split()
        rounding: Rounding = "stochastic" if "stochastic" in rest else "nearest"
        block = " ".join(word for word in rest if word not in ("stochastic", "rotated"))
        block_format(name, block=block or None)  # raises for what is not known
        return cls(name, block, rounding, "rotated" in rest)

    @property
    def par_db(self) -> float:
        """Its SQNR on Gaussian values."""
        return PAR[self.format, self.block][self.rounding != "nearest"]

    def __str__(self) -> str:
        words = (
            self.block,
            self.rounding.replace("nearest", ""),
            "rotated" if self.rotated else "",
        )
        return " ".join(filter(None, (self.format, *words)))


@dataclass(frozen=True)
class BlockRecipe:
    """A recipe.

    Attributes:
        target: Its name on the command line, such as ``"nvfp4"``.
        label: The name printed for people.
        input, weight, grad_output: How the operands are quantised.
        multiple: What every size of a product must be a multiple of in the engines that have it.
        rotates_wgrad: Whether both operands of wgrad are rotated.
        engines: The exports that hold it.
    """

    target: str
    label: str
    input: OperandFormat
    weight: OperandFormat
    grad_output: OperandFormat
    multiple: int
    rotates_wgrad: bool = False
    engines: tuple[str, ...] = ()

    def operand(self, gemm: str, operand: str) -> OperandFormat:
        """How an operand of a product is quantised.

        Raises:
            KeyError: If the product has no such operand.
        """
        if operand not in OPERANDS[gemm]:
            raise KeyError(operand)
        fmt: OperandFormat = getattr(self, operand)
        if gemm != "wgrad" or not self.rotates_wgrad:
            return fmt
        return OperandFormat(fmt.format, fmt.block, fmt.rounding, rotated=True)

    def formats(self) -> dict[str, dict[str, str]]:
        """Every operand's format in words, by product."""
        return {
            gemm: {name: str(self.operand(gemm, name)) for name in names}
            for gemm, names in OPERANDS.items()
        }


def _same(name: str) -> tuple[OperandFormat, OperandFormat, OperandFormat]:
    return OperandFormat(name), OperandFormat(name), OperandFormat(name)


def _four_bits(name: str, weight_block: str) -> tuple[OperandFormat, OperandFormat, OperandFormat]:
    gradient = OperandFormat(name, rounding="stochastic")
    return OperandFormat(name), OperandFormat(name, weight_block), gradient


_TENSOR = OperandFormat("fp8_tensor")
_1X128 = OperandFormat("fp8_1x128")
_ALL = ("torchao", "torchtitan", "transformer_engine")

BLOCK_RECIPES: dict[str, BlockRecipe] = {
    recipe.target: recipe
    for recipe in (
        BlockRecipe("mxfp8", "MXFP8", *_same("mxfp8_e4m3"), 32, engines=(*_ALL, "modelopt")),
        BlockRecipe("mxfp6", "MXFP6", *_same("mxfp6_e3m2"), 32, engines=("modelopt",)),
        BlockRecipe(
            "mxfp4",
            "MXFP4",
            *_four_bits("mxfp4", ""),
            32,
            rotates_wgrad=True,
            engines=("modelopt",),
        ),
        BlockRecipe(
            "nvfp4",
            "NVFP4",
            *_four_bits("nvfp4", "16x16"),
            128,  # torchao's kernels, of each tensor-parallel part
            rotates_wgrad=True,
            engines=(*_ALL, "modelopt"),
        ),
        BlockRecipe(
            "fp8-block",
            "FP8 by blocks",
            _1X128,
            OperandFormat("fp8_128x128"),
            _1X128,
            128,
            engines=("transformer_engine", "torchao"),  # torchao refuses layers with a bias
        ),
        BlockRecipe(
            "fp8-row", "FP8 by rows", *_same("fp8_row"), 16, engines=("torchao", "torchtitan")
        ),
        BlockRecipe(
            "fp8-tensor",
            "FP8 by tensors",
            _TENSOR,
            _TENSOR,
            OperandFormat("fp8_e5m2"),
            16,
            engines=("torchao", "transformer_engine", "modelopt"),
        ),
    )
}


def format_label(name: str) -> str:
    """The label of a format or of a recipe: ``"FP8 by rows"`` for ``"fp8-row"``; else the name."""
    known = FORMATS.get(name) or BLOCK_RECIPES.get(name)
    return known.label if known else name
