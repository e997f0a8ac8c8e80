"""Primitives on the layout of an intermediate: tile_layout, permute_layout, transform_layout, storage_align, swizzle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.injectivity import injective
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    Expr,
    ExprLike,
    Var,
    add,
    ceildiv,
    const,
    floormod,
    free_vars,
    le,
    maximum,
    mul,
    postorder,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import redirect
from relax_tune.ir.hardware.swizzle import ACCESS_BYTES, may_swizzle
from relax_tune.schedules.independence import writers
from relax_tune.schedules.loop_tree import find_alloc, swap_alloc
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.symbols import LIMIT, MAX_CHARACTERS, only_tunables, read_scalars


def tile_layout(func: PrimFunc, buffer: str, dim: int, factor: ExprLike, order: Sequence[int]) -> PrimFunc:
    """Split dimension `dim` of an intermediate's layout into (dim // factor, dim % factor), then permute the dimensions.

    Before: `B: (K, N)` read at `B[k, n]`
    After, with dim 1, factor T, order (1, 0, 2): `B: (ceil(N / T), K, T)` read at `B[n // T, k, n % T]`
    Checks: an intermediate; `factor` is positive; `order` is a permutation of the new dimensions.
    """
    old = find_alloc(func, buffer)
    f = positive(func, f"tile_layout({buffer!r})", factor, *writers(func, old))
    if sorted(order) != list(range(len(old.shape) + 1)) or not 0 <= dim < len(old.shape):
        raise ScheduleError(f"{func.name}: tile_layout({buffer!r}) expects a permutation of the new dims, got {order}")

    def relayout(parts: Sequence[Expr], outer: Expr, inner: Expr) -> tuple[Expr, ...]:
        wide = (*parts[:dim], outer, inner, *parts[dim + 1 :])
        return tuple(wide[o] for o in order)

    shape = relayout(old.shape, simplify(ceildiv(old.shape[dim], f)), f)
    new = replace(old, shape=shape)

    def where(indices: Sequence[Expr]) -> tuple[Expr, ...]:
        return relayout(indices, *_quotient_remainder(indices[dim], f))

    return with_layout(func, old, new, where)


def _quotient_remainder(e: Expr, f: Expr) -> tuple[Expr, Expr]:
    """Return quotient and remainder of an index; in a circular buffer of whole tiles, the slot of the tile and the remainder."""
    # For c a multiple of f: (x % c) // f == (x // f) % (c // f), and (x % c) % f == x % f. Later steps then see the
    # tile number x // f.
    if e.op == "floormod" and simplify(e.args[1] % f) is const(0):
        return floormod(e.args[0] // f, simplify(e.args[1] // f)), e.args[0] % f
    return e // f, e % f


def permute_layout(func: PrimFunc, buffer: str, order: Sequence[int]) -> PrimFunc:
    """Permute the dimensions of an intermediate's layout.

    Before: `B: (J, D)` read at `B[j, d]`
    After, with order (1, 0): `B: (D, J)` read at `B[d, j]`
    Checks: an intermediate; `order` is a permutation of its dimensions.
    """
    old = find_alloc(func, buffer)
    if sorted(order) != list(range(len(old.shape))):
        raise ScheduleError(f"{func.name}: permute_layout({buffer!r}) expects a permutation, got {order}")
    new = replace(old, shape=tuple(old.shape[o] for o in order))
    return with_layout(func, old, new, lambda indices: tuple(indices[o] for o in order))


def with_layout(
    func: PrimFunc, old: Buffer, new: Buffer, where: Callable[[Sequence[Expr]], tuple[Expr, ...]]
) -> PrimFunc:
    """Replace the intermediate `old` by `new`, whose element at `where(indices)` is the old one at `indices`."""
    body = redirect(func.body, lambda b, indices: (new, where(indices)) if b is old else None)
    return replace(func, body=body, allocs=tuple(new if a is old else a for a in func.allocs))


def transform_layout(func: PrimFunc, buffer: str, index_map: str, factors: Sequence[ExprLike] = ()) -> PrimFunc:
    """Store an intermediate by an index map.

    The map is text, `i, j -> j // f0, i, j % f0`: a name for each dimension, then the new indices. They consist of the names,
    numbers, `f0, f1, ...` (the factors) and `n0, n1, ...` (the old extents), with `+ * // %`.

    Before: `B: (I, J)` read at `B[i, j]`
    After, with `i, j -> i * n1 + j`: `B: (I * J,)` read at `B[i * J + j]`
    Checks: an intermediate; the factors are positive. The map parses, and divides only by positive numbers and factors. It is
    provably injective. `tile_layout` and `permute_layout` are its common cases.
    """
    old = find_alloc(func, buffer)
    values = [positive(func, "transform_layout", f, *writers(func, old)) for f in factors]
    dims, indices = _read_map(func, old, index_map, values)
    for n in postorder(indices):
        by = n.args[1] if n.op in ("floordiv", "floormod") else None
        if by is not None and (set(free_vars(by)) & set(dims) or prove(le(1, by)) is not Proof.YES):
            raise ScheduleError(f"{func.name}: transform_layout divides by numbers and factors, got {n!r}")
    ranges = dict(zip(dims, old.shape))
    # Two elements at one place would overwrite each other.
    if not injective(indices, ranges):
        raise ScheduleError(
            f"{func.name}: cannot prove that {index_map!r} puts different elements of {old.name!r} into different places"
        )
    shape = tuple(_extent(func, e, ranges) for e in indices)
    grown = tuple(d if prove(le(0, d)) is Proof.YES else maximum(d, 0) for d in map(simplify, shape))
    new = replace(old, shape=grown)
    return with_layout(func, old, new, lambda at: tuple(simplify(substitute(e, dict(zip(dims, at)))) for e in indices))


def _read_map(func: PrimFunc, old: Buffer, text: str, factors: Sequence[Expr]) -> tuple[list[Var], tuple[Expr, ...]]:
    """Parse an index map into a variable for each dimension, and the new indices over them."""
    left, _, right = text.partition("->")
    names = [n.strip() for n in left.split(",")] if left.strip() else []
    expectation = (
        f"{func.name}: transform_layout expects a map such as `i, j -> j // f0, i, j % f0` with a name for each of the "
        f"{len(old.shape)} dimensions of {old.name!r}, got {text[:MAX_CHARACTERS]!r}"
    )
    if not len(names) == len(old.shape) == len(set(names)) or not all(n.isidentifier() for n in names):
        raise ScheduleError(expectation)
    dims = [Var(n) for n in names]
    scope: dict[str, Expr] = {
        **{f"f{a}": f for a, f in enumerate(factors)},
        **{f"n{a}": d for a, d in enumerate(old.shape)},
        **dict(zip(names, dims)),
    }
    try:
        indices = read_scalars(right, scope.get, ", ".join(scope), ("add", "mul", "floordiv", "floormod"))
    except ScheduleError as error:
        raise ScheduleError(f"{expectation}: {error}") from None
    return dims, indices


def _extent(func: PrimFunc, e: Expr, ranges: Mapping[Var, Expr]) -> Expr:
    """Return one more than the largest value of an index over its variables' ranges; no part of an index falls."""
    if e in ranges:
        return ranges[e] if isinstance(e, Var) else e
    if not set(free_vars(e)) & set(ranges):
        return add(e, 1)
    a, b = e.args
    if e.op == "floormod":
        return b
    if e.op == "floordiv":
        return ceildiv(_extent(func, a, ranges), b)
    x, y = _extent(func, a, ranges), _extent(func, b, ranges)
    if e.op == "add":
        return x + y - 1
    if set(free_vars(a)) & set(free_vars(b)) & set(ranges):
        raise ScheduleError(f"{func.name}: transform_layout expects sums of multiples, got {e!r}")
    return (x - 1) * (y - 1) + 1


