"""Refusals of the primitives on buffers."""

from __future__ import annotations

import pytest
from tests.schedules.primitives.blocks.test_compute_location import guarded, in_parts
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.core.dtype import f32, f64
from relax_tune.ir.core.expr import Tunable, Var, cast, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.schedule import Schedule


def softmax() -> PrimFunc:
    return zoo.softmax().func


def plain() -> PrimFunc:
    return make.matmul(4, 6, epilogue=False)


def shifted() -> PrimFunc:
    """Z[i] = E[i - 1], and Y = 2 E: another reader that looks back."""
    n = Var("n")
    b = TensorBuilder("shifted")
    b.scalar(n)
    x, e = b.input("A", (n + 1,)), b.alloc("E", (n + 1,))
    z, y = b.alloc("Z", (n + 1,)), b.output("Y", (n + 1,))
    b.compute(e, lambda i: x[i] + 1.0, name="inc")
    b.compute(z, lambda i: e[i * 1 - i % 2] * 3.0, name="back")
    b.compute(y, lambda i: e[i] + z[i], name="both")
    return b.finish()


def converted() -> PrimFunc:
    """An intermediate of another dtype than the output."""
    n = Var("n")
    b = TensorBuilder("converted")
    x, t, y = b.input("A", (n,)), b.alloc("T", (n,), f64), b.output("Y", (n,))
    b.compute(t, lambda i: cast(x[i], f64), name="widen")
    b.compute(y, lambda i: cast(t[i], f32), name="narrow")
    return b.finish()


def sized() -> PrimFunc:
    """A constant divided by a shape symbol."""
    n = Var("n")
    b = TensorBuilder("sized")
    w, x = b.input("W", (4,), const=True), b.input("A", (n, 4))
    t, y = b.alloc("T", (4,)), b.output("Y", (n, 4))
    b.compute(t, lambda i: w[i] * cast(n, f32), name="scale")
    b.compute(y, lambda i, j: x[i, j] + t[j], name="add")
    return b.finish()


