"""What many libraries spell alike in a name: instruction shape, dtype, generation, alignment."""

from __future__ import annotations

import re

# -- instruction shapes ----------------------------------------------------------------------------

# s1688gemm, h884cudnn, i16832gemm, d884gemm, s161616 (wmma): accumulator and shape of the instruction.
SHAPE = re.compile(
    r"(?:^|[_<:])(?P<acc>g?[cz]|[shdi])(?P<shape>161616|168256|168128|16864|16832|16816|1688|88128|8832|8816|884)"
    r"(?P<fast>tf32|bf16|f16)?"
    r"(?=(?:sp)?gemm|cudnn|fprop|dgrad|wgrad|conv|xmma|_|trsm|trmm|syrk|symm|herk|hemm|rank)"
)
_ACCUMULATORS = {"s": "fp32", "h": "fp16", "d": "fp64", "i": "int32", "c": "fp32", "z": "fp64"}
_INTEGERS = {"8832": "int4", "16864": "int4", "88128": "int1", "168128": "int1", "168256": "int1"}
_TILE = re.compile(r"tensor(?P<m>8|16)x(?P<n>8)x(?P<k>4|8|16|32|64|128|256)(?=_|$)")
# The instruction of a CUTLASS 2 template: arch::Mma<gemm::GemmShape<16, 8, 16>, 32, half_t, …
_MMA = re.compile(
    r"arch::Mma<[\w:]*GemmShape<(?P<m>\d+), ?(?P<n>\d+), ?(?P<k>\d+) ?>, ?(?P<lanes>\d+), "
    r"?(?P<operand>[\w:]+(?: char)?)"
)
# Wide instructions of CUTLASS 3: s64x128x16gemm, h64x64x16spgemm, i64x128x32gemm.
_WIDE = re.compile(r"(?:^|_)(?P<acc>[shdicz])\d+x\d+x\d+(?P<fast>tf32|bf16|f16)?(?:sp)?gemm")
_FAST = {"tf32": "tf32", "bf16": "bf16", "f16": "fp16"}
NAMED_BY_SHAPE = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "tf32", "fp4")


def from_shape(shape: re.Match[str], instruction: str, dtype: str) -> tuple[str, str, str]:
    """Instruction, dtype and accumulator of a match of ``SHAPE``."""
    acc, size, fast = shape["acc"][-1], shape["shape"], shape["fast"]
    accumulator = _ACCUMULATORS[acc]
    if fast:
        dtype = _FAST[fast]
    elif acc in "dz":
        dtype = "fp64" if acc == "d" else "complex128"
    elif acc == "c":
        dtype = "complex64"
    elif acc == "h":
        dtype = "fp16"
    elif acc == "i":
        dtype = dtype if dtype.startswith("int") else _INTEGERS.get(size, "int8")
    elif dtype not in NAMED_BY_SHAPE:
        # No 16-bit token: 1688 is TF32; 884 is only for FP16.
        dtype = "tf32" if size in ("1688", "16816") else "fp16"
    kind = {"d": "DMMA", "z": "DMMA", "i": "IMMA"}.get(acc, "HMMA")
    kind = "QMMA" if dtype.startswith("fp8") else kind
    size = "16816" if size == "161616" else size  # wmma is compiled to mma of this shape
    if instruction and not instruction.startswith("HMMA"):
        return instruction, dtype, accumulator
    suffix = ".TF32" if dtype == "tf32" or acc == "c" else ""
    return f"{kind}.{size}{suffix}", dtype, accumulator


