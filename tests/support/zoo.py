"""A zoo of tensor functions with symbolic dims, each with its meaning in NumPy. Shared by the tests of every folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, f32, i64
from relax_tune.ir.core.expr import (
    Expr,
    Tunable,
    Var,
    and_,
    call,
    cast,
    ceildiv,
    const,
    div,
    load,
    lt,
    maximum,
    minimum,
    select,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt, lower_block, rewrite, seq
from relax_tune.ir.core.tensor_builder import Tensor, TensorBuilder

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A tensor function, how to make inputs for given dims, and the outputs those must give.

    inputs: dims by name -> the input arrays in call order. reference: input arrays -> output arrays (float64 inside).
    sizes: dims worth trying, small, with 1, primes and, where it means something, 0. scalars: names of the dims that are
    explicit scalar parameters, in order.
    """

    name: str
    func: PrimFunc
    inputs: Callable[[np.random.Generator, Mapping[str, int]], list[Array]]
    reference: Callable[..., tuple[Array, ...]]
    sizes: tuple[Mapping[str, int], ...]
    scalars: tuple[str, ...] = ()

    def arguments(self, rng: np.random.Generator, dims: Mapping[str, int]) -> tuple[list[Array], tuple[Array, ...]]:
        """All arguments (poisoned outputs last) and the expected outputs."""
        inputs = self.inputs(rng, dims)
        expected = self.reference(*inputs)
        outputs = [
            np.full(e.shape, np.nan, b.dtype.numpy) for e, b in zip(expected, self.func.output_buffers, strict=True)
        ]
        return inputs + outputs, expected

    def scalar_arguments(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dims[s] for s in self.scalars)


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def _sizes(names: str, *rows: Sequence[int]) -> tuple[Mapping[str, int], ...]:
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


def _wide(*arrays: Array) -> tuple[Array, ...]:
    return tuple(a.astype(np.float64) for a in arrays)


def gelu(x: Expr) -> Expr:
    """x * 0.5 * (1 + erf(x / sqrt(2)))."""
    return x * 0.5 * (call("erf", x * (1 / math.sqrt(2))) + 1.0)


def _gelu_reference(x: Array) -> Array:
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return x * 0.5 * (erf(x / math.sqrt(2)) + 1.0)


def _add(acc: Expr, value: Expr) -> Expr:
    return acc + value


def elementwise() -> Case:
    n, m = Var("n"), Var("m")
    b = TensorBuilder("elementwise")
    x, y = b.input("x", (n, m)), b.output("y", (n, m))
    b.compute(y, lambda i, j: call("exp", x[i, j] * -1.0) + 1.0)
    return Case(
        "elementwise",
        b.finish(),
        lambda rng, d: [_normal(rng, d["n"], d["m"])],
        lambda x: (np.exp(-x.astype(np.float64)) + 1.0,),
        _sizes("n m", (0, 4), (1, 1), (7, 13), (5, 0)),
    )


def broadcast_add() -> Case:
    n = Var("n")
    b = TensorBuilder("broadcast_add")
    x, y, z = b.input("x", (n, 8)), b.input("bias", (8,), const=True), b.output("z", (n, 8))
    b.compute(z, lambda i, j: x[i, j] + y[j])
    return Case(
        "broadcast_add",
        b.finish(),
        lambda rng, d: [_normal(rng, d["n"], 8), _normal(rng, 8)],
        lambda x, y: (x + y,),
        _sizes("n", (0,), (1,), (11,)),
    )


def matmul() -> Case:
    n, m, k = Var("n"), Var("m"), Var("k")
    b = TensorBuilder("matmul")
    x, w, y = b.input("A", (n, k)), b.input("B", (k, m)), b.output("C", (n, m))
    b.reduce(y, (k,), const(0.0), lambda acc, i, j, r: acc + x[i, r] * w[r, j], name="mm")
    return Case(
        "matmul",
        b.finish(),
        lambda rng, d: [_normal(rng, d["n"], d["k"]), _normal(rng, d["k"], d["m"])],
        lambda x, w: (np.matmul(*_wide(x, w)),),
        _sizes("n m k", (1, 1, 1), (0, 3, 5), (7, 13, 11), (4, 16, 8)),
    )


