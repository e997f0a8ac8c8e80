"""Pooling of the positions of a text to one vector, as sentence-transformers does.

Tests: `tests/ir/frontend/hf/test_sentence.py`, `tests/ir/frontend/hf/test_heads.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, add, const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.transformer.programs import Stage
from relax_tune.ir.frontend.hf.transformer.stack import StackEmitter
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Reshape, Slice
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Div, MaximumScalar, Mul, MulScalar, Sqrt, Sub
from relax_tune.ir.op.math.logic import Less, NotEqual, Where
from relax_tune.ir.op.reduction.reduce import L2Normalize, Max, MeanPool, Sum
from relax_tune.ir.op.reduction.scan import ArgMax

Pooling = Literal["mean", "cls", "max", "mean_sqrt_len", "weightedmean", "lasttoken", "none"]
PROMPT = "prompt_length"  # input with the number of leading tokens that are not pooled


def pooled(kind: str) -> Callable[[StackEmitter, GVar], GVar]:
    """Pool the positions of the mask: (b, n, hidden) to (b, hidden)."""
    return lambda e, x: _KINDS[kind](e, x, e.mask)


def concatenated(parts: tuple[str, ...], include_prompt: bool = True) -> Stage:
    """Concatenate the vectors of several poolings. include_prompt: if false, the prompt's positions are not pooled"""

    def stage(e: StackEmitter, x: GVar) -> GVar:
        mask = e.mask if include_prompt else _without_prompt(e)
        vectors = [_KINDS[kind](e, x, mask) for kind in parts]
        return vectors[0] if len(vectors) == 1 else e.g.call(Concat(1), *vectors, hint="pooled")

    return stage


def first_position(e: StackEmitter, x: GVar) -> GVar:
    """Take the first position: (b, n, hidden) to (b, hidden)."""
    return position(e, x, const(0))


def position(e: StackEmitter, x: GVar, number: Expr, hint: str = "pooled") -> GVar:
    """Take one position: (b, n, hidden) to (b, hidden)."""
    batch, _ = e.dims
    one = e.g.call(Slice(1, number, add(number, const(1))), x)
    return e.g.call(Reshape((batch, const(e.stack.hidden))), one, hint=hint)


def selected(e: StackEmitter, x: GVar, where: GVar) -> GVar:
    """Take a position of each row, `where` (b,) i64: (b, n, hidden) to (b, hidden)."""
    g, (batch, _), hidden = e.g, e.dims, const(e.stack.hidden)
    where = g.call(BroadcastTo((batch, const(1), hidden)), g.call(ExpandDims((1, 2)), where))
    return g.call(Reshape((batch, hidden)), g.call(GatherElements(1), x, where), hint="pooled")


def last_of(e: StackEmitter, marked: GVar) -> GVar:
    """Emit the last position that `marked` (b, n) i64 has 1 at, 0 for rows without one: (b,) i64."""
    numbers = e.g.call(ExpandDims((0,)), e.g.call(Iota(e.dims[1]), hint="position"))
    # Positions that are not marked count as 0, so the largest product is at the last marked one.
    return e.g.call(ArgMax(1), e.g.call(Mul(), marked, numbers), hint="last_position")


def normalized(e: StackEmitter, x: GVar) -> GVar:
    """Scale every vector to unit length."""
    return e.g.call(L2Normalize(1e-12), x, hint="sentence_embedding")


def visible(e: StackEmitter, mask: GVar) -> GVar:
    """Emit the mask as integers 0 and 1, (b, n)."""
    return e.g.call(Cast(i64), e.g.call(NotEqual(), mask, e.scalar("hidden", 0, np.int64)))


def _without_prompt(e: StackEmitter) -> GVar:
    """Emit the mask without the prompt: the first `prompt_length` positions after padding at the start."""
    g = e.g
    length = g.input(PROMPT, (e.dims[0],), i64)
    end = g.call(ExpandDims((1,)), g.call(Add(), _first_visible(e), length), hint="end_of_prompt")
    numbers = g.call(ExpandDims((0,)), g.call(Iota(e.dims[1]), hint="position"))
    after = g.call(AddScalar(1), g.call(MulScalar(-1), g.call(Cast(i64), g.call(Less(), numbers, end))))
    return g.call(Mul(), e.mask, after, hint="pooled_mask")


def _first_visible(e: StackEmitter, mask: GVar | None = None) -> GVar:
    return e.g.call(ArgMax(1), visible(e, e.mask if mask is None else mask), hint="first_position")


def _cls(e: StackEmitter, x: GVar, mask: GVar) -> GVar:
    return selected(e, x, _first_visible(e, mask))


def _mean(e: StackEmitter, x: GVar, mask: GVar) -> GVar:
    return e.g.call(MeanPool(1e-9), x, e.g.call(Cast(f32), mask), hint="pooled")


def _weighted_mean(e: StackEmitter, x: GVar, mask: GVar) -> GVar:
    """Weigh positions by their number, from 1 at the first one that is no padding (Muennighoff 2022, SGPT)."""
    g = e.g
    numbers = g.call(ExpandDims((0,)), g.call(AddScalar(1), g.call(Iota(e.dims[1]), hint="position")))
    # Padding may be at the start (decoders) or at the end; the count begins at the first token in both cases.
    weights = g.call(Sub(), numbers, g.call(ExpandDims((1,)), _first_visible(e)))
    return g.call(MeanPool(1e-9), x, g.call(Cast(f32), g.call(Mul(), mask, weights)), hint="pooled")


def _max(e: StackEmitter, x: GVar, mask: GVar) -> GVar:
    g, lowest = e.g, e.scalar("hidden_value", -1e9)
    shown = g.call(ExpandDims((2,)), g.call(NotEqual(), mask, e.scalar("hidden", 0, np.int64)))
    return g.call(Max((1,)), g.call(Where(), shown, x, lowest), hint="pooled")


def _mean_sqrt_len(e: StackEmitter, x: GVar, mask: GVar) -> GVar:
    g, weights = e.g, e.g.call(Cast(f32), mask)
    total = g.call(Sum((1,)), g.call(Mul(), x, g.call(ExpandDims((2,)), weights)))
    root = g.call(Sqrt(), g.call(MaximumScalar(1e-9), g.call(Sum((1,)), weights)))
    return g.call(Div(), total, g.call(ExpandDims((1,)), root), hint="pooled")


def _last_token(e: StackEmitter, x: GVar, mask: GVar) -> GVar:
    """Take the last position of the mask; a row without any gives zeros."""
    g, marked = e.g, visible(e, mask)
    some = g.call(Cast(f32), g.call(Max((1,)), marked))
    return g.call(Mul(), selected(e, x, last_of(e, marked)), g.call(ExpandDims((1,)), some), hint="pooled")


_KINDS = {
    "cls": _cls, "max": _max, "mean": _mean, "mean_sqrt_len": _mean_sqrt_len, "weightedmean": _weighted_mean, "lasttoken": _last_token,
}  # fmt: skip
