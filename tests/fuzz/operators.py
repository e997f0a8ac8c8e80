"""The table of operators for random programs: how each draws attributes and arguments, and how exactly it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from tests.fuzz.draft import Grower, Step

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import (
    ALL,
    COMPUTED,
    INTEGERS,
    SMALL,
    DType,
    bf16,
    bool_,
    f8e8m0,
    f16,
    f32,
    f64,
    i8,
    i32,
    i64,
    u8,
)
from relax_tune.ir.core.expr import Expr, as_int, ceildiv, const, expr, maximum
from relax_tune.ir.core.struct_info import ShapeInfo
from relax_tune.ir.op import shapes
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.create import Iota, Scalars
from relax_tune.ir.op.devices import HintOnDevice, ToDevice
from relax_tune.ir.op.indexing import gather, movement, scatter
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math import bits as bit_operators
from relax_tune.ir.op.math import elementwise, logic, numeric, quantize, small_floats
from relax_tune.ir.op.math.elementwise import DivScalar
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import CausalSoftmax, RmsNorm, Rotary
from relax_tune.ir.op.neural.fold import Fold
from relax_tune.ir.op.neural.grid_sample import GridSample
from relax_tune.ir.op.neural.paged import PagedAttention, PagedWrite
from relax_tune.ir.op.neural.resize import Resize
from relax_tune.ir.op.neural.window import Conv, Pool, PoolPositions
from relax_tune.ir.op.reduction import linalg, reduce, scan, trees
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.registry import ELEMENTWISE

FLOATS = (f16, bf16, f32, f64)
INTS = INTEGERS
NUMBERS = (*FLOATS, *INTS)
Rounding = Literal["exact", "rounded", "approximate", "summed"]
Make = Callable[[Grower], Step]


@dataclass(frozen=True)
class Entry:
    """make: draws one use of the operator.

    rounding: exact; rounded once; approximate, within `ulps` of the result for an argument off by one; summed in any order.
    beside: units of the last place of the argument that the result may be off by, where its formula cancels"""

    make: Make
    rounding: Rounding = "exact"
    ulps: float = 0
    argument_ulps: float = 0


def unary(op: Callable[[Grower], OperatorSpec], kinds: Sequence[DType]) -> Make:
    return lambda w: Step(op(w), (w.pick(kinds),))


def binary(op: Callable[[], OperatorSpec], kinds: Sequence[DType]) -> Make:
    def make(w: Grower) -> Step:
        x = w.pick(kinds)
        args = (x, w.like(x))
        return Step(op(), args if w.rng.random() < 0.7 else args[::-1])

    return make


def scalar(op: Callable[[float], OperatorSpec]) -> Make:
    def make(w: Grower) -> Step:
        x = w.pick(NUMBERS)
        values = [0.0, 1.0, 2.0, 3.0] if w.dtype(x).is_unsigned else [0.0, 1.0, -1.0, 2.0, -3.0]
        if w.dtype(x).is_float:
            values += [0.1, 0.5, -2.5, 1e-3]
        return Step(op(w.rng.choice(values)), (x,))

    return make


def divided(w: Grower) -> Step:
    return Step(DivScalar(w.rng.choice([1.0, -3.0, 41.0, 0.1, 1e-3, 0.0])), (w.pick(FLOATS),))


def axes(w: Grower, x: int) -> tuple[int, ...]:
    rank = len(w.shape(x))
    return tuple(sorted(w.rng.sample(range(rank), w.rng.randint(1, rank)))) if rank else ()


def axis(w: Grower, x: int) -> int:
    rank = len(w.shape(x))
    return w.rng.randrange(rank) - (rank if w.rng.random() < 0.3 else 0)


def reduction(op: Callable[..., OperatorSpec], kinds: Sequence[DType]) -> Make:
    def make(w: Grower) -> Step:
        x = w.pick(kinds, 1)
        return Step(op(None if w.rng.random() < 0.2 else axes(w, x), w.rng.random() < 0.4), (x,))

    return make


def scans(op: Callable[..., OperatorSpec]) -> Make:
    def make(w: Grower) -> Step:
        x = w.pick(NUMBERS, 1)
        return Step(op(axis(w, x), w.rng.random() < 0.4, w.rng.random() < 0.4), (x,))

    return make


def rows(op: Callable[[Grower], OperatorSpec], vectors: int = 0) -> Make:
    def make(w: Grower) -> Step:
        x = w.pick(FLOATS, 1)
        return Step(op(w), (x, *(w.fresh(w.shape(x)[-1:], w.dtype(x)) for _ in range(vectors))))

    return make


def layer_norm(w: Grower) -> Step:
    """Of the last axis, or of several with weights that broadcast."""
    if w.rng.random() < 0.5:
        return rows(lambda _: reduce.LayerNorm(), 2)(w)
    x = w.pick(FLOATS, 2)
    dims = w.shape(x)
    weights = ([d if w.rng.random() < 0.6 else const(1) for d in dims[w.rng.randrange(len(dims)) :]] for _ in range(2))
    op = reduce.LayerNorm(axes=w.rng.randint(2, len(dims)))
    return Step(op, (x, *(w.fresh(own, w.dtype(x)) for own in weights)))


def matmul(w: Grower) -> Step:
    a = w.pick(NUMBERS, 2, 3)
    *lead, _, k = w.shape(a)
    turned, j = w.rng.random() < 0.4, w.dims(1, 1)[0]
    lead_of_b = [w.other(d) if w.rng.random() < 0.3 else d for d in lead][w.rng.choice([0, 0, len(lead)]) :]
    b = w.fresh([*lead_of_b, *((j, k) if turned else (k, j))], w.dtype(a))
    return Step(linalg.Matmul(turned), (a, b))


def einsum(w: Grower) -> Step:
    terms = ["ij,jk->ik", "ij,kj->ik", "bij,bjk->bik", "ij->ji", "ij->j", "ij,ij->", "i,j->ij", "...i,i->...", "ii->i"]
    equation = w.rng.choice([t for t in terms if t != "..."])
    left = equation.split("->")[0].replace("...", "z").split(",")
    x = w.pick(NUMBERS, len(left[0]), len(left[0]))
    size: dict[str, Expr] = dict(zip(left[0], w.shape(x)))
    others = [w.fresh([size.setdefault(c, w.dims(1, 1)[0]) for c in term], w.dtype(x)) for term in left[1:]]
    return Step(Einsum(equation), (x, *others))


def indices(w: Grower, dims: Sequence[Expr], below: Expr) -> int:
    """Indices into a dim: an input as it is, turned, of whole floats, a part of one whose other numbers are none, or computed."""
    dtype, dims = w.rng.choice([i32, i64]), [expr(d) for d in dims]
    kind = w.rng.choice(("plain", "plain", "plain", "turned", "float", "part", "computed"))
    if kind == "turned" and len(dims) > 1:
        order = tuple(reversed(range(len(dims))))
        return w.step(Step(movement.Permute(order), (w.fresh(dims[::-1], dtype, below),)))
    if kind == "float":
        return w.step(Step(elementwise.Cast(dtype), (w.fresh(dims, f32, below),)))
    if kind == "part" and dims:
        at = w.rng.randrange(len(dims))
        whole = w.fresh([*dims[:at], dims[at] + 2, *dims[at + 1 :]], dtype, below, beyond=(at, 2))
        return w.step(Step(movement.Slice(at, const(0), dims[at]), (whole,)))
    if kind == "computed" and dims:
        result = w.fresh(dims, dtype, below, beyond=(w.rng.randrange(len(dims)), 1))
        return w.step(Step(w.rng.choice([E.Relu(), E.MaximumScalar(1.0), N.Abs()]), (result,)))
    return w.fresh(dims, dtype, below)


def take(w: Grower) -> Step:
    x = w.pick(ALL, 1, 3)
    return Step(movement.Take(), (x, indices(w, w.dims(0, 2), w.shape(x)[0])))


def gather_elements(w: Grower) -> Step:
    x = w.pick(ALL, 1, 3)
    at = axis(w, x)
    dims = list(w.shape(x))
    dims[at] = w.dims(1, 1)[0]
    return Step(gather.GatherElements(at), (x, indices(w, dims, w.shape(x)[at])))


def gather_nd(w: Grower) -> Step:
    x = w.pick(ALL, 1, 3)
    rows, sizes = w.dims(0, 1), w.shape(x)
    result = indices(w, [*rows, const(1)], sizes[0])
    if len(sizes) > 1 and w.rng.random() < 0.5 and w.dtype(result) is i64:  # a column for each of two dims
        result = w.step(Step(movement.Concat(len(rows)), (result, w.fresh([*rows, const(1)], i64, sizes[1]))))
    return Step(gather.GatherND(), (x, result))


def scatter_nd(w: Grower) -> Step:
    x, count = w.pick(NUMBERS, 1, 3), w.dims(1, 1)[0]
    result = indices(w, [count, const(1)], w.shape(x)[0])
    return Step(scatter.ScatterND(mode(w)), (x, result, w.fresh([count, *w.shape(x)[1:]], w.dtype(x))))


def scatter_elements(w: Grower) -> Step:
    x = w.pick(NUMBERS, 1, 3)
    at, dims = axis(w, x), list(w.shape(x))
    dims[at] = w.dims(1, 1)[0]
    result = indices(w, dims, w.shape(x)[at])
    return Step(scatter.ScatterElements(mode(w), at), (x, result, w.fresh(dims, w.dtype(x))))


def mode(w: Grower) -> scatter.Mode:
    modes: tuple[scatter.Mode, ...] = ("replace", "add", "mul", "max", "min")
    return w.rng.choice(modes)


def reshape(w: Grower) -> Step:
    x = w.pick(ALL, 1)
    dims = list(w.shape(x))
    at = w.rng.randrange(len(dims))
    number = as_int(dims[at])
    if w.rng.random() < 0.4 and len(dims) > 1:
        at = min(at, len(dims) - 2)
        dims[at : at + 2] = [dims[at] * dims[at + 1]]
    elif number in (8,):
        dims[at : at + 1] = [const(2), const(4)]
    else:
        dims.insert(at, const(1))
    return Step(movement.Reshape(tuple(dims)), (x,))


def expand(w: Grower) -> Step:
    x = w.pick(ALL, 0, 3)
    return Step(movement.ExpandDims((w.rng.randint(0, len(w.shape(x))),)), (x,))


def permute(w: Grower) -> Step:
    x = w.pick(ALL, 2)
    order = list(range(len(w.shape(x))))
    w.rng.shuffle(order)
    return Step(movement.Permute(tuple(order)), (x,))


def broadcast(w: Grower) -> Step:
    x = w.pick(ALL, 0, 3)
    dims = [w.number() if as_int(d) == 1 else d for d in w.shape(x)]
    return Step(movement.BroadcastTo((*([w.number()] * w.rng.randint(0, 1)), *dims)), (x,))


def concat(w: Grower) -> Step:
    x = w.pick(ALL, 1)
    at = axis(w, x)
    parts = [x]
    for _ in range(w.rng.randint(1, 2)):
        dims = list(w.shape(x))
        dims[at] = w.dims(1, 1)[0]
        parts.append(w.fresh(dims, w.dtype(x)))
    w.rng.shuffle(parts)
    return Step(movement.Concat(at), tuple(parts))


def split(w: Grower) -> Step:
    x = w.pick(ALL, 1)
    return Step(movement.Split(w.rng.randint(1, 3), axis(w, x)), (x,))


def slices(w: Grower) -> Step:
    x, step = w.pick(ALL, 1), w.rng.choice([1, 1, 2, 3, -1, -2])
    begin, end = w.rng.choice([const(0), w.number()]), w.number()
    return Step(movement.Slice(axis(w, x), *((begin, end) if step > 0 else (end, begin)), step), (x,))


def pad(w: Grower) -> Step:
    x = w.pick(ALL)
    sizes = [[const(w.rng.choice([0, 0, 1, 2, 3])) for _ in w.shape(x)] for _ in "ba"]
    kinds = ["constant", "constant", "edge", "reflect", "wrap"]
    return Step(Pad(tuple(sizes[0]), tuple(sizes[1]), w.rng.choice(kinds), w.rng.choice([0.0, 1.0])), (x,))


def where(w: Grower) -> Step:
    x = w.pick(ALL)
    return Step(logic.Where(), (w.like(x, bool_), x, w.like(x)))


def top_k(w: Grower) -> Step:
    x = w.pick(NUMBERS, 1)
    return Step(scan.TopK(w.rng.choice([const(1), const(2), w.number()]), axis(w, x), w.rng.random() < 0.6), (x,))


def tree_ensemble(w: Grower) -> Step:
    """Two trees of at most 7 nodes in all, whose children may be anywhere."""
    dtype = w.rng.choice([f32, f64])
    tables = [
        w.fresh((7,), i32, below=const(3)), w.fresh((7,), i32, below=const(6)), w.fresh((7,), dtype),
        w.fresh((7,), i32, below=const(4)), w.fresh((4, 2), dtype),
    ]  # fmt: skip
    op = trees.TreeEnsemble(2, 3, w.rng.choice(trees.AGGREGATES), w.rng.random() < 0.5)
    return Step(op, (w.fresh((w.symbols[0], 3), dtype), *tables))


def arg_max(w: Grower) -> Step:
    x = w.pick(NUMBERS, 1)
    return Step(scan.ArgMax(axis(w, x), w.rng.random() < 0.4, w.rng.random() < 0.4), (x,))


def windows(w: Grower, x: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    spatial = len(w.shape(x)) - 2
    return (
        spatial,
        tuple(w.rng.choice([1, 1, 2]) for _ in range(spatial)),
        tuple(w.rng.choice([1, 1, 2]) for _ in range(spatial)),
    )


def conv(w: Grower) -> Step:
    x = w.pick(NUMBERS, 3, 3)
    if w.rng.random() < 0.7:
        x = w.fresh((*w.dims(1, 1), const(2), *w.dims(1, 2)), w.rng.choice((f32, f32, *NUMBERS)))
    groups = w.rng.choice([1, 2]) if w.shape(x)[1] is const(2) else 1
    spatial, strides, dilations = windows(w, x)
    each = const(2 // groups) if w.shape(x)[1] is const(2) else w.shape(x)[1]
    taps = [const(w.rng.choice([1, 2, 3])) for _ in range(spatial)]
    return Step(Conv(strides, dilations, groups), (x, w.fresh([const(4), each, *taps], w.dtype(x))))


def pool(w: Grower) -> Step:
    x = w.pick(NUMBERS, 3, 4)
    spatial, strides, dilations = windows(w, x)
    kernel = tuple(w.rng.choice([1, 2, 3]) for _ in range(spatial))
    return Step(Pool(kernel, strides, dilations, w.rng.random() < 0.5), (x,))


def pool_positions(w: Grower) -> Step:
    top = pool(w)
    assert isinstance(top.op, Pool)
    op = replace(top.op, largest=True)
    (x,) = top.args
    none = (const(0),) * len(op.kernel)
    return Step(PoolPositions(op.kernel, op.strides, op.dilations, none), (x, w.step(Step(op, (x,)))))


def fold(w: Grower) -> Step:
    spatial = w.rng.choice([1, 1, 2])
    taps = [const(w.rng.choice([1, 2, 3])) for _ in range(spatial)]
    dims = (w.number(), const(2), *taps, *(w.rng.choice([const(3), w.number()]) for _ in taps))
    x = w.fresh(dims, w.rng.choice(NUMBERS))
    strides, dilations = (tuple(w.rng.choice([1, 1, 2, 3]) for _ in range(spatial)) for _ in "sd")
    sizes = tuple(w.rng.choice([const(4), const(9), w.number()]) for _ in range(spatial))
    return Step(Fold(sizes, strides, dilations, tuple(const(w.rng.choice([0, 0, 1, 2])) for _ in sizes)), (x,))


def grid_sample(w: Grower) -> Step:
    spatial = w.rng.choice([1, 2, 2, 3])
    kernel = w.rng.choice(["nearest", "linear", "linear", "cubic"])
    x = w.fresh((w.number(), const(2), *(w.rng.choice([const(1), const(4), w.number()]) for _ in range(spatial))), f32)
    grid = w.fresh((w.shape(x)[0], *w.dims(1, 2), const(spatial)), f32)
    padding = w.rng.choice(["zeros", "border", "reflection"])
    return Step(GridSample(kernel, padding, w.rng.random() < 0.5), (x, grid))


def resize(w: Grower) -> Step:
    x = w.pick(FLOATS, 1)
    at, size = w.rng.randrange(len(w.shape(x))), const(w.rng.choice([1, 2, 3, 5]))
    n, kernel = w.shape(x)[at], w.rng.choice(["nearest", "linear", "cubic"])
    smooth = kernel != "nearest" and w.rng.random() < 0.4
    return Step(
        Resize(
            (at,), (size,), (n * 2,), (n - size,), (size * 2,), kernel,
            w.rng.choice(["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]), within=w.rng.random() < 0.4,
            wide=(maximum(n, 1),) if smooth else (), narrow=(size,) if smooth else (), fill=w.rng.choice([None, None, 1.0]),
        ), (x,),
    )  # fmt: skip


def mean_pool(w: Grower) -> Step:
    x = w.pick(FLOATS, 3, 3)
    return Step(reduce.MeanPool(), (x, w.fresh(w.shape(x)[:2], w.dtype(x))))


def causal(w: Grower) -> Step:
    x = w.pick(FLOATS, 2)
    return Step(
        CausalSoftmax(w.rng.choice([const(0), w.number()]), w.rng.choice([1, 2]), w.rng.choice([None, 1, 3])), (x,)
    )


def rotary(w: Grower) -> Step:
    x = w.pick(FLOATS, 2, 3)
    if (as_int(w.shape(x)[-1]) or 1) % 2:
        x = w.fresh((*w.dims(1, 2), const(8)), w.rng.choice(FLOATS))
    at, offset = w.rng.randrange(len(w.shape(x)) - 1), const(w.rng.choice([0, 2]))
    half = const((as_int(w.shape(x)[-1]) or 2) // 2)
    tables = [w.fresh((w.shape(x)[at] + offset, half), w.dtype(x)) for _ in "cs"]
    return Step(Rotary(offset, at), (x, *tables))


def attention(w: Grower) -> Step:
    q = w.pick(FLOATS, 2, 3)
    *heads, r, d = w.shape(q)
    m = r if w.rng.random() < 0.4 else w.dims(1, 1)[0]
    k, v = w.fresh([*heads, m, d], w.dtype(q)), w.fresh([*heads, m, w.dims(1, 1)[0]], w.dtype(q))
    mask = [w.fresh([r, m], w.rng.choice([bool_, w.dtype(q)]))] if w.rng.random() < 0.4 else []
    is_causal = w.rng.random() < 0.4
    window, softcap = w.rng.choice([None, 3]) if is_causal else None, w.rng.choice([None, None, 5.0])
    return Step(Attention(0.5, is_causal, window=window, softcap=softcap), (q, k, v, *mask))


def places(w: Grower, rows: Expr, blocks: Expr, size: Expr) -> tuple[int, int, int]:
    """Tables of texts, and text and position of each row."""
    texts, width = w.dims(2, 2)
    tables = w.fresh([texts, width], w.rng.choice([i32, i64]), blocks)
    return tables, indices(w, [rows], texts), indices(w, [rows], width * size)


def paged_write(w: Grower) -> Step:
    pool, (rows,) = w.pick(NUMBERS, 4, 4), w.dims(1, 1)
    blocks, *dims = w.shape(pool)
    return Step(PagedWrite(), (pool, w.fresh([rows, *dims[1:]], w.dtype(pool)), *places(w, rows, blocks, dims[0])))


def paged_attention(w: Grower) -> Step:
    q, (blocks, size, width) = w.pick(FLOATS, 4, 4), w.dims(3, 3)
    rows, heads, _, d = w.shape(q)
    keys, values = (w.fresh([blocks, size, heads, n], w.dtype(q)) for n in (d, width))
    window, softcap = w.rng.choice([None, 3]), w.rng.choice([None, None, 5.0])
    return Step(PagedAttention(0.5, window, softcap), (q, keys, values, *places(w, rows, blocks, size)))


def quantise(w: Grower) -> Step:
    x, bits = w.pick(FLOATS, 1), w.rng.choice([2, 4, 8])
    at, kind = w.rng.choice([None, axis(w, x)]), w.rng.choice([i8, u8, *(d for d in SMALL if d is not f8e8m0)])
    scales = w.fresh([] if at is None else [w.shape(x)[at]], w.dtype(x), positive=True)
    zero = [w.fresh([] if at is None else [w.shape(x)[at]], kind)] if w.rng.random() < 0.4 else []
    return Step(quantize.Quantize(at, None, kind, bits, w.rng.random() < 0.5), (x, scales, *zero))


def dequantise(w: Grower) -> Step:
    x = w.pick((i8, u8, i32, *SMALL), 1)
    at, group = w.rng.choice([None, axis(w, x)]), None
    dims: list[Expr] = [] if at is None else [w.shape(x)[at]]
    if at is not None and w.rng.random() < 0.4:
        at, group, dims = at % len(w.shape(x)), 2, list(w.shape(x))
        dims[at] = ceildiv(dims[at], 2)
    scales = w.fresh(dims, w.rng.choice(FLOATS), positive=True)
    zero = [w.fresh(dims, w.dtype(x))] if w.rng.random() < 0.4 else []
    return Step(quantize.Dequantize(at, group), (x, scales, *zero))


def unpack(w: Grower) -> Step:
    x = w.pick([u8], 1)
    at = axis(w, x)
    size = w.shape(x)[at] * 2
    return Step(quantize.Unpack4(at, size - w.rng.choice([0, 0, 1]), w.rng.random() < 0.5), (x,))


def reshape_to(w: Grower) -> Step:
    result = [p for p, v in enumerate(w.values) if isinstance(v.info, ShapeInfo)]
    if not result:
        return Step(shapes.ShapeOf(), (w.pick(ALL),))
    to = w.values[result[-1]].info
    x = w.pick(ALL)
    if isinstance(to, ShapeInfo) and to.values is not None:
        x = w.fresh(to.values, w.rng.choice([f32, i64]))
    return Step(shapes.ReshapeTo(), (x, result[-1]))


def tensor_to_shape(w: Grower) -> Step:
    return Step(shapes.TensorToShape(), (w.step(Step(Scalars((w.number(), w.number())), ())),))


def bits(w: Grower) -> Step:
    """Bits of integers: bits of computed floats differ in the last places."""
    x = w.pick(INTS)
    source = w.dtype(x)
    return Step(B.BitCast(w.rng.choice([d for d in NUMBERS if d.bytes == source.bytes]), source), (x,))


def scalars(w: Grower) -> Step:
    return Step(Scalars(tuple(w.number() * w.rng.choice([1, 2]) for _ in range(w.rng.randint(1, 3)))), ())


def casts(w: Grower) -> Step:
    target = w.rng.choice(ALL)
    saturate = target.is_small and target.is_float and w.rng.random() < 0.5
    rounding = w.rng.choice(get_args(small_floats.Rounding)) if target is f8e8m0 else "nearest"
    return Step(E.Cast(target, saturate, rounding), (w.pick(ALL),))


def _plain(kind: type[OperatorSpec], kinds: Sequence[DType]) -> Make:
    return unary(lambda w: kind(), kinds)


E, N, B = elementwise, numeric, bit_operators
KINDS: Mapping[E.Operands, Sequence[DType]] = {
    "floats": FLOATS, "integers": INTS, "numbers": NUMBERS, "bools": [bool_], "any": COMPUTED,
}  # fmt: skip
ULPS = {"sqrt": 2, "div": 3, "power": 16, "floor": 0, "rint": 0, "fmod": 0}
"""Units of the last place that elementwise functions of floats may be off by, unless 8."""


def elementwise_entry(op: type[E.Elementwise]) -> Entry:
    """Return the entry of an elementwise operator without attributes."""
    kinds = NUMBERS if op is E.Relu else KINDS[op.operands]
    make = _plain(op, kinds) if op.arity == 1 else binary(op, kinds)
    ulps = ULPS.get(op.name, 8) if op.operands == "floats" else 0
    return Entry(make, "approximate" if ulps else "rounded" if op in (E.Add, E.Sub, E.Mul) else "exact", ulps)


ENTRIES: Mapping[str, Entry] = {
    **{name: elementwise_entry(op) for name, op in ELEMENTWISE.items() if not fields(op)},
    "gelu": Entry(_plain(E.Gelu, FLOATS), "approximate", 8, 2),
    "bitcast": Entry(bits),
    "cast": Entry(casts, "rounded"),
    "add_scalar": Entry(scalar(E.AddScalar), "rounded"), "mul_scalar": Entry(scalar(E.MulScalar), "rounded"),
    "div_scalar": Entry(divided, "approximate", 3),
    "maximum_scalar": Entry(scalar(E.MaximumScalar)), "where": Entry(where),
    "sum": Entry(reduction(reduce.Sum, NUMBERS), "summed"), "prod": Entry(reduction(scan.Prod, NUMBERS), "summed", 2),
    "mean": Entry(reduction(reduce.Mean, FLOATS), "summed"),
    "max": Entry(reduction(reduce.Max, NUMBERS)), "min": Entry(reduction(reduce.Min, NUMBERS)),
    **{op.name: Entry(reduction(op, NUMBERS)) for op in (reduce.MaxOrLowest, reduce.MinOrHighest)},
    "cum_sum": Entry(scans(scan.CumSum), "summed"), "cum_prod": Entry(scans(scan.CumProd), "summed", 2),
    "arg_max": Entry(arg_max), "top_k": Entry(top_k), "tree_ensemble": Entry(tree_ensemble),
    "matmul": Entry(matmul, "summed"), "einsum": Entry(einsum, "summed"), "conv": Entry(conv, "summed"),
    "pool": Entry(pool, "summed"), "mean_pool": Entry(mean_pool, "summed", 2),
    "softmax": Entry(rows(lambda w: reduce.Softmax()), "summed", 8),
    "layer_norm": Entry(layer_norm, "summed", 8),
    "l2_normalize": Entry(rows(lambda w: reduce.L2Normalize()), "summed", 8),
    "rms_norm": Entry(rows(lambda w: RmsNorm(), 1), "summed", 8),
    "causal_softmax": Entry(causal, "summed", 8), "attention": Entry(attention, "summed", 16),
    "paged_write": Entry(paged_write), "paged_attention": Entry(paged_attention, "summed", 16),
    "rotary": Entry(rotary, "summed"),
    "take": Entry(take), "gather_elements": Entry(gather_elements), "gather_nd": Entry(gather_nd),
    "scatter_nd": Entry(scatter_nd, "summed"), "scatter_elements": Entry(scatter_elements, "summed"),
    "reshape": Entry(reshape), "flatten": Entry(_plain(movement.Flatten, ALL)), "expand_dims": Entry(expand),
    "permute": Entry(permute), "broadcast_to": Entry(broadcast), "concat": Entry(concat), "split": Entry(split),
    "slice": Entry(slices), "pad": Entry(pad), "resize": Entry(resize, "summed", 16),
    "fold": Entry(fold, "summed"), "grid_sample": Entry(grid_sample, "summed", 64), "pool_positions": Entry(pool_positions),
    "iota": Entry(lambda w: Step(Iota(w.number()), ())), "scalars": Entry(scalars),
    "quantize": Entry(quantise, "summed", 4), "dequantize": Entry(dequantise, "rounded"),
    "pack4": Entry(lambda w: (lambda x: Step(quantize.Pack4(axis(w, x)), (x,)))(w.pick((i8, u8), 1))),
    "unpack4": Entry(unpack),
    "to_device": Entry(unary(lambda w: ToDevice("c"), ALL)),
    "hint_on_device": Entry(unary(lambda w: HintOnDevice("opencl"), ALL)),
    "shape_of": Entry(_plain(shapes.ShapeOf, ALL)), "reshape_to": Entry(reshape_to),
    "tensor_to_shape": Entry(tensor_to_shape), "unique": Entry(_plain(shapes.Unique, NUMBERS)),
}  # fmt: skip
"""Every operator of the registry, by name."""


def grow(w: Grower, count: int, weights: Callable[[str], float]) -> None:
    """Add `count` operators. weights: relative frequency of each."""
    names = sorted(ENTRIES)
    for _ in range(count * 8):
        name = w.rng.choices(names, [weights(n) for n in names])[0]
        try:
            w.step(ENTRIES[name].make(w))
        except DeduceError:
            continue
        count -= 1
        if not count:
            return
