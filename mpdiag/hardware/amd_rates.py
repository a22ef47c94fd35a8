"""Peak rates of AMD's Instinct GPUs, each with its source.

The rates of the ordinary (vector) units decide what the rate of a product proves, so they are what
the instructions can do, not what data sheets print of them: a compute unit has 64 lanes, and in each
the packed and dot instructions (``v_pk_fma_f16``, ``v_dot2_f32_f16``; ``v_pk_fma_f32`` from CDNA 2
on) do four FLOP a clock, whatever the dtype. That is 256 a compute unit and clock. AMD prints the same
figure for FP32 on MI300 and as "packed FP32" on MI200.

Sources: AMD's data sheets; *CDNA 3 Instruction Set Architecture*, packed and dot instructions; ROCm
documentation, *MI250* and *MI300 microarchitecture*, tables of FLOP a clock in each compute unit.
"""

from __future__ import annotations

from mpdiag.hardware.rates import Peaks, clocked

_CDNA1 = "AMD Instinct MI100 brochure"
_CDNA2 = "AMD Instinct MI200 series datasheet"
_CDNA3 = "AMD Instinct MI300 series datasheet"
_CDNA4 = "AMD Instinct MI350 series brochures"
_GCD = "; one of the two dies, which is what torch sees as a device"
_VECTOR = "; 16-bit rates of the vector units from the instruction set"
_PACKED = 256


def _matrix(half: float, fp32: float, **more: float) -> dict[str, float]:
    return {"fp32": fp32, "fp16": half, "bf16": half} | more


def _instinct(
    name: str,
    minor: int,
    numbers: tuple[int, int, float],
    tensor: dict[str, float],
    vector: tuple[float, float],
    source: str,
) -> Peaks:
    """A GPU with its rates.

    Args:
        name: Its name.
        minor: Of the compute capability 9.x that ROCm reports.
        numbers: Compute units, clock in MHz, GB/s.
        tensor: Rates of the matrix cores.
        vector: Rates of the vector units in FP64 and FP32.
        source: The document.
    """
    fp64, fp32 = vector
    packed = clocked(numbers[0], numbers[1], _PACKED)
    cuda = {"fp64": fp64, "fp32": fp32, "fp16": packed, "bf16": packed, "int8": 2 * packed}
    return Peaks(name, "cdna", (9, minor), *numbers, tensor, cuda, source + _VECTOR)


_MI300X = _matrix(1307.4, 163.4, tf32=653.7, fp8=2614.9, int8=2614.9, fp64=163.4)

AMD: tuple[tuple[str, Peaks], ...] = (
    (r"mi100", _instinct(
        "MI100", 0, (120, 1502, 1229),
        _matrix(184.6, 46.1, int8=184.6) | {"bf16": 92.3}, (11.5, 23.1), _CDNA1)),
    (r"mi210", _instinct(
        "MI210", 0, (104, 1700, 1638), _matrix(181, 45.3, int8=181, fp64=45.3),
        (22.6, 45.3), _CDNA2)),
    # The driver uses one name for both; the larger is the safer denominator, and so the first.
    (r"mi250x( mi250)?", _instinct(
        "MI250X, one die", 0, (110, 1700, 1638), _matrix(191.5, 47.9, int8=191.5, fp64=47.9),
        (23.9, 47.9), _CDNA2 + _GCD)),
    (r"(mi250x )?mi250", _instinct(
        "MI250, one die", 0, (104, 1700, 1638), _matrix(181, 45.3, int8=181, fp64=45.3),
        (22.6, 45.3), _CDNA2 + _GCD)),
    (r"mi300x.*", _instinct(
        "MI300X", 4, (304, 2100, 5300), _MI300X, (81.7, 163.4), _CDNA3)),
    (r"mi300a", _instinct(
        "MI300A", 4, (228, 2100, 5300),
        _matrix(980.6, 122.6, tf32=490.3, fp8=1961.2, int8=1961.2, fp64=122.6),
        (61.3, 122.6), _CDNA3)),
    (r"mi325x.*", _instinct(
        "MI325X", 4, (304, 2100, 6000), _MI300X, (81.7, 163.4), _CDNA3)),
    (r"mi350x.*", _instinct(
        "MI350X", 5, (256, 2200, 8000),
        _matrix(2306.9, 144.2, fp8=4613.7, int8=4613.7, fp6=9227.5, fp4=9227.5, fp64=72.1),
        (72.1, 144.2), _CDNA4)),
    (r"mi355x.*", _instinct(
        "MI355X", 5, (256, 2400, 8000),
        _matrix(2516.6, 157.3, fp8=5033.2, int8=5033.2, fp6=10066.3, fp4=10066.3, fp64=78.6),
        (78.6, 157.3), _CDNA4)),
)  # fmt: skip
