"""Table of library routines that can replace tensor functions, one entry per routine.

To add a routine, implement it in `runtime/library` (buffers: inputs, workspace, output) and add an entry here. A separate package
registers both by entry points: a class of the `Library` protocol in the group `relax_tune.libraries`, and an `Alternative`
(or a tuple of them) in the group `relax_tune.alternatives`. The routine becomes a variant of every task whose work it can compute, and is
called for the shapes for which it was measured to be fastest.

Tests: `tests/ir/passes/library/test_library_lowering.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import DType, bf16, f16, f32
from relax_tune.ir.core.expr import Expr, ceildiv, mul
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.passes.library.epilogue_match import BINARY_EPILOGUE_OPS
from relax_tune.ir.passes.pipeline import lower

Sizes = Mapping[str, Expr]
"""Scalar arguments available to a routine: name -> value over the symbols of the replaced function."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Prepacking of weights by a second routine, once, when a model is loaded.

    Attributes:
        routine: LIBRARY.NAME; its buffers are the weights and the packed array.
        scalars: Names of its scalar arguments, in order; all must be constants.
        elements: Returns the number of elements of the packed array.
    """

    routine: str
    scalars: tuple[str, ...]
    elements: Callable[[Sizes], Expr]


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """Work of a routine: the one matrix product of a function, `C = op(A) op(B)` row-major (BLAS GEMM).

    Computations before and after the product become separate kernels. Operands without a strided layout are packed.

    Buffers: A, B, arrays of the epilogue, C.
    Sizes: m, n, k; trans_a, trans_b (1: stored transposed); lda, ldb, ldc (elements of a row). Batched: batch and stride_a, stride_b,
    stride_c (elements of a matrix). The size `follows` encodes the epilogue operations, in order, as the sum of (index in `follows`, from
    1) * 16**position. Strides of epilogue array i: stride_di, row_di, column_di (0: broadcast).

    Attributes:
        dtype: Element type of the operands; products of 16-bit floats accumulate in f32.
        batched: Whether the routine computes a batch of products.
        transposed: Whether the routine reads transposed operands; otherwise they are packed.
        follows: Epilogue operations of the routine, names of `EPILOGUE_OPS`.
        operands: Largest number of arrays that its epilogue operations read.
        packing: Prepacking of B, which must then be a weight.
        result: Element type of C if it is not `dtype`; f32 for unrounded sums of 16-bit floats.
        once: Whether each epilogue operation is possible at most once, and none after an operation without an array.
        converts: Whether 16-bit operands may be converted to f32 for this routine.
    """

    dtype: DType = f32
    batched: bool = False
    transposed: bool = True
    follows: tuple[str, ...] = ()
    operands: int = 0
    packing: Packing | None = None
    result: DType | None = None
    once: bool = False
    converts: bool = True

    @property
    def writes(self) -> DType:
        """Element type of C."""
        return self.result or self.dtype

    def allowed_next(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the epilogue operations that the routine can apply after `names`."""
        with_array = sum(n in BINARY_EPILOGUE_OPS for n in names)
        if self.once and with_array < len(names):
            return ()
        return tuple(
            n
            for n in self.follows
            if (n not in BINARY_EPILOGUE_OPS or with_array < self.operands) and not (self.once and n in names)
        )


@dataclass(frozen=True, slots=True, eq=False)
class WholeFunction:
    """Work of a routine: a function with the same loops as `func`, for some values of its symbols.

    Sizes: the symbols of `func`, by name. Buffers: the buffers of `func`.
    """

    func: PrimFunc


@dataclass(frozen=True, slots=True)
class Alternative:
    """A library routine and the work that it can compute.

    Attributes:
        routine: LIBRARY.NAME.
        takes: The work that it replaces.
        scalars: Names of its scalar arguments, in order.
        targets: Languages of the devices whose memory it accesses.
        needs: Returns a condition on the sizes that must be provable.
        workspace: Returns the bytes of its workspace, an array of u8 before the output.
    """

    routine: str
    takes: MatrixProduct | WholeFunction
    scalars: tuple[str, ...]
    targets: tuple[str, ...]
    needs: Callable[[Sizes], Expr] | None = None
    workspace: Callable[[Sizes], Expr] | None = None

    def __post_init__(self) -> None:
        takes = self.takes
        known = (
            (*SIZES, *epilogue_sizes(takes))
            if isinstance(takes, MatrixProduct)
            else tuple(v.name for v in takes.func.symbols)
        )
        packing = takes.packing if isinstance(takes, MatrixProduct) else None
        wrong = [s for s in (*self.scalars, *(packing.scalars if packing else ())) if s not in known]
        if wrong or "." not in self.routine:
            raise UserError(
                f"alternative {self.routine!r}: expected LIBRARY.NAME and scalars among {', '.join(known)}; "
                f"got {', '.join(wrong) or 'no dot in the name'}"
            )

    @property
    def library(self) -> str:
        return self.routine.split(".")[0]


