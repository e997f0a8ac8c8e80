"""Scaled dot-product attention (Vaswani et al. 2017) as one operator: semantics, loops and decomposition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, bool_
from relax_tune.ir.core.expr import (
    Expr,
    add,
    and_,
    as_int,
    call,
    cast,
    ceildiv,
    const,
    div,
    eq,
    floordiv,
    le,
    lt,
    maximum,
    mul,
    select,
    sub,
)
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, all_tensors
from relax_tune.ir.core.tensor_builder import Tensor
from relax_tune.ir.op.base import (
    Array,
    Decomposer,
    Deduction,
    HalfPolicy,
    OperatorBuilder,
    OperatorSpec,
    dtype_of,
    float_result,
    shape_of,
    wide,
)
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.math.elementwise import (
    Add,
    MaximumScalar,
    MulScalar,
    Tanh,
    broadcast_dims,
    broadcast_index,
    broadcast_position,
    division_by,
)
from relax_tune.ir.op.math.logic import Equal, Where
from relax_tune.ir.op.neural.decoder import CausalSoftmax
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax, lowest

Dims = tuple[Expr, ...]
_NOTHING_BEFORE = const(0)


@dataclass(frozen=True, slots=True)
class Attention(OperatorSpec):
    """Attention `softmax(scale * q @ k.T + mask) @ v`, with grouped-query heads (Ainslie et al. 2023).

    q: (..., h, r, d); k: (..., g, m, d); v: (..., g, m, e); result: (..., h, r, e). Leading dims broadcast; `h` is a multiple of
    `g`, and query head `i` reads key head `i // (h / g)`. An optional mask broadcasts to (..., h, r, m): booleans, true
    where a row sees a column, or floats that are added.

    Attributes:
        scale: factor of the scores.
        causal: row `i`, at position `offset + i // group`, sees no later column.
        offset: number of earlier positions, such as the length of a cache; at least 0.
        group: number of neighbouring rows that share a position (rows of one key head: the query heads that share it).
        window: number of columns that a row sees, up to its own position; None: all.
        softcap: scores `s` become `softcap * tanh(s / softcap)` before the mask.
        hides_rows: a row that sees no column gives 0; False: every row sees a column.
        stored: type that the weights are rounded to before the second product; None: the type of the arguments.
    """

    scale: float
    causal: bool = False
    offset: Expr = _NOTHING_BEFORE
    group: int = 1
    window: int | None = None
    softcap: float | None = None
    hides_rows: bool = True
    stored: DType | None = None
    half_policy: ClassVar[HalfPolicy] = "prefer"
    name: ClassVar[str] = "attention"

    def reads(self, position: int) -> HalfPolicy:
        return self.half_policy if position < 3 else "never"

    def storing(self, dtype: DType) -> Attention:
        return replace(self, stored=dtype)

    def _arguments(self, infos: Sequence[StructInfo]) -> tuple[TensorInfo, ...]:
        tensors = all_tensors(infos)
        if not 3 <= len(tensors) <= 4:
            raise DeduceError(f"attention: expected queries, keys, values and perhaps a mask, got {list(infos)!r}")
        for what, t in zip(("queries", "keys", "values"), tensors):
            if t.dtype is not None and not t.dtype.is_float:
                raise DeduceError(f"attention: expected floating-point {what}, got {t!r}; cast them first")
            if t.ndim is not None and t.ndim < 2:
                raise DeduceError(f"attention: expected at least 2 dims in {what}, got {t!r}")
        mask = tensors[3] if len(tensors) == 4 else None
        if mask is not None and mask.dtype not in (None, bool_, tensors[0].dtype):
            raise DeduceError(f"attention: expected a mask of truth values or of the queries' type, got {mask!r}")
        return tensors

    def _check(self) -> None:
        if self.group < 1 or (self.window is not None and self.window < 1):
            raise DeduceError(
                f"attention: expected a group and a window of at least 1, got {self.group} and {self.window}"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise DeduceError(f"attention: expected a softcap above 0, got {self.softcap}")
        if not self.causal and (self.group > 1 or self.window is not None or as_int(self.offset) != 0):
            raise DeduceError("attention: expected an offset, group or window only where it is causal")

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        self._check()
        tensors = self._arguments(infos)
        dtype = self.same_dtype(tensors[:3])
        q, k, v = (t.shape for t in tensors[:3])
        if q is None or k is None or v is None:
            return TensorInfo(None, dtype, None)
        if len({len(s) for s in (q, k, v)}) != 1:
            raise DeduceError(f"attention: expected equal numbers of dims, got {list(tensors[:3])!r}")
        ctx.require_equal(q[-1], k[-1], "attention: widths of queries and keys")
        ctx.require_equal(k[-2], v[-2], "attention: positions of keys and values")
        if len(q) > 2:
            ctx.require_equal(k[-3], v[-3], "attention: heads of keys and values")
            ctx.require_equal(
                mul(_shared(q, k, ctx), k[-3]), q[-3], "attention: query heads, a multiple of the key heads"
            )
        lead = _lead(q, k, v, ctx)
        if lead is None:
            return TensorInfo(None, dtype, len(q))
        if self.causal:
            ctx.require_at_least(self.offset, 0, "attention: offset")
        if len(tensors) == 4 and tensors[3].shape is not None:
            whole = (*lead, *q[len(lead) : -1], k[-2])
            if len(tensors[3].shape) > len(whole):
                raise DeduceError(f"attention: expected a mask of at most {len(whole)} dims, got {tensors[3]!r}")
            for p, d in enumerate(reversed(tensors[3].shape), 1):
                if as_int(d) != 1:
                    ctx.require_equal(d, whole[-p], f"attention: dim {len(tensors[3].shape) - p} of the mask")
        return TensorInfo((*lead, *q[len(lead) : -1], v[-1]), dtype)

    def _needed(self, rows: Expr, columns: Expr, ctx: Deduction) -> Attention:
        """Drop a window that covers all columns, and causality when the first row is at or after the last column."""
        last = add(self.offset, ceildiv(rows, self.group))
        window = self.window
        if window is not None and ctx.proves(le(last, window)) is Proof.YES:
            window = None
        if window is None and ctx.proves(le(columns, add(self.offset, 1))) is Proof.YES:
            return replace(self, causal=False, offset=_NOTHING_BEFORE, group=1, window=None)
        return replace(self, window=window)

    # lowering

    def decompose(self, args: Sequence[Value], infos: Sequence[TensorInfo], g: Decomposer) -> Value:
        """Decompose into two products with a softmax between; grouped heads become a separate dim, without copies."""
        q, k, v = args[:3]
        dims, keys = shape_of(infos[0]), shape_of(infos[1])
        lead = _lead(dims, keys, shape_of(infos[2]), g.deduction) or ()
        n = len(lead)
        rows = (*lead, *dims[n:-1])
        grouped = len(dims) > 2 and keys[-3] is not const(1) and not g.deduction.same(dims[-3], keys[-3])
        heads: Dims = ()
        if grouped:
            heads = (*lead, keys[-3], _shared(dims, keys, g.deduction))
            q = g.call(Reshape((*dims[:n], *heads[n:], *dims[-2:])), q)
            k, v = (
                g.call(Reshape((*d[: n + 1], const(1), *d[-2:])), t) for t, d in ((k, keys), (v, shape_of(infos[2])))
            )
        scores = g.call(Matmul(transpose_b=True), q, k, hint="scores")
        if grouped:
            scores = g.call(Reshape((*rows, keys[-2])), scores, hint="scores")
        scores = g.call(MulScalar(self.scale), scores, hint="scores")
        if self.softcap is not None:
            scores = g.call(MulScalar(self.softcap), g.call(Tanh(), g.call(division_by(self.softcap), scores)))
        softmax: OperatorSpec = Softmax()
        needed = self._needed(dims[-2], keys[-2], g.deduction)
        if needed.causal:
            softmax = CausalSoftmax(needed.offset, needed.group, needed.window)
        if len(args) == 4:
            weights = self._masked(scores, args[3], softmax, dtype_of(infos[0]), infos[3].dtype is bool_, g)
        else:
            weights = g.call(softmax, scores)
        if grouped:
            weights = g.call(Reshape((*heads, dims[-2], keys[-2])), weights)
        context = g.call(Matmul(), weights, v, hint="context")
        return g.call(Reshape((*rows, shape_of(infos[2])[-1])), context, hint="context") if grouped else context

    def _masked(
        self, scores: Value, mask: Value, softmax: OperatorSpec, dtype: DType, truth: bool, g: Decomposer
    ) -> Value:
        """Return the softmax of the masked scores."""
        # the lowest finite number avoids inf - inf in rows without a visible column
        low = dtype.lowest
        if truth:
            weights = g.call(softmax, g.call(Where(), mask, scores, g.literal(low, dtype)))
            return g.call(Where(), mask, weights, g.literal(0.0, dtype)) if self.hides_rows else weights
        shifted = g.call(Add(), scores, mask)
        if not self.hides_rows:
            return g.call(softmax, shifted)
        hidden = g.call(Equal(), shifted, g.literal(-np.inf, dtype))
        return g.call(Where(), hidden, g.literal(0.0, dtype), g.call(softmax, g.call(MaximumScalar(low), shifted)))

    def build(self, b: OperatorBuilder) -> None:
        ctx = b.ctx
        (dims, keys, values), dtype = map(shape_of, b.infos[:3]), b.dtype(0)
        q, k, v = (b.argument(p, name) for p, name in enumerate("qkv"))
        mask = None
        if len(b.infos) == 4:
            mask = b.argument(3, "mask")
        lead = _lead(dims, keys, values, ctx) or ()
        shared, columns = _shared(dims, keys, ctx), keys[-2]
        needed = self._needed(dims[-2], columns, ctx)
        rows = (*lead, *dims[len(lead) : -1])

        def at(t: Tensor, place: Sequence[Expr], *last: Expr, key: bool = False) -> Expr:
            """Read an element at the heads of `place`, whose leading dims may be wider."""
            dims_of_t, n = t.buffer.shape, len(lead)
            before = [
                const(0) if d is const(1) else broadcast_position(i, o, d) for i, o, d in zip(place, lead, dims_of_t)
            ]
            head = [floordiv(i, shared) if key else i for i in place[n:]]
            return t[(*before, *head, *last)]

        # The lowest finite number stands for -inf: in a row without a visible column, score - top would be inf - inf = NaN.
        hidden = lowest(dtype)

        def scored(product: Expr, *i: Expr) -> Expr:
            shown = None if mask is None else broadcast_index(mask, i, (*rows, columns))  # type: ignore[arg-type]
            return needed._score(product, shown, i[-2], i[-1], hidden)

        attention_loops(
            b,
            rows,
            columns,
            (dims[-1], values[-1]),
            lambda *i: at(q, i[:-2], *i[-2:]),
            lambda *i: at(k, i[:-2], *i[-2:], key=True),
            lambda *i: at(v, i[:-2], *i[-2:], key=True),
            scored,
            dtype,
            self.stored or dtype,
        )

    def _score(self, product: Expr, mask: Expr | None, r: Expr, column: Expr, hidden: Expr) -> Expr:
        """Return the score of row `r` and a column: scaled, capped and masked; `hidden` where the row does not see it."""
        dtype = hidden.dtype
        value: Expr = mul(product, const(self.scale, dtype))
        if self.softcap is not None:
            cap = const(self.softcap, dtype)
            value = mul(call("tanh", div(value, cap)), cap)
        row = add(self.offset, floordiv(r, const(self.group)))
        if mask is not None:
            value = select(mask, value, hidden) if mask.dtype is bool_ else add(value, mask)
        if self.causal:
            near = le(column, row)
            near = near if self.window is None else and_(near, lt(sub(row, self.window), column))
            value = select(near, value, hidden)
        return value

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        q, k, v = map(wide, arrays[:3])
        if q.ndim > 2 and k.shape[-3] not in (1, q.shape[-3]):
            k, v = (np.repeat(t, q.shape[-3] // k.shape[-3], axis=-3) for t in (k, v))
        scores = np.matmul(q, np.swapaxes(k, -1, -2)) * self.scale
        if self.softcap is not None:
            scores = np.tanh(scores / self.softcap) * self.softcap
        if len(arrays) == 4:
            mask = arrays[3]
            scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + wide(mask)
        if self.causal:
            offset = as_int(self.offset)
            if offset is None:
                raise DeduceError(
                    f"attention: expected a number to evaluate with, got {self.offset!r}; bind its symbols"
                )
            r, m = scores.shape[-2:]
            row, column = offset + np.arange(r)[:, None] // self.group, np.arange(m)
            visible = column <= row
            visible = visible if self.window is None else visible & (row - self.window < column)
            scores = np.where(visible, scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        # In a row without visible columns, -inf - -inf would be NaN.
        e = np.exp(scores - np.where(np.isneginf(top), 0, top))
        total = e.sum(axis=-1, keepdims=True)
        weights = e / np.where(total == 0, 1, total)
        context = np.where(total == 0, 0, np.matmul(weights, v))  # also where a hidden value is infinite
        return float_result(context, arrays, arrays[0].dtype)


def attention_loops(
    b: OperatorBuilder,
    rows: Dims,
    columns: Expr,
    sizes: tuple[Expr, Expr],
    query: Callable[..., Expr],
    key: Callable[..., Expr],
    value: Callable[..., Expr],
    scored: Callable[..., Expr],
    dtype: DType,
    stored: DType,
) -> None:
    """Define attention by the seven blocks that schedules know.

    Args:
        rows: dims of the queries, (heads..., rows).
        columns: number of keys.
        sizes: of a key and of a value.
        query, key, value: element of an operand at (heads..., row or column, position in it).
        scored: the score of a product at (heads..., row, column), `lowest` where the row does not see the column.
        stored: type that the weights are rounded to before the second product.
    """
    y = b.output("y", (*rows, sizes[1]), dtype)
    product, score = (b.alloc(what, (*rows, columns), dtype) for what in ("product", "score"))
    power = b.alloc("power", (*rows, columns), stored)
    top, total = b.alloc("top", rows, dtype), b.alloc("total", rows, dtype)
    context = b.alloc("context", (*rows, sizes[1]), dtype)
    zero, hidden = const(0, dtype), lowest(dtype)
    b.reduce(
        product, sizes[:1], zero,
        lambda old, *i: add(old, mul(query(*i[:-2], i[-1]), key(*i[:-3], i[-2], i[-1]))), "scores",
    )  # fmt: skip
    b.compute(score, lambda *i: scored(product[i], *i), "mask")
    b.reduce(top, (columns,), hidden, lambda old, *i: maximum(old, score[i]), "softmax_max")
    b.compute(
        power,
        lambda *i: cast(select(eq(score[i], hidden), zero, call("exp", sub(score[i], top[i[:-1]]))), stored),
        "softmax_exp",
    )
    b.reduce(total, (columns,), zero, lambda old, *i: add(old, cast(power[i], dtype)), "softmax_sum")
    b.reduce(
        context, (columns,), zero,
        lambda old, *i: add(old, mul(cast(power[(*i[:-2], i[-1])], dtype), value(*i[:-3], i[-1], i[-2]))), "context",
    )  # fmt: skip
    # a total of 0 means that the row sees no column: its result is 0, not 0 / 0
    b.compute(y, lambda *i: select(eq(total[i[:-1]], zero), zero, div(context[i], total[i[:-1]])), "softmax_divide")


def _lead(q: Sequence[Expr], k: Sequence[Expr], v: Sequence[Expr], ctx: Deduction) -> Dims | None:
    """Broadcast the dims before the heads; None when only run time decides them."""
    both, _ = broadcast_dims("attention", k[:-3], v[:-3], ctx)
    return None if both is None else broadcast_dims("attention", q[:-3], both, ctx)[0]


def _shared(q: Sequence[Expr], k: Sequence[Expr], ctx: Deduction) -> Expr:
    """Return the number of query heads that read one key head."""
    if len(q) < 3 or q[-3] is k[-3]:
        return const(1)
    return ctx.simplify(floordiv(q[-3], k[-3]))
