"""Fast reference results in NumPy: operators by their own definition, unscheduled tensor functions block by block.

Floats are float64 throughout, rounded to the type only for 16-bit types, so kernels are compared against exact results.
The interpreter (`ir/interp/interp.py`) is the oracle, element by element; this serves sizes at which it would take minutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from relax_tune.ir.op.math.erf import erf

Array = NDArray[Any]
Symbols = Mapping[Var, int]

# Points of an elementwise block, or of a reduction that is no product, evaluated at a time.
CHUNK = 4 << 20


def size_of(e: Expr, symbols: Symbols) -> int:
    """Return the value of a dim. Raises VerifyError for a symbol without one."""
    found = as_int(substitute(e, {v: const(n) for v, n in symbols.items()}))
    if found is None:
        raise VerifyError(f"wanted a value for every symbol of {e!r}, found {[v.name for v in symbols]}")
    return found


def evaluate_prim(
    func: PrimFunc, inputs: Sequence[Array], scalars: Sequence[int] = (), outs: Sequence[tuple[int, ...]] = ()
) -> tuple[Array, ...]:
    """Return the outputs of an unscheduled tensor function, floats as float64.

    outs: the outputs' shapes, for symbols that no input has.

    Raises: UserError for arrays that do not fit, VerifyError for a function that is scheduled or reads unwritten
    elements.
    """
    blocks = plain_blocks(func)
    if blocks is None:
        raise VerifyError(f"{func.name}: wanted an unscheduled function of plain loops, found a scheduled one")
    if len(inputs) != len(func.input_buffers) or len(scalars) != len(func.scalar_params):
        raise UserError(
            f"{func.name}: wanted {len(func.input_buffers)} arrays and {len(func.scalar_params)} scalars, "
            f"found {len(inputs)} and {len(scalars)}"
        )
    symbols: dict[Var, int] = dict(zip(func.scalar_params, scalars, strict=True))
    stored: dict[Buffer, Array] = {}
    for buffer, array in zip(func.input_buffers, inputs, strict=True):
        _bind(func.name, buffer.name, buffer.shape, array, symbols)
        stored[buffer] = _wide(array)
    for buffer, shape in zip(func.output_buffers, outs, strict=False):
        symbols |= {d: n for d, n in zip(buffer.shape, shape, strict=True) if isinstance(d, Var) and d not in symbols}
    for buffer, array in zip(func.input_buffers, inputs, strict=True):
        wanted = tuple(size_of(d, symbols) for d in buffer.shape)
        if array.shape != wanted:
            raise UserError(f"{func.name}: {buffer.name}: wanted shape {wanted}, found {array.shape}")
    for block in blocks:
        _Block(block, symbols, stored).run()
    return tuple(stored[b] for b in func.output_buffers)


def _wide(a: Array) -> Array:
    return a.astype(np.float64) if is_floating(a.dtype) and a.dtype != np.float64 else a


def _bind(where: str, name: str, dims: Sequence[Expr], array: Array, symbols: dict[Var, int]) -> None:
    if array.ndim != len(dims):
        raise UserError(f"{where}: {name}: wanted {len(dims)} dims, found shape {array.shape}")
    for d, n in zip(dims, array.shape, strict=True):
        if isinstance(d, Var) and symbols.setdefault(d, n) != n:
            raise UserError(f"{where}: {name}: wanted {d.name} = {symbols[d]}, found {n}")


class _Block:
    """One plain block over all its points at once. Axis `p` of every array is iterator `p`, of size 1 where unused."""

    def __init__(self, block: Block, symbols: Symbols, stored: dict[Buffer, Array]) -> None:
        self.block, self.symbols, self.stored = block, symbols, stored
        self.axes = {i.var: p for p, i in enumerate(block.iters)}
        self.whole = tuple(size_of(i.extent, symbols) for i in block.iters)
        self.extents, self.low = self.whole, 0  # extents and start of the evaluated part of the first iterator
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
        dtype = np.float64 if target.dtype.is_float else target.dtype.numpy
        if covers:
            out = np.empty(shape, dtype)
        elif target in self.stored:
            out = self.stored[target]
        else:  # elements no block writes are not numbers
            out = np.full(shape, np.nan if target.dtype.is_float else 0, dtype)
        for low, high in self._windows():
            self.low = low
            self.extents = (high - low, *self.whole[1:]) if self.whole else ()
            part = tuple(n if kind == "spatial" else 1 for n, kind in zip(self.extents, kinds, strict=True))
            value = np.broadcast_to(
                self._reduced() if self.block.is_reduction else self._value(self.block.body.value), part
            )
            if covers:
                slot = tuple(slice(low, high) if p == 0 else slice(None) for p in order)
                out[slot] = np.transpose(value, order + rest).reshape([part[p] for p in order])
            else:
                out[tuple(np.broadcast_to(self._value(i), part) for i in indices)] = value
        self.stored[target] = _held(out, target.dtype)

    def _windows(self) -> list[tuple[int, int]]:
        """Return the ranges of the first iterator whose evaluation makes arrays of at most `CHUNK` elements.

        Values that do not depend on the first iterator do not count, since each range evaluates them anew.
        """
        first = self.whole[0] if self.whole else 1
        position = None if self.scan is None else self.scan.position
        if not self.whole or self.block.iters[0].kind == "reduce" or self.block.iters[0] is position:
            return [(0, first)]
        value = self.block.body.value if self.scan is None else self.scan.term
        step = accumulated(self.block) if self.block.is_reduction and self.scan is None else None
        parts = step.args if step is not None and (value.op, step.op) == ("add", "mul") else (value,)
        spread = [{v for v in free_vars(part) if v in self.axes} for part in parts]
        spread.append({i.var for i in self.block.iters if i.kind == "spatial" and i is not position})
        moving = [found for found in spread if self.block.iters[0].var in found]
        most = max(math.prod(self.whole[self.axes[v]] for v in found if self.axes[v] > 0) for found in moving)
        width = max(1, CHUNK // max(1, most))
        return [(low, min(first, low + width)) for low in range(0, first, width)]

    def _reduced(self) -> Array:
        if self.scan is not None:
            return self._scanned(self.scan)
        step, op = accumulated(self.block), self.block.body.value
        if step is None or self.block.init is None:
            raise VerifyError(f"block {self.block.name}: wanted a sum, product, max or min, found {op!r}")
        start = self._value(self.block.init.value)
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

    def _scanned(self, scan: ScanPattern) -> Array:
        """Accumulate along the steps, whose results are those of the positions: the work of a scan, not of its reductions."""
        step, position = self.axes[scan.step.var], self.axes[scan.position.var]
        shape = [1 if p == position else n for p, n in enumerate(self.extents)]
        terms = np.broadcast_to(self._value(scan.term), shape)
        start = np.broadcast_to(self._value(scan.neutral), [1 if p == step else n for p, n in enumerate(shape)])
        terms = np.flip(terms, step) if scan.reverse else terms
        accumulate: Any = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[scan.operation]
        with np.errstate(all="ignore"):
            found = accumulate.accumulate(np.concatenate((start, terms), step), step, dtype=terms.dtype)
        # the first is that of no terms, the last that of all
        found = np.split(found, [-1] if scan.exclusive else [1], step)[0 if scan.exclusive else 1]
        return np.swapaxes(np.flip(found, step) if scan.reverse else found, step, position)

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
            case Var() if e not in self.axes:
                return np.asarray(self.symbols[e])
            case Var():
                p = self.axes[e]
                low = self.low if p == 0 else 0
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
            found = np.asarray(_EVALUATE[e.op](*args))
            return found.astype(e.dtype.numpy, copy=False) if e.dtype.is_int else found

    def _load(self, e: Load, args: Sequence[Array]) -> Array:
        if e.buffer not in self.stored:
            raise VerifyError(f"block {self.block.name}: wanted {e.buffer.name} written before it is read")
        array = self.stored[e.buffer]
        where = [self.axes.get(i) if isinstance(i, Var) else None for i in e.indices]
        plain = None not in where and len(set(where)) == len(where)
        if plain and all(array.shape[d] == self.whole[p] for d, p in enumerate(where) if p is not None):
            part = array[tuple(slice(self.low, self.low + self.extents[0]) if p == 0 else slice(None) for p in where)]
            order = np.argsort([p for p in where if p is not None])
            shape = [1] * len(self.extents)
            for d, p in enumerate(where):
                shape[p if p is not None else 0] = part.shape[d]
            return np.transpose(part, order).reshape(shape)
        if not args:
            return array
        # both sides of a select are evaluated: what the side not chosen reads is kept inside the array
        inside = [np.clip(a, 0, max(n - 1, 0)) for a, n in zip(args, array.shape, strict=True)]
        if array.size == 0:
            return np.zeros(np.broadcast_shapes(*(np.shape(a) for a in inside)), array.dtype)
        return np.asarray(array[tuple(inside)])


def _cast(a: Array, e: Expr) -> Array:
    if e.dtype.is_float:
        return _held(a.astype(np.float64, copy=False), e.dtype)
    return np.asarray(converted(a, e.dtype))


def _held(a: Array, dtype: DType) -> Array:
    """Round float64 values to a type of at most 16 bits; wider types stay float64."""
    with np.errstate(over="ignore"):
        return np.asarray(converted(a, dtype)).astype(np.float64) if dtype.is_packed and dtype.is_float else a


# the error function by rational approximation: the table's own goes element by element
_EVALUATE: Mapping[str, Any] = {o.name: o.evaluate for o in SCALAR_OPS.values() if o.evaluate} | {"erf": erf}


def evaluate_function(module: IRModule, inputs: Sequence[Array], name: str = "main", double: bool = True) -> Any:
    """Run a graph function: operators by `evaluate`, `call_tir` by `evaluate_prim`. Library calls are not run.

    double: floats as float64 throughout. Returns an array or a tuple of arrays.
    Raises: UserError for arrays that do not fit the parameters."""
    func = module.functions[name]
    if not isinstance(func, Function):
        raise UserError(f"wanted a graph function called {name!r}, found {type(func).__name__}")
    if len(inputs) != len(func.params):
        raise UserError(f"{name}: wanted {len(func.params)} arrays, found {len(inputs)}")
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
        raise UserError(f"wanted a value this reference can compute, found {what}")

    def numbers(self) -> dict[Var, Expr]:
        return {s: const(n) for s, n in self.symbols.items()}
