"""ONNX operators that sample images at positions from data: GridSample, AffineGrid."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from relax_tune.ir.core.dtype import DType, f32, i64
from relax_tune.ir.core.expr import Expr, const, maximum, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.shape import expressions
from relax_tune.ir.frontend.shared.compositions import cast_to, permute
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat
from relax_tune.ir.op.math.elementwise import AddScalar, Div, MulScalar, Sub
from relax_tune.ir.op.math.logic import Less, Where
from relax_tune.ir.op.neural.grid_sample import GridSample
from relax_tune.ir.op.reduction.linalg import Matmul

KERNELS = {"linear": "linear", "bilinear": "linear", "nearest": "nearest", "cubic": "cubic", "bicubic": "cubic"}


def _grid_sample(w: Writer, node: OnnxNode) -> ImportedValue:
    x, grid = node.item(0), node.item(1)
    mode = node.choice("mode", "linear", "nearest", "cubic", "bilinear", "bicubic")
    padding = node.choice("padding_mode", "zeros", "border", "reflection")
    if x.ndim < 3 or grid.ndim != x.ndim:
        raise node.refuse(
            f"wanted (n, c, dims...) and (n, places..., number of dims), found {x.info!r} and {grid.info!r}"
        )
    positions = w.reshape(w.tensor(grid), [x.shape[0], *grid.shape[1:-1], const(x.ndim - 2)])
    if KERNELS[mode] == "cubic" and padding == "border":
        positions = _nearest_ends(w, node, positions)
    op = GridSample(KERNELS[mode], padding, bool(node.attributes.get("align_corners", 0)))
    return w.of(w.emit(op, w.tensor(x), positions), x.natural and mode == "nearest")


def _nearest_ends(w: Writer, node: OnnxNode, positions: Value) -> Value:
    """Move positions beyond the edges to the first and last element, as ONNX does before cubic sampling."""
    x, element = node.item(0), node.item(1).dtype
    one = w.literal(1, element)
    first: Value = one
    if not node.attributes.get("align_corners", 0):
        sizes = np.empty(x.ndim - 2, object)
        sizes[:] = x.shape[:1:-1]
        whole = cast_to(w, w.tensor(w.known(sizes)), i64, element)
        first = w.emit(Sub(), one, w.emit(Div(), one, whole))
    low = w.emit(Less(), positions, w.literal(-1, element))
    positions = w.emit(Where(), low, w.emit(MulScalar(-1.0), first), positions)
    return w.emit(Where(), w.emit(Less(), one, positions), first, positions)


def size_of(w: Writer, n: Expr, element: DType) -> Value:
    """Return a size as a float without dims."""
    return cast_to(w, w.size(n), i64, element)


def _steps(w: Writer, n: Expr, aligned: bool, element: DType) -> Value:
    """Return the positions (n,) of the elements of a dim from -1 to 1."""
    at = cast_to(w, w.emit(Iota(n)), i64, element)
    if aligned:  # a single element lies at -1, as by numpy.arange
        last = size_of(w, w.simplify(maximum(sub(n, 1), 1)), element)
        return w.emit(AddScalar(-1.0), w.emit(Div(), w.emit(MulScalar(2.0), at), last))
    odd = w.emit(AddScalar(1.0), w.emit(MulScalar(2.0), at))
    return w.emit(AddScalar(-1.0), w.emit(Div(), odd, size_of(w, n, element)))


def columns(w: Writer, parts: list[Value], dims: list[Expr]) -> Value:
    """Return values that broadcast to `dims` side by side in a new last dim."""
    spread = [w.emit(BroadcastTo(tuple(dims)), p) for p in parts]
    return w.emit(Concat(len(dims)), *(w.reshape(p, [*dims, const(1)]) for p in spread))


def _affine_grid(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import AffineGrid: the positions of the elements of an image, times a matrix for each image."""
    theta, dims = node.item(0), expressions(w, node, 1)[2:]
    n = len(dims)
    if theta.ndim != 3 or n not in (2, 3):
        raise node.refuse(f"wanted matrices (n, dims, dims + 1) and a size (n, c, 2 or 3 dims), found {theta.info!r}")
    aligned = bool(node.attributes.get("align_corners", 0))
    work = theta.dtype if not theta.dtype.is_half else f32
    matrix = w.reshape(cast_to(w, w.tensor(theta), theta.dtype, work), [theta.shape[0], const(n), const(n + 1)])
    parts = []
    for axis in range(n - 1, -1, -1):
        own = _steps(w, dims[axis], aligned, work)
        parts.append(w.reshape(own, [dims[axis], *[const(1)] * (n - 1 - axis)]))
    parts.append(w.full([const(1)] * n, 1.0, work))
    places = w.simplify(dims[0] * dims[1] * (dims[2] if n == 3 else 1))
    plain = w.reshape(columns(w, parts, dims), [places, const(n + 1)])
    found = w.emit(Matmul(), plain, permute(w, matrix, (0, 2, 1)))
    return w.of(cast_to(w, w.reshape(found, [theta.shape[0], *dims, const(n)]), work, theta.dtype))


HANDLERS: Mapping[str, Handler] = {"GridSample": _grid_sample, "AffineGrid": _affine_grid}
