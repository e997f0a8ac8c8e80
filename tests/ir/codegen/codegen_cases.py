"""Small scheduled functions for the tests of code generation. Loop kinds, tails and tile sizes are arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.expr import Expr, Var, and_, call, ceildiv, const, div, lt, maximum
from relax_tune.ir.core.expr import load as read
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, LoopKind, Stmt, Tail, seq


def outer_kind(language: str) -> LoopKind:
    return "parallel" if language == "c" else "group"


def gelu(x: Expr) -> Expr:
    return x * 0.5 * (call("erf", x * 0.7071067811865476) + 1.0)


def matmul(
    language: str, rows: int, cols: int, depth: int, tail: Tail, *, guarded_init: bool = True, compact: bool = False
) -> PrimFunc:
    """gelu(A(m, depth) @ B(depth, n) + bias): both dims symbolic and tiled, the accumulator local.

    compact: the accumulator has the shape of a tile instead of the output's; guarded_init: its first values are stored
    under the bounds too.
    """
    m, n = Var("m"), Var("n")
    a, b = Buffer("A", (m, const(depth)), f32), Buffer("B", (const(depth), n), f32)
    bias, c = Buffer("bias", (n,), f32), Buffer("C", (m, n), f32)
    acc = Buffer("acc", (const(rows), const(cols)) if compact else (m, n), f32, "local")
    mo, no = Var("mo"), Var("no")
    vi, vj, vk, wi, wj = (Var(x) for x in ("vi", "vj", "vk", "wi", "wj"))
    place = (wi, wj) if compact else (vi, vj)

    def nest(name: str, value: Expr, buffer: Buffer, where: tuple[Expr, ...], reduce: bool, guarded: bool) -> Stmt:
        i, j, k = Var(f"{name}_i"), Var(f"{name}_j"), Var(f"{name}_k")
        row, col = mo * rows + i, no * cols + j
        iters: tuple[IterVar, ...] = (
            IterVar(vi, m), IterVar(vj, n), IterVar(wi, const(rows)), IterVar(wj, const(cols)),
        )  # fmt: skip
        bindings: tuple[Expr, ...] = (row, col, i, j)
        if reduce:
            iters, bindings = (*iters, IterVar(vk, const(depth), "reduce")), (*bindings, k)
        inside = and_(lt(row, m), lt(col, n))
        block = (
            Block(name, iters, bindings, BufferStore(buffer, where, value), None, inside)
            if guarded
            else Block(name, iters[2:4], bindings[2:4], BufferStore(buffer, where, value))
        )
        tile = For(i, const(rows), For(j, const(cols), block, "vectorized"), "unrolled")
        return For(k, const(depth), tile) if reduce else tile

    update = read(acc, place) + read(a, (vi, vk)) * read(b, (vk, vj))
    body = seq(
        nest("init", const(0.0), acc, place, False, guarded_init or not compact),
        nest("mm", update, acc, place, True, True),
        nest("out", gelu(read(acc, place) + read(bias, (vj,))), c, (vi, vj), False, True),
    )
    inner = For(mo, ceildiv(m, const(rows)), body, "serial" if language == "c" else "group", 1, tail)
    outer = For(no, ceildiv(n, const(cols)), inner, outer_kind(language), 0, "peel")
    return PrimFunc("matmul", (a, b, bias, c), 1, outer, (acc,))


def pointwise(
    language: str, tiles: tuple[int, int], kinds: tuple[LoopKind, LoopKind], tails: tuple[Tail, Tail],
    value: Callable[[Expr], Expr], source: DType = f32, target: DType = f32,
) -> PrimFunc:  # fmt: skip
    """y[i] = value(x[i]) with i split three ways."""
    n = Var("n")
    x, y = Buffer("x", (n,), source), Buffer("y", (n,), target)
    o, p, q, vi = Var("o"), Var("p"), Var("q"), Var("vi")
    at = (o * tiles[0] + p) * tiles[1] + q
    block = Block("f", (IterVar(vi, n),), (at,), BufferStore(y, (vi,), value(read(x, (vi,)))), None, lt(at, n))
    middle = For(p, const(tiles[0]), For(q, const(tiles[1]), block, kinds[1]), kinds[0], tail=tails[1])
    outer = For(o, ceildiv(n, const(tiles[0] * tiles[1])), middle, outer_kind(language), tail=tails[0])
    return PrimFunc("pointwise", (x, y), 1, outer)


def ragged_rows(language: str, rows: int, cols: int, bound: Callable[[Var], Expr]) -> PrimFunc:
    """y[r, c] = x[r, c] + 1 where c < bound(r), in rows with a narrow tail. Other elements stay as they are."""
    x, y = (Buffer(name, (const(rows), const(cols)), f32) for name in ("x", "y"))
    r, c, vr, vc = Var("r"), Var("c"), Var("vr"), Var("vc")
    iters = (IterVar(vr, const(rows)), IterVar(vc, const(cols)))
    block = Block("f", iters, (r, c), BufferStore(y, (vr, vc), read(x, (vr, vc)) + 1.0), None, lt(c, bound(r)))
    body = For(c, const(cols), block, "vectorized")
    return PrimFunc("ragged", (x, y), 1, For(r, const(rows), body, outer_kind(language), tail="narrow"))


def row_softmax(language: str, tile: int, tail: Tail) -> PrimFunc:
    """softmax over the last dim of x: (n, m), one accumulator per lane, in three passes."""
    n, m, r = Var("n"), Var("m"), Var("r")
    x, y = Buffer("x", (n, m), f32), Buffer("y", (n, m), f32)
    lanes = [Buffer(name, (const(tile),), f32, "local") for name in ("tops", "sums")]
    ones = [Buffer(name, (const(1),), f32, "local") for name in ("top", "total")]

    def fill(b: Buffer, value: float) -> Stmt:
        lane, vl = Var("f"), Var("vl")
        block = Block("fill", (IterVar(vl, b.shape[0]),), (lane,), BufferStore(b, (vl,), const(value)))
        return For(lane, b.shape[0], block, "vectorized")

    def columns(name: str, b: Buffer, local: bool, value: Callable[[Expr, Expr, Expr], Expr]) -> Stmt:
        o, lane, vr, vj, vl = Var("o"), Var("l"), Var("vr"), Var("vj"), Var("vl")
        at = o * tile + lane
        iters = (IterVar(vr, n), IterVar(vj, m), IterVar(vl, const(tile)))
        block = Block(
            name, iters, (r, at, lane), BufferStore(b, (vl,) if local else (vr, vj), value(vr, vj, vl)), None, lt(at, m)
        )
        return For(o, ceildiv(m, const(tile)), For(lane, const(tile), block, "vectorized"), tail=tail)

    def fold(b: Buffer, source: Buffer, combine: Callable[[Expr, Expr], Expr]) -> Stmt:
        lane, vl = Var("g"), Var("vl")
        store = BufferStore(b, (const(0),), combine(read(b, (0,)), read(source, (vl,))))
        return For(lane, const(tile), Block("fold", (IterVar(vl, const(tile), "reduce"),), (lane,), store), "unrolled")

    (tops, sums), (top, total) = lanes, ones
    body = seq(
        fill(tops, -math.inf),
        columns("largest", tops, True, lambda i, j, k: maximum(read(tops, (k,)), read(x, (i, j)))),
        fill(top, -math.inf),
        fold(top, tops, maximum),
        fill(sums, 0.0),
        columns("exp", y, False, lambda i, j, _k: call("exp", read(x, (i, j)) - read(top, (0,)))),
        columns("sum", sums, True, lambda i, j, k: read(sums, (k,)) + read(y, (i, j))),
        fill(total, 0.0),
        fold(total, sums, lambda s, v: s + v),
        columns("scale", y, False, lambda i, j, _k: read(y, (i, j)) * div(const(1.0), read(total, (0,)))),
    )
    return PrimFunc("softmax", (x, y), 1, For(r, n, body, outer_kind(language)), (*lanes, *ones))


def through_shared_memory() -> PrimFunc:
    """Rows of 16 reversed by 16 work-items through shared memory: x, y of (n, 16)."""
    n, size = Var("n"), 16
    x, y = Buffer("x", (n, const(size)), f32), Buffer("y", (n, const(size)), f32)
    tile = Buffer("tile", (n, const(size)), f32, "shared")
    g, a, b, vi, vj = (Var(s) for s in ("g", "a", "b", "vi", "vj"))
    iters = (IterVar(vi, n), IterVar(vj, const(size)))
    fill = Block("fill", iters, (g, a), BufferStore(tile, (vi, vj), read(x, (vi, vj))))
    turn = Block("turn", iters, (g, b), BufferStore(y, (vi, vj), read(tile, (vi, const(size - 1) - vj))))
    body = seq(For(a, const(size), fill, "item"), For(b, const(size), turn, "item"))
    return PrimFunc("reverse", (x, y), 1, For(g, n, body, "group"), (tile,))
