"""Lower a fused function to a library call with kernels before and after it.

The form is an alternative to generated kernels, and measurement chooses between them. The table of routines is in `library_forms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import left_out
from relax_tune.ir.arith.prove import Proof, prove, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bf16, f16, f32, u8
from relax_tune.ir.core.expr import Expr, Load, Var, as_int, const, free_vars, load, mul, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.plain_loops import all_loads, block_loads, plain_blocks
from relax_tune.ir.core.stmt import Block, BufferStore, IterVar
from relax_tune.ir.core.struct_info import CallableInfo, ObjectInfo, TensorInfo
from relax_tune.ir.deduce.pattern_kinds import PatternKind, block_kind, operands
from relax_tune.ir.deduce.relations import differences, solve
from relax_tune.ir.op.base import product
from relax_tune.ir.passes.fusion.symbol_interface import lift_symbols, substitute_symbols
from relax_tune.ir.passes.fusion.unfuse import FunctionStep, step_of
from relax_tune.ir.passes.library.epilogue_match import take_epilogue
from relax_tune.ir.passes.library.library_forms import (
    ALTERNATIVES,
    Alternative,
    MatrixProduct,
    Packing,
    Sizes,
    WholeFunction,
    epilogue_sizes,
)


@dataclass(frozen=True, slots=True, eq=False)
class LibraryCall:
    """The call `routine(buffers, scalars)`; the last buffer is the output."""

    routine: str
    buffers: tuple[Buffer, ...]
    scalars: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LibraryForm:
    """A fused function as a library call.

    Attributes:
        routine: LIBRARY.NAME.
        buffers: Arguments, the output last: parameters of the fused function, `temps` or the packed array.
        scalars: Scalar arguments.
        packing: The call that packs weights, once, when a model is loaded.
        temps: Intermediate buffers, over the symbols of the fused function.
        before: Steps before the call.
        after: Step after the call.
    """

    routine: str
    buffers: tuple[Buffer, ...]
    scalars: tuple[Expr, ...]
    packing: LibraryCall | None = None
    temps: tuple[Buffer, ...] = ()
    before: tuple[FunctionStep, ...] = ()
    after: FunctionStep | None = None


def library_forms(func: PrimFunc, alternatives: Sequence[Alternative] = ALTERNATIVES) -> tuple[LibraryForm, ...]:
    """Return a library form of `func` for each routine that can compute it, in table order.

    A routine whose form raises an error, such as one of another package, is left out with a warning.
    """
    forms = []
    for alternative in alternatives:
        form, takes = None, alternative.takes
        with left_out(f"the library form {alternative.routine}", func.name):
            form = (
                _product_form(func, alternative, takes)
                if isinstance(takes, MatrixProduct)
                else _whole_form(func, alternative, takes)
            )
        if form is not None:
            forms.append(form)
    return tuple(forms)


def _finished(func: PrimFunc, alternative: Alternative, form: LibraryForm, sizes: Sizes) -> LibraryForm | None:
    """Add the scalar arguments and the workspace to a form; None if the condition of the routine cannot be proved."""
    if alternative.needs is not None and prove(alternative.needs(sizes)) is not Proof.YES:
        return None
    form = replace(form, scalars=tuple(sizes[name] for name in alternative.scalars))
    if alternative.workspace is None:
        return form
    space = Buffer(_free_name("workspace", func, form.temps), (simplify(alternative.workspace(sizes)),), u8)
    buffers = (*form.buffers[:-1], space, form.buffers[-1])
    return replace(form, buffers=buffers, temps=(*form.temps, space))


def _free_name(name: str, func: PrimFunc, temps: Sequence[Buffer]) -> str:
    return fresh(name, {x.name for x in (*func.buffers, *func.allocs, *temps)})


def _whole_form(func: PrimFunc, alternative: Alternative, takes: WholeFunction) -> LibraryForm | None:
    """Return the call of the routine if `func` equals the routine's function at the sizes of `func`, else None."""
    pattern = takes.func
    infos = tuple(TensorInfo(b.shape, b.dtype) for b in func.buffers)
    pattern_infos = tuple(TensorInfo(b.shape, b.dtype) for b in pattern.buffers)
    if (
        len(infos) != len(pattern_infos)
        or func.outputs != 1
        or pattern.outputs != 1
        or None in (plain_blocks(func), plain_blocks(pattern))
    ):
        return None
    meaning = solve(CallableInfo(pattern_infos, ObjectInfo()), infos)
    pairs = zip(pattern_infos, infos, strict=True)
    if any(True for expected, actual in pairs for _ in differences(expected, actual, None, meaning)):
        return None
    known = {v: e for v, e in meaning.items() if e is not None}
    if not all(v in known for v in pattern.symbols):
        return None
    if _key(substitute_symbols(pattern, known)) != _key(func):
        return None
    return _finished(
        func, alternative, LibraryForm(alternative.routine, func.buffers, ()), {v.name: e for v, e in known.items()}
    )


