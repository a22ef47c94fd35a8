"""The table of kernel names: ordered, the first rule that matches decides.

To add a kernel, add one line at the right place of its subject in ``kernel_names/``, and its name with
the expected verdict to ``tests/hardware/kernel_names/``. A rule's pattern is searched in the name
without its argument list. Order matters: names that only *sound* like matrix math come first, then
matrix math on CUDA cores, then Tensor Cores, then names that do not say what they run, then all others,
and last what the words of a name say that no rule knows.

Sources: names in public traces of torch.profiler, nsys and ncu; NVIDIA's PyProf, kineto's and
xprof's lists, except where real traces prove them wrong; the sources of PyTorch, CUTLASS,
FlashAttention, Triton, MIOpen, Tensile, NCCL, and of the libraries that the rules name.
"""

from mpdiag.hardware.kernel_names.amd import AMD
from mpdiag.hardware.kernel_names.attention import ATTENTION
from mpdiag.hardware.kernel_names.cuda_cores import CUDA_CORES
from mpdiag.hardware.kernel_names.helpers import HELPERS
from mpdiag.hardware.kernel_names.inference import INFERENCE
from mpdiag.hardware.kernel_names.nvidia import CUTLASS, NVJET
from mpdiag.hardware.kernel_names.opaque import HOW, OPAQUE, WORDS
from mpdiag.hardware.kernel_names.others import BEFORE_OPAQUE, FIRST, OTHERS
from mpdiag.hardware.kernel_names.rule import KernelRule
from mpdiag.hardware.kernel_names.triton import KNOWN, TRITON

TABLE_VERSION = 6
"""Incremented whenever a rule changes a verdict."""

TENSOR_CORES: tuple[KernelRule, ...] = NVJET + ATTENTION + INFERENCE + CUTLASS + AMD + TRITON
"""Matrix math on Tensor Cores, by libraries first: their names also hold the parts they are made of."""

# Elementwise kernels of PyTorch and collectives precede the opaque names, whose patterns are wide.
RULES: tuple[KernelRule, ...] = (
    FIRST
    + KNOWN
    + HELPERS
    + CUDA_CORES
    + TENSOR_CORES
    + BEFORE_OPAQUE
    + HOW
    + OPAQUE
    + OTHERS
    + WORDS
)
"""The whole table, in the order in which it is tried."""

WORD_RULES: tuple[KernelRule, ...] = tuple(rule for rule in RULES if rule.of_words)
"""Those that read the words of a name, once more with its namespace where no rule matched."""
