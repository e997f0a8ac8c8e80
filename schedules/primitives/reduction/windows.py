"""The primitive for windows that move along an axis: separable_reduce."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    Var,
    add,
    as_int,
    const,
    free_vars,
    le,
    load,
    loads,
    maximum,
    minimum,
    mul,
    op,
    replaced,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt, seq
from relax_tune.ir.deduce.pattern_kinds import starts_neutral
from relax_tune.schedules.loop_tree import (
    enclosing,
    find_block,
    fresh,
    replace_node,
    require_compute_block,
    require_rectangular,
    with_body,
)
from relax_tune.schedules.primitives.loops.loops import require_serial
from relax_tune.schedules.primitives.reduction.reductions import combiner


def separable_reduce(func: PrimFunc, block: str, loop: str, step: str) -> PrimFunc:
    """Reduce windows along their other axes first, once for each place that neighbouring windows share.

    Separable filter: Halide, Ragan-Kelley et al., PLDI 2013. A window of 3 x 3 takes 3 + 3 loads then, and the first three are of
    adjacent elements for any stride.

    Before: `for x: for j: for k: B[x] = op(B[x], f(j, S * x + D * k))`
    After: `for c: for j: R[c] = op(R[c], f(j, c))`, then `for x: for k: B[x] = op(B[x], R[S * x + D * k])`
    Checks: every loop around the block feeds one iterator and is serial, with nothing but loops between. The block runs everywhere
    and combines with an associative operation from a neutral value. It reads x and k only as `S * x + D * k`, with constant S and D
    above 0. The steps are of a constant number. Where windows leave places out, indices are affine or clamped affine. Results of
    floating-point sums differ by rounding.
    """
    node = find_block(func, block)
    require_compute_block(func, "separable_reduce", node)
    operation, term = combiner(node)
    nest = _nest(func, node)
    x, k = (_iterator(func, node, nest, name) for name in (loop, step))
    spatial, inside = _others(func, node, x, k)
    assert node.init is not None
    stride = _stride(func, term, x.var, k.var)
    length = _places(x.extent, as_int(k.extent) or 0, stride)
    old, first = node.body.buffer, node.init.value
    rows = Buffer(fresh(func, f"{block}_shared"), (*(i.extent for i in spatial), length), old.dtype)
    names = list[str]()
    new_vars = {i.var: Var(i.var.name) for i in (*spatial, *inside)}
    c = Var(f"{x.var.name}_{k.var.name}")
    where = (*(new_vars[i.var] for i in spatial), c)
    moved = substitute(stride.along(func, term, c), new_vars)
    if stride.of_k > 1 or stride.of_x > (as_int(k.extent) or 0):
        _require_readable_gaps(func, moved, c)
    iters = (
        *(replace(i, var=new_vars[i.var]) for i in spatial),
        IterVar(c, length),
        *(replace(i, var=new_vars[i.var]) for i in inside),
    )
    loops = [(i.extent, _fresh(func, f"{i.var.name}_{block}", names)) for i in iters]
    body = BufferStore(rows, where, op(operation, (load(rows, where), moved), old.dtype))
    shared: Stmt = Block(
        fresh(func, f"{block}_rows"), iters, tuple(v for _, v in loops), body, BufferStore(rows, where, first)
    )
    for extent, var in reversed(loops):
        shared = For(var, extent, shared)
    at = (*(i.var for i in spatial), add(mul(stride.of_x, x.var), mul(stride.of_k, k.var)))
    pairs = [(i, b) for i, b in zip(node.iters, node.bindings) if i not in inside]
    value = op(operation, (load(old, node.body.indices), load(rows, at)), old.dtype)
    last: Stmt = replace(
        node,
        iters=tuple(i for i, _ in pairs),
        bindings=tuple(b for _, b in pairs),
        body=replace(node.body, value=value),
    )
    for p in reversed(nest):
        if any(p.var is b for _, b in pairs):
            last = replace(p, body=last)
    extended = replace(func, allocs=(*func.allocs, rows))
    return with_body(extended, replace_node(func.body, nest[0], seq(shared, last)))


def _places(windows: Expr, steps: int, stride: _Stride) -> Expr:
    """Return the number of places from the first window's start to the last one's end: none without windows."""
    one = stride.of_k * (steps - 1) + 1
    length = add(mul(stride.of_x, sub(windows, 1)), one)
    if prove(le(1, windows)) is not Proof.YES:
        length = maximum(minimum(length, mul(windows, max(one, stride.of_x))), 0)
    return simplify(length)


def _require_readable_gaps(func: PrimFunc, term: Expr, place: Var) -> None:
    """Check that indices of positions in no window are between indices of positions in windows. Raises ScheduleError."""
    for x in loads(term):
        for index in x.indices:
            e = index
            while e.op in ("min", "max") and len(moving := [a for a in e.args if place in free_vars(a)]) == 1:
                (e,) = moving
            if linear(e, (place,)) is None:
                raise ScheduleError(
                    f"{func.name}: separable_reduce expects affine indices where windows leave places out, got {index!r}"
                )


def _fresh(func: PrimFunc, name: str, names: list[str]) -> Var:
    names.append(fresh(func, name, names))
    return Var(names[-1])


def _nest(func: PrimFunc, node: Block) -> tuple[For, ...]:
    """Return the loops around a block, each feeding one iterator. Raises ScheduleError."""
    nest = enclosing(func, node)
    require_rectangular(func, nest, "separable_reduce")
    for p in nest:
        require_serial(func, p, "separable_reduce")
    whole = len(nest) == len(node.iters) and all(any(b is p.var for b in node.bindings) for p in nest)
    if not nest or not whole or node.predicate is not TRUE or any(not isinstance(p.body, (For, Block)) for p in nest):
        raise ScheduleError(
            f"{func.name}: separable_reduce expects only {node.name!r} in one loop for each iterator, without a condition"
        )
    return nest


def _iterator(func: PrimFunc, node: Block, nest: tuple[For, ...], name: str) -> IterVar:
    """Return the iterator of a loop. Raises ScheduleError."""
    for it, bound in zip(node.iters, node.bindings):
        if any(p.var is bound and p.var.name == name for p in nest):
            return it
    raise ScheduleError(
        f"{func.name}: separable_reduce expects loops around {node.name!r}, got {name!r}; they are {[p.var.name for p in nest]}"
    )


def _others(func: PrimFunc, node: Block, x: IterVar, k: IterVar) -> tuple[list[IterVar], list[IterVar]]:
    """Return the iterators over elements and over steps other than x and k. Raises ScheduleError for what is no window."""
    spatial = [i for i in node.iters if i.kind == "spatial" and i is not x]
    inside = [i for i in node.iters if i.kind == "reduce" and i is not k]
    if x.kind != "spatial" or k.kind != "reduce" or not starts_neutral(node):
        raise ScheduleError(
            f"{func.name}: separable_reduce expects a loop over elements and one over steps of {node.name!r}, and a neutral "
            f"initial value; got {x.var.name!r} over {x.kind}, {k.var.name!r} over {k.kind} points"
        )
    if not inside:
        raise ScheduleError(f"{func.name}: separable_reduce expects windows along two axes, got one in {node.name!r}")
    if (as_int(k.extent) or 0) < 1:
        raise ScheduleError(
            f"{func.name}: separable_reduce expects a constant number of steps, got {k.extent!r} of {k.var.name!r}"
        )
    return spatial, inside


@dataclass(frozen=True)
class _Stride:
    """Places `of_x * x + of_k * k` of an axis."""

    x: Var
    k: Var
    of_x: int
    of_k: int

    def along(self, func: PrimFunc, e: Expr, place: Var) -> Expr:
        """Write an expression of x and k as one of their place."""

        def change(rest: Expr, a: int, b: int) -> Expr:
            if a * self.of_k != b * self.of_x or a % self.of_x:
                raise ScheduleError(
                    f"{func.name}: separable_reduce expects {self.x.name!r} and {self.k.name!r} as {self.of_x} * {self.x.name} + "
                    f"{self.of_k} * {self.k.name} only, got {e!r}"
                )
            return add(mul(const(a // self.of_x), place), rest)

        return _affine_parts(func, e, self.x, self.k, change)


def _stride(func: PrimFunc, term: Expr, x: Var, k: Var) -> _Stride:
    """Return how a term reads x and k. Raises ScheduleError unless they are together somewhere."""
    strides: set[tuple[int, int]] = set()

    def note(rest: Expr, a: int, b: int) -> Expr:
        strides.add((a // math.gcd(a, b), b // math.gcd(a, b)))
        return rest

    _affine_parts(func, term, x, k, note)
    if len(strides) != 1 or min(next(iter(strides))) < 1:
        raise ScheduleError(
            f"{func.name}: separable_reduce expects sums of {x.name!r} and {k.name!r} in one ratio above 0, got {term!r}"
        )
    return _Stride(x, k, *next(iter(strides)))


def _affine_parts(func: PrimFunc, e: Expr, x: Var, k: Var, change: Callable[[Expr, int, int], Expr]) -> Expr:
    """Replace every largest affine expression of x and k.

    Args:
        change: Builds the new expression from the rest and the two coefficients.
    """

    def part(n: Expr) -> Expr | None:
        if not {x, k} & set(free_vars(n)):
            return n
        if n.dtype is i64 and (isinstance(n, Var) or n.op in ("add", "sub", "mul")):
            parts = linear(n, (x, k))
            numbers = None if parts is None else [as_int(parts[0].get(v, const(0))) for v in (x, k)]
            if parts is not None and numbers is not None and None not in numbers:
                return change(parts[1], *(number or 0 for number in numbers))
        if isinstance(n, Var):
            raise ScheduleError(f"{func.name}: separable_reduce expects {n.name!r} in sums, got it in {e!r}")
        return None

    return replaced(e, part)
