"""Fast reference results in NumPy: operators by `evaluate`, unscheduled tensor functions block by block.

Floats are float64 throughout, rounded to the type only for 16-bit types, so kernels are compared against exact results.
The interpreter (`ir/interp/interp.py`) is the oracle, element by element; this module is for sizes at which it would take minutes.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError, VerifyError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, is_floating
from relax_tune.ir.core.expr import Const, Expr, Load, Var, as_int, const, free_vars, postorder, substitute
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import (
    Call,
    CallDPSLibrary,
    CallTIR,
    Constant,
    Function,
    GVar,
    PrimValue,
    ShapeValue,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.core.plain_loops import plain_blocks
from relax_tune.ir.core.scalar_ops import SCALAR_OPS, converted, reinterpreted
from relax_tune.ir.core.stmt import Block
from relax_tune.ir.core.struct_info import ShapeInfo, TensorInfo
from relax_tune.ir.deduce.pattern_kinds import ScanPattern, accumulated, prefix_scan
from relax_tune.ir.op.base import OperatorSpec

Array = NDArray[Any]
Symbols = Mapping[Var, int]

PRODUCT_CHUNK = 4 << 20
"""Elements evaluated at a time of a product that is summed, of a scan, and of a reduction that runs step by step."""
CHUNK = 1 << 16
"""The same of other blocks, whose intermediate arrays then stay in the processor's caches."""


def size_of(e: Expr, symbols: Symbols) -> int:
    """Return the value of a dim.

    Raises:
        VerifyError: a symbol has no value.
    """
    size = as_int(substitute(e, {v: const(n) for v, n in symbols.items()}))
    if size is None:
        raise VerifyError(f"expected a value for every symbol of {e!r}, got {[v.name for v in symbols]}")
    return size


def evaluate_prim(
    func: PrimFunc, inputs: Sequence[Array], scalars: Sequence[int] = (), outs: Sequence[tuple[int, ...]] = ()
) -> tuple[Array, ...]:
    """Return the outputs of an unscheduled tensor function, floats as float64.

    Args:
        outs: the outputs' shapes, for symbols that no input has.

    Raises:
        UserError: arrays that do not fit.
        VerifyError: a function that is scheduled or reads unwritten elements.
    """
    blocks = plain_blocks(func)
    if blocks is None:
        raise VerifyError(f"{func.name}: expected an unscheduled function of plain loops, got a scheduled one")
    if len(inputs) != len(func.input_buffers) or len(scalars) != len(func.scalar_params):
        raise UserError(
            f"{func.name}: expected {len(func.input_buffers)} arrays and {len(func.scalar_params)} scalars, "
            f"got {len(inputs)} and {len(scalars)}"
        )
    symbols: dict[Var, int] = dict(zip(func.scalar_params, scalars, strict=True))
    stored: dict[Buffer, Array] = {}
    for buffer, array in zip(func.input_buffers, inputs, strict=True):
        _bind(func.name, buffer.name, buffer.shape, array, symbols)
        stored[buffer] = _wide(array)
    for buffer, shape in zip(func.output_buffers, outs, strict=False):
        symbols |= {d: n for d, n in zip(buffer.shape, shape, strict=True) if isinstance(d, Var) and d not in symbols}
    for buffer, array in zip(func.input_buffers, inputs, strict=True):
        expected = tuple(size_of(d, symbols) for d in buffer.shape)
        if array.shape != expected:
            raise UserError(f"{func.name}: {buffer.name}: expected shape {expected}, got {array.shape}")
    for block in blocks:
        BlockEvaluator(block, symbols, stored).run()
    return tuple(stored[b] for b in func.output_buffers)


def _wide(a: Array) -> Array:
    return a.astype(np.float64) if is_floating(a.dtype) and a.dtype != np.float64 else a


def _bind(where: str, name: str, dims: Sequence[Expr], array: Array, symbols: dict[Var, int]) -> None:
    if array.ndim != len(dims):
        raise UserError(f"{where}: {name}: expected {len(dims)} dims, got shape {array.shape}")
    for d, n in zip(dims, array.shape, strict=True):
        if isinstance(d, Var) and symbols.setdefault(d, n) != n:
            raise UserError(f"{where}: {name}: expected {d.name} = {symbols[d]}, got {n}")


