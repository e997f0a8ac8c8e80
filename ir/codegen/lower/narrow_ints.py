"""Integers of few bits inside int32: which values an expression may take, and what is a function of four bits alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relax_tune.ir.core.dtype import DType, i8, i32, u8
from relax_tune.ir.core.expr import Const, Expr, Load, Op, as_int, postorder

Interval = tuple[int, int]
LIMITS: Mapping[DType, Interval] = {i8: (-128, 127), u8: (0, 255), i32: (-(1 << 31), (1 << 31) - 1)}


def interval(e: Expr) -> Interval | None:
    """Bounds of an integer value; None where nothing is known, or it might not fit int32."""
    known: dict[Expr, Interval | None] = {}
    for n in postorder((e,)):
        found = _interval(n, known)
        known[n] = found if found is not None and _within(found, LIMITS[i32]) else None
    return known[e]


def _interval(e: Expr, known: Mapping[Expr, Interval | None]) -> Interval | None:
    if isinstance(e, Const):
        return (int(e.value), int(e.value)) if e.dtype.is_int else None
    if isinstance(e, Load):
        return LIMITS.get(e.dtype)
    if not isinstance(e, Op) or not e.dtype.is_int:
        return None
    a, b = known[e.args[-2]] if len(e.args) > 1 else None, known[e.args[-1]]
    if e.op == "cast":
        whole = LIMITS.get(e.dtype)
        return b if b is not None and whole is not None and _within(b, whole) else whole
    if e.op in ("floordiv", "floormod"):
        c = as_int(e.args[1]) or 0
        if c <= 0 or (a is None and e.op == "floordiv"):
            return None
        return (0, c - 1) if e.op == "floormod" or a is None else (a[0] // c, a[1] // c)
    if a is None or b is None:
        return None
    if e.op == "select":
        return min(a[0], b[0]), max(a[1], b[1])
    return _combined(e.op, a, b) if e.op in ("add", "sub", "mul", "min", "max") else None


def fits(e: Expr, dtype: DType) -> bool:
    """Whether the value stays what it is as a `dtype`."""
    found = interval(e)
    return found is not None and dtype in LIMITS and _within(found, LIMITS[dtype])


def power_of_two(e: Expr) -> int | None:
    """The exponent of a positive constant power of two."""
    c = as_int(e)
    return c.bit_length() - 1 if c is not None and c > 0 and c & (c - 1) == 0 else None


@dataclass(frozen=True, slots=True)
class FourBits:
    """A value that the four lowest bits of an int32 determine: `values[bits of source // 2**shift]`."""

    source: Expr
    shift: int
    values: tuple[int, ...]


def four_bits(e: Expr, taken: Callable[[Op], Expr | None]) -> FourBits | None:
    """The integer `e` as such a value, if it is made of one; `taken`: the branch that is known to be taken of a select."""
    chain: list[Op] = []
    found: tuple[int, Expr, int] | None = None
    while isinstance(e, Op):
        if e.op == "select":
            branch = taken(e)
            if branch is None:
                break
            e = branch
            continue
        if e.op == "cast" and e.args[0].dtype in LIMITS and e.dtype in LIMITS:
            chain.append(e)
            e = e.args[0]
            continue
        if e.op not in ("add", "sub", "mul", "floordiv", "floormod") or not isinstance(e.args[1], Const):
            break
        inner = interval(e.args[0])
        if e.dtype is i32 and as_int(e.args[1]) == 16:
            if e.op == "floormod":
                found = len(chain), e.args[0], 0
            elif e.op == "floordiv" and inner is not None and _within(inner, LIMITS[u8]):
                found = len(chain), e.args[0], 4
        chain.append(e)
        e = e.args[0]
    if found is None:
        return None
    depth, source, shift = found
    values = tuple(_through(chain[:depth], bits) for bits in range(16))
    return FourBits(source, shift, values)


def _through(chain: list[Op], value: int) -> int:
    """What becomes of a value, innermost step last."""
    for step in reversed(chain):
        if step.op == "cast":
            low, high = LIMITS[step.dtype]
            value = (value - low) % (high - low + 1) + low
            continue
        other = as_int(step.args[1]) or 0
        value = {
            "add": value + other,
            "sub": value - other,
            "mul": value * other,
            "floordiv": value // other if other else 0,
            "floormod": value % other if other else 0,
        }[step.op]
    return value


def _combined(op: str, a: Interval, b: Interval) -> Interval:
    if op == "add":
        return a[0] + b[0], a[1] + b[1]
    if op == "sub":
        return a[0] - b[1], a[1] - b[0]
    if op == "mul":
        ends = [x * y for x in a for y in b]
        return min(ends), max(ends)
    pick = min if op == "min" else max
    return pick(a[0], b[0]), pick(a[1], b[1])


def _within(a: Interval, b: Interval) -> bool:
    return b[0] <= a[0] and a[1] <= b[1]