def from_tile(head: str, instruction: str, dtype: str) -> tuple[str, str]:
    """Instruction and accumulator of a name that spells a tile, or nothing."""
    accumulator = "int32" if dtype.startswith("int") else "fp32"
    if dtype in ("fp64", "complex128"):
        accumulator = "fp64"
    tile = _TILE.search(head) or _MMA.search(head)
    if tile and (not instruction or instruction == "HMMA"):
        kind = {"fp64": "DMMA", "complex128": "DMMA"}.get(dtype, "HMMA")
        kind = "IMMA" if dtype.startswith("int") else kind
        kind = "QMMA" if dtype.startswith("fp8") else kind
        suffix = ".TF32" if dtype == "tf32" else ""
        instruction = f"{kind}.{tile['m']}{tile['n']}{tile['k']}{suffix}"
    other = {"HGMMA": ("QGMMA", "IGMMA"), "UTCHMMA": ("UTCQMMA", "UTCIMMA")}.get(instruction)
    if other and dtype.startswith("fp8"):
        instruction = other[0]
    if other and dtype.startswith("int"):
        instruction = other[1]
    if instruction == "UTCHMMA" and dtype == "fp4":
        instruction = "UTCOMMA"
    wide, group = _WIDE.search(head), _XMMA.search(head)
    if wide:
        accumulator = _ACCUMULATORS[wide["acc"]]
    elif group and group["acc"]:
        accumulator = DTYPES_OF_TOKENS.get(group["acc"], accumulator)
    return instruction, accumulator


# -- dtypes ----------------------------------------------------------------------------------------