class BlockEvaluator:
    """One plain block over all its points at once. Axis `p` of every array is iterator `p`, of size 1 where unused."""

    def __init__(self, block: Block, symbols: Symbols, stored: dict[Buffer, Array]) -> None:
        self.block, self.symbols, self.stored = block, symbols, stored
        self.axes = {i.var: p for p, i in enumerate(block.iters)}
        self.whole = tuple(size_of(i.extent, symbols) for i in block.iters)
        # the blocks of one image begin with an iterator of one value
        self.cut = next((p for p, n in enumerate(self.whole) if n > 1), 0)  # the iterator that is evaluated in parts
        self.extents, self.low = self.whole, 0  # extents, and start of the evaluated part
        self.fixed: dict[Var, int] = {}  # reduction iterators while a reduction runs step by step
        scan = prefix_scan(block)
        if scan is not None and self.whole[self.axes[scan.position.var]] != self.whole[self.axes[scan.step.var]]:
            scan = None
        self.scan = scan

    def run(self) -> None:
        target, kinds = self.block.body.buffer, [i.kind for i in self.block.iters]
        shape = tuple(size_of(d, self.symbols) for d in target.shape)
        indices = self.block.body.indices
        where = [self.axes.get(i) if isinstance(i, Var) else None for i in indices]
        order = [p for p in where if p is not None]
        rest = [p for p in range(len(kinds)) if p not in order]
        covers = len(set(order)) == len(where) and tuple(self.whole[p] for p in order) == shape
        covers = covers and all(kinds[p] == "reduce" or self.whole[p] == 1 for p in rest)
        out = self._initial(target, shape, covers)
        for low, high in self._windows():
            self.low = low
            self.extents = tuple(high - low if p == self.cut else n for p, n in enumerate(self.whole))
            part = tuple(n if kind == "spatial" else 1 for n, kind in zip(self.extents, kinds, strict=True))
            value = np.broadcast_to(self._result(), part)
            if covers:
                slot = tuple(slice(low, high) if p == self.cut else slice(None) for p in order)
                out[slot] = np.transpose(value, order + rest).reshape([part[p] for p in order])
            else:
                out[tuple(np.broadcast_to(self._value(i), part) for i in indices)] = value
        self._keep(target, out)

    def _initial(self, target: Buffer, shape: tuple[int, ...], covers: bool) -> Array:
        """Return the array that the block writes. covers: whether it writes every element"""
        dtype = np.float64 if target.dtype.is_float else target.dtype.numpy
        if not covers and target in self.stored:
            return self.stored[target]
        # elements that no block writes are NaN
        return np.empty(shape, dtype) if covers else np.full(shape, np.nan if target.dtype.is_float else 0, dtype)

    def _result(self) -> Array:
        """Return what the block stores for the present part."""
        return self._reduced() if self.block.is_reduction else self._value(self.block.body.value)

    def _keep(self, target: Buffer, out: Array) -> None:
        self.stored[target] = _stored_value(out, target.dtype)

    def _windows(self) -> list[tuple[int, int]]:
        """Return the parts of an iterator whose evaluation makes arrays of few elements (`CHUNK`, `PRODUCT_CHUNK`).

        Values that do not depend on the iterator do not count, since each part evaluates them again.
        """
        if not self.whole:
            return [(0, 1)]
        extent, cut = self.whole[self.cut], self.block.iters[self.cut]
        position = None if self.scan is None else self.scan.position
        if cut.kind == "reduce" or cut is position:
            return [(0, extent)]
        value = self.block.body.value if self.scan is None else self.scan.term
        step = accumulated(self.block) if self.block.is_reduction and self.scan is None else None
        product = step is not None and (value.op, step.op) == ("add", "mul")
        parts = step.args if step is not None and product else (value,)
        spread = [{v for v in free_vars(part) if v in self.axes} for part in parts]
        spread.append({i.var for i in self.block.iters if i.kind == "spatial" and i is not position})
        moving = [variables for variables in spread if cut.var in variables]
        most = max(math.prod(self.whole[self.axes[v]] for v in variables if v is not cut.var) for variables in moving)
        small = not self.block.is_reduction or (step is not None and not product)
        width = max(1, (CHUNK if small else PRODUCT_CHUNK) // max(1, most))
        return [(low, min(extent, low + width)) for low in range(0, extent, width)]

    def _reduced(self) -> Array:
        if self.scan is not None:
            return self._scanned(self.scan)
        step, op = accumulated(self.block), self.block.body.value
        if self.block.init is None:
            raise VerifyError(f"block {self.block.name}: expected a reduction with a first value, got {op!r}")
        start = self._value(self.block.init.value)
        if step is None:
            for _ in self._steps():
                self._hold(self.stored, start)
                start = self._value(op)
            return start
        axes = tuple(p for p, i in enumerate(self.block.iters) if i.kind == "reduce")
        if op.op == "add":
            if step.op == "mul":
                return np.asarray(start + self._contract(self._value(step.args[0]), self._value(step.args[1]), axes))
            value = np.asarray(self._value(step))
            value = value.reshape(value.shape or (1,) * len(self.extents))
            stretched = [self.extents[a] for a in axes if value.shape[a] != self.extents[a]]
            return np.asarray(start + value.sum(axis=axes, keepdims=True) * int(np.prod(stretched, dtype=np.int64)))
        full = np.broadcast_to(self._value(step), self.extents)
        reduce: Any = {"max": np.max, "min": np.min, "mul": np.prod}[op.op]
        return np.asarray(reduce(full, axis=axes, keepdims=True, initial=start.reshape(-1)[0]))

    def _part_of(self, axis: int | None) -> slice:
        """Return the present part of an iterator."""
        return slice(self.low, self.low + self.extents[self.cut]) if axis == self.cut else slice(None)

    def _steps(self) -> Iterator[None]:
        """Fix the reduction iterators at each of their points, in order."""
        steps = [i.var for i in self.block.iters if i.kind == "reduce"]
        for point in np.ndindex(*(self.whole[self.axes[v]] for v in steps)):
            self.fixed = dict(zip(steps, point, strict=True))
            yield
        self.fixed = {}

    def _hold(self, table: dict[Buffer, Array], partial: Array) -> None:
        """Store the results of the present part after some steps, for a next step that reads them at its own point."""
        places = [self.axes[i.var] for i in self.block.iters if i.kind == "spatial"]
        if [self.axes.get(i) if isinstance(i, Var) else None for i in self.block.body.indices] != places:
            raise VerifyError(f"block {self.block.name}: expected results at its iterators, got {self.block.body!r}")
        part = [self.extents[p] if p in places else 1 for p in range(len(self.extents))]
        full = np.zeros([self.whole[p] for p in places], partial.dtype)
        slot = tuple(self._part_of(p) for p in places)
        full[slot] = np.broadcast_to(partial, part).reshape([part[p] for p in places])
        table[self.block.body.buffer] = full

    def _scanned(self, scan: ScanPattern) -> Array:
        """Accumulate along the steps; partial results are the results of the positions (O(n) work, not O(n^2) as reductions)."""
        return self._accumulated(scan, self._value(scan.term), self._value(scan.neutral), scan.operation)

    def _accumulated(self, scan: ScanPattern, term: Array, neutral: Array, operation: str) -> Array:
        step, position = self.axes[scan.step.var], self.axes[scan.position.var]
        shape = [1 if p == position else n for p, n in enumerate(self.extents)]
        terms = np.broadcast_to(term, shape)
        start = np.broadcast_to(neutral, [1 if p == step else n for p, n in enumerate(shape)])
        terms = np.flip(terms, step) if scan.reverse else terms
        accumulate: Any = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[operation]
        with np.errstate(all="ignore"):
            sums = accumulate.accumulate(np.concatenate((start, terms), step), step, dtype=terms.dtype)
        # the first sum has no terms, the last one all
        sums = np.split(sums, [-1] if scan.exclusive else [1], step)[0 if scan.exclusive else 1]
        return np.swapaxes(np.flip(sums, step) if scan.reverse else sums, step, position)

    def _contract(self, left: Array, right: Array, axes: tuple[int, ...]) -> Array:
        """Sum a product over `axes` as one batched matrix product."""
        n = len(self.extents)
        left, right = (
            np.asarray(a).reshape((1,) * (n - np.asarray(a).ndim) + np.asarray(a).shape) for a in (left, right)
        )
        for a in axes:  # a factor that does not vary along a summed axis is repeated along it
            if left.shape[a] != self.extents[a]:
                left = np.repeat(left, self.extents[a], a)
            if right.shape[a] != self.extents[a]:
                right = np.repeat(right, self.extents[a], a)
        both = [p for p in range(n) if p not in axes and left.shape[p] == right.shape[p]]
        rows = [p for p in range(n) if p not in axes and p not in both and right.shape[p] == 1]
        columns = [p for p in range(n) if p not in axes and p not in both and p not in rows]

        def matrix(a: Array, order: Sequence[Sequence[int]]) -> Array:
            flat = [p for g in order for p in g]
            rest = [p for p in range(n) if p not in flat]
            sizes = [int(np.prod([a.shape[p] for p in g], dtype=np.int64)) for g in order]
            return np.transpose(a, flat + rest).reshape(sizes)

        product = np.matmul(matrix(left, (both, rows, axes)), matrix(right, (both, axes, columns)))
        shape = [left.shape[p] for p in both + rows] + [right.shape[p] for p in columns]
        flat = product.reshape(shape + [1] * len(axes))
        return np.transpose(flat, np.argsort([*both, *rows, *columns, *axes]))

    def _value(self, root: Expr) -> Array:
        done: dict[Expr, Array] = {}
        for node in postorder((root,)):
            done[node] = self._node(node, [done[c] for c in node.children])
        return done[root]

    def _node(self, e: Expr, args: Sequence[Array]) -> Array:
        match e:
            case Const(value=value):
                return np.asarray(value, e.dtype.numpy if e.dtype.is_int else None)
            case Var() if e in self.fixed:
                return np.asarray(self.fixed[e])
            case Var() if e not in self.axes:
                return np.asarray(self.symbols[e])
            case Var():
                p = self.axes[e]
                low = self.low if p == self.cut else 0
                spread = [-1 if q == p else 1 for q in range(len(self.extents))]
                return np.arange(low, low + self.extents[p]).reshape(spread)
            case Load():
                return self._load(e, args)
        if e.op == "cast":
            return _cast(args[0], e)
        if e.op == "bitcast":
            with np.errstate(over="ignore"):
                bits = np.asarray(reinterpreted(args[0], e.args[0].dtype, e.dtype))
            return bits.astype(np.float64) if e.dtype.is_float else bits
        with np.errstate(all="ignore"):
            computed = np.asarray(_EVALUATE[e.op](*args))
            return computed.astype(e.dtype.numpy, copy=False) if e.dtype.is_int else computed

    def _load(self, e: Load, args: Sequence[Array]) -> Array:
        if e.buffer not in self.stored:
            raise VerifyError(f"block {self.block.name}: expected {e.buffer.name} written before it is read")
        return self._read(e, self.stored[e.buffer], args)

    def _read(self, e: Load, array: Array, args: Sequence[Array]) -> Array:
        """Return the elements of an array that a load reads."""
        where = [self.axes.get(i) if isinstance(i, Var) and i not in self.fixed else None for i in e.indices]
        plain = None not in where and len(set(where)) == len(where)
        if plain and all(array.shape[d] == self.whole[p] for d, p in enumerate(where) if p is not None):
            part = array[tuple(self._part_of(p) for p in where)]
            order = np.argsort([p for p in where if p is not None])
            shape = [1] * len(self.extents)
            for d, p in enumerate(where):
                shape[p if p is not None else 0] = part.shape[d]
            return np.transpose(part, order).reshape(shape)
        if not args:
            return array
        # both sides of a select are evaluated: indices of the side not chosen are clamped into the array
        inside = [np.clip(a, 0, max(n - 1, 0)) for a, n in zip(args, array.shape, strict=True)]
        if array.size == 0:
            return np.zeros(np.broadcast_shapes(*(np.shape(a) for a in inside)), array.dtype)
        return np.asarray(array[tuple(inside)])


def _cast(a: Array, e: Expr) -> Array:
    if e.dtype.is_float:
        return _stored_value(a.astype(np.float64, copy=False), e.dtype)
    return np.asarray(converted(a, e.dtype))


def _stored_value(a: Array, dtype: DType) -> Array:
    """Round float64 values to a type of at most 16 bits; wider types stay float64."""
    with np.errstate(over="ignore"):
        return np.asarray(converted(a, dtype)).astype(np.float64) if dtype.is_packed and dtype.is_float else a


_EVALUATE: Mapping[str, Any] = {o.name: o.evaluate for o in SCALAR_OPS.values() if o.evaluate}


def evaluate_function(module: IRModule, inputs: Sequence[Array], name: str = "main", double: bool = True) -> Any:
    """Run a graph function: operators by `evaluate`, `call_tir` by `evaluate_prim`. Library calls are not run.

    Args:
        double: floats as float64 throughout. Returns an array or a tuple of arrays.

    Raises:
        UserError: arrays that do not fit the parameters.
    """
    func = module.functions[name]
    if not isinstance(func, Function):
        raise UserError(f"expected a graph function called {name!r}, got {type(func).__name__}")
    if len(inputs) != len(func.params):
        raise UserError(f"{name}: expected {len(func.params)} arrays, got {len(inputs)}")
    run = _Graph(module, double)
    for param, array in zip(func.params, inputs, strict=True):
        run.bind(name, param, array)
        run.values[param] = _wide(array) if double else array
    for binding in func.bindings:
        run.values[binding.var] = run.value(binding.value)
        if isinstance(binding.var.info, ShapeInfo):
            dims = zip(binding.var.info.values or (), run.values[binding.var])
            run.symbols = {d: n for d, n in dims if isinstance(d, Var)} | run.symbols
        if not isinstance(run.values[binding.var], tuple):
            run.bind(name, binding.var, run.values[binding.var])
    return run.value(func.ret)


class _Graph:
    def __init__(self, module: IRModule, double: bool) -> None:
        self.module, self.double = module, double
        self.values: dict[GVar, Any] = {}
        self.symbols: dict[Var, int] = {}

    def bind(self, where: str, var: GVar, array: Array) -> None:
        if isinstance(var.info, TensorInfo) and var.info.shape is not None:
            _bind(where, var.name, var.info.shape, array, self.symbols)

    def value(self, v: Value) -> Any:
        match v:
            case GVar():
                return self.values[v]
            case Constant(name):
                return _wide(self.module.constants[name]) if self.double else self.module.constants[name]
            case TupleValue(parts):
                return tuple(map(self.value, parts))
            case TupleItem(whole, index):
                return self.value(whole)[index]
            case ShapeValue(dims):
                return tuple(size_of(d, self.symbols) for d in dims)
            case PrimValue(scalar):
                return substitute(scalar, self.numbers()).value
            case Call(OperatorSpec() as operator, args):
                return operator.substituted(self.numbers()).evaluate([self.value(a) for a in args])
            case CallTIR(callee, args, out):
                scalars = [size_of(s, self.symbols) for s in v.scalars]
                shapes = [tuple(size_of(d, self.symbols) for d in o.shape or ()) for o in out]
                outs = evaluate_prim(self.module.prim(callee), [self.value(a) for a in args], scalars, shapes)
                if not self.double:
                    outs = tuple(o.astype(i.dtype.numpy) if i.dtype else o for o, i in zip(outs, out, strict=True))
                return outs[0] if len(outs) == 1 else outs
        what = f"library routine {v.routine}" if isinstance(v, CallDPSLibrary) else repr(v)
        raise UserError(f"expected a value this reference can compute, got {what}")

    def numbers(self) -> dict[Var, Expr]:
        return {s: const(n) for s, n in self.symbols.items()}
