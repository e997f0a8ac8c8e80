"""Which library routines can take a tensor function's work: the table, one entry per routine.

To add a routine: implement it in `runtime/library` (its buffers are inputs, then workspace, then the output), and put an entry
here. A package of its own brings both by entry points: a class of the `Library` protocol in the group
`relax_tune.libraries`, and an `Alternative` (or a tuple of them) in `relax_tune.alternatives`. An entry decides nothing: the
routine becomes a variant of every task it fits, and is dispatched where it measured fastest.
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
"""What a routine can be told, by name, over the symbols of the function whose work it takes."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a routine wants weights: as another, `routine`, writes them once, when a model is loaded.

    scalars: the sizes that one is called with, in its order, all known numbers then. Its buffers: the weights, the array that it
    writes, of `elements` elements at least."""

    routine: str
    scalars: tuple[str, ...]
    elements: Callable[[Sizes], Expr]


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """The one matrix product of a function, `C = op(A) op(B)` row-major, read off its loops; what is computed before and after
    it become kernels of their own, and operands that no strides describe are packed.

    dtype: of the operands' elements. A product of 16-bit floats sums in f32, and is one here where both operands are stored so.
    converts: whether such operands are written out as f32 for a routine that reads those; not where its library has one that reads
    them as they are. result: the type of what it writes, where it is another than that of the operands; f32 is for sums of 16-bit
    floats that the function uses as f32.

    Sizes: m, n, k; trans_a, trans_b (1 when stored transposed); lda, ldb, ldc, the lengths of rows in elements; and of a
    batched product batch, stride_a, stride_b, stride_c, the distances of matrices in elements. Buffers: A, B, C.
    transposed: whether the routine reads transposed operands; otherwise they are packed.

    follows: the operations it can do to each element of the product before storing it, names of `epilogue.FOLLOWING`; what the
    function does so after its product becomes part of the call, as far as it is that. The size `follows` tells which, in order: the
    sum of (place in this tuple, from 1) * 16**position. Two-sided ones read one more buffer each, between B and C, `operands`
    of them at most; stride_d0, row_d0, column_d0 (d1 ...) are its strides, 0 where it has none of the role. once: it does each at
    most once, and nothing after one without an array.

    packing: how the routine wants B, which has to be a weight then; None: as it lies."""

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
        """The type of the result's elements."""
        return self.result or self.dtype

    def allowed_next(self, names: Sequence[str]) -> tuple[str, ...]:
        """The operations it can do after these."""
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
    """A function that computes the same as `func`, loop by loop, at any sizes: its dims are the symbols' values.

    Sizes: the symbols of `func`, by name. Buffers: those of `func`."""

    func: PrimFunc


@dataclass(frozen=True, slots=True)
class Alternative:
    """A routine and the work it takes.

    routine: LIBRARY.NAME, as the library has it. scalars: the sizes it is called with, in its order. targets: the languages of
    the devices whose memory it can reach. needs: a condition on the sizes that must be proved. workspace: bytes it wants
    to itself, an array of u8 before the output."""

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
                f"alternative {self.routine!r}: wanted LIBRARY.NAME and scalars among {', '.join(known)}; "
                f"found {', '.join(wrong) or 'no dot in the name'}"
            )

    @property
    def library(self) -> str:
        return self.routine.split(".")[0]


PLAIN_SIZES = ("m", "n", "k", "trans_a", "trans_b", "lda", "ldb", "ldc")
SIZES = ("batch", *PLAIN_SIZES, "stride_a", "stride_b", "stride_c")


def epilogue_sizes(takes: MatrixProduct) -> tuple[str, ...]:
    """The names of what a routine is told of the operations after its product."""
    strides = [f"{what}_d{i}" for i in range(takes.operands) for what in ("stride", "row", "column")]
    return ("follows", *strides) if takes.follows else ()


_FOLLOWS = ("add", "mul", "relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "swish")
_ONEDNN = MatrixProduct(follows=_FOLLOWS, operands=2)
# blocks of at most 64 columns and as many rows
_BLOCKS = Packing(
    "onednn.pack",
    ("n", "k", "trans_b", "ldb"),
    lambda sizes: mul(mul(ceildiv(sizes["n"], 64), ceildiv(sizes["k"], 64)), 64 * 64),
)


def _of_nvidia() -> Iterator[Alternative]:
    """cuBLAS, and cuBLASLt with what follows, for each pair of types."""
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
    # on OpenCL devices its OpenMP threads would take the processors from the device's own
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
    """What one tensor function computes: given itself, or as a module that lowers to it (operators that fuse into one)."""
    if isinstance(x, PrimFunc):
        return WholeFunction(x)
    prims = list(lower(x).prims.values())
    if len(prims) != 1:
        raise UserError(
            f"alternative: wanted a module that lowers to one tensor function, found {len(prims)}: "
            f"{', '.join(p.name for p in prims)}"
        )
    return WholeFunction(prims[0])
