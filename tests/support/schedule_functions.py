"""Tensor functions that the schedule tests share: the corner cases of primitives and rules that the zoo lacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from relax_tune.ir.core.dtype import DType, bool_, f16, f32, i8, i32, i64
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    ExprLike,
    Var,
    and_,
    call,
    cast,
    const,
    div,
    eq,
    expr,
    le,
    lt,
    maximum,
    minimum,
    select,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.indexing.scatter import Mode, ScatterElements, ScatterND
from relax_tune.ir.op.math.elementwise import Add, Relu
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.paged import PagedAttention, PagedWrite
from relax_tune.ir.op.neural.window import Pool
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm
from relax_tune.ir.op.reduction.scan import TopK
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.pipeline import lower, passes_for


def chain() -> PrimFunc:
    """B = 2 A, C = B + 1 over (n, m)."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("chain")
    x, y, z = b.input("A", (n, m)), b.alloc("B", (n, m)), b.output("C", (n, m))
    b.compute(y, lambda i, j: x[i, j] * 2.0, name="double")
    b.compute(z, lambda i, j: y[i, j] + 1.0, name="inc")
    return b.finish()


def flipped() -> PrimFunc:
    """C[j, i] = B[i, j] + D[j] with B = 2 A over (n, m)."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("flipped")
    x, d, y, z = b.input("A", (n, m)), b.input("D", (m,)), b.alloc("B", (n, m)), b.output("C", (m, n))
    b.compute(y, lambda i, j: x[i, j] * 2.0, name="double")
    b.compute(z, lambda j, i: y[i, j] + d[j], name="turn")
    return b.finish()


def stencil() -> PrimFunc:
    """C[i] = B[i] + B[i + 1] with B = A * A over (n + 1,)."""
    n = Var("n")
    b = TensorBuilder("stencil")
    b.scalar(n)
    x, y, z = b.input("A", (n + 1,)), b.alloc("B", (n + 1,)), b.output("C", (n,))
    b.compute(y, lambda i: x[i] * x[i], name="square")
    b.compute(z, lambda i: y[i] + y[i + 1], name="pair")
    return b.finish()


def csr_rows(most: bool = False) -> PrimFunc:
    """C = 2 * B with B the sum (or the largest, at least 0) of value * x over the n rows of a sparse matrix of at most w elements.

    Rows start at multiples of 5: `start` holds the factors."""
    n, m, k, w = Var("n"), Var("m"), Var("k"), Var("w")
    b = TensorBuilder("csr_rows")
    start, column = b.input("start", (n + 1,), i32), b.input("column", (m,), i32)
    value, x, z = b.input("value", (m,)), b.input("x", (k,)), b.output("C", (n,))
    b.scalar(w)
    y = b.alloc("B", (n,))

    def step(acc: Expr, i: Expr, j: Expr) -> Expr:
        at = cast(start[i], i64) * 5 + j
        inside = maximum(minimum(at, m - 1), 0)
        chosen = x[maximum(minimum(cast(column[inside], i64), k - 1), 0)]
        term = select(lt(at, cast(start[i + 1], i64) * 5), value[inside] * chosen, const(0.0))
        return maximum(acc, term) if most else acc + term

    b.reduce(y, (w,), const(0.0), step, name="row")
    b.compute(z, lambda i: y[i] * 2.0, name="twice")
    return b.finish()


def moments_of_cells() -> PrimFunc:
    """Density and flow of cells (n, m) from five directions, by which each relaxes, as in lattice Boltzmann (D2Q5)."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("cells")
    f, speed, z = b.input("f", (5, n + 2, m + 2)), b.input("speed", (5,)), b.output("out", (5, n, m))
    density, flow = b.alloc("density", (n, m)), b.alloc("flow", (n, m))

    def source(q: Expr, i: Expr, j: Expr) -> Expr:
        row = select(lt(q, 1), const(0), select(lt(q, 4), const(1), const(2)))
        return f[q, i + row, j + select(lt(q, 1), const(1), select(lt(q, 4), q - 1, const(1)))]

    b.reduce(density, (const(5),), const(0.0), lambda acc, i, j, q: acc + source(q, i, j), name="density")
    b.reduce(flow, (const(5),), const(0.0), lambda acc, i, j, q: acc + source(q, i, j) * speed[q], name="flow")
    b.compute(
        z,
        lambda q, i, j: source(q, i, j) * 0.5 + speed[q] * flow[i, j] * density[i, j],
        name="relax",
    )
    return b.finish()


