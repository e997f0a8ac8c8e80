"""Checks of the scalar arguments of primitives.

Tests: `tests/schedules/primitives/test_golden.py`.
"""

from __future__ import annotations

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.expr import Expr, ExprLike, Tunable, as_int, expr, free_vars, le, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block
from relax_tune.schedules.symbols import LIMIT


def scalar(func: PrimFunc, step: str, value: ExprLike, *touched: Block) -> Expr:
    """Return `value` as an expression over shape symbols and tunables whose divisors are provably positive.

    Args:
        touched: Blocks that the primitive changes; `prepack` blocks know no shape symbols.
    """
    e = expr(value)
    number = as_int(e)
    if number is not None:
        if abs(number) >= LIMIT:
            raise ScheduleError(f"{func.name}: {step} expects factors below {LIMIT}, got {number}")
        return e
    known = set(func.symbols)
    symbols = [v for v in free_vars(e) if not isinstance(v, Tunable)]
    for v in symbols:
        if v not in known:
            raise ScheduleError(
                f"{func.name}: {step} expects factors of shape symbols and tunables, got {v.name!r} in {e!r}"
            )
    for n in postorder((e,)):
        if n.op in ("floordiv", "floormod") and prove(le(1, n.args[1])) is not Proof.YES:
            raise ScheduleError(
                f"{func.name}: {step} cannot prove that {n.args[1]!r} is positive, which {e!r} divides by"
            )
    once = [b.name for b in touched if b.role != "compute"]
    if symbols and once:
        raise ScheduleError(
            f"{func.name}: {step} expects factors without shape symbols for {once[0]!r}, which runs once before any call; got {e!r}"
        )
    return e


def positive(func: PrimFunc, step: str, value: ExprLike, *touched: Block) -> Expr:
    """Return a `scalar` that is provably positive for all shapes and tunables. Raises ScheduleError."""
    e = scalar(func, step, value, *touched)
    if prove(le(1, e)) is not Proof.YES:
        raise ScheduleError(
            f"{func.name}: {step} expects a positive factor, got {e!r}"
            + ("" if as_int(e) is not None else ", which may be zero; max(..., 1) is positive")
        )
    return e
