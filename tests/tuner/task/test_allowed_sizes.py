"""Shapes that the tuner makes up: each is one that the model allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.support.tuner_models import PAPER_DEVICE, QUICK

from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.expr import Expr, Var, const, eq, floordiv, floormod, le
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Reshape, Slice
from relax_tune.ir.op.math.elementwise import Add, Exp
from relax_tune.ir.op.neural.window import Conv
from relax_tune.runtime.program.scalars import evaluate
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.measure.device_process.inputs import buffer_shapes
from relax_tune.tuner.task.allowed_sizes import AllowedSizes, Range, allowed_sizes
from relax_tune.tuner.task.check import check_case, check_point
from relax_tune.tuner.task.domain import anchors

N, M, K = Var("n"), Var("m"), Var("k")


def crop() -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", 100, 4000)
    return g.finish(g.call(Exp(), g.call(Slice(1, const(64), n), g.input("x", (4, n)))))


def raw_audio(kernel: int = 80, stride: int = 4, lower: int = 1) -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", lower, 16000)
    x, w = g.input("x", (1, 1, n)), g.constant("w", np.ones((2, 1, kernel), np.float32))
    return g.finish(g.call(Exp(), g.call(Conv((stride,), (1,)), x, w)))


def spectrum() -> IRModule:
    return raw_audio(400, 160)


def rows_of_eight() -> IRModule:
    """x as (n / 8, 8): deduction leaves to run time that 8 divides n."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 512)
    return g.finish(g.call(Exp(), g.call(Reshape((floordiv(n, 8), const(8))), g.input("x", (n,)))))


def equal_dims() -> IRModule:
    """x[2:] + y, whose dims are equal at run time."""
    g = GraphBuilder()
    n, m = g.symbol("n", 1, 300), g.symbol("m", 1, 512)
    x = g.call(Slice(0, const(2), n), g.input("x", (n,)))
    return g.finish(g.call(Add(), x, g.input("y", (m,))))


MODELS = {m.__name__: m for m in (crop, raw_audio, spectrum, rows_of_eight, equal_dims)}


@pytest.mark.parametrize("model", MODELS)
def test_extract_tasks_gives_shapes_within_the_domain(model: str) -> None:
    job = device_job(MODELS[model](), PAPER_DEVICE, MemoryStore(), QUICK)
    program = job.build("generic").program
    for task in job.tasks:
        for number in range(2):
            assert all(size > 0 for e in check_case(task, number).expected for size in e.shape)
        points = [*task.domain.points, *task.domain.others, *(check_point(task, k) for k in range(2))]
        for point in points:
            candidate = job.task_variants[task.name].program(job.task_variants[task.name].sketch_set.generic())
            shapes = buffer_shapes(candidate, {f"s{a}": x for a, x in enumerate(point)})
            assert min(size for shape in shapes for size in shape) >= 0, point
            assert task.allows(point)
    # the tasks' symbols of these models are the model's own, or one size computed from it
    names = [s.name for s in program.symbols]
    for task in job.tasks:
        if all(isinstance(e, Var) for e in task.sites[0]):
            at = [names.index(e.name) for e in task.sites[0] if isinstance(e, Var)]
            for point in task.domain.points if len(at) == len(names) else ():
                slots = evaluate(program.scalars, [x for _, x in sorted(zip(at, point))])
                assert all(slots[c.slot] for c in program.checks)


def test_anchors_with_wide_kernel_begin_where_windows_fit() -> None:
    (task,) = device_job(raw_audio(), PAPER_DEVICE, MemoryStore(), QUICK).tasks
    spans = {e: x for e, x in zip(task.sites[0], task.domain.points[0])}
    assert len(task.domain.points) == 6
    assert all(x >= 0 for x in spans.values())


def test_check_shapes_with_lower_bounds_differ_and_are_small() -> None:
    (task,) = device_job(crop(), PAPER_DEVICE, MemoryStore(), QUICK).tasks
    first, second = (check_point(task, number) for number in range(2))
    assert first == (100,) and second == (131,)


def test_check_shapes_within_the_bounds_are_the_usual_ones() -> None:
    g = GraphBuilder()
    b, n = g.symbol("b", 1, 8), g.symbol("n", 1, 512)
    (task,) = device_job(g.finish(g.call(Exp(), g.input("x", (b, n)))), PAPER_DEVICE, MemoryStore(), QUICK).tasks
    sizes = [dict(zip((repr(e) for e in task.sites[0]), check_point(task, k))) for k in range(2)]
    assert sizes == [{"b * n": 5 * 19}, {"b * n": 2 * 67}]


RANGES = {N: Range(1, 512), M: Range(1, 512), K: Range(1, 4096)}
CASES: dict[str, tuple[list[Expr], Callable[[int, int, int], bool]]] = {
    "product": ([eq(N * M, K)], lambda n, m, k: n * m == k),
    "multiple": ([eq(floormod(N, 8), 0)], lambda n, m, k: n % 8 == 0),
    "order": ([le(N, M), le(M + 100, K)], lambda n, m, k: n <= m and m + 100 <= k),
    "least": ([le(const(80), N), eq(M, N - 79)], lambda n, m, k: n >= 80 and m == n - 79),
    "sum": ([eq(N + M, K), eq(floormod(K, 4), 0)], lambda n, m, k: n + m == k and k % 4 == 0),
}


@pytest.mark.parametrize("case", CASES)
def test_allowed_sizes_near_a_start_satisfy_the_conditions(case: str) -> None:
    conditions, right = CASES[case]
    sizes = allowed_sizes(RANGES, conditions, [], 0)
    for start in [(19, 19, 19), (67, 2, 5), (1, 1, 1), (512, 512, 4096)]:
        near = sizes.nearest(dict(zip((N, M, K), start)))
        assert near is not None and right(near[N], near[M], near[K])
        assert all(RANGES[v].lower <= x <= RANGES[v].upper for v, x in near.items())
    points = anchors([(N, M, K)], RANGES, allowed=sizes).points
    assert len(points) > 1 and all(right(*p) for p in points)


def test_anchors_of_one_symbol_keep_both_ends_where_others_follow() -> None:
    sizes = allowed_sizes(RANGES, [eq(N * M, K)], [], 0)
    points = anchors([(N,)], {N: RANGES[N]}, allowed=sizes).points
    assert points[0] == (1,) and points[-1] == (512,)


def test_allowed_sizes_of_contradictory_conditions_are_none() -> None:
    sizes = allowed_sizes(RANGES, [le(N, M), le(M + 1, N)], [], 0)
    assert sizes.nearest({N: 5, M: 5, K: 5}) is None
    assert AllowedSizes(RANGES, ()).nearest({N: 600, M: 0, K: 5}) == {N: 512, M: 1, K: 5}