def prefix_sums(axis: int = 1, exclusive: bool = False, from_end: bool = False, stored: DType = f32) -> PrimFunc:
    """C = 2 * B with B the sums of A * A along an axis of (n, m), up to each element."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("prefix_sums")
    x, z = b.input("A", (n, m), stored), b.output("C", (n, m), stored)
    t, y = (b.alloc(name, (n, m), stored) for name in ("S", "B"))
    b.compute(t, lambda i, j: x[i, j] * x[i, j], name="square")
    before = lt if exclusive else le

    def step(acc: Expr, i: Expr, j: Expr, k: Expr) -> Expr:
        own = (i, j)[axis]
        taken = before(own, k) if from_end else before(k, own)
        return acc + select(taken, t[(k, j) if axis == 0 else (i, k)], const(0, stored))

    b.reduce(y, ((n, m)[axis],), const(0, stored), step, name="scan")
    b.compute(z, lambda i, j: y[i, j] * const(2, stored), name="twice")
    return b.finish()


def top_places(axis: int = 1, largest: bool = True, stored: DType = f32) -> PrimFunc:
    """The places of the k largest or smallest elements of (n, m) along an axis."""
    info = TensorInfo((Var("n"), Var("m")), stored)
    return TopK(Var("k"), axis, largest).legalize("top_k", [info])


def top_places_of(
    length: int, axis: int = 1, largest: bool = True, stored: DType = f32, k: ExprLike | None = None
) -> PrimFunc:
    """The places of the k largest or smallest elements along an axis of n rows or columns of known length."""
    dims = (Var("n"), const(length)) if axis else (const(length), Var("n"))
    return TopK(Var("k") if k is None else expr(k), axis, largest).legalize("top_k", [TensorInfo(dims, stored)])


def scattered_rows(mode: Mode = "add", stored: DType = f32, width: int | None = None) -> PrimFunc:
    """(n, w) with each of m rows of updates combined with the row at its index. width: w, a symbol without it."""
    n, m, w = Var("n"), Var("m"), Var("w") if width is None else const(width)
    infos = [TensorInfo((n, w), stored), TensorInfo((m, const(1)), i64), TensorInfo((m, w), stored)]
    return ScatterND(mode).legalize("scatter_rows", infos)


def scattered_columns(mode: Mode = "add", stored: DType = f32) -> PrimFunc:
    """(n, w) with each of m updates of a row combined with the element of this row at its index."""
    n, m, w = Var("n"), Var("m"), Var("w")
    infos = [TensorInfo((n, w), stored), TensorInfo((n, m), i32), TensorInfo((n, m), stored)]
    return ScatterElements(mode, axis=1).legalize("scatter_columns", infos)


def group_norm() -> PrimFunc:
    """Group normalisation of (n, 2 groups, 3 channels, h), with weights by channel."""
    n, h = Var("n"), Var("h")
    x, weight = TensorInfo((n, const(2), const(3), h), f32), TensorInfo((const(2), const(3), const(1)), f32)
    return LayerNorm(1e-5, 2).legalize("group_norm", [x, weight, weight], (False, True, True))


def reverse() -> PrimFunc:
    """C[i] = B[n - 1 - i] with B = A + 1."""
    n = Var("n")
    b = TensorBuilder("reverse")
    x, y, z = b.input("A", (n,)), b.alloc("B", (n,)), b.output("C", (n,))
    b.compute(y, lambda i: x[i] + 1.0, name="inc")
    b.compute(z, lambda i: y[n - 1 - i], name="flip")
    return b.finish()


def transposed_scale(stored: DType = f32) -> PrimFunc:
    """Y[b, j, i] = X[b, i, j] * s[i] over (b, n, m)."""
    p, n, m = Var("b"), Var("n"), Var("m")
    b = TensorBuilder("turned")
    x, s, y = b.input("X", (p, n, m), stored), b.input("s", (n,)), b.output("Y", (p, m, n), stored)
    b.compute(y, lambda z, j, i: cast(cast(x[z, i, j], f32) * s[i], stored), name="turn")
    return b.finish()


def two_outputs() -> PrimFunc:
    """Row sums and row maxima."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("two_outputs")
    x, s, t = b.input("A", (n, m)), b.output("S", (n,)), b.output("T", (n,))
    b.reduce(s, (m,), const(0.0), lambda acc, i, k: acc + x[i, k], name="sum")
    b.reduce(t, (m,), const(-math.inf), lambda acc, i, k: maximum(acc, x[i, k]), name="max")
    return b.finish()


