"""More kernels of `zoo.py`, each kind at four sizes: convolutions, pools, resampling, scans, sorts, scatters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.kernels.model import Kernel, Model
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.op.indexing.movement import Permute, Reshape, Take
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.indexing.scatter import ScatterND
from relax_tune.ir.op.neural.fold import Fold
from relax_tune.ir.op.neural.resize import Resize
from relax_tune.ir.op.neural.window import Conv, Pool
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Sum
from relax_tune.ir.op.reduction.scan import ArgMax, CumSum, TopK


def conv(name: str, c: int, size: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> Kernel:
    pad = kernel // 2

    def make(g: Model) -> GVar:
        x = g.input("x", "n", c, size, size)
        if pad:
            x = g(Pad((0, 0, pad, pad), (0, 0, pad, pad)), x)
        return g(Conv((stride, stride), (1, 1), groups), x, g.weight("w", out, c // groups, kernel, kernel))

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return t.nn.functional.conv2d(v["x"], v["w"], stride=stride, padding=pad, groups=groups)

    places = ((size + 2 * pad - kernel) // stride + 1) ** 2
    flops = 2.0 * places * out * (c // groups) * kernel**2
    return Kernel(name, {"n": 1}, make, torch, flops, 4.0 * (c * size**2 + out * places))


def _depthwise(c: int, size: int, kernel: int = 3) -> Kernel:
    return conv(f"depthwise{kernel}_{c}x{size}", c, size, c, kernel, groups=c)


def _shaped(g: Model, x: Any, *dims: int) -> GVar:
    return g(Reshape(tuple(map(const, dims))), x)


def _transposed(c: int, size: int, out: int) -> Kernel:
    """Kernels of 4 x 4, strides of 2, one element cropped around: twice the size."""

    def make(g: Model) -> GVar:
        filters = g(Permute((1, 0)), _shaped(g, g.weight("w", c, out, 4, 4), c, out * 16))
        y = g(Matmul(), filters, _shaped(g, g.input("x", 1, c, size, size), 1, c, size * size))
        y = _shaped(g, y, 1, out, 4, 4, size, size)
        return g(Fold((const(2 * size),) * 2, (2, 2), (1, 1), (const(1),) * 2), y)

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return t.nn.functional.conv_transpose2d(v["x"], v["w"], stride=2, padding=1)

    return Kernel(f"transposed_{c}x{size}", {}, make, torch, 32.0 * c * out * size**2, 4.0 * size**2 * (c + 4 * out))


def _max_pool(c: int, size: int) -> Kernel:
    def make(g: Model) -> GVar:
        x, around = g.input("x", 1, c, size, size), (const(0), const(0), const(1), const(1))
        return g(Pool((3, 3), (2, 2), (1, 1)), g(Pad(around, around, value=-math.inf), x))

    return Kernel(
        f"max_pool_{c}x{size}",
        {},
        make,
        lambda t, v: t.nn.functional.max_pool2d(v["x"], 3, 2, 1),
        bytes=5.0 * c * size**2,
    )


def _resize(c: int, size: int) -> Kernel:
    """Twice the size, linearly."""
    two = (const(2),) * 2

    def make(g: Model) -> GVar:
        op = Resize((2, 3), (const(2 * size),) * 2, two, (const(-1),) * 2, (const(4),) * 2)
        return g(op, g.input("x", 1, c, size, size))

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return t.nn.functional.interpolate(v["x"], scale_factor=2, mode="bilinear")

    return Kernel(f"resize_{c}x{size}", {}, make, torch, bytes=20.0 * c * size**2)


def _group_norm(c: int, size: int) -> Kernel:
    """32 groups of channels (Wu and He 2018), as importers write it."""

    def make(g: Model) -> GVar:
        x = _shaped(g, g.input("x", 1, c, size, size), 1, 32, c // 32, size * size)
        gamma, beta = (_shaped(g, g.weight(name, c), 32, c // 32, 1) for name in ("gamma", "beta"))
        return _shaped(g, g(LayerNorm(1e-5, 2), x, gamma, beta), 1, c, size, size)

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return t.nn.functional.group_norm(v["x"], 32, v["gamma"], v["beta"], 1e-5)

    return Kernel(f"group_norm_{c}x{size}", {}, make, torch, bytes=8.0 * c * size**2)


def _cum_sum(rows: int, width: int, axis: int) -> Kernel:
    name = f"cum_sum{axis}_{rows}x{width}"
    return Kernel(
        name, {}, lambda g: g(CumSum(axis), g.input("x", rows, width)), lambda t, v: t.cumsum(v["x"], axis),
        bytes=8.0 * rows * width,
    )  # fmt: skip


def _arg_max(rows: int, width: int) -> Kernel:
    name = f"arg_max_{rows}x{width}"
    return Kernel(
        name, {}, lambda g: g(ArgMax(1), g.input("x", rows, width)), lambda t, v: t.argmax(v["x"], 1),
        bytes=4.0 * rows * width,
    )  # fmt: skip


def _top_k(rows: int, width: int, k: int) -> Kernel:
    """The places of the k largest elements, best first: of all, a sort."""

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return (
            t.topk(v["x"], k, -1).indices if k < width else t.sort(v["x"], dim=-1, descending=True, stable=True).indices
        )

    return Kernel(
        f"top_{k}_of_{rows}x{width}", {}, lambda g: g(TopK(const(k)), g.input("x", rows, width)), torch,
        bytes=4.0 * rows * width,
    )  # fmt: skip


def _scatter_add(rows: int, updates: int, width: int) -> Kernel:
    def make(g: Model) -> GVar:
        x, u = g.input("x", rows, width), g.input("u", updates, width)
        return g(ScatterND("add"), x, g.input("i", updates, 1, element=i64), u)

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return v["x"].index_add(0, v["i"][:, 0], v["u"])

    name = f"scatter_add_{updates}_into_{rows}x{width}"
    return Kernel(name, {}, make, torch, bytes=4.0 * width * (2 * rows + updates), index_limit=rows)


def _embedding_bag(bags: int, length: int, width: int) -> Kernel:
    table = 50_000

    def make(g: Model) -> GVar:
        return g(Sum((1,)), g(Take(), g.weight("table", table, width), g.input("i", bags, length, element=i64)))

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return t.nn.functional.embedding_bag(v["i"], v["table"], mode="sum")

    name = f"embedding_bag_{bags}x{length}x{width}"
    return Kernel(name, {}, make, torch, bytes=4.0 * bags * (length + 1) * width, index_limit=table)


def kinds() -> Sequence[Kernel]:
    """Each kind at four sizes."""
    return (
        *(_depthwise(c, s) for c, s in ((32, 112), (144, 56), (192, 28), (576, 14))),
        *(_depthwise(c, s, 7) for c, s in ((96, 56), (192, 28), (384, 14), (768, 7))),
        *(conv(f"grouped_{c}x{s}", c, s, c, 3, groups=32) for c, s in ((128, 56), (256, 28), (512, 14), (1024, 7))),
        *(_transposed(c, s, o) for c, s, o in ((64, 64, 32), (128, 32, 64), (256, 16, 128), (512, 8, 256))),
        *(_max_pool(c, s) for c, s in ((64, 112), (128, 56), (256, 28), (512, 14))),
        *(_resize(c, s) for c, s in ((64, 64), (128, 32), (256, 16), (512, 8))),
        *(_group_norm(c, s) for c, s in ((64, 112), (128, 56), (320, 32), (640, 16))),
        *(_cum_sum(r, w, 1) for r, w in ((1, 1 << 20), (64, 16384), (1024, 1024), (16384, 64))),
        *(_cum_sum(r, w, 0) for r, w in ((16384, 1), (16384, 64), (1024, 1024), (64, 16384))),
        *(_arg_max(r, w) for r, w in ((1, 32000), (64, 32000), (1024, 1024), (65536, 16))),
        *(
            _top_k(r, w, k)
            for r, w, k in ((1, 32000, 50), (16, 4096, 8), (1024, 64, 2), (64, 1024, 1024), (1, 32000, 32000))
        ),
        *(
            _scatter_add(r, u, w)
            for r, u, w in ((1000, 10000, 64), (4096, 4096, 16), (100, 30000, 8), (20000, 2000, 1))
        ),
        *(_embedding_bag(b, n, w) for b, n, w in ((1, 32, 64), (256, 32, 64), (2048, 8, 16), (64, 200, 128))),
    )
