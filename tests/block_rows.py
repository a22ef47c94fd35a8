"""Recorded operands of matrix products, made from tensors by the recorder's own arithmetic."""

from torch import Tensor

from mpdiag.numerics.block_recipes import OPERANDS
from mpdiag.recording.operand_matrices import Matrix, measure
from mpdiag.runs.block_operands import BlockOperand


def operand_row(
    values: Tensor,
    gemm: str = "fprop",
    operand: str = "input",
    module: str = "fc",
    *,
    step: int = 0,
    across: int = 1,
    **fields,
) -> BlockOperand:
    """A row of one operand.

    Args:
        values: (lines, length).
        gemm, operand, module, step, fields: What the row says of it.
        across: Lines of the product's other operand, for its FLOPs.
    """
    matrix = Matrix(values, (), (0,), (1,))
    counted = measure(matrix, operand, gemm, f"{module} {gemm} {operand}", step)
    lines, length = values.shape
    own = {
        "rank": 0,
        "steps": (step,),
        "module": module,
        "product": "linear",
        "call": 0,
        "gemm": gemm,
        "operand": operand,
        "parameter": f"{module}.weight",
        "expert": None,
        "dtype": "float32",
        "lines": lines,
        "length": length,
        "flops": 2 * lines * length * across,
    }
    return BlockOperand(**{**own, **fields}, **counted.fields())


def layer_rows(
    x: Tensor, weight: Tensor, gradient: Tensor, module: str = "fc", **fields
) -> list[BlockOperand]:
    """The six rows of a linear layer: x (tokens, features), weight (outputs, features) and the gradient
    of its output."""
    matrices = {
        ("fprop", "input"): x,
        ("fprop", "weight"): weight,
        ("dgrad", "grad_output"): gradient,
        ("dgrad", "weight"): weight.T.contiguous(),
        ("wgrad", "grad_output"): gradient.T.contiguous(),
        ("wgrad", "input"): x.T.contiguous(),
    }
    return [
        operand_row(values, gemm, name, module, across=_other(matrices, gemm, name), **fields)
        for (gemm, name), values in matrices.items()
    ]


def _other(matrices: dict[tuple[str, str], Tensor], gemm: str, name: str) -> int:
    (other,) = (n for n in OPERANDS[gemm] if n != name)
    return len(matrices[gemm, other])
