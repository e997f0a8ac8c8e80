"""Refusals of software_pipeline, and pipelines of several depths on every target."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.core.expr import Tunable, Var, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import Sketch, instantiate

SPLIT = step("split", loop="inc_i", factors=[None, 4])
AT = step("compute_at", block="double", loop="inc_i_0")
PARALLEL = step("set_kind", loop="inc_i_0", kind="parallel")
Step = tuple[str, dict[str, object]]


def ahead(loop: str, block: str = "double", stages: int = 2) -> Step:
    return step("software_pipeline", block=block, loop=loop, stages=stages)


def carried() -> PrimFunc:
    """B is computed from S, which the same loop computes."""
    n = Var("n")
    b = TensorBuilder("carried")
    x, s, y, z = b.input("A", (n,)), b.alloc("S", (n,)), b.alloc("B", (n,)), b.output("C", (n,))
    b.compute(s, lambda i: x[i] + 1.0, name="shift")
    b.compute(y, lambda i: s[i] * 2.0, name="double")
    b.compute(z, lambda i: y[i] + 1.0, name="inc")
    return b.finish()


def row_sums() -> PrimFunc:
    """C[i, j] = A[i, j] + the sum of row i."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("row_sums")
    x, s, z = b.input("A", (n, m)), b.alloc("S", (n,)), b.output("C", (n, m))
    b.reduce(s, (m,), const(0.0), lambda acc, i, k: acc + x[i, k], name="sum")
    b.compute(z, lambda i, j: x[i, j] + s[i], name="add")
    return b.finish()


def window() -> PrimFunc:
    """C[i] = B[i] + B[i + 1] + B[i + 2] with B = A * A."""
    n = Var("n")
    b = TensorBuilder("window")
    x, y, z = b.input("A", (n + 2,)), b.alloc("B", (n + 2,)), b.output("C", (n,))
    b.compute(y, lambda i: x[i] * x[i], name="square")
    b.reduce(z, (3,), const(0.0), lambda acc, i, k: acc + y[i + k], name="slide")
    return b.finish()


REFUSALS = [
    refuse("one stage", make.chain, SPLIT, AT, ahead("inc_i_0", stages=1), message="from two to 16 stages"),
    refuse("a marked loop", make.chain, SPLIT, AT, PARALLEL, ahead("inc_i_0"), message="marked parallel"),
    refuse("a loop around nothing else", make.chain, ahead("double_i"), message="one of several statements"),
    refuse("an output", make.chain, SPLIT, AT, ahead("inc_i_0", "inc"), message="make an intermediate by itself"),
    refuse(
        "a reader before it",
        carried,
        step("fuse_sibling_loops", first="double_i", second="inc_i"),
        step("fuse_sibling_loops", first="shift_i", second="double_i"),
        ahead("shift_i"),
        message="cannot run ahead of 'shift'",
    ),
    refuse(
        "elements of other iterations",
        make.stencil,
        step("split", loop="pair_i", factors=[None, 4]),
        step("compute_at", block="square", loop="pair_i_0"),
        ahead("pair_i_0", "square"),
        message="along one dimension of 'B', got 0",
    ),
    refuse(
        "the same elements in each iteration",
        row_sums,
        step("reorder", names=["add_j", "add_i"]),
        step("compute_at", block="sum", loop="add_j"),
        ahead("add_j", "sum"),
        message="along one dimension of 'S', got 0",
    ),
    refuse(
        "a ring that threads would share",
        make.chain,
        step("split", loop="inc_i", factors=[None, 2, 4]),
        step("compute_at", block="double", loop="inc_i_1"),
        step("set_kind", loop="inc_i_0", kind="parallel"),
        ahead("inc_i_1"),
        message="would share the ring of 'B'",
    ),
    refuse(
        "what runs once",
        lambda: make.matmul(4, 6, epilogue=False),
        step("cache_read", block="mm", buffer="W"),
        step("mark_prepack", block="W_cache_copy"),
        ahead("W_cache_copy_i", "W_cache_copy"),
        message="one of several statements",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_software_pipeline_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


def sums(block: str, loop: str, stages: int) -> Schedule:
    """Row sums that are computed one or more rows before their use."""
    s = Schedule(row_sums())
    s.apply("compute_at", block="sum", loop="add_i")
    s.apply("software_pipeline", block=block, loop=loop, stages=stages)
    return s


@pytest.mark.parametrize("stages", [2, 3])
def test_software_pipeline_of_reduction_keeps_meaning(stages: int) -> None:
    s = sums("sum", "add_i", stages)
    assert [repr(d) for d in s.func.allocs[0].shape] == [str(stages)]
    for n, m in ((0, 2), (1, 3), (2, 0), (stages, 1), (7, 4)):
        assert_same_meaning(row_sums(), s.func, {"n": n, "m": m})


def test_overlapping_tiles() -> None:
    s = Schedule(window())
    outer, _ = s.split("slide_i", [None, 4])
    s.compute_at("square", outer)
    s.apply("software_pipeline", block="square", loop=outer, stages=3)
    # three tiles of four, and the two elements the last one needs of the next
    assert [repr(d) for d in s.func.allocs[0].shape] == ["14"]
    for n in (0, 1, 3, 4, 5, 12, 13, 29):
        assert_same_meaning(window(), s.func, {"n": n})


def packed(tile: int | Tunable, width: int, stages: int, threads: str) -> Schedule:
    """A product that copies tiles of W ahead of their use."""
    s = Schedule(make.matmul(epilogue=False))
    s.apply("cache_read", block="mm", buffer="W", scope="local")
    k_0, k_1 = s.split("mm_k", [None, tile])
    j_0, j_1 = s.split("mm_j", [None, width])
    s.reorder([j_0, k_0, "mm_i", k_1, j_1])
    inner = s.compute_at("W_cache_copy", k_0)
    s.apply("software_pipeline", block="W_cache_copy", loop=k_0, stages=stages)
    s.vectorize(inner[-1])
    s.vectorize(j_1)
    s.set_kind(j_0, "parallel" if threads == "parallel" else "group")
    return s


@pytest.mark.process
@pytest.mark.parametrize(("language", "threads"), [("c", "parallel"), ("opencl", "group")])
def test_pipelined_products(language: str, threads: str) -> None:
    device = opened(language)
    tile = Tunable("T", (2, 4))
    sketch = packed(tile, 8, 2, threads)
    funcs = [instantiate(Sketch("ahead", sketch.func, sketch.trace, ()), {"T": 4}), packed(3, 8, 3, threads).func]
    for run in Compiled.together(device, language, funcs):
        for m, n, k in ((1, 1, 1), (3, 8, 4), (2, 9, 5), (3, 17, 13), (2, 3, 0)):
            rng = np.random.default_rng(k)
            a, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
            (d,) = run([a, w, np.empty((m, n), np.float32)])
            np.testing.assert_allclose(d, a @ w, rtol=1e-5, atol=1e-5, err_msg=f"{m} {n} {k}")
            assert_same_meaning(make.matmul(epilogue=False), sketch.func, {"m": m, "n": n, "k": k}, tunables={tile: 4})
    device.close()
