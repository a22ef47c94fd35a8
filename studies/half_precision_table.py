"""Which ATen operations refuse half precision on CUDA, read from torch's own tests of its operators.

    python studies/half_precision_table.py            # what differs from the package's table
    python studies/half_precision_table.py --write    # put them into mpdiag/numerics/autocast_lists.tsv

``op_db`` (``torch.testing._internal.common_methods_invocations``) says for each public function which
dtypes it takes on CUDA (``dtypesIfCUDA``) and in its backward pass (``backward_dtypesIfCUDA``). A
function that takes FP32 and neither FP16 nor BF16 is run in FP32 on a CPU, and the ATen operations
below autograd are noted; one of them refuses. Those that some other function runs with half
precision are not the one, unless the refusing function bears its name. What autocast casts by itself
is left out. Rows that are in the table alone stay: torch runs other operations where a mode looks on.
``op_db`` needs the package expecttest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from mpdiag.numerics.autocast_lists import LISTS, policy_name  # noqa: E402

TABLE = ROOT / "mpdiag" / "numerics" / "autocast_lists.tsv"
HALF = (torch.float16, torch.bfloat16)
NO_HALF = "no_half"


class _Names(TorchDispatchMode):
    """Notes the ATen operations that run below autograd and make a floating-point tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        reads = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        if reads and func.namespace == "aten" and not func.is_view:
            self.names.add(func.overloadpacket.__name__)
        return result


def aten_operations(info: Any) -> set[str]:
    """What one public function runs, over its first samples."""
    names = _Names()
    try:
        for sample, _ in zip(info.sample_inputs("cpu", torch.float32), range(8), strict=False):
            with names:
                info.op(sample.input, *sample.args, **sample.kwargs)
    except Exception as error:  # noqa: BLE001 - a sample that needs a GPU: the others count
        print(f"{info.name}: {type(error).__name__}: {str(error)[:80]}")
    return names.names


def refusing(infos: Iterable[Any]) -> set[str]:
    """ATen operations without a half-precision kernel on CUDA, forward or backward."""
    taken: set[str] = set()
    refused: set[str] = set()
    named: set[str] = set()
    for info in infos:
        if torch.float32 not in info.dtypesIfCUDA:
            continue
        names = aten_operations(info)
        if any(dtype in info.dtypesIfCUDA for dtype in HALF):
            taken |= names
            if info.supports_autograd and not any(d in info.backward_dtypesIfCUDA for d in HALF):
                named |= {info.aten_name}
        else:
            refused |= names
            named |= {n for n in names if _stem(n) == info.aten_name.replace(".", "_")}
    known = {n for n in (refused - taken) | named if policy_name(n) not in LISTS}
    return {n for n in known if not n.endswith("_")}  # in place: a part of a composite


def _stem(name: str) -> str:
    """The public name of an ATen operation: ``_linalg_svd`` -> ``linalg_svd``."""
    return name.lstrip("_").removesuffix("_helper").removesuffix("_ex")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the rows into the table")
    options = parser.parse_args()
    from torch.testing._internal.common_methods_invocations import op_db

    made = refusing(op_db)
    lines = TABLE.read_text().splitlines()
    listed = [line for line in lines if line.startswith(f"{NO_HALF}\t")]
    known = {line.split("\t")[1] for line in listed}
    print(f"torch {torch.__version__}: {len(op_db)} functions, {len(made)} operations refuse")
    print("not in the table:", *sorted(made - known))
    print("in the table alone:", *sorted(known - made))
    if options.write:
        at = lines.index(listed[0])
        kept = [line for line in lines if line not in listed]
        rows = [f"{NO_HALF}\t{name}" for name in sorted(made | known)]
        TABLE.write_text("\n".join([*kept[:at], *rows, *kept[at:], ""]))


if __name__ == "__main__":
    main()
