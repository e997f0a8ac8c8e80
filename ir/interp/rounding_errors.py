"""Bounds of the rounding errors of a tensor function, by which a correct kernel may differ from the reference.

Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.3): each operation adds its own
rounding to what its operands' errors cause. The latter is evaluated at operands moved by their errors. So a cast to an integer has an error
of 1 next to a tie, otherwise 0. An error is a complex number: its real part is how much too low a
value may be, its imaginary part how much too high.

Tests: `tests/tuner/task/test_rounding_errors.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import VerifyError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Const, Expr, Load, Var, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.plain_loops import plain_blocks
from relax_tune.ir.core.scalar_ops import MATH
from relax_tune.ir.core.stmt import Block
from relax_tune.ir.deduce.pattern_kinds import accumulated
from relax_tune.ir.interp.reference import Array, BlockEvaluator, size_of

Errors = NDArray[np.complex128]
NONE, HUGE = np.zeros(1, np.complex128), 1e300

# Roundings of one operation, in units of half an epsilon: several kernels compute a value in different ways, functions by polynomials.
ARITHMETIC, FUNCTION = 4, 16
EXACT_OPS = frozenset({"min", "max", "select", "abs", "floor", "ceil", "rint", "and", "or", "not", "bitcast"})
COMPARISONS = frozenset({"lt", "le", "eq", "ne"})


def rounding_errors(
    func: PrimFunc, inputs: Sequence[Array], symbols: Mapping[Var, int]
) -> tuple[NDArray[np.float64], ...]:
    """Return the largest error that a correct kernel is expected to have in each element of the outputs.

    Args:
        symbols: a value for each symbol.

    Raises:
        VerifyError: as `evaluate_prim`.
    """
    blocks = plain_blocks(func)
    if blocks is None:
        raise VerifyError(f"{func.name}: expected an unscheduled function of plain loops, got a scheduled one")
    stored: dict[Buffer, Array] = {b: _wide(a) for b, a in zip(func.input_buffers, inputs, strict=True)}
    errors: dict[Buffer, Errors] = {b: np.zeros((1,) * a.ndim, np.complex128) for b, a in stored.items()}
    for block in blocks:
        ErrorEvaluator(block, symbols, stored, errors).run()
        BlockEvaluator(block, symbols, stored).run()
    bounds = ((errors[b], [size_of(d, symbols) for d in b.shape]) for b in func.output_buffers)
    return tuple(np.broadcast_to(np.maximum(e.real, e.imag), shape).copy() for e, shape in bounds)


def _wide(a: Array) -> Array:
    return a.astype(np.float64) if a.dtype.kind not in "biu" else a


class ErrorEvaluator(BlockEvaluator):
    """The errors of what one block stores, from the values and the errors of what it loads."""

    def __init__(
        self, block: Block, symbols: Mapping[Var, int], stored: dict[Buffer, Array], errors: dict[Buffer, Errors]
    ) -> None:
        super().__init__(block, symbols, dict(stored))  # partial results of a reduction by steps stay its own
        self.errors = errors

    def _initial(self, target: Buffer, shape: tuple[int, ...], covers: bool) -> Array:
        if not covers and target in self.errors:
            return np.broadcast_to(self.errors[target], shape).copy()
        return np.zeros(shape, np.complex128)

    def _keep(self, target: Buffer, out: Array) -> None:
        self.errors[target] = out

    def _result(self) -> Array:
        if not self.block.is_reduction:
            return self._pair(self.block.body.value)[1]
        dtype = self.block.body.buffer.dtype
        steps = math.prod(n for n, i in zip(self.whole, self.block.iters) if i.kind == "reduce")
        # roundings of partial sums, which grow with their number where terms have one sign
        operation_error = (ARITHMETIC + math.sqrt(steps)) * _unit(dtype)
        scan = self.scan
        if scan is not None:
            term, error = self._pair(scan.term)
            fold = partial(self._accumulated, scan)
            return _combined(scan.operation, term, error, operation_error, fold, np.abs(self._value(scan.neutral)))
        step, op = accumulated(self.block), self.block.body.value
        if self.block.init is None:
            raise VerifyError(f"block {self.block.name}: expected a reduction with a first value, got {op!r}")
        if step is None:
            value, error = self._pair(self.block.init.value)
            for _ in self._steps():
                self._hold(self.stored, value)
                self._hold(self.errors, error)
                value, error = self._pair(op)
            return error
        axes = tuple(p for p, i in enumerate(self.block.iters) if i.kind == "reduce")
        if op.op == "add" and step.op == "mul":
            return self._contracted(step, axes, operation_error)
        folds: Any = {"add": np.sum, "max": np.max, "mul": np.prod}

        def reduced(x: Array, start: Array, operation: str) -> Array:
            full = np.broadcast_to(x, self.extents)
            return np.asarray(folds[operation](full, axis=axes, keepdims=True, initial=start.reshape(-1)[0]))

        return _combined(op.op, *self._pair(step), operation_error, reduced, np.abs(self._value(self.block.init.value)))

    def _contracted(self, step: Expr, axes: tuple[int, ...], operation_error: float) -> Errors:
        """Return the errors of sums of products."""
        (a, a_error), (b, b_error) = (self._pair(x) for x in step.args)
        a_most, b_most = (np.maximum(e.real, e.imag) for e in (a_error, b_error))
        if not np.any(a_most) and not np.any(b_most) and operation_error == 0:
            return np.zeros((1,) * len(self.extents), np.complex128)
        # |a b - a' b'| <= |a| |b - b'| + |a - a'| |b|, each summed by one matrix product
        left, right = (np.abs(np.asarray(x, np.float64)) for x in (a, b))
        with np.errstate(all="ignore"):
            error = self._contract(left, b_most + (operation_error + _rounding(step)) * right, axes)
            if np.any(a_most):
                error = error + self._contract(np.broadcast_to(a_most, left.shape or (1,)), right, axes)
        return _both(error, error)

    def _pair(self, root: Expr) -> tuple[Array, Errors]:
        """Return the values of an expression and their errors."""
        values: dict[Expr, Array] = {}
        errors: dict[Expr, Errors] = {}
        for node in postorder((root,)):
            args = [np.asarray(values[c]) for c in node.children]
            values[node] = np.asarray(self._node(node, args))
            errors[node] = self._error(node, values[node], args, [errors[c] for c in node.children])
        return values[root], errors[root]

    def _error(self, e: Expr, value: Array, args: Sequence[Array], errors: Sequence[Errors]) -> Errors:
        uncertain = [k for k, x in enumerate(errors) if np.any(x)]
        if isinstance(e, (Const, Var)):
            return NONE
        if isinstance(e, Load):
            return self._load_error(e, args, [errors[k] for k in uncertain])
        if e.op in COMPARISONS and uncertain:
            # a comparison may flip if it does for any combination of operands at the ends of their errors
            ends = [(_moved(a, -x.real), _moved(a, x.imag)) for a, x in zip(args, errors)]
            flips = [np.asarray(self._node(e, pair)) != value for pair in itertools.product(*ends)]
            either = np.any(np.broadcast_arrays(*flips), axis=0).astype(np.float64)
            return _both(either, either)
        size = np.abs(np.asarray(value, np.float64))
        operation_error = _rounding(e) * np.where(np.isfinite(size), size, 0.0)
        below, above = operation_error, operation_error
        # the operation is evaluated at each end of one operand's error at a time: no derivatives, and steps such as casts count
        for k in uncertain:
            low, high = (
                _difference(self._node(e, [_moved(a, by) if j == k else a for j, a in enumerate(args)]), value)
                for by in (-errors[k].real, errors[k].imag)
            )
            below = below + np.maximum(0, np.maximum(-low, -high))
            above = above + np.maximum(0, np.maximum(low, high))
        return _both(below, above)

    def _load_error(self, e: Load, args: Sequence[Array], places: Sequence[Errors]) -> Errors:
        """Return the errors of loaded values. Where the place is uncertain, another element may be read."""
        array, known = self.stored[e.buffer], self.errors[e.buffer]
        error = np.asarray(self._read(e, np.broadcast_to(known, array.shape), args)) if np.any(known) else NONE
        if not places:
            return error
        moved = np.any(np.broadcast_arrays(*(x != 0 for x in places)), axis=0)
        most = 2 * np.max(np.abs(np.asarray(array, np.float64)), initial=0.0)
        return np.asarray(np.where(moved, most + 1j * most, error))


def _combined(
    operation: str,
    term: Array,
    error: Errors,
    operation_error: float,
    fold: Callable[[Array, Array, str], Array],
    start: Array,
) -> Errors:
    """Return the errors of a reduction or scan. `operation_error` is relative to the terms."""
    size, zero = np.abs(np.asarray(term, np.float64)), np.zeros(1)
    with np.errstate(all="ignore"):
        if operation in ("max", "min"):
            return _both(fold(error.real, zero, "max"), fold(error.imag, zero, "max"))
        if operation == "add":
            return _both(*(fold(side + operation_error * size, zero, "add") for side in (error.real, error.imag)))
        whole = fold(size, start.astype(np.float64), "mul")
        most = (
            fold(size + np.maximum(error.real, error.imag), start.astype(np.float64), "mul")
            - whole
            + operation_error * whole
        )
        return _both(most, most)


def _both(below: Array, above: Array) -> Errors:
    """Return errors from how far values may be too low and too high."""
    error = np.zeros(np.broadcast_shapes(np.shape(below), np.shape(above)), np.complex128)
    error.real, error.imag = (
        x if np.isfinite(x).all() else np.nan_to_num(x, nan=0.0, posinf=HUGE) for x in (below, above)
    )
    return error


def _moved(a: Array, by: NDArray[np.float64]) -> Array:
    """Return values moved by errors; an uncertain bool becomes its negation."""
    if a.dtype.kind == "b":
        return np.asarray(a ^ (by != 0))
    return np.asarray(a + (np.rint(by).astype(a.dtype) if a.dtype.kind in "iu" else by))


def _difference(a: Array, b: Array) -> NDArray[np.float64]:
    with np.errstate(all="ignore"):
        difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return np.where(np.isnan(difference), 0.0, difference)


def _unit(dtype: DType) -> float:
    """Return half an epsilon of the type that a float is computed in; 0 for integers."""
    if not dtype.is_float:
        return 0.0
    return 2.0**-53 if dtype.bytes == 8 else 2.0**-24


def _rounding(e: Expr) -> float:
    """Return the error of an operation itself, relative to its result."""
    if e.op in EXACT_OPS or not e.dtype.is_float:
        return 0.0
    return (FUNCTION if e.op in MATH or e.op == "pow" else ARITHMETIC) * _unit(e.dtype)