DTYPES_OF_TOKENS = {
    "f16": "fp16", "fp16": "fp16", "half": "fp16", "half_t": "fp16", "bf16": "bf16", "bfloat16": "bf16",
    "bfloat16_t": "bf16", "tf32": "tf32", "tfloat32_t": "tf32", "tf32f32": "tf32", "f32": "fp32",
    "fp32": "fp32", "float": "fp32", "f64": "fp64", "double": "fp64", "i8": "int8", "u8": "int8",
    "s8": "int8", "int8": "int8", "int8_t": "int8", "uint8_t": "int8", "signed char": "int8",
    "unsigned char": "int8", "i4": "int4", "s4": "int4", "u4": "int4", "int4b_t": "int4",
    "uint4b_t": "int4", "b1": "int1", "uint1b_t": "int1", "i32": "int32", "s32": "int32",
    "e4m3": "fp8_e4m3", "float_e4m3_t": "fp8_e4m3", "f8": "fp8_e4m3", "fp8": "fp8_e4m3",
    "e5m2": "fp8_e5m2", "float_e5m2_t": "fp8_e5m2", "e2m1": "fp4", "f4": "fp4",
    "c32": "complex64", "cf32": "complex64", "cf64": "complex128", "half2": "fp16", "__half": "fp16",
    "__nv_bfloat16": "bf16", "fp8e4nv": "fp8_e4m3", "fp8e4b8": "fp8_e4m3", "fp8e5": "fp8_e5m2",
    "mxfp4": "fp4", "fp4": "fp4", "f8e4m3fn": "fp8_e4m3", "f8e5m2": "fp8_e5m2", "f4e2m1fn": "fp4",
    "c": "tf32", "f8_t": "fp8_e4m3", "f8_fnuz_t": "fp8_e4m3", "f8_ocp_t": "fp8_e4m3", "bf8_t": "fp8_e5m2",
    "bf8_fnuz_t": "fp8_e5m2", "bf8_ocp_t": "fp8_e5m2", "f4x2_pk_t": "fp4", "_Float16": "fp16",
    "unsigned short": "bf16", "bhalf_t": "bf16",
}  # fmt: skip
_TOKENS = "tf32|bf16|f16|f32|f64|e4m3|e5m2|e2m1|i8|u8|i4|u4|b1"
# xmma: what is stored, then what is multiplied and accumulated: f32f32_tf32f32_f32, i8f32_i8i32_f32.
_XMMA = re.compile(
    rf"xmma_\w{{0,60}}?_(?:{_TOKENS}|i32)+_(?P<operand>{_TOKENS})(?P<acc>f32|f16|i32|f64)(?=_)"
)
_CONVENTIONS = (
    _XMMA,
    _MMA,
    # CuTe's atoms: SM80_16x8x16_F32BF16BF16F32, SM90_64x128x32_F32E4M3E4M3_SS, SM100_MMA_TF32_SS.
    re.compile(
        r"SM\d+_\d+x\d+x\d+_(?:[FSC]\d\d)(?P<operand>TF32|BF16|F16|E4M3|E5M2|E2M1|[SU]8|[SU]4|F64|C64)"
    ),
    re.compile(
        r"CollectiveMainloop(?:Fwd|Bwd)\w*<.{0,300}?(?P<operand>(?:half|bfloat16|float_e4m3|float_e5m2)_t)"
    ),
    re.compile(r"kernel::Default(?:Gemm|Conv)\w*<\s*(?P<operand>[\w:]+(?: char)?),"),
    re.compile(r"cutlass_\dx_gemm\w*<(?P<operand>[\w:]+(?: char)?),"),
    re.compile(r"SM1\d\d_MMA_(?P<operand>TF32|S8)_"),
    # CUTLASS: the first type after gemm is that of A.
    re.compile(
        r"tensorop_\w{0,60}?\d(?:sp)?gemm_(?:block_scaled_ue\dm\dx)?"
        r"(?P<operand>tf32|bf16|f16|e4m3|e5m2|e2m1|f8|f4|s8|u8|s4|u4|b1)(?=_|x)"
    ),
    # AITER: the quantisation, then the type it is to; the first type is of the result.
    re.compile(
        r"(?:pertoken|perToken|per\d+x\d+|blockscale|noquant)_?(?P<operand>Int8|I8|Fp8|Fp4|Bf16|Fp16)(?=_)"
    ),
    # CuTe DSL: the first tensor among the arguments; a step of 8 along K is TF32's alone.
    re.compile(
        r"^kernel_cutlass_\w*?tensorptr(?P<operand>bf16|f16|tf32|f8E4M3FN|f8E5M2|f4E2M1FN|f64)gmem"
    ),
    re.compile(
        r"^kernel_(?P<operand>c)utlass_\w*?MMAAtom_ThrID(?:10|21|1281)_ShapeMNK(?:64|128|256)(?:8|16|24|32|48|64|96|128|160|192|224|256)8_"
    ),
    # Triton's matmul_ogs: result x left x right; the left one is multiplied.
    re.compile(r"_matmul(?:_ogs)?_[NT]{3}_\w{1,20}?x(?P<operand>mxfp4|[a-wyz0-9]+)x\w+?_\d+x\d+"),
    # Composable Kernel's grids: the layouts, then the types of A, B, the sum and C.
    re.compile(
        r"\bGridwise\w*<(?:ck::(?:tensor_layout[\w:]*|Tuple<[^<>]*>), ){2,6}"
        r"(?:ck::)?(?P<operand>\w+(?: (?:char|short))?),"
    ),
    # TensorRT-LLM's generated kernels: result_left right_accumulator.
    re.compile(
        r"(?:bmm|gemm)_(?:Mx)?[A-Z]\w{0,60}?_(?P<operand>Bfloat16|Fp16)(?:Bfloat16|Fp16)?_Fp32"
    ),
)
_TENSILE = re.compile(
    r"Cij[a-z]*_A[a-zA-Z]+_B[a-zA-Z]+_"
    r"(?P<type>F8B8N?|B8F8N?|F8N?|B8N?|F6|B6|F4|I8|4xi8|[HBSDCZX])(?:F8|B8|I8|[HBSDCZI])*_?"
)
_TENSILE_TYPES = {
    "H": "fp16", "B": "bf16", "S": "fp32", "D": "fp64", "C": "complex64", "Z": "complex128", "X": "tf32",
    "I8": "int8", "4xi8": "int8", "F4": "fp4",
}  # fmt: skip
# The first match names the dtype, so tf32 precedes f32, and bf16 precedes f16.
_DTYPES = tuple(
    (name, re.compile(text))
    for name, text in (
        (
            "fp8_e4m3",
            r"[eE]4[mM]3|(?:^|_)f8(?=_)|[fF][pP]8|float8|fp8e4|F8F8|(?<!unsigned )_BitInt\(8\)|\bf8_(?:fnuz_|ocp_)?t|QkvE4m3",
        ),
        ("fp8_e5m2", r"[eE]5[mM]2|bf8|unsigned _BitInt\(8\)"),
        ("fp4", r"[eE]2[mM]1|xf4|(?:^|_)f4(?=_)|mxfp4|nvfp4|[fF]p4"),
        ("tf32", r"[tT][fF]32|tfloat32|xf32"),
        (
            "bf16",
            r"(?<!F16)[bB][fF]16|[bB]float16|bfloat(?!8)|DF16b|bhalf|__bf16|(?:\bck::|Gridwise).*unsigned short",
        ),
        (
            "fp16",
            r"(?:^|_|[^bn])f16|\bDF16|F16F16|[hH]gemm|HGEMM|[fF]p16|FP16|half(?:_t|2|(?=_|\W|$))|_hmma_|_HMMA|[fF]loat16",
        ),
        ("int8", r"i8i8|s8s8|(?:^|_)[isu]8(?=_|i32|x)|int8|INT8|_I8|signed char|[wW]8[aA]8"),
        ("int4", r"(?:^|_)[su]4(?=_)"),
        ("fp64", r"f64|(?<!float_)double(?!_buffer)|[dD]gemm|DGEMM|fp64"),
        ("complex64", r"[cC]gemm|complex<float>"),
        ("complex128", r"[zZ]gemm|complex<double>"),
        ("fp32", r"f32|fp32|float|[sS]gemm|SGEMM|scudnn|<f, ?f|FP32"),
    )
)
# Types that are no operand: of a paged cache, of a scale, of the choice between 16-bit formats.
_NO_OPERAND = re.compile(r"\w*Fp8KVCacheDataType\)?\w*|F16BF16|float_ue\dm\d_t|cuda::std::\w+")


