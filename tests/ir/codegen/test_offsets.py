"""Offsets in C: long ones get a name, lanes at a distance are accessed by one call, and nothing is divided before its guard."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import TARGETS, Compiled, opened
from tests.support.candidates import WIDE

from relax_tune.ir.codegen.generate import generate, split_kernels
from relax_tune.ir.core.expr import Var, const, lt, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.passes.pipeline import lower
from relax_tune.schedules.sketch import generate_sketches, instantiate
from relax_tune.tuner.task.legal_values import first_legal


def guarded() -> PrimFunc:
    """y[i] = x[f(i, m)] if m > 0, else 1, where f divides by m."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("guarded")
    x, y = b.input("X", (n,)), b.output("Y", (n,))
    b.scalar(m)
    b.compute(y, lambda i: select(lt(0, m), x[(i // m * m + i % m * m + n * m // (m * m)) % n], const(1.0)), name="y")
    return b.finish()


@cache
def convolution(channels: int) -> PrimFunc:
    """A convolution of images of any size to `channels` channels, scheduled so that vectors hold channels."""
    g = GraphBuilder()
    image = (g.symbol("b", 1, 4), 8, g.symbol("h", 3, 512), g.symbol("w", 3, 512))
    y = g.call(Conv((1, 1), (1, 1)), g.input("x", image), g.input("w0", (channels, 8, 3, 3)))
    (func,) = lower(g.finish(y)).module.prims.values()
    sketch = next(s for s in generate_sketches(func, WIDE) if s.name == "convolution.channels.panels")
    values = first_legal(sketch)
    assert values is not None
    return instantiate(sketch, values)


@pytest.mark.parametrize("channels", [32, 40])
def test_source_of_tiles_is_short(channels: int) -> None:
    """The offsets of rows and lanes are not repeated: the source had 660,000 and 860,000 characters."""
    sources = [generate(part, TARGETS["c"]).source for part in split_kernels(convolution(channels))]
    assert max(map(len, sources)) < 90_000
    assert any("rt_scatter_f32x16(" in source for source in sources)
    assert any("rt_scatterm_f32x16(" in source for source in sources) == (channels % 16 > 0)


@pytest.mark.ccompiler
@pytest.mark.parametrize("channels", [32, 40])
def test_lanes_at_a_distance(channels: int) -> None:
    device = opened("c")
    kernel = Compiled(device, "c", convolution(channels))
    random = np.random.default_rng(0)
    for b, h, w in ((1, 3, 3), (1, 7, 4), (2, 11, 36)):
        x, weights = random.normal(size=(b, 8, h, w)), random.normal(size=(channels, 8, 3, 3))
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
        expected = np.einsum("bchwij,ocij->bohw", windows, weights)
        x, weights, y = (a.astype(np.float32) for a in (x, weights, np.zeros_like(expected)))
        np.testing.assert_allclose(kernel([x, weights, y])[0], expected, rtol=1e-4, atol=1e-4)
    device.close()


@pytest.mark.ccompiler
def test_gathered_lanes() -> None:
    """Columns of a matrix whose row length is a symbol are read at a distance."""
    g = GraphBuilder()
    y = g.call(Permute((1, 0)), g.input("x", (g.symbol("n", 1, 512), g.symbol("m", 1, 512))))
    (func,) = lower(g.finish(y)).module.prims.values()
    device = opened("c")
    for sketch in generate_sketches(func, WIDE):
        scheduled = instantiate(sketch, first_legal(sketch) or {})
        kernel = Compiled(device, "c", scheduled)
        for shape in ((1, 1), (17, 5), (40, 33)):
            x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
            np.testing.assert_array_equal(kernel([x, np.zeros(shape[::-1], np.float32)])[0], x.T)
    device.close()


@pytest.mark.ccompiler
def test_guarded_quotients_are_not_computed_early() -> None:
    """A divisor that may be 0 is never part of a named offset, so nothing is divided by 0 where the guard is false."""
    func = guarded()
    source = generate(func, TARGETS["c"]).source
    assert not re.search(r"const i64 at\w* = [^;]*[/%]", source)
    device = opened("c")
    kernel = Compiled(device, "c", func)
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(kernel([x, x], [0])[0], np.ones(5))
    device.close()