def row_sum_of_six() -> PrimFunc:
    """Row sums of an (n, 6): a reduction that is never empty."""
    n = Var("n")
    b = TensorBuilder("row_sum")
    x, y = b.input("A", (n, const(6))), b.output("B", (n,))
    b.reduce(y, (const(6),), const(0.0), lambda acc, i, k: acc + x[i, k], name="row_sum")
    return b.finish()


def dot() -> PrimFunc:
    """A scalar: y[0] = sum(A * B), biased by the initial value."""
    n = Var("n")
    b = TensorBuilder("dot")
    x, w, y = b.input("A", (n,)), b.input("B", (n,)), b.output("y", (1,))
    b.reduce(y, (n,), const(1.0), lambda acc, i, k: acc + x[k] * w[k], name="dot")
    return b.finish()


def matmul(
    n: int | None = None, k: int | None = None, epilogue: bool = True, const_weight: bool = True, stored: DType = f32
) -> PrimFunc:
    """D = max(A @ W + bias, 0) over (m, k) and (k, n); symbolic where no number is given. A, W and D are stored as `stored`."""
    m = Var("m")
    cols, depth = Var("n") if n is None else const(n), Var("k") if k is None else const(k)
    b = TensorBuilder("matmul")
    x, w = b.input("A", (m, depth), stored), b.input("W", (depth, cols), stored, const_weight)
    if not epilogue:
        out = b.output("D", (m, cols))
        b.reduce(out, (depth,), const(0.0), lambda acc, i, j, r: acc + x[i, r] * w[r, j], name="mm")
        return b.finish()
    bias, c, out = (
        b.input("bias", (cols,), const=const_weight),
        b.alloc("C", (m, cols)),
        b.output("D", (m, cols), stored),
    )
    b.reduce(c, (depth,), const(0.0), lambda acc, i, j, r: acc + cast(x[i, r], f32) * cast(w[r, j], f32), name="mm")
    b.compute(out, lambda i, j: cast(maximum(c[i, j] + bias[j], const(0.0)), stored), name="relu")
    return b.finish()


def transposed_product(stored: DType = f32) -> PrimFunc:
    """D = A^T @ B^T + bias over (k, m) and (n, k), all symbolic."""
    m, n, k = Var("m"), Var("n"), Var("k")
    b = TensorBuilder("turned_product")
    x, w, bias = b.input("A", (k, m), stored), b.input("B", (n, k), stored), b.input("bias", (n,))
    c, d = b.alloc("C", (m, n)), b.output("D", (m, n))
    b.reduce(c, (k,), const(0.0), lambda acc, i, j, r: acc + cast(x[r, i], f32) * cast(w[j, r], f32), name="mm")
    b.compute(d, lambda i, j: c[i, j] + bias[j], name="add")
    return b.finish()


def dense(n: int, k: int, rows: int | None = None, stored: DType = f32, weights: DType | None = None) -> PrimFunc:
    """max(x @ w.T + bias, 0) with a constant w of (n, k), stored as x or in a type of its own."""
    m = Var("m") if rows is None else const(rows)
    b = TensorBuilder("dense")
    x, w, bias = (
        b.input("x", (m, k), stored),
        b.input("w", (n, k), weights or stored, const=True),
        b.input("bias", (n,), const=True),
    )
    c, d = b.alloc("C", (m, n)), b.output("D", (m, n))
    b.reduce(c, (k,), const(0.0), lambda acc, i, j, r: acc + cast(x[i, r], f32) * cast(w[j, r], f32), name="mm")
    b.compute(d, lambda i, j: maximum(c[i, j] + bias[j], const(0.0)), name="relu")
    return b.finish()


