"""Bounds of indices that come from data.

An index outside its dim is an error if it comes from a parameter of the call (`ir/deduce/index_ranges`). An index that is computed
has a defined result: gathers take the nearest element, and scatters drop the update.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, as_int, cast, eq, lt, maximum, minimum, or_, sub
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.op.base import Array, Deduction, IndexUse, product, shape_of


def inside(index: Expr, size: Expr) -> Expr:
    """Clamp `index`, as int64, into [0, size)."""
    return maximum(minimum(cast(index, i64), sub(size, 1)), 0)


def require_elements(name: str, ctx: Deduction, size: Expr, result: Sequence[Expr]) -> None:
    """Require a non-empty dim of `size` unless the result is empty.

    Raises:
        DeduceError: the condition never holds; if undecided it becomes a run-time check.
    """
    cond = or_(lt(0, size), eq(product(result), 0))
    proof = ctx.proves(cond)
    if proof is Proof.NO:
        raise DeduceError(f"{name}: expected a dim of at least 1 to take elements from, got {size!r}")
    if proof is Proof.UNKNOWN:
        ctx.require(cond, f"{name}: expected a dim of at least 1 to take elements from, got {{0}}", size)


def nearest(indices: Array, size: int) -> Array:
    """Clamp indices into [0, size), as `inside` does in loops."""
    return np.clip(indices.astype(np.int64, copy=False), 0, max(size - 1, 0))


def readable(x: Array, axes: Sequence[int]) -> Array:
    """Return `x`, with empty `axes` extended by an element.

    NumPy refuses indices into an empty dim, also where the result is empty."""
    return x if x.size else np.zeros([max(n, 1) if p in axes else n for p, n in enumerate(x.shape)], x.dtype)


def columns(position: int, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
    """Return the use of the last dim of an argument as indices into the leading dims of argument 0."""
    depth = as_int(shape_of(infos[position])[-1]) or 0
    return tuple(IndexUse(position, shape_of(infos[0])[k], depth, k) for k in range(depth))
