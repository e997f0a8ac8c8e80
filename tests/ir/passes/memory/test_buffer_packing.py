"""Packing of lifetimes: live buffers never share a slot, slots are large enough, and their sum is near the peak."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.core.expr import Expr, Var, as_int, ceildiv, const, floordiv, maximum, substitute
from relax_tune.ir.passes.memory.buffer_packing import LiveRange, pack

n, m = Var("n"), Var("m")
SIZES = (
    n,
    n * 4,
    m * 4,
    n * m,
    n * n,
    n + m * 8,
    ceildiv(n, 8) * 8,
    const(64),
    maximum(n, m),
    floordiv(n, m),
    const(0),
)


def value_at(e: Expr, x: int, y: int) -> int:
    value = as_int(substitute(e, {n: const(x), m: const(y)}))
    assert value is not None
    return value


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.sampled_from(SIZES)), max_size=14), st.booleans())
def test_packing_separates_overlapping_lifetimes(lives: list[tuple[int, int, Expr]], bounded: bool) -> None:
    env = Env({n: (1, 512), m: (1, 16)}) if bounded else Env()
    ranges = [LiveRange(first, first + length, size) for first, length, size in lives]
    sizes, slots = pack(ranges, env)
    assert set(slots) == set(range(len(sizes)))
    for (a, s), (b, t) in combinations(zip(ranges, slots, strict=True), 2):
        assert s != t or a.last < b.first or b.last < a.first
    for x, y in ((1, 1), (3, 16), (512, 1), (512, 16), (100, 7)):
        for span, slot in zip(ranges, slots, strict=True):
            assert value_at(span.nbytes, x, y) <= value_at(sizes[slot], x, y)
    assert pack(ranges, env) == (sizes, slots)


def layers(count: int) -> list[LiveRange]:
    """The buffers of a decoder's layers: norm, three projections, scores, probabilities, context, output, gated part."""
    wide, inner, square, row = n * 1024, n * 2752, n * n * 16, n * 4
    ranges = [LiveRange(0, 1, wide)]
    for step in range(1, 1 + 10 * count, 10):
        steps = [(0, 3, wide), (1, 4, wide), (2, 4, wide), (3, 6, wide), (4, 5, square), (5, 6, square), (6, 7, wide)]
        steps += [(7, 10, wide), (7, 8, row), (8, 9, inner), (9, 10, inner)]
        ranges += [LiveRange(step + first, step + last, size) for first, last, size in steps]
    return ranges


def test_packing_decoder_stays_near_peak_of_live_bytes() -> None:
    for count in (1, 6):
        ranges = layers(count)
        rooms, _ = pack(ranges, Env({n: (1, 1024)}))
        for x in (1, 16, 128, 333, 1024):
            live = max(
                sum(value_at(s.nbytes, x, 1) for s in ranges if s.first <= t <= s.last) for t in range(10 * count + 2)
            )
            assert sum(value_at(r, x, 1) for r in rooms) <= 1.35 * live, f"{count} layers, n = {x}"