def quantised(
    n: int,
    k: int,
    bits: int,
    group: int | None = None,
    transposed: bool = True,
    rows: int | None = None,
    activations: Literal["f32", "int8"] = "f32",
) -> PrimFunc:
    """max(x @ w + bias, 0) of an (m, k) and a weight stored in `bits` bits, as `QuantizeWeights` and lowering make it."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("m") if rows is None else rows, k))
    w = g.constant("w", np.random.default_rng(0).standard_normal((n, k) if transposed else (k, n), np.float32))
    y = g.call(Add(), g.call(Matmul(transposed), x, w), g.constant("bias", np.ones(n, np.float32)))
    module = QuantizeWeights(bits, group)(g.finish(g.call(Relu(), y)))
    lowered = lower(module, passes_for(activations=activations))
    (func,) = [f for name, f in lowered.prims.items() if "matmul" in name]
    return func


def scaled_bytes(n: int, k: int, stored: DType = f16) -> PrimFunc:
    """x @ (q * scale).T of an (m, k) in 16 bits and a constant (n, k) of integers with one scale per row."""
    m = Var("m")
    b = TensorBuilder("scaled_bytes")
    x, q, scale = b.input("x", (m, k), stored), b.input("q", (n, k), i8, const=True), b.input("scale", (n,), const=True)
    c, d = b.alloc("C", (m, n)), b.output("D", (m, n), stored)
    b.reduce(
        c,
        (k,),
        const(0.0),
        lambda acc, i, j, r: acc + cast(x[i, r], f32) * (cast(q[j, r], f32) * scale[j]),
        name="mm",
    )
    b.compute(d, lambda i, j: cast(c[i, j], stored), name="round")
    return b.finish()


def rows_by_vector(k: int | None = None, stored: DType = f32) -> PrimFunc:
    """y = A @ x of an (m, k) and a vector, as a product with one column."""
    m, depth = Var("m"), Var("k") if k is None else const(k)
    b = TensorBuilder("rows_by_vector")
    a, x, y = b.input("A", (m, depth), stored), b.input("x", (depth, const(1)), stored), b.output("y", (m, const(1)))
    b.reduce(y, (depth,), const(0.0), lambda acc, i, j, r: acc + cast(a[i, r], f32) * cast(x[r, j], f32), name="mv")
    return b.finish()


def scores(heads: int = 3, depth: int = 5, stored: DType = f32) -> PrimFunc:
    """Batched NT with a scale and a mask: (b, n, h, d) x (b, n, h, d) -> (b, h, n, n)."""
    p, n = Var("b"), Var("n")
    b = TensorBuilder("scores")
    q, k = (b.input(x, (p, n, heads, depth), stored) for x in "QK")
    mask = b.input("mask", (p, n))
    c, d = b.alloc("C", (p, heads, n, n)), b.output("D", (p, heads, n, n))
    b.reduce(
        c,
        (depth,),
        const(0.0),
        lambda acc, z, h, i, j, r: acc + cast(q[z, i, h, r], f32) * cast(k[z, j, h, r], f32),
        name="qk",
    )
    b.compute(d, lambda z, h, i, j: c[z, h, i, j] * 0.25 + mask[z, j], name="mask_add")
    return b.finish()


def context(heads: int = 3, depth: int = 7, stored: DType = f32) -> PrimFunc:
    """Batched NN: (b, h, n, n) x (b, n, h, d) -> (b, n, h, d)."""
    p, n = Var("b"), Var("n")
    b = TensorBuilder("context")
    w, v = b.input("P", (p, heads, n, n), stored), b.input("V", (p, n, heads, depth), stored)
    d = b.output("D", (p, n, heads, depth))
    b.reduce(
        d,
        (n,),
        const(0.0),
        lambda acc, z, i, h, e, r: acc + cast(w[z, h, i, r], f32) * cast(v[z, r, h, e], f32),
        name="pv",
    )
    return b.finish()


def softmax_mask(heads: int = 3) -> PrimFunc:
    """Softmax over the last axis of (b, h, n, n) with an additive mask (b, n)."""
    p, n = Var("b"), Var("n")
    b = TensorBuilder("softmax_mask")
    x, mask, y = b.input("X", (p, heads, n, n)), b.input("mask", (p, n)), b.output("Y", (p, heads, n, n))
    t = b.alloc("T", (p, heads, n, n))
    top, e, total = b.alloc("M", (p, heads, n)), b.alloc("E", (p, heads, n, n)), b.alloc("S", (p, heads, n))
    b.compute(t, lambda z, h, i, j: x[z, h, i, j] + mask[z, j], name="add_mask")
    b.reduce(top, (n,), const(-math.inf), lambda acc, z, h, i, r: maximum(acc, t[z, h, i, r]), name="row_max")
    b.compute(e, lambda z, h, i, j: call("exp", t[z, h, i, j] - top[z, h, i]), name="row_exp")
    b.reduce(total, (n,), const(0.0), lambda acc, z, h, i, r: acc + e[z, h, i, r], name="row_sum")
    b.compute(y, lambda z, h, i, j: div(e[z, h, i, j], total[z, h, i]), name="row_div")
    return b.finish()


def short_softmax(width: int = 17) -> PrimFunc:
    """Softmax of rows that fit in registers, with an input scaled on the way."""
    n = Var("n")
    b = TensorBuilder("short_softmax")
    x, y, t = b.input("X", (n, width)), b.output("Y", (n, width)), b.alloc("T", (n, width))
    top, e, total = b.alloc("M", (n,)), b.alloc("E", (n, width)), b.alloc("S", (n,))
    b.compute(t, lambda i, j: x[i, j] * 0.5, name="half")
    b.reduce(top, (width,), const(-math.inf), lambda acc, i, r: maximum(acc, t[i, r]), name="row_max")
    b.compute(e, lambda i, j: call("exp", t[i, j] - top[i]), name="row_exp")
    b.reduce(total, (width,), const(0.0), lambda acc, i, r: acc + e[i, r], name="row_sum")
    b.compute(y, lambda i, j: div(e[i, j], total[i]), name="row_div")
    return b.finish()


def embed_norm(width: int = 24) -> PrimFunc:
    """Gather two tables, add, layer norm over the last axis: (b, n) ids -> (b, n, width)."""
    p, n = Var("b"), Var("n")
    b = TensorBuilder("embed_norm")
    words, places = b.input("words", (11, width), const=True), b.input("places", (64, width), const=True)
    ids = b.input("ids", (p, n), i64)
    scale, shift = b.input("scale", (width,), const=True), b.input("shift", (width,), const=True)
    y = b.output("Y", (p, n, width))
    x, mean, var = b.alloc("X", (p, n, width)), b.alloc("mean", (p, n)), b.alloc("var", (p, n))
    b.compute(x, lambda z, i, j: words[ids[z, i], j] + places[i, j], name="embed")
    b.reduce(mean, (width,), const(0.0), lambda acc, z, i, r: acc + x[z, i, r] * (1.0 / width), name="mean")
    b.reduce(
        var,
        (width,),
        const(0.0),
        lambda acc, z, i, r: acc + (x[z, i, r] - mean[z, i]) * (x[z, i, r] - mean[z, i]) * (1.0 / width),
        name="variance",
    )
    b.compute(
        y,
        lambda z, i, j: (x[z, i, j] - mean[z, i]) * call("rsqrt", var[z, i] + 1e-5) * scale[j] + shift[j],
        name="norm",
    )
    return b.finish()


def mean_over_middle(width: int = 10) -> PrimFunc:
    """(b, n, width) -> (b, width), mean over n."""
    p, n = Var("b"), Var("n")
    b = TensorBuilder("mean_over_middle")
    x, t, y = b.input("X", (p, n, width)), b.alloc("T", (p, width)), b.output("Y", (p, width))
    b.reduce(t, (n,), const(0.0), lambda acc, z, j, r: acc + x[z, r, j], name="total")
    b.compute(y, lambda z, j: div(t[z, j], cast(n, x.buffer.dtype)), name="mean")
    return b.finish()


def pointwise(rank: int) -> PrimFunc:
    """Two fused elementwise steps over 1, 2 or 4 dims."""
    dims = [(Var("n"),), (Var("n"), Var("m")), (Var("b"), Var("n"), const(3), const(5))][{1: 0, 2: 1, 4: 2}[rank]]
    b = TensorBuilder(f"pointwise{rank}")
    x, t, y = b.input("X", dims), b.alloc("T", dims), b.output("Y", dims)
    b.compute(t, lambda *i: x[i] * 0.5, name="half")
    b.compute(y, lambda *i: call("tanh", t[i]) + 1.0, name="squash")
    return b.finish()


def scaled_rows() -> PrimFunc:
    """y = x / limit with `limit` an explicit scalar parameter that no buffer shows."""
    n, limit = Var("n"), Var("limit")
    b = TensorBuilder("scaled_rows")
    x, y = b.input("X", (n, 6)), b.output("Y", (n, 6))
    b.scalar(limit)
    b.compute(y, lambda i, j: select(lt(i, limit), div(x[i, j], cast(limit + 1, x.buffer.dtype)), const(0.0)))
    return b.finish()


def sum_of_all() -> PrimFunc:
    """One number: the sum over (n,)."""
    n = Var("n")
    b = TensorBuilder("sum_of_all")
    x, y = b.input("X", (n,)), b.output("y", ())
    b.reduce(y, (n,), const(0.0), lambda acc, k: acc + x[k], name="sum")
    return b.finish()


def column_extremes() -> PrimFunc:
    """(n, m) -> the largest element of each column, at least 0."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("column_extremes")
    x, y, t = b.input("X", (n, m)), b.output("Y", (m,)), b.alloc("T", (m,))
    b.reduce(t, (n,), const(-math.inf), lambda acc, j, k: maximum(acc, x[k, j] * 2.0), name="top")
    b.compute(y, lambda j: maximum(t[j], const(0.0)), name="at_least")
    return b.finish()