def storage_align(func: PrimFunc, buffer: str, factor: ExprLike, offset: int = 0) -> PrimFunc:
    """Pad the rows of an intermediate to a multiple of `factor` elements plus `offset`, against bank or cache-set conflicts.

    Before: `B: (I, J)`
    After, with factor 32 and offset 1: `B: (I, ceil(J / 32) * 32 + 1)`. A local or shared buffer keeps its shape, and its rows
    grow after lowering has shrunk it: `alloc((I, J), f32, scope="shared", row_alignment=(32, 1))`
    Checks: an intermediate of two or more dimensions; `factor` is positive, `offset` is not negative. A factor with shape
    symbols is for global memory.
    """
    old = find_alloc(func, buffer)
    f = positive(func, f"storage_align({buffer!r})", factor, *writers(func, old))
    if not 0 <= offset < LIMIT:
        raise ScheduleError(
            f"{func.name}: storage_align({buffer!r}) expects no negative offset, and one below {LIMIT}; got {offset}"
        )
    if len(old.shape) < 2:
        raise ScheduleError(f"{func.name}: storage_align expects rows, and {old!r} has {len(old.shape)} dims")
    if old.swizzle:
        raise ScheduleError(
            f"{func.name}: storage_align expects rows that can be padded, and the rows of {buffer!r} are swizzled"
        )
    if old.scope == "global":
        last = simplify(add(mul(ceildiv(old.shape[-1], f), f), offset))
        new = replace(old, shape=(*old.shape[:-1], last))
    elif not only_tunables(f):
        raise ScheduleError(
            f"{func.name}: storage_align({buffer!r}) expects a factor without shape symbols for {old.scope} memory, got {f!r}"
        )
    else:
        new = replace(old, row_alignment=(f, offset))
    return swap_alloc(func, old, new)


def swizzle(func: PrimFunc, buffer: str, vector: int) -> PrimFunc:
    """Rotate the vectors within each row of a shared intermediate by the row's number, against bank conflicts without padding.

    See `relax_tune.ir.hardware.swizzle`. vector: elements of a vector.

    Before: `B = alloc((I, J), f16, scope="shared")`
    After, with vector 8: `B = alloc((I, J), f16, scope="shared", row_alignment=(8, 0), swizzle=8)`. Rows are whole vectors after lowering
    has shrunk it. Vector c of row r is stored as vector `(c + r % 8) % vectors`, for rows of eight vectors or more.
    Checks: a shared intermediate of two or more dimensions; a vector has 4, 8 or 16 bytes; the rows are not aligned otherwise.
    """
    old = find_alloc(func, buffer)
    if old.scope != "shared" or len(old.shape) < 2:
        raise ScheduleError(
            f"{func.name}: swizzle expects rows in shared memory, got {old!r} in {old.scope} memory; use set_scope first"
        )
    if isinstance(vector, bool) or not may_swizzle(old, vector):
        raise ScheduleError(
            f"{func.name}: swizzle({buffer!r}) expects vectors of {', '.join(map(str, ACCESS_BYTES))} bytes, got {vector!r} "
            f"elements of {old.dtype}"
        )
    if old.row_alignment is not None:
        raise ScheduleError(
            f"{func.name}: swizzle expects rows of {buffer!r} that are not aligned already, got {old.row_alignment}"
        )
    return swap_alloc(func, old, replace(old, row_alignment=(const(vector), 0), swizzle=vector))
