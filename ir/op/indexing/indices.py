"""Bounds of indices that come from data.

NumPy semantics refuse an index outside its dim, and a built model checks inputs that it uses as indices. Compiled loops cannot
report errors: they clamp the index to the nearest element, so that no memory outside the array is accessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, cast, eq, lt, maximum, minimum, or_, sub
from relax_tune.ir.op.base import Array, Deduction, product


def inside(index: Expr, size: Expr) -> Expr:
    """Clamp `index`, as int64, into [0, size)."""
    return maximum(minimum(cast(index, i64), sub(size, 1)), 0)


def require_elements(name: str, ctx: Deduction, size: Expr, result: Sequence[Expr]) -> None:
    """Require a non-empty dim of `size` unless the result is empty.

    Raises DeduceError when it never holds; undecided becomes a run-time check."""
    cond = or_(lt(0, size), eq(product(result), 0))
    proof = ctx.proves(cond)
    if proof is Proof.NO:
        raise DeduceError(f"{name}: wanted a dim of at least 1 to take elements from, found {size!r}")
    if proof is Proof.UNKNOWN:
        ctx.require(cond, f"{name}: wanted a dim of at least 1 to take elements from, found {{0}}", size)


def refuse_outside(name: str, indices: Array, size: int) -> None:
    """Refuse indices outside [0, size). Raises DeduceError naming the first."""
    wrong = (indices < 0) | (indices >= size)
    if wrong.any():
        raise DeduceError(f"{name}: wanted indices in [0, {size}), found {indices[wrong].flat[0]}")
