"""What a task's outputs should be: its tensor function evaluated block by block in vectorised NumPy with f64 accumulation.

Independent of schedules and code generation: it reads the unscheduled function, so it can tell a wrong kernel (DESIGN 8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import VerifyError
from relax_tune.ir.buffer import Buffer
from relax_tune.ir.expr import Const, Expr, Load, Op, Var, postorder
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.op.erf import erf
from relax_tune.ir.stmt import Block, blocks

Array = NDArray[Any]

# Elements of one block's iteration space evaluated at a time.
CHUNK = 4 << 20

_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "floordiv": np.floor_divide, "floormod": np.mod, "min": np.minimum, "max": np.maximum,
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.logical_and, "or": np.logical_or, "pow": np.power,
}  # fmt: skip
_UNARY: Mapping[str, Callable[[Any], Any]] = {
    "exp": np.exp, "log": np.log, "erf": erf, "tanh": np.tanh, "sqrt": np.sqrt, "abs": np.abs, "floor": np.floor,
    "rsqrt": lambda x: 1.0 / np.sqrt(x), "not": np.logical_not,
}  # fmt: skip
_REDUCE: Mapping[str, tuple[Callable[..., Any], Callable[[Any, Any], Any]]] = {
    "add": (np.sum, np.add),
    "mul": (np.prod, np.multiply),
    "max": (np.max, np.maximum),
    "min": (np.min, np.minimum),
}


def evaluate(func: PrimFunc, inputs: Sequence[Array], symbols: Mapping[Var, int]) -> list[Array]:
    """The outputs of an unscheduled function, floats in float64. `inputs` in the order of its input buffers.

    Raises VerifyError for a function whose loops were already changed, or a reduction that is not `C = op(C, x)`.
    """
    wide = {b: _widened(a) for b, a in zip(func.input_buffers, inputs, strict=True)}
    for b in (*func.output_buffers, *func.allocs):
        shape = tuple(int(_evaluate(d, dict(symbols), wide)) for d in b.shape)
        wide[b] = np.zeros(shape, np.float64 if b.dtype.is_float else b.dtype.numpy)
    with np.errstate(all="ignore"):
        for block in blocks(func.body):
            _run_block(block, dict(symbols), wide)
    return [wide[b] for b in func.output_buffers]


def _widened(a: Array) -> Array:
    return a.astype(np.float64) if a.dtype.kind == "f" else a


def _run_block(block: Block, symbols: dict[Var, Any], arrays: dict[Buffer, Array]) -> None:
    extents = [int(_evaluate(i.extent, symbols, arrays)) for i in block.iters]
    spatial = [a for a, i in enumerate(block.iters) if i.kind == "spatial"]
    reduce = tuple(a for a, i in enumerate(block.iters) if i.kind == "reduce")
    own = [block.iters[a].var for a in spatial]
    if len(own) != len(block.body.indices) or set(own) != set(block.body.indices):
        raise VerifyError(f"block {block.name!r}: the reference wants plain spatial iterators as store indices")
    order = [own.index(e) for e in block.body.indices if isinstance(e, Var)]
    if 0 in (extents[a] for a in spatial):
        return
    target = arrays[block.body.buffer]
    rest = int(np.prod(extents[1:], dtype=np.int64)) if extents else 1
    step = max(1, CHUNK // max(rest, 1)) if spatial and spatial[0] == 0 else None
    first = extents[0] if extents else 1
    for low in range(0, first, step or max(first, 1)):
        high = first if step is None else min(first, low + step)
        values = dict(symbols)
        for a, it in enumerate(block.iters):
            grid = np.arange(low, high) if a == 0 else np.arange(extents[a])
            values[it.var] = grid.reshape([-1 if x == a else 1 for x in range(len(extents))])
        shape = [high - low, *extents[1:]] if extents else []
        where = tuple(slice(low, high) if spatial[o] == 0 else slice(None) for o in order)
        if not reduce:
            target[where] = np.broadcast_to(_evaluate(block.body.value, values, arrays), shape).transpose(order)
            continue
        value = block.body.value
        if (
            not (isinstance(value, Op) and value.op in _REDUCE and isinstance(value.args[0], Load))
            or block.init is None
        ):
            raise VerifyError(f"block {block.name!r}: the reference wants `C = op(C, x)`, found {value!r}")
        total, pair = _REDUCE[value.op]
        start = _evaluate(block.init.value, values, arrays)
        if 0 in (extents[a] for a in reduce):
            target[where] = start
            continue
        term = np.broadcast_to(_evaluate(value.args[1], values, arrays), shape)
        target[where] = pair(np.asarray(total(term, axis=reduce)), start).transpose(order)


def _evaluate(e: Expr, values: Mapping[Var, Any], arrays: Mapping[Buffer, Array]) -> Any:
    done: dict[Expr, Any] = {}
    for n in postorder((e,)):
        if isinstance(n, Const):
            done[n] = n.value
        elif isinstance(n, Var):
            done[n] = values[n]
        elif isinstance(n, Load):
            source = arrays[n.buffer]
            # both sides of a select are evaluated: keep the side that is not chosen inside the array
            where = tuple(np.clip(done[i], 0, max(d - 1, 0)) for i, d in zip(n.indices, source.shape))
            done[n] = source[where] if source.size else np.zeros(np.broadcast_shapes(*(np.shape(w) for w in where)))
        else:
            assert isinstance(n, Op)
            args = [done[a] for a in n.args]
            if n.op in _BINARY:
                done[n] = _BINARY[n.op](*args)
            elif n.op in _UNARY:
                done[n] = _UNARY[n.op](args[0])
            elif n.op == "select":
                done[n] = np.where(*args)
            else:
                done[n] = np.asarray(args[0]).astype(np.float64 if n.dtype.is_float else n.dtype.numpy)
    return done[e]


def tolerances(func: PrimFunc, symbols: Mapping[Var, int], expected: Sequence[Array]) -> list[tuple[float, float]]:
    """(rtol, atol) per output: grows with the longest reduction and the outputs' magnitude (f32 epsilon 1.2e-7)."""
    longest = 1
    for block in blocks(func.body):
        size = 1
        for i in block.iters:
            if i.kind == "reduce":
                size *= max(1, int(_evaluate(i.extent, dict(symbols), {})))
        longest = max(longest, size)
    out = []
    for b, e in zip(func.output_buffers, expected, strict=True):
        if not b.dtype.is_float:
            out.append((0.0, 0.0))
            continue
        magnitude = float(np.max(np.abs(e[np.isfinite(e)]), initial=0.0))
        out.append((2e-5, 1.2e-7 * 4 * longest**0.5 * max(magnitude, 1e-3) + 1e-6))
    return out