def dtype_of(head: str) -> str:
    """The dtype of a kernel's operands, by the conventions first, then by any token; "" if none."""
    text = _NO_OPERAND.sub("", head)
    tensile = _TENSILE.search(text)
    if tensile:
        return _tensile(tensile, text)
    for convention in _CONVENTIONS:
        found = convention.search(text)
        if found:
            operand = found["operand"].rpartition("::")[2]
            known = DTYPES_OF_TOKENS.get(operand) or DTYPES_OF_TOKENS.get(operand.lower())
            if known:
                return known
    for name, pattern in _DTYPES:
        if pattern.search(text):
            return name
    return ""


def _tensile(found: re.Match[str], text: str) -> str:
    kind = found["type"]
    if kind == "S" and re.search(r"_M?X_(?:B|MX|)", text[: found.end() + 6]):
        return "tf32"  # F32XdlMathOp: rounded to XF32
    if kind.startswith("F8"):
        return "fp8_e4m3"
    return "fp8_e5m2" if kind.startswith("B8") else _TENSILE_TYPES.get(kind, "")


# -- generation and alignment ----------------------------------------------------------------------

_PREFIX = re.compile(
    r"(?:^|[_:<(])(?:sm|SM)_?(\d{2,3})[af]?(?=_|[A-Z<:]|$)|[sS]m(\d{2,3})|[a-z]sm(\d{2,3})(?=\D)"
)
_CUTLASS = re.compile(r"cutlass_(\d\d)_|cutlass3x_sm(\d+)")
_GFX = re.compile(r"ISA(\d+[a-f]?\d*)|(?<![a-z])gfx(\d{3,4}[a-f]?|90[a8])")
_NAMED = (
    ("volta", "sm70"), ("turing", "sm75"), ("ampere", "sm80"), ("hopper", "sm90"), ("blackwell", "sm100"),
)  # fmt: skip
_ALIGNED = re.compile(r"_align([a-d]?)(\d+)")


def generation_of(head: str, instruction: str, dtype: str) -> str:
    """The architecture that a kernel was written for, such as ``sm80``; "" if the name gives none."""
    gfx = _GFX.search(head)
    if gfx:
        return f"gfx{gfx[1] or gfx[2]}"
    numbered = _CUTLASS.search(head) or _PREFIX.search(head)
    if numbered:
        digits = next(filter(None, numbered.groups()), "")
        if 30 <= int(digits) <= 130:
            return f"sm{digits}"
    lower = head.lower()
    for name, generation in _NAMED:
        if name in lower:
            return generation
    if instruction.startswith("HMMA."):
        if instruction.endswith("884"):
            return "sm70"
        return "sm75" if instruction.endswith("1688") and dtype == "fp16" else "sm80"
    return {"DMMA.884": "sm80", "IMMA.8816": "sm75", "IMMA.16832": "sm80"}.get(instruction, "")


def alignment_of(head: str) -> int | None:
    """Elements that a kernel's rows must be aligned to, as its name says."""
    found = [(which, int(n)) for which, n in _ALIGNED.findall(head) if 0 < int(n) <= 512]
    inputs = [n for which, n in found if which in ("", "a", "b")] or [n for _, n in found]
    return min(inputs) if inputs else None
