"""Emission of RWKV's layers (Peng et al. 2023, version 4): attention with weights that decay by the distance of positions.

The sums over a prompt are computed without a loop over positions: in each step, every position adds the sum at the position
before its window, and the window doubles. Sums are relative to their largest exponent.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import GVar, Value
from relax_tune.ir.frontend.hf.transformer.attention import AttentionBlocks
from relax_tune.ir.frontend.hf.transformer.mixers import TimeMix
from relax_tune.ir.op.indexing.movement import ExpandDims, Reshape, Slice
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add, Div, Exp, Maximum, Mul, MulScalar, Relu, Sigmoid, Sub

NOTHING = -1e38  # exponent of an empty sum
Sums = tuple[Value, Value, Value]
"""Weighted sum of values, sum of weights, and the exponent that both are relative to."""


def time_mix_layer(e: AttentionBlocks, x: GVar, number: int, m: TimeMix) -> GVar:
    """Emit a layer, and its states behind the last position as results."""
    g, path = e.g, e.stack.layers[number].path
    earlier = e.states[number] if e.states else None
    if number == 0:
        x = e.norm(x, f"{path}.pre_ln")
    y = e.norm(x, f"{path}.ln1")
    mixed, sums = _attention(e, y, f"{path}.attention", m, earlier)
    x = g.call(Add(), x, e.scaled(mixed, m.scale(number)))
    z = e.norm(x, f"{path}.ln2")
    x = g.call(Add(), x, e.scaled(_feed_forward(e, z, f"{path}.feed_forward", earlier), m.scale(number)))
    e.results += [_last(e, y), _last(e, z), *sums]
    return e.scaled(x, 0.5) if m.rescaled and (number + 1) % m.rescaled == 0 else x


def _last(e: AttentionBlocks, x: GVar) -> GVar:
    """Take the last position (b, width)."""
    g, (batch, length), width = e.g, e.dims, e.stack.hidden
    one = x if length is const(1) else g.call(Slice(1, length - 1, length), x)
    return g.call(Reshape((batch, const(width))), one, hint="last")


def _mixed(e: AttentionBlocks, x: GVar, before: GVar, name: str) -> GVar:
    """Mix positions with the ones before them, by channel."""
    g, full, width = e.g, e.parameters.full(name), e.stack.hidden
    share = e.weight(name, 1, 1, width)
    rest = e.constant(f"{full}.rest", lambda: 1 - e.parameters.get(name, 1, 1, width))
    return g.call(Add(), g.call(Mul(), x, share), g.call(Mul(), before, rest))


def _shifted(e: AttentionBlocks, x: GVar, earlier: GVar | None, by: int = 1, value: float = 0.0) -> GVar:
    """Return what precedes each position of x (b, n, width): the given state of a token, else padding in front."""
    g, none = e.g, const(0)
    if earlier is not None:
        return g.call(ExpandDims((1,)), earlier)
    padded = g.call(Pad((none, const(by), none), (none,) * 3, value=value), x)
    return g.call(Slice(1, none, e.dims[1]), padded, hint=f"before_{by}")


def _attention(
    e: AttentionBlocks, x: GVar, path: str, m: TimeMix, earlier: tuple[GVar, ...] | None
) -> tuple[GVar, list[GVar]]:
    g, hidden, get = e.g, e.stack.hidden, e.parameters.get
    before = _shifted(e, x, None if earlier is None else earlier[0])
    k, v, r = (
        e.dense(_mixed(e, x, before, f"{path}.time_mix_{part}"), f"{path}.{part}", hidden, m.width, False)
        for part in ("key", "value", "receptance")
    )
    full = e.parameters.full(path)

    def decay(times: int) -> Value:
        def make() -> NDArray[np.float32]:
            return np.asarray(-np.exp(get(f"{path}.time_decay", m.width)) * np.float32(times), np.float32)

        return e.constant(f"{full}.decay_{times}", make)

    first = g.call(Add(), k, e.weight(f"{path}.time_first", m.width))
    if earlier is None:
        sums = _scanned(e, k, v, decay)
        earliest: Sums = tuple(_shifted(e, s, None, 1, fill) for s, fill in zip(sums, (0.0, 0.0, NOTHING)))  # type: ignore[assignment]
    else:
        earliest = tuple(g.call(ExpandDims((1,)), s) for s in earlier[2:])  # type: ignore[assignment]
        sums = _added(e, _decayed(e, earliest, decay(1)), (v, e.scalar("one", 1.0), k))
    numerator, denominator, _ = _added(e, earliest, (v, e.scalar("one", 1.0), first))
    y = g.call(Mul(), g.call(Sigmoid(), r), g.call(Div(), numerator, denominator))
    wide = [g.call(Slice(1, e.dims[1] - 1, e.dims[1]), s) for s in sums]
    last = [g.call(Reshape((e.dims[0], const(m.width))), s, hint="sum") for s in wide]
    return e.dense(y, f"{path}.output", m.width, hidden, False), last


def _decayed(e: AttentionBlocks, sums: Sums, decay: Value) -> Sums:
    return sums[0], sums[1], e.g.call(Add(), sums[2], decay)


def _added(e: AttentionBlocks, one: Sums, other: Sums) -> tuple[GVar, GVar, GVar]:
    """Add sums of different exponents."""
    g = e.g
    largest = g.call(Maximum(), one[2], other[2])
    first, second = (g.call(Exp(), g.call(Sub(), s[2], largest)) for s in (one, other))
    total, weights = (g.call(Add(), g.call(Mul(), first, one[at]), g.call(Mul(), second, other[at])) for at in (0, 1))
    return total, weights, largest


def _scanned(e: AttentionBlocks, k: GVar, v: GVar, decay: object) -> tuple[GVar, GVar, GVar]:
    """Emit the sums over every position and all before it, (b, n, width) each."""
    assert callable(decay)
    g = e.g
    ones = g.call(Exp(), g.call(MulScalar(0.0), k), hint="ones")
    sums, window = (v, ones, k), 1
    while window < e.positions:
        num, den, exponent = (_shifted(e, s, None, window, fill) for s, fill in zip(sums, (0.0, 0.0, NOTHING)))
        sums = _added(e, _decayed(e, (num, den, exponent), decay(window)), sums)
        window *= 2
    return sums


def _feed_forward(e: AttentionBlocks, x: GVar, path: str, earlier: tuple[GVar, ...] | None) -> GVar:
    g, hidden, inner = e.g, e.stack.hidden, e.stack.inner
    before = _shifted(e, x, None if earlier is None else earlier[1])
    key = g.call(Relu(), e.dense(_mixed(e, x, before, f"{path}.time_mix_key"), f"{path}.key", hidden, inner, False))
    value = e.dense(g.call(Mul(), key, key), f"{path}.value", inner, hidden, False)
    gate = e.dense(_mixed(e, x, before, f"{path}.time_mix_receptance"), f"{path}.receptance", hidden, hidden, False)
    return g.call(Mul(), g.call(Sigmoid(), gate), value)
