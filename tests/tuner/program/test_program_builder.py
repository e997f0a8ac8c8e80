"""From scheduled functions to programs: well-formed, nothing twice, and right on both devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.effort import thinned
from tests.support.tuner_models import (
    DEVICES,
    PAPER_DEVICE,
    QUICK,
    attention,
    feed_forward,
    opened,
    paper_job,
    task_variants_of,
)

from relax_tune.database.records import VariantRecord
from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32, i32, i64
from relax_tune.ir.core.expr import Var, cast, const, load, lt, minimum, select
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.math.elementwise import Add
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import Fill, Program, program_from_json, verify_program
from relax_tune.runtime.program.scalars import ScalarBuilder, evaluate
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.measure.device_process.inputs import buffer_shapes, random_constants, random_inputs
from relax_tune.tuner.program.program_builder import ProgramBuilder, input_fill, is_constant, lower_scalar, nbytes
from relax_tune.tuner.task.domain import Domain
from relax_tune.tuner.task.reference import evaluate as reference
from relax_tune.tuner.task.reference import tolerances
from relax_tune.tuner.task.variants import TaskVariants


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened(request.param) as found:
        yield found


def job_on(make: Callable[[], IRModule], device: Device) -> DeviceJob:
    return device_job(make(), device.info, MemoryStore(), QUICK)


def check(task_variants: TaskVariants, variant: VariantRecord, device: Device, shapes: list[tuple[int, ...]]) -> None:
    """A variant's program gives the reference's outputs."""
    program = task_variants.program(variant)
    verify_program(program)
    func = task_variants.task.func
    constants = random_constants(program)
    executor = Executor(program, device, constants)
    try:
        for point in shapes:
            names = {f"s{a}": x for a, x in enumerate(point)}
            inputs = random_inputs(program, names, 3)
            values = dict(zip(func.symbols, point, strict=True))
            by_position = iter(inputs)
            arrays = [
                constants[f"p{number}"] if b in func.consts else next(by_position)
                for number, b in enumerate(func.input_buffers)
            ]
            expected = reference(func, arrays, values)
            limits = tolerances(func, values, expected)
            found = executor.run(inputs)
            for f, e, (rtol, atol) in zip(found, expected, limits, strict=True):
                np.testing.assert_allclose(f, e, rtol=rtol, atol=atol, err_msg=f"{variant} at {point}")
    finally:
        executor.close()


def shapes_of(task_variants: TaskVariants) -> list[tuple[int, ...]]:
    """One, a prime off every tile, and the largest anchor."""
    points = task_variants.task.domain.points
    middle = tuple(min(7, max(p[a] for p in points)) for a in range(len(points[0])))
    return sorted({points[0], middle, points[-1]})


@pytest.mark.parametrize("make", thinned([feed_forward, attention]))
def test_every_form_of_every_task_is_right(make: Callable[[], IRModule], device: Device) -> None:
    job = job_on(make, device)
    libraries = 0
    for task_variants in job.task_variants.values():
        variants = [
            task_variants.sketch_set.generic(),
            *(task_variants.sketch_set.record_of(c) for c in task_variants.sketch_set.seeds(2)),
            *task_variants.library.variants[:1],
        ]
        libraries += bool(task_variants.library.variants)
        for variant in variants:
            check(task_variants, variant, device, shapes_of(task_variants))
    assert libraries == 2


def test_library_forms_pack_before_and_permute_after(device: Device) -> None:
    """q k^T reads both operands permuted; its weights times v writes a permuted result."""
    job = job_on(attention, device)
    forms = [f for c in job.task_variants.values() for f in c.library.forms]
    assert "openblas.sgemm_batched" in {f.routine for f in forms}
    assert any(f.before for f in forms) and any(f.after for f in forms)
    for task_variants in job.task_variants.values():
        for variant in task_variants.library.variants:
            (form,) = (f for f in task_variants.library.forms if f.routine == variant.sketch.split("+")[0])
            steps = task_variants.program(variant).calls[0].variants[0].steps
            kinds = [s.kind for s in steps]
            assert kinds.count("library") == 1
            assert kinds.index("library") >= len(form.before) and (kinds[-1] == "kernel") == (form.after is not None)
            check(task_variants, variant, device, shapes_of(task_variants))


@pytest.mark.slow
def test_program_of_many_calls_shares_equal_parts() -> None:
    """Two layers of the same shape: each kernel once, each weight packed once, scratch memory shared."""
    rng = np.random.default_rng(0)
    g = GraphBuilder()
    n = g.symbol("n", 1, 64)
    x = g.input("x", (n, 32))
    shared = g.constant("shared", rng.standard_normal((32, 32)).astype(np.float32))
    own = g.constant("own", rng.standard_normal((32, 32)).astype(np.float32))
    y = x
    for weight in (shared, own, shared):
        bias = g.constant(f"bias{len(g._constants)}", rng.standard_normal(32).astype(np.float32))
        y = g.call(Add(), g.call(Matmul(), y, weight), bias)
    job = device_job(g.finish(y), PAPER_DEVICE, MemoryStore(), QUICK)
    (task_variants,) = job.task_variants.values()
    assert len(task_variants.task.sites) == 3
    packed = next(
        v
        for v in map(task_variants.sketch_set.record_of, task_variants.sketch_set.seeds(12))
        if task_variants.program(v).prepare and "pack" in v.sketch
    )
    builder = ProgramBuilder("m", job.code_target)
    s = {task_variants.task.func.symbols[0]: builder.symbol("n", 1, 64)}
    weights: dict[str, int] = {}
    workspaces: list[int] = []
    for number, name in enumerate(("shared", "own", "shared")):
        arguments = {}
        for b in task_variants.task.func.buffers:
            role = (
                "const"
                if b in task_variants.task.func.consts
                else "output"
                if b in task_variants.task.func.output_buffers
                else "input"
            )
            key = f"{name}.{b.name}" if role == "const" else f"{b.name}{number}"
            if key not in weights:
                weights[key] = builder.buffer(key, b, role, s)  # type: ignore[arg-type]
            arguments[b] = weights[key]
        for record in (packed, task_variants.library.variants[0]):
            stages = task_variants.stages(record)
            needed = builder.workspaces(stages, arguments)
            workspaces += [builder.storage(size, s) for size in needed[len(workspaces) :]]
            builder.variant(record.kind, record.key, stages, arguments, s, workspaces[: len(needed)])
    assert len(builder.prepare) == 2  # one a weight
    assert len({p.target for p in builder.prepare}) == 1
    temps = [b for b in builder.buffers if b.role == "temp"]
    assert {b.storage for b in temps} == set(workspaces) and len(workspaces) <= 2 < len(temps)


@pytest.mark.slow
@pytest.mark.parametrize("make", [feed_forward, attention])
def test_programs_verify_and_survive_json(make: Callable[[], IRModule]) -> None:
    for task_variants in paper_job(make).task_variants.values():
        for variant in (
            task_variants.sketch_set.generic(),
            *map(task_variants.sketch_set.record_of, task_variants.sketch_set.seeds(3)),
            *task_variants.library.variants,
        ):
            program = task_variants.program(variant)
            assert program_from_json(program.to_json()) == program
            (call,) = program.calls
            assert [v.label for v in call.variants] == [variant.kind]
            names = [k.name for k in program.kernels]
            assert len(names) == len(set(names)) == len({k.source for k in program.kernels})
            _every_scalar_is_a_size(program, task_variants)


def _every_scalar_is_a_size(program: Program, task_variants: TaskVariants) -> None:
    """Shapes of the declared arrays are those of the function's parameters, at every anchor."""
    func = task_variants.task.func
    for point in task_variants.task.domain.points:
        shapes = buffer_shapes(program, {f"s{a}": x for a, x in enumerate(point)})
        for spec, shape in zip(program.buffers, shapes):
            if spec.name.startswith("p") and spec.name[1:].isdigit():
                wanted = func.buffers[int(spec.name[1:])].shape
                slots = ScalarBuilder()
                symbols = {v: slots.symbol(a) for a, v in enumerate(func.symbols)}
                dims = [lower_scalar(slots, d, symbols) for d in wanted]
                assert shape == tuple(evaluate(slots.code, point)[d] for d in dims)