def matmul_bias_gelu() -> Case:
    n = Var("n")
    b = TensorBuilder("matmul_bias_gelu")
    x, w, bias = b.input("x", (n, 8)), b.input("w", (8, 12), const=True), b.input("bias", (12,), const=True)
    t, s, y = b.alloc("t", (n, 12)), b.alloc("s", (n, 12)), b.output("y", (n, 12))
    b.reduce(t, (8,), const(0.0), lambda acc, i, j, r: acc + x[i, r] * w[r, j], name="mm")
    b.compute(s, lambda i, j: t[i, j] + bias[j], name="bias_add")
    b.compute(y, lambda i, j: gelu(s[i, j]), name="gelu")
    return Case(
        "matmul_bias_gelu",
        b.finish(),
        lambda rng, d: [_normal(rng, d["n"], 8), _normal(rng, 8, 12), _normal(rng, 12)],
        lambda x, w, bias: (_gelu_reference(np.matmul(*_wide(x, w)) + bias),),
        _sizes("n", (0,), (1,), (7,), (16,)),
    )


def batched_matmul_nn() -> Case:
    b_, n, m = Var("b"), Var("n"), Var("m")
    b = TensorBuilder("batched_matmul_nn")
    p, v, o = b.input("P", (b_, n, m)), b.input("V", (b_, m, 4)), b.output("O", (b_, n, 4))
    b.reduce(o, (m,), const(0.0), lambda acc, h, i, j, r: acc + p[h, i, r] * v[h, r, j], name="bmm")
    return Case(
        "batched_matmul_nn",
        b.finish(),
        lambda rng, d: [_normal(rng, d["b"], d["n"], d["m"]), _normal(rng, d["b"], d["m"], 4)],
        lambda p, v: (np.matmul(*_wide(p, v)),),
        _sizes("b n m", (1, 1, 1), (2, 5, 7), (0, 3, 3), (3, 1, 11)),
    )


def batched_matmul_nt() -> Case:
    b_, n, m = Var("b"), Var("n"), Var("m")
    b = TensorBuilder("batched_matmul_nt")
    q, k, s = b.input("Q", (b_, n, 4)), b.input("K", (b_, m, 4)), b.output("S", (b_, n, m))
    b.reduce(s, (4,), const(0.0), lambda acc, h, i, j, r: acc + q[h, i, r] * k[h, j, r], name="bmm")
    return Case(
        "batched_matmul_nt",
        b.finish(),
        lambda rng, d: [_normal(rng, d["b"], d["n"], 4), _normal(rng, d["b"], d["m"], 4)],
        lambda q, k: (np.matmul(q.astype(np.float64), np.swapaxes(k, 1, 2).astype(np.float64)),),
        _sizes("b n m", (1, 1, 1), (2, 5, 7), (2, 0, 3)),
    )


def softmax() -> Case:
    n, m = Var("n"), Var("m")
    b = TensorBuilder("softmax")
    x, y = b.input("x", (n, m)), b.output("y", (n, m))
    top, e, total = b.alloc("top", (n,)), b.alloc("e", (n, m)), b.alloc("total", (n,))
    b.reduce(top, (m,), const(-math.inf), lambda acc, i, k: maximum(acc, x[i, k]), name="row_max")
    b.compute(e, lambda i, j: call("exp", x[i, j] - top[i]), name="exp")
    b.reduce(total, (m,), const(0.0), lambda acc, i, k: acc + e[i, k], name="row_sum")
    b.compute(y, lambda i, j: div(e[i, j], total[i]), name="div")

    def reference(x: Array) -> tuple[Array, ...]:
        wide = x.astype(np.float64)
        e = np.exp(wide - wide.max(axis=1, keepdims=True, initial=-np.inf))
        return (e / e.sum(axis=1, keepdims=True),)

    return Case(
        "softmax",
        b.finish(),
        lambda rng, d: [_normal(rng, d["n"], d["m"]) * np.float32(4)],
        reference,
        _sizes("n m", (1, 1), (3, 17), (0, 5), (2, 0)),
    )


