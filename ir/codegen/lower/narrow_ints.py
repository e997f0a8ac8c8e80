"""Narrow integers inside int32: intervals of expressions, and functions of four bits.

Tests: `tests/ir/codegen/lower/test_narrow_ints.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relax_tune.ir.core.dtype import ALL, DType, i32, i64, u8
from relax_tune.ir.core.expr import Expr, Load, as_int, postorder
from relax_tune.ir.core.intervals import UNBOUNDED, Interval, within
from relax_tune.ir.core.scalar_ops import SCALAR_OPS, wrapped

# Smallest and largest value of integer types other than int64, which holds indices.
LIMITS: Mapping[DType, tuple[int, int]] = {d: d.limits for d in ALL if d.is_int and d is not i64}


def interval(e: Expr) -> Interval:
    """Return bounds of an integer value; UNBOUNDED if it may not fit int32."""
    known: dict[Expr, Interval] = {}
    for n in postorder((e,)):
        exact = _interval(n, known)
        limits = LIMITS.get(n.dtype, LIMITS[i32])  # an operation wraps around in its type
        known[n] = exact if within(exact, limits) else limits if n.dtype not in (i32, i64) else UNBOUNDED
    return known[e]


def _interval(e: Expr, known: Mapping[Expr, Interval]) -> Interval:
    if e.value is not None:
        return (int(e.value), int(e.value)) if e.dtype.is_int else UNBOUNDED
    if isinstance(e, Load):
        return LIMITS.get(e.dtype, UNBOUNDED)
    if not e.op or not e.dtype.is_int:
        return UNBOUNDED
    if e.op == "cast":
        limits, inner = LIMITS.get(e.dtype, UNBOUNDED), known[e.args[0]]
        return inner if within(inner, limits) else limits
    operation = SCALAR_OPS[e.op].interval
    return UNBOUNDED if operation is None else operation(*(known[a] for a in e.args))


def fits(e: Expr, dtype: DType) -> bool:
    """Return whether a cast to `dtype` keeps the value."""
    return dtype in LIMITS and within(interval(e), LIMITS[dtype])


def fits_arithmetic(e: Expr) -> bool:
    """Return whether a sum, difference or product in int32 cannot overflow."""
    return e.dtype is i32 and within(_interval(e, {a: interval(a) for a in e.args}), LIMITS[i32])


def power_of_two(e: Expr) -> int | None:
    """Return the exponent of a positive constant power of two."""
    c = as_int(e)
    return c.bit_length() - 1 if c is not None and c > 0 and c & (c - 1) == 0 else None


@dataclass(frozen=True, slots=True)
class FourBits:
    """A value that four bits of an int32 determine: `values[source // 2**shift % 16]`."""

    source: Expr
    shift: int
    values: tuple[int, ...]


def four_bits(e: Expr, decided_branch: Callable[[Expr], Expr | None]) -> FourBits | None:
    """Return `e` as a function of four bits; None for any other expression.

    Args:
        decided_branch: Returns the branch of a select whose condition can be decided statically, else None.
    """
    chain: list[Expr] = []
    field: tuple[int, Expr, int] | None = None
    while e.op:
        if e.op == "select":
            branch = decided_branch(e)
            if branch is None:
                break
            e = branch
            continue
        if e.op == "cast" and e.args[0].dtype in LIMITS and e.dtype in LIMITS:
            chain.append(e)
            e = e.args[0]
            continue
        if e.op not in ("add", "sub", "mul", "floordiv", "floormod") or e.args[1].value is None:
            break
        inner = interval(e.args[0])
        # x % 16 has the low four bits of any x; x // 16 has four bits only if x is a byte.
        if e.dtype is i32 and as_int(e.args[1]) == 16:
            if e.op == "floormod":
                field = len(chain), e.args[0], 0
            elif e.op == "floordiv" and within(inner, LIMITS[u8]):
                field = len(chain), e.args[0], 4
        chain.append(e)
        e = e.args[0]
    if field is None:
        return None
    depth, source, shift = field
    values = tuple(_through(chain[:depth], bits) for bits in range(16))
    return FourBits(source, shift, values)


def _through(chain: list[Expr], value: int) -> int:
    """Apply a chain of operations on constants, innermost last, to a value."""
    for step in reversed(chain):
        if step.op == "cast":
            value = wrapped(value, step.dtype)
            continue
        other = as_int(step.args[1]) or 0
        known = SCALAR_OPS[step.op]
        assert known.evaluate is not None
        value = 0 if other == 0 and known.kind == "integer" else wrapped(known.evaluate(value, other), step.dtype)
    return value
