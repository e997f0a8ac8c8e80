"""Indices that come from data: what every gather promises about them.

An index outside its dim is an error wherever somebody can be told: the NumPy meaning refuses it, and a built model checks
the inputs it uses as indices. Compiled loops cannot tell anybody, so they read the nearest element that exists: whatever
the data holds, no memory outside the array is touched.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, cast, eq, lt, maximum, minimum, or_, sub
from relax_tune.ir.op.base import Array, Deduction, product


def inside(index: Expr, size: Expr) -> Expr:
    """`index` as int64, moved into [0, size)."""
    return maximum(minimum(cast(index, i64), sub(size, 1)), 0)


def require_elements(name: str, ctx: Deduction, size: Expr, result: Sequence[Expr]) -> None:
    """There must be something to read along a dim of `size` unless the result is empty. Raises DeduceError when there
    never is; unknown becomes a run-time check."""
    cond = or_(lt(0, size), eq(product(result), 0))
    proof = ctx.proves(cond)
    if proof is Proof.NO:
        raise DeduceError(f"{name}: wanted a dim of at least 1 to take elements from, found {size!r}")
    if proof is Proof.UNKNOWN:
        ctx.require(cond, f"{name}: wanted a dim of at least 1 to take elements from, found {{0}}", size)


def refuse_outside(name: str, indices: Array, size: int) -> None:
    """Raises DeduceError naming the first of `indices` that is not in [0, size)."""
    wrong = (indices < 0) | (indices >= size)
    if wrong.any():
        raise DeduceError(f"{name}: wanted indices in [0, {size}), found {indices[wrong].flat[0]}")