def layer_norm() -> Case:
    n, m = Var("n"), Var("m")
    b = TensorBuilder("layer_norm")
    x = b.input("x", (n, m))
    scale, shift = b.input("scale", (m,), const=True), b.input("shift", (m,), const=True)
    y = b.output("y", (n, m))
    total, square = b.alloc("total", (n,)), b.alloc("square", (n,))
    size = cast(m, f32)

    def centred(i: Expr, j: Expr) -> Expr:
        return x[i, j] - div(total[i], size)

    b.reduce(total, (m,), const(0.0), lambda acc, i, k: acc + x[i, k], name="row_sum")
    b.reduce(square, (m,), const(0.0), lambda acc, i, k: acc + centred(i, k) * centred(i, k), name="row_square")
    b.compute(
        y,
        lambda i, j: centred(i, j) * call("rsqrt", div(square[i], size) + 1e-5) * scale[j] + shift[j],
        name="normalise",
    )

    def reference(x: Array, scale: Array, shift: Array) -> tuple[Array, ...]:
        wide = x.astype(np.float64)
        if not wide.size:
            return (wide,)
        centred = wide - wide.mean(axis=1, keepdims=True)
        return (centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * scale + shift,)

    return Case(
        "layer_norm",
        b.finish(),
        lambda rng, d: [_normal(rng, d["n"], d["m"]), _normal(rng, d["m"]), _normal(rng, d["m"])],
        reference,
        _sizes("n m", (1, 2), (5, 13), (0, 8), (3, 0)),
    )


def transpose_0213() -> Case:
    b_, n = Var("b"), Var("n")
    b = TensorBuilder("transpose_0213")
    x, y = b.input("x", (b_, n, 3, 4)), b.output("y", (b_, 3, n, 4))
    b.compute(y, lambda i, h, j, d: x[i, j, h, d])
    return Case(
        "transpose_0213",
        b.finish(),
        lambda rng, d: [_normal(rng, d["b"], d["n"], 3, 4)],
        lambda x: (x.transpose(0, 2, 1, 3),),
        _sizes("b n", (1, 1), (2, 7), (1, 0)),
    )


def gather() -> Case:
    s = Var("s")
    b = TensorBuilder("gather")
    table, ids, y = b.input("table", (10, 4), const=True), b.input("ids", (s,), i64), b.output("y", (s, 4))
    b.compute(y, lambda i, j: table[ids[i], j], name="take")
    return Case(
        "gather",
        b.finish(),
        lambda rng, d: [_normal(rng, 10, 4), rng.integers(0, 10, d["s"])],
        lambda table, ids: (table[ids],),
        _sizes("s", (0,), (1,), (13,)),
    )


def _row(name: str, start: float, combine: Callable[[Expr, Expr], Expr], reference: Callable[[Array], Array]) -> Case:
    n, m = Var("n"), Var("m")
    b = TensorBuilder(name)
    x, y = b.input("x", (n, m)), b.output("y", (n,))
    b.reduce(y, (m,), const(start), lambda acc, i, k: combine(acc, x[i, k]), name=name)
    return Case(
        name,
        b.finish(),
        lambda rng, d: [_normal(rng, d["n"], d["m"])],
        lambda x: (reference(x.astype(np.float64)),),
        _sizes("n m", (1, 1), (5, 17), (0, 3), (31, 2)),
    )


def row_sum() -> Case:
    return _row("row_sum", 0.0, _add, lambda x: x.sum(axis=1))


def row_max() -> Case:
    return _row("row_max", -math.inf, maximum, lambda x: x.max(axis=1, initial=-np.inf))