def test_scalar_expressions_lower_to_the_same_numbers() -> None:
    n, m = Var("n"), Var("m")
    e = select(lt(n // 3 + m % 5, n * m - 7), (n + 1) * 4, m - n)
    slots = ScalarBuilder()
    symbols = {n: slots.symbol(0), m: slots.symbol(1)}
    at = lower_scalar(slots, e, symbols)
    for x, y in ((0, 0), (1, 5), (7, 3), (100, 11)):
        assert evaluate(slots.code, (x, y))[at] == ((x + 1) * 4 if x // 3 + y % 5 < x * y - 7 else y - x)


def test_a_foreign_symbol_or_a_float_is_refused() -> None:
    n, m = Var("n"), Var("m")
    slots = ScalarBuilder()
    with pytest.raises(BuildError, match="'m'"):
        lower_scalar(slots, n + m, {n: slots.symbol(0)})
    x = Buffer("x", (n,), f32)
    with pytest.raises(BuildError, match="expected an integer expression"):
        lower_scalar(slots, load(x, (n,)), {n: slots.symbol(0)})


def test_input_fill_keeps_indices_in_range() -> None:
    gather = next(c for c in zoo.cases() if c.name == "gather").func
    table, ids = gather.input_buffers
    assert input_fill(gather, table).kind == "normal"
    fill = input_fill(gather, ids)
    assert (fill.kind, fill.low, fill.high) == ("integers", 0, 10)
    pool = next(c for c in zoo.cases() if c.name == "mean_pool").func
    assert input_fill(pool, pool.input_buffers[1]).high == 2


def test_starts_of_rows_are_filled_with_offsets() -> None:
    csr = make.csr_rows()
    start, column, *others = csr.input_buffers
    assert input_fill(csr, start) == Fill("offsets", 0, 8)
    assert input_fill(csr, column).kind == "integers" and {input_fill(csr, b).kind for b in others} == {"normal"}


def test_neighbours_without_clamped_places_are_no_offsets() -> None:
    """Differences of an array of whole numbers; and starts that index as they are, which offsets would leave."""
    n, m = Var("n"), Var("m")
    for indexing in (False, True):
        b = TensorBuilder("differences")
        start, x, y = b.input("start", (n + 1,), i32), b.input("x", (m,)), b.output("y", (n,))

        def value(i: Any, start: Any = start, x: Any = x, indexing: bool = indexing) -> Any:
            length = cast(start[i + 1], f32) - cast(start[i], f32)
            return x[cast(start[i], i64)] * length if indexing else length

        b.compute(y, value, "difference")
        func = b.finish()
        assert input_fill(func, func.input_buffers[0]) == Fill("integers", 0, 1 if indexing else 2)


def test_raw_indices_stay_inside_one_element() -> None:
    """Those of a symbolic dim; clamped ones may be outside."""
    n, k = Var("n"), Var("k")
    for clamped, high in ((False, 1), (True, 2)):
        b = TensorBuilder("taken")
        x, ids, y = b.input("x", (k,)), b.input("ids", (n,), i32), b.output("y", (n,))
        at = lambda i, ids=ids, clamped=clamped: minimum(cast(ids[i], i64), k - 1) if clamped else cast(ids[i], i64)
        b.compute(y, lambda i, x=x, at=at: x[at(i)], "take")
        func = b.finish()
        assert input_fill(func, func.input_buffers[1]) == Fill("integers", 0, high)


def test_bytes_of_a_buffer() -> None:
    n = Var("n")
    slots = ScalarBuilder()
    at = lower_scalar(slots, nbytes(Buffer("x", (n, const(3)), f32)), {n: slots.symbol(0)})
    assert evaluate(slots.code, (7,))[at] == 84


@pytest.mark.parametrize("case", thinned(zoo.cases(), 2), ids=lambda c: c.name)
def test_the_generic_form_of_every_function_of_the_zoo(case: zoo.Case, device: Device) -> None:
    job = job_on(feed_forward, device)
    top = tuple(max(d[v.name] for d in case.sizes) for v in case.func.symbols)
    task_variants = task_variants_of(case.func, Domain((top,), (1.0,)), job.hardware)
    program = task_variants.program(task_variants.sketch_set.generic())
    verify_program(program)
    rng = np.random.default_rng(1)
    consts = [f"p{n}" for n, b in enumerate(case.func.input_buffers) if is_constant(case.func, b)]
    for dims in case.sizes:
        arguments, expected = case.arguments(rng, dims)
        named = {f"p{n}": a for n, a in enumerate(arguments[: len(case.func.input_buffers)])}
        executor = Executor(program, device, {k: named.pop(k) for k in consts})
        try:
            found = executor.run(list(named.values()))
        finally:
            executor.close()
        for f, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(f, e, rtol=2e-5, atol=2e-5, err_msg=f"{case.name} {dims}")


def test_inapplicable_records_are_build_errors() -> None:
    task_variants = next(iter(paper_job(feed_forward).task_variants.values()))
    for record in (
        VariantRecord("tuned", "gone", "[]"),
        VariantRecord("library", "nolib.gemm"),
        VariantRecord("tuned", "fallback", '{"tunables": {}, "steps": [["split", {}]]}'),
    ):
        with pytest.raises(BuildError, match=r"apply|not available"):
            task_variants.program(record)