def summed() -> PrimFunc:
    """Y[i] = sum over k of B[i] * A[k], with B like Y."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("summed")
    x, t, y = b.input("A", (m,)), b.alloc("B", (n,)), b.output("Y", (n,))
    c = b.input("C", (n,))
    b.compute(t, lambda i: c[i] + 1.0, name="inc")
    b.reduce(y, (m,), const(0.0), lambda acc, i, k: acc + t[i] * x[k], name="sum")
    return b.finish()


CACHE_W = step("cache_read", block="mm", buffer="W")
PREPARE_W = step("mark_prepack", block="W_cache_copy")
CACHE_Q = step("cache_read", block="matmul", buffer="q")
DECOMPOSED = step("decompose_reduction", block="mm", loop="mm_i")

REFUSALS = [
    refuse("read what is not read", plain, step("cache_read", block="mm", buffer="D"), message="does not read 'D'"),
    refuse("read into nowhere", plain, step("cache_read", block="mm", buffer="W", scope="moon"), message="expected a scope"),
    refuse(
        "read before it is written",
        make.chain,
        step("fuse_sibling_loops", first="double_i", second="inc_i"),
        step("cache_read", block="inc", buffer="B"),
        message="complete before",
    ),
    refuse("read what is updated", plain, DECOMPOSED, step("cache_read", block="mm", buffer="D"), message="complete before"),
    refuse(
        "read padding",
        make.chain,
        step("tile_layout", buffer="B", dim=1, factor=4, order=[1, 0, 2]),
        step("cache_read", block="inc", buffer="B"),
        message="in parts or with padding",
    ),
    refuse("write part of a buffer", lambda: zoo.concat_blocks().func, step("cache_write", block="first"), message="all of 'z'"),
    refuse("write a decomposed sum", plain, DECOMPOSED, step("cache_write", block="mm"), message="by itself"),
    refuse(
        "write in place",
        softmax,
        step("reuse_output", buffer="e", output="y"),
        step("cache_write", block="div"),
        message="by itself",
    ),
    refuse(
        "write out of a shared nest",
        make.chain,
        step("fuse_sibling_loops", first="double_i", second="inc_i"),
        step("cache_write", block="inc"),
        message="no other block in the nest",
    ),
    refuse("write for no reader", make.chain, step("cache_write", block="double", readers=["double"]), message="expects readers"),
    refuse("write what runs once", plain, CACHE_W, PREPARE_W, step("cache_write", block="W_cache_copy"), message="runs once"),
    refuse("scope of an output", make.chain, step("set_scope", buffer="C", scope="local"), message="intermediate buffer called 'C'"),
    refuse("an unknown scope", make.chain, step("set_scope", buffer="B", scope="moon"), message="expected a scope"),
    refuse(
        "scope of what is filled once",
        plain,
        CACHE_W,
        step("mark_prepack", block="W_cache_copy"),
        step("set_scope", buffer="W_cache", scope="local"),
        message="runs once",
    ),
    refuse("whole numbers of few bits", make.chain, step("store_as", buffer="B", dtype="f16"), message="numbers of 8 bits"),
    refuse("as f32", lambda: make.quantised(3, 5, 8), CACHE_Q, step("store_as", buffer="q_cache", dtype="f32"), message="and f32, got"),
    refuse(
        "sums of whole numbers",
        lambda: make.quantised(3, 4, 4),
        step("cache_read", block="matmul", buffer="x"),
        step("store_as", buffer="x_cache", dtype="f16"),
        message="become f32 at once",
    ),
    refuse("tile an input", make.chain, step("tile_layout", buffer="A", dim=0, factor=2, order=[0, 1, 2]), message="called 'A'"),
    refuse("tile a missing dim", make.chain, step("tile_layout", buffer="B", dim=2, factor=2, order=[0, 1, 2]), message="permutation"),
    refuse("tile in no order", make.chain, step("tile_layout", buffer="B", dim=0, factor=2, order=[0, 1]), message="permutation"),
    refuse("tile by nothing", make.chain, step("tile_layout", buffer="B", dim=0, factor=0, order=[0, 1, 2]), message="positive"),
    refuse("permute an input", make.chain, step("permute_layout", buffer="A", order=[1, 0]), message="called 'A'"),
    refuse("permute in no order", make.chain, step("permute_layout", buffer="B", order=[0, 0]), message="permutation"),
    refuse("reuse an input", softmax, step("reuse_output", buffer="x", output="y"), message="called 'x'"),
    refuse("reuse no output", softmax, step("reuse_output", buffer="e", output="x"), message="shaped like"),
    refuse("reuse another shape", softmax, step("reuse_output", buffer="top", output="y"), message="shaped like"),
    refuse("reuse another dtype", converted, step("reuse_output", buffer="T", output="Y"), message="shaped like"),
    refuse("reuse at another element", make.reverse, step("reuse_output", buffer="B", output="C"), message="element it writes"),
    refuse("reuse under a sum", summed, step("reuse_output", buffer="B", output="Y"), message="without an initial value"),
    refuse(
        "reuse what an earlier iteration overwrote",
        shifted,
        step("fuse_sibling_loops", first="inc_i", second="inc_i"),
        message="to follow",
    ),
    refuse(
        "reuse what a block of the same loop looks back at",
        shifted,
        step("compute_at", block="back", loop="both_i"),
        step("reuse_output", buffer="E", output="Y"),
        message="an earlier iteration",
    ),
    refuse(
        "prepare an input",
        plain,
        step("cache_read", block="mm", buffer="A"),
        step("mark_prepack", block="A_cache_copy"),
        message="not constant",
    ),
    refuse(
        "prepare a local copy",
        plain,
        step("cache_read", block="mm", buffer="W", scope="local"),
        step("mark_prepack", block="W_cache_copy"),
        message="global intermediate",
    ),
    refuse("prepare in parts", in_parts, step("mark_prepack", block="first"), message="global intermediate"),
    refuse(
        "prepare inside another nest",
        plain,
        CACHE_W,
        step("compute_at", block="W_cache_copy", loop="mm_i"),
        step("mark_prepack", block="W_cache_copy"),
        message="its own nest",
    ),
    refuse("prepare a symbolic size", make.matmul, CACHE_W, step("mark_prepack", block="W_cache_copy"), message="symbolic extent"),
    refuse("prepare a symbolic value", sized, step("mark_prepack", block="scale"), message="shape symbol"),
    refuse("write under a condition", guarded, step("cache_write", block="some"), message="all of 'B'"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_buffer_primitives_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


def test_layouts_compose() -> None:
    tile = Tunable("T", (1, 3, 4))
    s = Schedule(make.matmul(5, 7))
    s.apply("cache_read", block="mm", buffer="W")
    s.apply("tile_layout", buffer="W_cache", dim=1, factor=tile, order=[1, 0, 2])
    s.apply("permute_layout", buffer="W_cache", order=[2, 0, 1])
    s.apply("mark_prepack", block="W_cache_copy")
    for width in tile.domain:
        assert_same_meaning(make.matmul(5, 7), s.func, {"m": 3}, tunables={tile: width})


def test_reuse_across_stages_of_a_row() -> None:
    s = Schedule(softmax())
    for block in ("row_sum", "exp", "row_max"):
        s.compute_at(block, "div_i")
    s.apply("reuse_output", buffer="e", output="y")
    assert "e" not in [b.name for b in s.func.allocs]
    for n, m in ((1, 1), (3, 5), (0, 2)):
        assert_same_meaning(softmax(), s.func, {"n": n, "m": m})