def mean_pool() -> Case:
    b_, n = Var("b"), Var("n")
    b = TensorBuilder("mean_pool")
    x, mask, y = b.input("x", (b_, n, 6)), b.input("mask", (b_, n), i64), b.output("y", (b_, 6))
    total, count = b.alloc("total", (b_, 6)), b.alloc("count", (b_,))
    b.reduce(total, (n,), const(0.0), lambda acc, i, j, k: acc + x[i, k, j] * cast(mask[i, k], f32), name="masked_sum")
    b.reduce(count, (n,), const(0.0), lambda acc, i, k: acc + cast(mask[i, k], f32), name="count")
    b.compute(y, lambda i, j: div(total[i, j], maximum(count[i], const(1e-9))), name="mean")

    def reference(x: Array, mask: Array) -> tuple[Array, ...]:
        weight = mask[:, :, None].astype(np.float64)
        return ((x * weight).sum(axis=1) / np.maximum(weight.sum(axis=1), 1e-9),)

    def inputs(rng: np.random.Generator, d: Mapping[str, int]) -> list[Array]:
        mask = rng.integers(0, 2, (d["b"], d["n"]))
        mask[:, :1] = 1
        return [_normal(rng, d["b"], d["n"], 6), mask]

    return Case("mean_pool", b.finish(), inputs, reference, _sizes("b n", (1, 1), (3, 7), (0, 4)))


def concat_select() -> Case:
    n, m = Var("n"), Var("m")
    b = TensorBuilder("concat_select")
    x, y, z = b.input("x", (n, 3)), b.input("y", (m, 3)), b.output("z", (n + m, 3))
    b.compute(z, lambda i, j: select(lt(i, n), x[minimum(i, n - 1), j], y[maximum(i - n, 0), j]), name="concat")
    return Case(
        "concat_select",
        b.finish(),
        lambda rng, d: [_normal(rng, d["n"], 3), _normal(rng, d["m"], 3)],
        lambda x, y: (np.concatenate((x, y)),),
        _sizes("n m", (1, 1), (5, 7), (13, 2)),  # a select evaluates both sides, so neither part may be empty
    )


def concat_blocks() -> Case:
    n, m = Var("n"), Var("m")
    b = TensorBuilder("concat_blocks")
    x, y, z = b.input("x", (n, 3)), b.input("y", (m, 3)), b.output("z", (n + m, 3))
    first = _spatial("first", (n, const(3)), z, lambda i, j: (i, j), lambda i, j: x[i, j])
    second = _spatial("second", (m, const(3)), z, lambda i, j: (i + n, j), lambda i, j: y[i, j])
    f = b.finish()
    func = PrimFunc(f.name, f.params, f.outputs, seq(first, second))
    return Case(
        "concat_blocks",
        func,
        lambda rng, d: [_normal(rng, d["n"], 3), _normal(rng, d["m"], 3)],
        lambda x, y: (np.concatenate((x, y)),),
        _sizes("n m", (0, 1), (5, 7), (2, 0), (0, 0)),
    )


