"""Random uses of ONNX operators that move elements, gather, scatter and make tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import numpy_helper
from tests.fuzz.importers.builder import (
    BOOL,
    EVERY,
    FLOATS,
    I32,
    I64,
    INTS,
    NUMBERS,
    Builder,
    number_of,
    types_of,
    within,
)
from tests.fuzz.importers.elementwise import Use
from tests.fuzz.importers.program import Invalid

LARGE = 2**63 - 1


def transpose(b: Builder, op: str) -> None:
    x = b.x(op)
    perm = list(range(b.get(x).ndim))
    b.rng.shuffle(perm)
    b.node(op, [x], perm=perm if perm and b.chance(0.8) else None)


def _factored(b: Builder, n: int, parts: int) -> list[int]:
    result = []
    for _ in range(parts - 1):
        f = b.choose([d for d in range(1, n + 1) if n % d == 0]) if n else b.choose((0, 2, 3))
        result.append(f)
        n = n // f if f else 0
    return [*result, n]


def reshape(b: Builder, op: str) -> None:
    x = b.x(op)
    shape = b.get(x).shape
    n = int(np.prod(shape))
    if n == 0:
        return _reshape_nothing(b, op, x)
    dims = _factored(b, n, b.choose((1, 2, 2, 3, 4)))
    if b.chance(0.4):
        b.rng.shuffle(dims)
    target = [*dims]
    for p, d in enumerate(dims):
        if p < len(shape) and d == shape[p] and b.chance(0.6):
            target[p] = 0
    if b.chance(0.6):
        target[b.rng.randrange(len(target))] = -1
    if n == 1 and b.chance(0.2):
        target = []
    b.node(op, [x, b.ints(target, b.chance(0.9))])


def _reshape_nothing(b: Builder, op: str, x: str) -> None:
    shape = b.get(x).shape
    if b.opset < 14 or b.chance(0.5):
        b.node(op, [x, b.ints([0] * len(shape))])
        return
    b.node(op, [x, b.ints(b.choose(([0], [3, 0], [0, 5, 2])))], allowzero=1)


def flatten(b: Builder, op: str) -> None:
    x = b.x(op)
    rank = b.get(x).ndim
    low = -rank if b.opset >= 11 else 0
    b.node(op, [x], axis=b.choose((None, b.rng.randint(low, rank))) if rank else None)


def squeeze(b: Builder, op: str) -> None:
    x = b.x(op)
    shape = [*b.get(x).shape]
    if 1 not in shape:
        at = b.rng.randrange(len(shape) + 1)
        shape.insert(at, 1)
        x = b.given(shape, b.get(x).dtype)
    ones = [p for p, d in enumerate(shape) if d == 1]
    axes = sorted(b.rng.sample(ones, b.rng.randint(1, len(ones))))
    if b.opset >= 11:
        axes = [a - len(shape) if b.chance(0.4) else a for a in axes]
    if b.opset < 13:
        b.node(op, [x], axes=axes)
    else:
        b.node(op, [x, b.ints(axes)])


def unsqueeze(b: Builder, op: str) -> None:
    x = b.x(op)
    rank = b.get(x).ndim + b.choose((1, 1, 2))
    axes = b.rng.sample(range(rank), rank - b.get(x).ndim)
    if b.opset >= 11:
        axes = [a - rank if b.chance(0.4) else a for a in axes]
    if b.opset < 13:
        b.node(op, [x], axes=sorted(axes))
    else:
        b.node(op, [x, b.ints(axes)])


def expand(b: Builder, op: str) -> None:
    x = b.x(op)
    shape = [d if d != 1 or b.chance(0.3) else b.size(1) for d in b.get(x).shape]
    target = [d if b.chance(0.7) else 1 for d in shape]
    if b.chance(0.4):
        target = [b.size(1), *target]
    elif target and b.chance(0.2):
        target = target[1:]
    if int(np.prod(target)) > 4000:
        raise Invalid("large")
    if b.chance(0.3):  # the shape of another value
        y = b.given(target, b.choose((np.dtype("f4"), I64)))
        b.node(op, [x, *b.node("Shape", [y])])
        return
    b.node(op, [x, b.ints(target, b.chance(0.85))])


def concat(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    shape, parts = b.get(x).shape, [x]
    axis = b.axis(len(shape)) if b.opset >= 11 else b.axis(len(shape)) % len(shape)
    for _ in range(b.choose((0, 1, 1, 2))):
        other = [*shape]
        other[axis] = b.size()
        same = [n for n in b.values if isinstance(b.values[n], np.ndarray) and b.get(n).dtype == b.get(x).dtype
                and b.get(n).shape == tuple(other)]  # fmt: skip
        parts.append(b.choose(same) if same and b.chance(0.7) else b.given(other, b.get(x).dtype))
    b.rng.shuffle(parts)
    b.node(op, parts, axis=axis)


def _parts(b: Builder, n: int) -> list[int]:
    cuts = sorted(b.rng.randint(0, n) for _ in range(b.choose((1, 1, 2))))
    return [hi - lo for lo, hi in zip([0, *cuts], [*cuts, n], strict=True)]


def split(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    shape = b.get(x).shape
    axis = b.axis(len(shape)) if b.opset >= 11 else b.axis(len(shape)) % len(shape)
    n = shape[axis]
    if b.chance(0.5):
        sizes = _parts(b, n)
        if b.opset < 13:
            b.node(op, [x], len(sizes), axis=axis, split=sizes)
        else:
            b.node(op, [x, b.ints(sizes)], len(sizes), axis=axis)
        return
    count = b.choose([k for k in (1, 2, 3) if b.opset >= 18 or n % k == 0])
    b.node(op, [x], count, axis=axis, num_outputs=count if b.opset >= 18 else None)


def slice_(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    shape = b.get(x).shape
    axes = sorted(b.rng.sample(range(len(shape)), b.rng.randint(1, len(shape))))
    starts, ends, steps = [], [], []
    for a in axes:
        n = shape[a]
        step = 1 if b.opset < 10 else b.choose((1, 1, 1, 2, 3, -1, -2))
        lo, hi = b.choose((0, 1, -1, n // 2, -n - 3, n, -2)), b.choose((n, LARGE, -1, n // 2, 1, n + 5, -n))
        starts.append(hi if step < 0 else lo)
        ends.append(b.choose((-n - 1, -LARGE, 0, lo)) if step < 0 else hi)
        steps.append(step)
    if b.opset >= 10:
        axes = [a - len(shape) if b.chance(0.3) else a for a in axes]
    if b.opset < 10:
        b.node(op, [x], starts=starts, ends=ends, axes=axes)
        return
    kind = b.choose((I64, I64, I32))
    if kind is I32:
        starts, ends = ([max(-(2**31), min(2**31 - 1, v)) for v in vs] for vs in (starts, ends))
    fixed = b.chance(0.85)
    b.node(op, [x, *(b.ints(v, fixed, kind) for v in (starts, ends, axes, steps))])


def tile(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    repeats = [b.choose((1, 1, 2, 3, 0 if b.zeros else 1)) for _ in b.get(x).shape]
    b.node(op, [x, b.ints(repeats, b.chance(0.9))])


def pad(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    shape = b.get(x).shape
    modes = ("constant", "constant", "reflect", "edge", *(("wrap",) if b.opset >= 19 else ()))
    mode = b.choose(modes)
    most = [n - 1 if mode == "reflect" else n if mode == "wrap" else 3 for n in shape]
    if min(shape) == 0 and mode != "constant":
        mode = "constant"
    pads = [b.rng.randint(0, max(0, min(3, m))) for m in (*most, *most)]
    if mode == "constant" and b.chance(0.15):
        p = b.rng.randrange(len(shape))
        pads[p] = -1 if shape[p] > 1 else 0
    if b.opset < 11:
        b.node(op, [x], mode=mode, pads=pads, value=b.choose((None, 1.5)))
        return
    inputs, axes = [x], None
    if b.opset >= 18 and b.chance(0.4):
        chosen = sorted(b.rng.sample(range(len(shape)), b.rng.randint(1, len(shape))))
        pads = [pads[c] for c in chosen] + [pads[len(shape) + c] for c in chosen]
        axes = [c - len(shape) if b.chance(0.3) else c for c in chosen]
    inputs.append(b.ints(pads, b.chance(0.9)))
    value = b.given((), b.get(x).dtype, constant=b.chance(0.7)) if mode == "constant" and b.chance(0.6) else ""
    inputs += [value, b.ints(axes)] if axes is not None else [value] if value else []
    b.node(op, inputs, mode=mode if mode != "constant" or b.chance(0.5) else None)


def blocks(b: Builder, op: str) -> None:
    k = b.choose((1, 2, 3))
    n, c, h, w = b.size(1, 3), b.size(1, 3), b.size(1, 4), b.size(1, 4)
    shape = (n, c * k * k, h, w) if op == "DepthToSpace" else (n, c, h * k, w * k)
    x = b.x(op, shape=shape)
    mode = b.choose((None, "DCR", "CRD")) if op == "DepthToSpace" and b.opset >= 11 else None
    b.node(op, [x], blocksize=k, mode=mode)


def shape_of(b: Builder, op: str) -> None:
    x = b.x(op)
    rank = b.get(x).ndim
    more = {}
    if op == "Shape" and b.opset >= 15:
        more = {
            "start": b.choose((None, b.rng.randint(-rank - 1, rank))),
            "end": b.choose((None, b.rng.randint(-rank, rank + 1))),
        }
    (sizes,) = b.node(op, [x], **more)
    if b.chance(0.4):  # a computed size
        b.node(
            "Cast", b.node(b.choose(("Mul", "Add", "Sub")), [sizes, b.literal(np.int64(b.choose((2, 3, -1))))]), to=1
        )


def constant(b: Builder, op: str) -> None:
    kind = b.choose(("value", "value_float", "value_floats", "value_int", "value_ints"))
    if b.opset < 12 or kind == "value":
        b.node(op, [], value=numpy_helper.from_array(b.get(b.given(b.shape(), b.choose(EVERY), constant=True)), "c"))
        return
    number = b.choose((0.1, -2.5, 41.0)) if "float" in kind else b.choose((0, 3, -7))
    b.node(op, [], **{kind: [number, number] if kind.endswith("s") else number})


def constant_of_shape(b: Builder, op: str) -> None:
    kind = b.choose([t for t in EVERY])
    array = b.get(b.given((1,), kind, constant=True))
    value = None if b.chance(0.2) else numpy_helper.from_array(array, "c")
    dims = b.shape()
    if dims and b.chance(0.5):
        sizes = b.node("Shape", [b.given(dims)])[0]
    else:
        sizes = b.ints(dims, b.chance(0.8))
    b.node(op, [sizes], value=value)


def range_(b: Builder, op: str) -> None:
    kind = b.dtype(op)
    step = b.choose((1, 2, 3, -1, -2)) if kind.kind in "if" else 1
    start, count = b.rng.randint(-5, 5), b.choose((0, 1, 4, 7))
    ends = [start, start + step * count, step]
    if kind.kind == "f":
        ends = [start / 2, start / 2 + 0.3 * count, 0.3]
    if b.chance(0.4) and kind == I64:  # up to a size
        x = b.x("Size")
        size = b.node("Size", [x])[0]
        b.node(op, [b.literal(np.int64(0)), size, b.literal(np.int64(b.choose((1, 2))))])
        return
    b.node(op, [b.literal(np.asarray(v, kind), b.chance(0.8)) for v in ends])


def eye_like(b: Builder, op: str) -> None:
    x = b.x(op, 2)
    target = b.choose([None, *(number_of(t) for t in NUMBERS)])
    b.node(op, [x], k=b.choose((None, -1, 1, 2)), dtype=target)


def trilu(b: Builder, op: str) -> None:
    x = b.x(op, least=2)
    inputs = [x, b.literal(np.int64(b.rng.randint(-4, 4)), b.chance(0.7))] if b.chance(0.7) else [x]
    b.node(op, inputs, upper=b.choose((None, 0, 1)))


def _indices(b: Builder, shape: tuple[int, ...], n: int, op: str, negative: bool = True) -> str:
    kinds = [t for t in types_of(op, b.opset, 1) if t in (I32, I64)]
    kind = b.choose(kinds)
    if n == 0 and int(np.prod(shape)):
        raise Invalid("no elements")
    low = -n if negative and b.chance(0.6) else 0
    return b.given(shape, kind, within(low, n, kind))


def gather(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    shape = b.get(x).shape
    axis = b.axis(len(shape))
    indices = _indices(b, b.shape(b.choose((0, 1, 1, 2))), shape[axis], op, b.opset >= 11)
    b.node(op, [x, indices], axis=axis)


def gather_elements(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    shape = [*b.get(x).shape]
    axis = b.axis(len(shape))
    n, dims = shape[axis], [b.rng.randint(1, d) if d > 1 and b.chance(0.3) else d for d in shape]
    dims[axis] = b.size()
    b.node(op, [x, _indices(b, tuple(dims), n, op)], axis=axis)


def gather_nd(b: Builder, op: str) -> None:
    x = b.x(op, least=1, low=1)
    shape = b.get(x).shape
    batch = b.rng.randint(0, len(shape) - 1) if b.opset >= 12 and b.chance(0.4) else 0
    depth = b.rng.randint(1, len(shape) - batch)
    n = min(shape[batch : batch + depth])
    lead = (*shape[:batch], *b.shape(b.choose((0, 1, 2)), 0, 2))
    indices = b.given((*lead, depth), I64, within(-n if b.opset >= 12 else 0, n, I64))
    b.node(op, [x, indices], batch_dims=batch or None)


def _distinct_rows(b: Builder, n: int, shape: tuple[int, ...], axis: int) -> str:
    """Return indices along an axis without repetition, so that one update counts for each element."""
    count = shape[axis]
    order = np.argsort(b.np_rng.random((*shape[:axis], n, *shape[axis + 1 :])), axis=axis)
    return b.literal(np.take(order, range(count), axis=axis).astype(I64), b.chance(0.5))


def scatter_elements(b: Builder, op: str) -> None:
    x = b.x(op, least=1, low=1)
    shape = b.get(x).shape
    axis = b.rng.randrange(len(shape))
    reductions = [None, "none", *(("add", "mul") if b.opset >= 16 else ()), *(("max", "min") if b.opset >= 18 else ())]
    reduction = b.choose(reductions) if op == "ScatterElements" else None
    dims = [b.rng.randint(1, d) if b.chance(0.3) else d for d in shape]
    dims[axis] = b.rng.randint(1, shape[axis])
    if reduction in (None, "none"):
        indices = _distinct_rows(b, shape[axis], tuple(dims), axis)
    else:
        indices = b.given(dims, I64, within(-shape[axis], shape[axis], I64))
    updates = b.given(dims, b.get(x).dtype)
    b.node(
        op,
        [x, indices, updates],
        axis=axis - (len(shape) if b.opset >= 11 and b.chance(0.3) else 0),
        reduction=reduction,
    )


def scatter_nd(b: Builder, op: str) -> None:
    x = b.x(op, least=1, low=1)
    shape = b.get(x).shape
    depth = b.rng.randint(1, len(shape))
    reductions = [None, *(("add", "mul") if b.opset >= 16 else ()), *(("max", "min") if b.opset >= 18 else ())]
    reduction = b.choose(reductions)
    places = int(np.prod(shape[:depth]))
    count = b.rng.randint(0, min(places, 5))
    flat = b.np_rng.choice(places, count, replace=reduction is not None) if places else np.zeros(0, I64)
    indices = np.stack(np.unravel_index(flat, shape[:depth]), -1).astype(I64)
    if b.chance(0.3):
        indices = indices - np.array(shape[:depth])
    updates = b.given((count, *shape[depth:]), b.get(x).dtype)
    b.node(op, [x, b.literal(indices, b.chance(0.5)), updates], reduction=reduction)


def tensor_scatter(b: Builder, op: str) -> None:
    shape = b.shape(b.choose((3, 4)), 1)
    axis = b.choose((1, -2)) if len(shape) == 3 else b.choose((1, 2, -2))
    n = shape[axis]
    m = b.rng.randint(1, n)
    dims = [*shape]
    dims[axis] = m
    x = b.x(op, shape=shape)
    mode = b.choose(("linear", "circular"))
    limit = n - m + 1 if mode == "linear" else n
    inputs = [x, b.given(dims, b.get(x).dtype)]
    if b.chance(0.8):
        inputs.append(b.given((shape[0],), I64, within(0, limit, I64)))
    b.node(op, inputs, axis=axis, mode=mode)


def one_hot(b: Builder, op: str) -> None:
    depth = b.choose((1, 3, 4, 6))
    kinds = types_of(op, b.opset, 0)
    kind = b.choose([t for t in kinds if t in INTS and t.itemsize > 1] or [I64])
    low = -depth if kind.kind == "i" else 0
    indices = b.given(
        b.shape(b.choose((0, 1, 2))), kind, within(low - 1, depth + 2, kind) if low else within(0, depth + 2, kind)
    )
    value = b.given((2,), b.choose([t for t in types_of(op, b.opset, 2) if t in EVERY]))
    rank = b.get(indices).ndim + 1
    b.node(op, [indices, b.literal(np.asarray(depth, I64)), value], axis=b.choose((None, b.axis(rank))))


def reverse_sequence(b: Builder, op: str) -> None:
    x = b.x(op, least=2)
    shape = b.get(x).shape
    time = b.choose((0, 1))
    steps, batch = shape[time], shape[1 - time]
    b.node(op, [x, b.given((batch,), I64, within(min(1, steps), steps + 1, I64))], time_axis=time, batch_axis=1 - time)


def compress(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    shape = b.get(x).shape
    axis = b.choose((None, b.rng.randrange(len(shape))))
    n = int(np.prod(shape)) if axis is None else shape[axis]
    condition = b.given((b.rng.randint(0, n),), BOOL)
    (y,) = b.node(op, [x, condition], axis=axis)
    _after_data(b, y)


def _after_data(b: Builder, y: str) -> None:
    """Read a result whose size data decides."""
    if b.chance(0.5) and b.get(y).dtype in FLOATS and b.opset >= 13:
        b.node("ReduceSum", [y, b.ints([0])], keepdims=0)


def non_zero(b: Builder, op: str) -> None:
    b.node(op, [b.x(op, least=1)])


def unique(b: Builder, op: str) -> None:
    kind = b.dtype(op)
    x = b.given(b.shape(b.choose((1, 1, 2))), kind, within(-3, 3, kind) if kind.kind in "if" else None)
    rank = b.get(x).ndim
    b.node(op, [x], b.choose((1, 2, 4)), axis=b.choose((None, b.axis(rank))) if rank == 1 else None, sorted=1)


def center_crop_pad(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    shape = b.get(x).shape
    axes = sorted(b.rng.sample(range(len(shape)), b.rng.randint(1, len(shape))))
    whole = len(axes) == len(shape) and b.chance(0.5)
    sizes = [max(0, shape[a] + b.rng.randint(-3, 3)) for a in axes]
    b.node(op, [x, b.ints(sizes)], axes=None if whole else [a - len(shape) if b.chance(0.3) else a for a in axes])


USES: Mapping[str, Use] = {
    "Transpose": transpose, "Reshape": reshape, "Flatten": flatten, "Squeeze": squeeze, "Unsqueeze": unsqueeze, "Expand": expand,
    "Concat": concat, "Split": split, "Slice": slice_, "Tile": tile, "Pad": pad, "DepthToSpace": blocks, "SpaceToDepth": blocks,
    "Shape": shape_of, "Size": shape_of, "Constant": constant, "ConstantOfShape": constant_of_shape, "Range": range_,
    "EyeLike": eye_like, "Trilu": trilu, "Gather": gather, "GatherElements": gather_elements, "GatherND": gather_nd,
    "Scatter": scatter_elements, "ScatterElements": scatter_elements, "ScatterND": scatter_nd, "TensorScatter": tensor_scatter,
    "OneHot": one_hot, "ReverseSequence": reverse_sequence, "Compress": compress, "NonZero": non_zero, "Unique": unique,
    "CenterCropPad": center_crop_pad,
}  # fmt: skip