def _key(func: PrimFunc) -> str:
    """Return the workload key of a function, ignoring which inputs are weights."""
    return workload_key(replace(lift_symbols(func).func, consts=()))


@dataclass(frozen=True, slots=True)
class _Axes:
    """Iterators of a product by role, each in loop order."""

    batch: tuple[IterVar, ...]
    rows: tuple[IterVar, ...]
    columns: tuple[IterVar, ...]
    inner: tuple[IterVar, ...]


def _product_form(func: PrimFunc, alternative: Alternative, takes: MatrixProduct) -> LibraryForm | None:
    """Split `func` around its one matrix product; None unless it has exactly one, of the kind `takes`.

    A computed operand, or one without a strided layout, is first packed into a temporary. A result without a strided layout is written to
    a temporary and permuted by a step after the call.
    """
    blocks = plain_blocks(func)
    if blocks is None or func.outputs != 1:
        return None
    kinds = [block_kind(b) for b in blocks]
    if kinds.count(PatternKind.OUT_FUSIBLE) != 1:
        return None
    at = kinds.index(PatternKind.OUT_FUSIBLE)
    block, rest = blocks[at], list(blocks[at + 1 :])
    factors = operands(block)
    zero = block.init is not None and block.init.value.value == 0
    sums = f32 if takes.dtype.is_half else takes.dtype
    if at != 0 or factors is None or not zero or block.body.buffer.dtype is not sums:
        return None
    if any(b.is_reduction for b in rest) or any(f.dtype is not sums for f in factors):
        return None
    if takes.dtype.is_half:
        stored = [_widened(f, takes.dtype) for f in factors]
        rounded = _rounded(func, block, rest, takes.dtype)
        if stored[0] is None or stored[1] is None or (rounded is None) is not (takes.writes is f32):
            return None
        factors = (stored[0], stored[1])
        if rounded is not None:
            func, block, rest = rounded
    elif not takes.converts and any(all(_widened(f, half) is not None for f in factors) for half in (f16, bf16)):
        return None
    spatial = [i for i in block.iters if i.kind == "spatial"]
    left, right = (set(free_vars(f)) for f in factors)
    axes = _Axes(
        tuple(i for i in spatial if i.var in left and i.var in right),
        tuple(i for i in spatial if i.var in left and i.var not in right),
        tuple(i for i in spatial if i.var in right and i.var not in left),
        tuple(i for i in block.iters if i.kind == "reduce"),
    )
    # an iterator in neither factor would repeat the product
    if bool(axes.batch) is not takes.batched or any(i.var not in left | right for i in block.iters):
        return None
    target = _strides(load(block.body.buffer, block.body.indices), axes)
    if target is not None and target.unit_rows and not target.unit_columns:
        # C is stored transposed: compute the transposed product, whose rows are contiguous
        factors = (factors[1], factors[0])
        axes = replace(axes, rows=axes.columns, columns=axes.rows)
    return _Splitter(func, block, rest, axes, alternative, takes).split(factors[0], factors[1])


def _widened(factor: Expr, dtype: DType) -> Expr | None:
    """Return the operand of a cast from `dtype`; None for another factor."""
    return factor.args[0] if factor.op == "cast" and factor.args[0].dtype is dtype else None


def _rounded(
    func: PrimFunc, block: Block, rest: Sequence[Block], dtype: DType
) -> tuple[PrimFunc, Block, list[Block]] | None:
    """Store the product as `dtype`; None unless every reader rounds it to `dtype`."""
    wide = block.body.buffer
    narrow = Buffer(wide.name, wide.shape, dtype)

    def use(e: Expr) -> Expr | None:
        if not (e.op == "cast" and e.dtype is dtype):
            return None
        (read,) = e.args
        return load(narrow, read.indices) if isinstance(read, Load) and read.buffer is wide else None

    after = [replace(b, body=replace(b.body, value=transform(b.body.value, use))) for b in rest]
    if wide in func.output_buffers or any(r.buffer is wide for b in after for r in block_loads(b)):
        return None
    allocs = tuple(narrow if a is wide else a for a in func.allocs)
    return replace(func, allocs=allocs), replace(block, body=replace(block.body, buffer=narrow)), after


@dataclass(frozen=True, slots=True)
class _Strides:
    """Strides of one operand in elements, by role of the flattened iterators; None for a role that the operand does not have."""

    batch: Expr | None
    rows: Expr | None
    columns: Expr | None
    inner: Expr | None

    @property
    def unit_rows(self) -> bool:
        return self.rows is None or as_int(self.rows) == 1

    @property
    def unit_columns(self) -> bool:
        return self.columns is None or as_int(self.columns) == 1


