"""Recipes of block formats: their operands, and the SQNR that Gaussian values have in them."""

import pytest
import torch
from block_measure import measure_error

from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import BLOCK_FORMATS, block_format
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, OPERANDS, PAR


@pytest.mark.parametrize(("name", "block"), PAR)
def test_par_is_the_sqnr_of_gaussian_values(name, block):
    x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(5))
    for rounding, par in zip(("nearest", "stochastic"), PAR[name, block], strict=True):
        fmt = block_format(name, block=block or None, rounding=rounding)
        generator = None if rounding == "nearest" else CounterGenerator(0)
        assert measure_error(x, fmt, generator=generator).sqnr_db == pytest.approx(par, abs=0.06)


def test_every_operand_has_a_format_with_a_par():
    for recipe in BLOCK_RECIPES.values():
        for gemm, names in OPERANDS.items():
            for name in names:
                fmt = recipe.operand(gemm, name)
                assert fmt.format in BLOCK_FORMATS
                assert fmt.par_db > 10
                assert fmt.rotated == (gemm == "wgrad" and recipe.rotates_wgrad)
    with pytest.raises(KeyError):
        BLOCK_RECIPES["mxfp8"].operand("fprop", "grad_output")


def test_the_formats_of_nvfp4_are_those_of_its_recipe():
    assert BLOCK_RECIPES["nvfp4"].formats() == {
        "fprop": {"input": "nvfp4", "weight": "nvfp4 16x16"},
        "dgrad": {"grad_output": "nvfp4 stochastic", "weight": "nvfp4 16x16"},
        "wgrad": {"grad_output": "nvfp4 stochastic rotated", "input": "nvfp4 rotated"},
    }