def standardise() -> PrimFunc:
    """(n,) minus its mean over its standard deviation: reductions that wait for one another, and a vector from them; and the mean."""
    n = Var("n")
    b = TensorBuilder("standardise")
    x, total, square = b.input("X", (n,)), b.alloc("total", ()), b.alloc("square", ())
    y, mean = b.output("Y", (n,)), b.output("mean", ())
    size = cast(n, x.buffer.dtype)
    b.reduce(total, (n,), const(0.0), lambda acc, k: acc + x[k], name="sum")
    centred = lambda k: x[k] - div(total[()], size)
    b.reduce(square, (n,), const(0.0), lambda acc, k: acc + centred(k) * centred(k), name="squares")
    b.compute(y, lambda k: div(centred(k), call("sqrt", div(square[()], size) + 1e-5)), name="scale")
    b.compute(mean, lambda: div(total[()], size), name="mean")
    return b.finish()


def ends(width: int = 12) -> PrimFunc:
    """(n, m, width) -> (m,): sums over the first and the last dimension."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("ends")
    x, y = b.input("X", (n, m, width)), b.output("Y", (m,))
    b.reduce(y, (n, const(width)), const(0.0), lambda acc, j, i, k: acc + x[i, j, k], name="sum")
    return b.finish()


def weighted(guarded: bool = True, near: Callable[[Expr, Expr], Expr] | None = None) -> PrimFunc:
    """Y[i, c] = sum_k softmax(s)[i, k] V[k, c] of masked scores A[i, k]; 0 in rows without any key.

    near: a further condition on i and k.
    guarded: whether the weights test for masked scores; otherwise masked scores are minus infinity.
    """
    n, m = Var("n"), Var("m")
    b = TensorBuilder("weighted")
    x, seen, v = b.input("A", (n, m)), b.input("seen", (n, m), bool_), b.input("V", (m, 3))
    y = b.output("Y", (n, 3))
    s, w = b.alloc("S", (n, m)), b.alloc("W", (n, m))
    top, total, context = b.alloc("M", (n,)), b.alloc("L", (n,)), b.alloc("C", (n, 3))
    hidden, zero = const(-math.inf), const(0.0)
    shown = near or (lambda i, k: TRUE)
    b.compute(s, lambda i, k: select(and_(shown(i, k), seen[i, k]), x[i, k], hidden), name="score")
    b.reduce(top, (m,), hidden, lambda acc, i, k: maximum(acc, s[i, k]), name="top")

    def weight(i: Expr, k: Expr) -> Expr:
        power = call("exp", s[i, k] - top[i])
        return select(eq(s[i, k], hidden), zero, power) if guarded else power

    b.compute(w, weight, name="weight")
    b.reduce(total, (m,), zero, lambda acc, i, k: acc + w[i, k], name="total")
    b.reduce(context, (m,), zero, lambda acc, i, c, k: acc + w[i, k] * v[k, c], name="context")
    b.compute(y, lambda i, c: select(eq(total[i], zero), zero, div(context[i, c], total[i])), name="divide")
    return b.finish()


def attention(heads: int = 2, depth: int = 16, width: int = 16) -> PrimFunc:
    """Queries (h, n, d) over keys (h, m, d) and values (h, m, e)."""
    n, m = Var("n"), Var("m")
    infos = [TensorInfo((const(heads), r, const(w)), f32) for r, w in ((n, depth), (m, depth), (m, width))]
    return Attention(depth**-0.5).legalize("attention", infos)


def attention_of_positions(dtype: DType = f32) -> PrimFunc:
    """Queries, keys and values as products leave them, (b, n, h, d), under a mask of truth values of positions."""
    g = GraphBuilder()
    b, n = g.symbol("b"), g.symbol("n")
    q, k, v = (g.input(x, (b, n, const(3), const(32)), dtype) for x in "qkv")
    mask = g.input("mask", (b, const(1), const(1), n), bool_)
    turned = (g.call(Permute((0, 2, 1, 3)), x) for x in (q, k, v))
    y = g.call(Attention(0.2, softcap=5.0), *turned, mask)
    (func,) = lower(g.finish(g.call(Permute((0, 2, 1, 3)), y))).prims.values()
    return func


def attention_over_cache() -> PrimFunc:
    """Causal attention of the last n of m positions with a window of nine; four heads share two heads of keys."""
    n, m = Var("n"), Var("m")
    infos = [TensorInfo((const(h), r, const(24)), f32) for h, r in ((4, n), (2, m), (2, m))]
    return Attention(0.3, causal=True, offset=m - n, window=9).legalize("attention", infos)


def paged_infos(rows: tuple[TensorInfo, ...], dtype: DType = f32) -> list[TensorInfo]:
    """The arguments of an operator of pools: rows of tokens, pools of (p, 4, 2, 16), tables, requests and positions."""
    t, r, w, p = (Var(name) for name in "trwp")
    pool = TensorInfo((p, const(4), const(2), const(16)), dtype)
    places = [TensorInfo(dims, i64) for dims in ((r, w), (t,), (t,))]
    return [*(TensorInfo((t, *x.shape), x.dtype) if x.shape is not None else pool for x in rows), *places]


def paged_attention(dtype: DType = f32) -> PrimFunc:
    """Attention over pools, of six query heads that share two key heads, with a window of nine."""
    heads = TensorInfo(tuple(map(const, (2, 3, 16))), f32)
    infos = paged_infos((heads, TensorInfo(None, dtype), TensorInfo(None, dtype)), dtype)
    return PagedAttention(0.3, window=9).legalize("paged_attention", infos)


def paged_write() -> PrimFunc:
    """Rows written to their places in a pool."""
    infos = paged_infos((TensorInfo(None, f32), TensorInfo((const(2), const(16)), f32)))
    return PagedWrite().legalize("paged_write", infos)


def attention_of_halves(dtype: DType = f16) -> PrimFunc:
    """Causal attention of the last n of m positions in 16-bit floats, weights included; four heads share two heads of
    keys.
    """
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    q, k, v = (g.input(x, (h, r, w), dtype) for x, h, r, w in (("q", 4, n, 32), ("k", 2, m, 32), ("v", 2, m, 16)))
    (func,) = lower(g.finish(g.call(Attention(0.2, causal=True, offset=m - n), q, k, v))).prims.values()
    return func


def causal_attention() -> PrimFunc:
    """Positions see those up to their own; two neighbouring rows, of query heads that share keys, stand at each."""
    n = Var("n")
    infos = [TensorInfo((const(3), r, const(16)), f32) for r in (n * 2, n, n)]
    return Attention(0.3, causal=True, group=2).legalize("attention", infos)


def gates(width: int = 16, depth: int = 9) -> PrimFunc:
    """A step of a layer with three gates: products with columns of W, and two new states over (m, width)."""
    m = Var("m")
    b = TensorBuilder("gates")
    h, w = b.input("H", (m, depth)), b.input("W", (depth, 3 * width), const=True)
    c, p = b.input("C", (m, width)), b.alloc("P", (3, m, width))
    new, state, shown = b.output("C2", (m, width)), b.alloc("S", (m, width)), b.output("H2", (m, width))
    b.reduce(p, (depth,), const(0.0, f32), lambda old, g, i, j, k: old + h[i, k] * w[k, g * width + j], "mm")
    b.compute(new, lambda i, j: p[0, i, j] * c[i, j] + p[1, i, j], "cell")
    b.compute(state, lambda i, j: call("tanh", new[i, j]) * p[2, i, j], "state")
    b.compute(shown, lambda i, j: select(lt(i, 3), state[i, j], c[i, j]), "shown")
    return b.finish()


def windows() -> PrimFunc:
    """C[i, j] = relu(sum over k, t of A[i + k, j + t] * W[k, t]) over (n, m), windows of (2, 3)."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("windows")
    b.scalar(n)
    b.scalar(m)
    x, w = b.input("A", (n + 1, m + 2)), b.input("W", (2, 3))
    y, z = b.alloc("B", (n, m)), b.output("C", (n, m))
    b.reduce(y, (2, 3), const(0.0), lambda acc, i, j, k, t: acc + x[i + k, j + t] * w[k, t], name="slide")
    b.compute(z, lambda i, j: maximum(y[i, j], 0.0), name="relu")
    return b.finish()