def _strides(read: Load, axes: _Axes) -> _Strides | None:
    """Return the strides of a read; None if an index is not an iterator, or if a role cannot be flattened to one stride."""
    shape = read.buffer.shape
    at: dict[Var, Expr] = {}
    for p, index in enumerate(read.indices):
        if index.value == 0:
            continue
        if not isinstance(index, Var) or index in at:
            return None
        at[index] = simplify(product(shape[p + 1 :]))
    strides: list[Expr | None] = []
    for role in (axes.batch, axes.rows, axes.columns, axes.inner):
        have = [i for i in role if i.var in at]
        if not have:
            strides.append(None)
            continue
        if len(have) != len(role):
            return None
        for outer, nested in zip(role, role[1:], strict=False):
            if prove_equal(mul(at[nested.var], nested.extent), at[outer.var]) is not Proof.YES:
                return None
        strides.append(at[role[-1].var])
    return _Strides(*strides)


def _extent(role: Sequence[IterVar]) -> Expr:
    return simplify(product([i.extent for i in role]))


class _Splitter:
    """Builder of one library form."""

    def __init__(
        self,
        func: PrimFunc,
        block: Block,
        rest: Sequence[Block],
        axes: _Axes,
        alternative: Alternative,
        takes: MatrixProduct,
    ) -> None:
        self.func, self.block, self.rest, self.axes = func, block, rest, axes
        self.alternative, self.takes = alternative, takes
        self.temps: list[Buffer] = []
        self.before: list[FunctionStep] = []
        # rounding to 16 bits is part of a call that writes 16 bits, so an epilogue of no operations counts
        least = 0 if takes.writes.is_half else 1
        self.epilogue = (
            take_epilogue(block, rest, takes.allowed_next, self._readable, least)
            if takes.follows or least == 0
            else None
        )

    def split(self, left: Expr, right: Expr) -> LibraryForm | None:
        axes = self.axes
        a, sa = self._operand(left, axes.rows, axes.inner, "a_packed")
        b, sb = self._operand(right, axes.inner, axes.columns, "b_packed")
        c, sc, after = self._result()
        m, n, k = map(_extent, (axes.rows, axes.columns, axes.inner))
        # `_leading` also covers matrices of one row or one column, for which BLAS accepts any leading dim of at least the width
        trans_a, lda = _leading(sa.rows, sa.inner, m, k)
        trans_b, ldb = _leading(sb.inner, sb.columns, k, n)
        _, ldc = _leading(sc.rows, sc.columns, m, n)
        sizes = {"m": m, "n": n, "k": k, "trans_a": const(trans_a), "trans_b": const(trans_b)}
        sizes |= {"lda": lda, "ldb": ldb, "ldc": ldc}
        if axes.batch:
            strides = {"stride_a": sa.batch, "stride_b": sb.batch, "stride_c": sc.batch}
            sizes |= {"batch": _extent(axes.batch), **{x: const(0) if s is None else s for x, s in strides.items()}}
        packing = None
        if self.takes.packing is not None:
            packing = self._packing(self.takes.packing, b, sizes)
            if packing is None:
                return None
            b = packing.buffers[-1]
        sizes |= self._following()
        arrays = () if self.epilogue is None else tuple(r.buffer for r in self.epilogue.arrays)
        form = LibraryForm(
            self.alternative.routine, (a, b, *arrays, c), (), packing, tuple(self.temps), tuple(self.before), after
        )
        return _finished(self.func, self.alternative, form, sizes)

    def _packing(self, packing: Packing, b: Buffer, sizes: Sizes) -> LibraryCall | None:
        """Return the call that packs the second operand; None unless it is a weight of constant sizes."""
        scalars = tuple(simplify(sizes[name]) for name in packing.scalars)
        if b not in self.func.consts or any(as_int(s) is None for s in scalars):
            return None
        name = _free_name("b_packed", self.func, self.temps)
        packed = Buffer(name, (simplify(packing.elements(sizes)),), b.dtype)
        return LibraryCall(packing.routine, (b, packed), scalars)

    def _readable(self, operation: str, read: Load) -> bool:
        """Return whether an epilogue operation can read an array: it is strided, and has the roles of the operation."""
        strides = _strides(read, self.axes)
        if read.dtype is not self.takes.writes or strides is None:
            return False
        if operation not in ("bias", "residual"):
            return True
        roles = [s is not None for s in (strides.batch, strides.rows)]
        expected = [bool(self.axes.batch), bool(self.axes.rows)] if operation == "residual" else [False, False]
        return strides.unit_columns and strides.columns is not None and roles == expected

    def _following(self) -> dict[str, Expr]:
        """Return the sizes that describe the epilogue."""
        sizes: dict[str, Expr] = dict.fromkeys(epilogue_sizes(self.takes), const(0))
        if self.epilogue is None:
            return sizes
        code = sum((self.takes.follows.index(n) + 1) << (4 * i) for i, n in enumerate(self.epilogue.names))
        sizes["follows"] = const(code)
        for i, read in enumerate(self.epilogue.arrays):
            at = _strides(read, self.axes)
            assert at is not None
            named = {f"stride_d{i}": at.batch, f"row_d{i}": at.rows, f"column_d{i}": at.columns}
            sizes |= {name: const(0) if s is None else s for name, s in named.items()}
        return sizes

    def _temp(self, name: str, roles: Sequence[IterVar], dtype: DType) -> Buffer:
        name = _free_name(name, self.func, self.temps)
        buffer = Buffer(name, tuple(i.extent for i in roles), dtype)
        self.temps.append(buffer)
        return buffer

    def _operand(
        self, value: Expr, first: Sequence[IterVar], second: Sequence[IterVar], name: str
    ) -> tuple[Buffer, _Strides]:
        """Return the buffer of an operand and its strides; add a packing step if the routine cannot read it."""
        if isinstance(value, Load):
            strides = _strides(value, self.axes)
            if strides is not None:
                last_stride = strides.inner if second is self.axes.inner else strides.columns
                other = strides.rows if second is self.axes.inner else strides.inner
                readable = (other, last_stride) if self.takes.transposed else (last_stride,)
                if any(s is None or as_int(s) == 1 for s in readable):
                    return value.buffer, strides
        # the contiguous axis of the source is contiguous in the packed array, too, so that packing copies runs of elements
        last = value.indices[-1] if isinstance(value, Load) and value.indices else None
        swapped = self.takes.transposed and any(i.var is last for i in first) and not any(i.var is last for i in second)
        order = (*self.axes.batch, *((*second, *first) if swapped else (*first, *second)))
        packed = self._temp(name, order, self.takes.dtype)
        indices = tuple(i.var for i in order)
        spatial = tuple(IterVar(i.var, i.extent) for i in order)
        pack = Block(f"pack_{name}", spatial, indices, BufferStore(packed, indices, value))
        inputs = tuple(dict.fromkeys(r.buffer for r in all_loads((value,))))
        self.before.append(step_of(self.func, f"{self.func.name}_{name}", [pack], inputs, (packed,)))
        strides = _strides(load(packed, indices), self.axes)
        assert strides is not None
        return packed, strides

    def _result(self) -> tuple[Buffer, _Strides, FunctionStep | None]:
        """Return the buffer that the product writes, its strides, and the step after the call."""
        output = self.func.output_buffers[0]
        target = self.block.body.buffer
        strides = _strides(load(target, self.block.body.indices), self.axes)
        fits = strides is not None and strides.unit_columns
        rest = list(self.rest)
        if self.epilogue is not None:
            rest[0] = self.epilogue.rest
            store = rest[0].body
            output_strides = _strides(load(store.buffer, store.indices), self.axes)
            if (
                self.epilogue.is_complete
                and store.buffer is output
                and output_strides is not None
                and output_strides.unit_columns
            ):
                return output, output_strides, None
        if fits and strides is not None and target is output:
            return output, strides, None
        if fits and strides is not None:
            self.temps.append(target)
            return target, strides, self._after(rest, target, output)
        order = (*self.axes.batch, *self.axes.rows, *self.axes.columns)
        packed = self._temp("c_packed", order, self.takes.writes)
        spatial = tuple(i for i in self.block.iters if i.kind == "spatial")
        copy = Block(
            "unpack",
            spatial,
            tuple(i.var for i in spatial),
            BufferStore(target, self.block.body.indices, load(packed, tuple(i.var for i in order))),
        )
        strides = _strides(load(packed, tuple(i.var for i in order)), self.axes)
        assert strides is not None
        return packed, strides, self._after([copy, *rest], packed, output)

    def _after(self, blocks: Sequence[Block], source: Buffer, output: Buffer) -> FunctionStep:
        written = {b.body.buffer for b in blocks}
        read = dict.fromkeys(x.buffer for b in blocks for x in block_loads(b))
        inputs = (source, *(r for r in read if r is not source and r not in written))
        return step_of(self.func, f"{self.func.name}_after", blocks, inputs, (output,))


def _leading(outer: Expr | None, inner: Expr | None, height: Expr, width: Expr) -> tuple[int, Expr]:
    """Return (transposed, leading dim) of a `height` x `width` matrix with these strides. At least one of them is 1.

    If both are 1, the matrix has one row or one column, and the leading dim `width` is correct for either.
    """
    if inner is None or as_int(inner) == 1:
        return 0, width if outer is None or as_int(outer) == 1 else outer
    return 1, height if as_int(inner) is None and outer is None else inner