PLAIN_SIZES = ("m", "n", "k", "trans_a", "trans_b", "lda", "ldb", "ldc")
SIZES = ("batch", *PLAIN_SIZES, "stride_a", "stride_b", "stride_c")


def epilogue_sizes(takes: MatrixProduct) -> tuple[str, ...]:
    """Return the names of the sizes that describe the epilogue."""
    strides = [f"{what}_d{i}" for i in range(takes.operands) for what in ("stride", "row", "column")]
    return ("follows", *strides) if takes.follows else ()


_FOLLOWS = ("add", "mul", "relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "swish")
_ONEDNN = MatrixProduct(follows=_FOLLOWS, operands=2)
# oneDNN packs blocks of at most 64 columns and 64 rows.
_BLOCKS = Packing(
    "onednn.pack",
    ("n", "k", "trans_b", "ldb"),
    lambda sizes: mul(mul(ceildiv(sizes["n"], 64), ceildiv(sizes["k"], 64)), 64 * 64),
)


def _of_nvidia() -> Iterator[Alternative]:
    """Yield cuBLAS routines, and cuBLASLt routines with epilogues, for each pair of types."""
    pairs = ((f32, None), (f16, None), (bf16, None), (f16, f32), (bf16, f32))
    for batched in (False, True):
        end, sizes = ("_batched", SIZES) if batched else ("", PLAIN_SIZES)
        for dtype, result in pairs:
            kind = str(dtype) if result is None else f"{dtype}_{result}"
            plain = MatrixProduct(dtype, batched, result=result, converts=False)
            yield Alternative(f"cublas.gemm_{kind}{end}", plain, sizes, ("cuda",))
            more = replace(plain, follows=("bias", "residual", "relu", "gelu_tanh"), operands=2, once=True)
            yield Alternative(f"cublaslt.matmul_{kind}{end}", more, (*sizes, *epilogue_sizes(more)), ("cuda",))


ALTERNATIVES: tuple[Alternative, ...] = (
    Alternative(
        "openblas.sgemm",
        MatrixProduct(),
        scalars=PLAIN_SIZES,
        targets=("c", "opencl"),
    ),
    Alternative(
        "openblas.sgemm_batched",
        MatrixProduct(batched=True),
        scalars=SIZES,
        targets=("c", "opencl"),
    ),
    Alternative("clblast.sgemm", MatrixProduct(), PLAIN_SIZES, ("opencl",)),
    Alternative("clblast.sgemm_batched", MatrixProduct(batched=True), SIZES, ("opencl",)),
    # Not for OpenCL devices: oneDNN's OpenMP threads would compete with the threads of the device.
    Alternative("onednn.matmul", _ONEDNN, (*PLAIN_SIZES, *epilogue_sizes(_ONEDNN)), ("c",)),
    Alternative(
        "onednn.matmul_packed",
        replace(_ONEDNN, packing=_BLOCKS),
        (*(s for s in PLAIN_SIZES if s not in ("trans_b", "ldb")), *epilogue_sizes(_ONEDNN)),
        ("c",),
    ),
    Alternative("onednn.matmul_batched", replace(_ONEDNN, batched=True), (*SIZES, *epilogue_sizes(_ONEDNN)), ("c",)),
    *_of_nvidia(),
)


def whole(x: PrimFunc | IRModule) -> WholeFunction:
    """Return the work of one tensor function, or of a module that lowers to one.

    Raises:
        UserError: The module lowers to several tensor functions.
    """
    if isinstance(x, PrimFunc):
        return WholeFunction(x)
    prims = list(lower(x).prims.values())
    if len(prims) != 1:
        raise UserError(
            f"alternative: expected a module that lowers to one tensor function, got {len(prims)}: "
            f"{', '.join(p.name for p in prims)}"
        )
    return WholeFunction(prims[0])