def reshape() -> Case:
    n = Var("n")
    b = TensorBuilder("reshape")
    x, y = b.input("x", (n, 6)), b.output("y", (n * 2, 3))
    b.compute(y, lambda i, j: x[(i * 3 + j) // 6, (i * 3 + j) % 6])
    return Case(
        "reshape",
        b.finish(),
        lambda rng, d: [_normal(rng, d["n"], 6)],
        lambda x: (x.reshape(-1, 3),),
        _sizes("n", (0,), (1,), (7,)),
    )


def _spatial(
    name: str,
    extents: Sequence[Expr],
    out: Tensor,
    where: Callable[..., tuple[Expr, ...]],
    value: Callable[..., Expr],
) -> Stmt:
    loops = [Var(f"{name}_{'ij'[a]}") for a in range(len(extents))]
    iters = [IterVar(Var("v" + v.name[-1]), e) for v, e in zip(loops, extents, strict=True)]
    points = [i.var for i in iters]
    body: Stmt = Block(name, tuple(iters), tuple(loops), BufferStore(out.buffer, where(*points), value(*points)))
    for var, extent in reversed(list(zip(loops, extents, strict=True))):
        body = For(var, extent, body)
    return body


def tiled_matmul(tunables: tuple[Tunable, Tunable] | None = None) -> PrimFunc:
    """A scheduled matmul (n, 8) x (8, m) with two tiled dims, predicate, parallel and vector loops.

    With tunables it is a sketch; without, tiles are 4 and 8.
    """
    n, m = Var("n"), Var("m")
    ti, tj = tunables or (const(4), const(8))
    a, w = Buffer("A", (n, const(8)), f32), Buffer("B", (const(8), m), f32)
    c, acc = Buffer("C", (n, m), f32), Buffer("acc", (ti, tj), f32, "local")
    io, jo, ii, jj, k = (Var(x) for x in ("io", "jo", "ii", "jj", "k"))

    def point(reduce: bool, i: Expr, j: Expr) -> tuple[tuple[IterVar, ...], tuple[Expr, ...]]:
        iters = (IterVar(Var("vi"), n), IterVar(Var("vj"), m))
        tail = (IterVar(Var("vk"), const(8), "reduce"),) if reduce else ()
        return iters + tail, (io * ti + i, jo * tj + j, *((k,) if reduce else ()))

    def inside(i: Expr, j: Expr) -> Expr:
        return and_(lt(io * ti + i, n), lt(jo * tj + j, m))

    # the accumulator is indexed by tile-local iterators, so both blocks carry them beside the global ones
    i2, j2 = Var("i2"), Var("j2")
    iters, bindings = point(True, ii, jj)
    local = (IterVar(Var("wi"), ti), IterVar(Var("wj"), tj))
    (vi, vj, vk), (wi, wj) = (i.var for i in iters), (i.var for i in local)
    here = (wi, wj)
    update = Block(
        "mm",
        (*iters[:2], *local, iters[2]),
        (*bindings[:2], ii, jj, bindings[2]),
        BufferStore(acc, here, load(acc, here) + load(a, (vi, vk)) * load(w, (vk, vj))),
        BufferStore(acc, here, const(0.0)),
        inside(ii, jj),
    )
    iters, bindings = point(False, i2, j2)
    local = (IterVar(Var("wi"), ti), IterVar(Var("wj"), tj))
    (vi, vj), (wi, wj) = (i.var for i in iters), (i.var for i in local)
    write = Block(
        "write",
        (*iters, *local),
        (*bindings, i2, j2),
        BufferStore(c, (vi, vj), load(acc, (wi, wj))),
        None,
        inside(i2, j2),
    )
    kind = "serial" if tunables else "vectorized"
    compute = For(k, const(8), For(ii, ti, For(jj, tj, update, kind)))
    body = seq(compute, For(i2, ti, For(j2, tj, write, kind)))
    body = For(io, ceildiv(n, ti), For(jo, ceildiv(m, tj), body), "parallel", tail="predicate")
    return PrimFunc("tiled_matmul", (a, w, c), 1, body, (acc,))


def lowered(func: PrimFunc) -> PrimFunc:
    """`func` without blocks: iterators replaced, predicates as `If`."""
    body = rewrite(func.body, lambda s: lower_block(s) if isinstance(s, Block) else s)
    return PrimFunc(func.name, func.params, func.outputs, body, func.allocs, func.consts)


@cache
def cases() -> tuple[Case, ...]:
    """Every case of the zoo."""
    makers = (
        elementwise, broadcast_add, matmul, matmul_bias_gelu, batched_matmul_nn, batched_matmul_nt, softmax, layer_norm,
        transpose_0213, gather, row_sum, row_max, mean_pool, concat_select, concat_blocks, reshape,
    )  # fmt: skip
    return tuple(make() for make in makers)


def functions() -> tuple[PrimFunc, ...]:
    """The functions of the zoo, the scheduled, lowered and open ones included."""
    plain = tuple(c.func for c in cases())
    sketch = tiled_matmul((Tunable("T0", (1, 2, 4)), Tunable("T1", (4, 8, 16))))
    more = (tiled_matmul(), sketch, scaled())
    return (*plain, *more, *(lowered(f) for f in (plain[2], plain[6], tiled_matmul())))


def scaled(dtype: DType = f32) -> PrimFunc:
    """y = x * cast(n) with n only as an explicit scalar parameter beside a fixed dim."""
    n = Var("n")
    b = TensorBuilder("scaled")
    x, y = b.input("x", (4,), dtype), b.output("y", (4,), dtype)
    b.scalar(n)
    b.compute(y, lambda i: x[i] * cast(n, dtype))
    return b.finish()