def convolution(
    channels: tuple[int, int],
    kernel: tuple[int, ...],
    places: tuple[int | str, ...],
    strides: tuple[int, ...] = (1, 1),
    dilations: tuple[int, ...] = (1, 1),
    groups: int = 1,
    const_weight: bool = True,
    last: bool = False,
    padded: bool = False,
) -> PrimFunc:
    """A convolution of n inputs, with bias and relu after it: channels of (input, output), places along each dim of the windows.

    last: the output's channels are its last dim, as a permutation that was fused makes them. padded: the input is made here.
    """
    n, dims = Var("n"), [Var(p) if isinstance(p, str) else const(p) for p in places]
    each, per_group = channels[1] // groups, channels[0] // groups
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
    b = TensorBuilder("convolution")
    for d in dims:
        if isinstance(d, Var):
            b.scalar(d)
    x = b.input("x", (n, channels[0], *(d * s + max(r - s, 0) for d, s, r in zip(dims, strides, reach))))
    if padded:
        raw, x = x, b.alloc("padded", x.buffer.shape)
        b.compute(x, lambda *i: select(lt(0, i[-1]), raw[i], 0.0), name="pad")
    w = b.input("weights", (channels[1], per_group, *kernel), const=const_weight)
    bias, y = b.input("bias", (channels[1],)), b.alloc("acc", (n, channels[1], *dims))
    z = b.output("y", (n, *dims, channels[1]) if last else (n, channels[1], *dims))
    rank = len(kernel)

    def step(acc: Expr, *i: Expr) -> Expr:
        (image, o), at, c, taps = i[:2], i[2 : 2 + rank], i[2 + rank], i[3 + rank :]
        where = (p * s + t * d for p, s, t, d in zip(at, strides, taps, dilations))
        return acc + x[(image, o // each * per_group + c if groups > 1 else c, *where)] * w[(o, c, *taps)]

    b.reduce(y, (per_group, *kernel), const(0.0), step, name="conv")
    if last:
        b.compute(z, lambda i, *p: maximum(y[(i, p[-1], *p[:-1])] + bias[p[-1]], 0.0), name="relu")
    else:
        b.compute(z, lambda i, o, *p: maximum(y[(i, o, *p)] + bias[o], 0.0), name="relu")
    return b.finish()


def pooled(
    places: tuple[int | str, ...], kernel: int, stride: int, pad: int, largest: bool, dilation: int = 1
) -> PrimFunc:
    """Extremes or sums over the windows of two padded maps, and relu after them."""
    g, rank = GraphBuilder(), len(places)
    x = g.input("x", (1, 2, *(g.symbol(p, 1) if isinstance(p, str) else p for p in places)))
    around = (const(0), const(0), *[const(pad)] * rank)
    padded = g.call(Pad(around, around, value=-math.inf if largest else 0.0), x) if pad else x
    y = g.call(Pool((kernel,) * rank, (stride,) * rank, (dilation,) * rank, largest), padded)
    (func,) = lower(g.finish(g.call(Relu(), y))).prims.values()
    return func


def padded(places: tuple[int | str, ...], before: int, after: int) -> PrimFunc:
    """Two maps with a margin of fives around them."""
    g, rank = GraphBuilder(), len(places)
    x = g.input("x", (2, *(g.symbol(p) if isinstance(p, str) else p for p in places)))
    margins = [(const(0), *[const(e)] * rank) for e in (before, after)]
    (func,) = lower(g.finish(g.call(Pad(*margins, value=5.0), x))).prims.values()
    return func
