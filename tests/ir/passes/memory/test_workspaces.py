"""Arrays that kernels and libraries need while they run are part of the memory plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ir.passes.memory.test_storage_plans import chain
from tests.ir.passes.memory.test_storage_plans_branches import unplanned
from tests.runtime.whole_models import MODELS, Built, built, inputs_of
from tests.support.built_modules import executed
from tests.support.tuner_models import QUICK, attention

import relax_tune as rt
from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.core.expr import Expr, Var, as_int, const, substitute
from relax_tune.ir.passes.memory.memory_plan import overlay
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import evaluate
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.ccompiler


@pytest.fixture(scope="module")
def model(device: Device) -> Built:
    """Attention with generic, library and tuned variants in every call; they pack operands and store products."""
    return built(MODELS["attention"], device.info)


def uses(program: Program) -> dict[int, set[tuple[int, int]]]:
    """For every temporary, the (call, variant) that touch it."""
    result: dict[int, set[tuple[int, int]]] = {}
    for c, call in enumerate(program.calls):
        for v, variant in enumerate(call.variants):
            for index in {i for s in variant.steps for i in s.buffers if program.buffers[i].role == "temp"}:
                result.setdefault(index, set()).add((c, v))
    return result


def test_workspace_shares_no_memory_with_live_tensors(model: Built) -> None:
    touched = uses(model.program)
    spaces = [i for i in touched if model.program.buffers[i].name.startswith("scratch")]
    assert spaces and any(len(c.variants) > 1 for c in model.program.calls)
    shared = 0
    for a in spaces:
        ((call, variant),) = touched[a]
        for b, where in touched.items():
            if b == a or model.program.buffers[b].storage != model.program.buffers[a].storage:
                continue
            shared += 1
            inside = min(c for c, _ in where) <= call <= max(c for c, _ in where)
            assert not inside or where == {(call, next(v for _, v in where))}
            assert (call, variant) not in where
    assert shared  # memory that is free at that time is reused


def test_planned_results_equal_unplanned_results(model: Built, device: Device) -> None:
    separate = Executor(unplanned(model.program), device, model.constants)
    together = Executor(model.program, device, model.constants)
    for at in MODELS["attention"].shapes:
        arrays = inputs_of(model, at, 2, 3)
        for a, b in zip(together.run(arrays), separate.run(arrays), strict=True):
            np.testing.assert_array_equal(a, b)
    separate.close()
    together.close()


def test_constant_plans_hold_workspaces_at_the_largest_sizes(device: Device) -> None:
    job = device_job(attention(), device.info, MemoryStore(), QUICK)
    symbolic = job.build("library").program
    program = job.build("library", memory="constant").program
    assert any(b.name.startswith("scratch") for b in program.buffers)
    upper = {s.name: s.upper or 0 for s in program.symbols}
    small = {s.name: s.lower for s in program.symbols}
    with executed(program, job, device) as one, executed(symbolic, job, device) as other:
        sizes = [[one.bind(at).values[s] for s in program.storages] for at in (small, upper)]
        assert sizes[0] == sizes[1]
        assert sum(sizes[1]) <= sum(other.bind(upper).values[s] for s in symbolic.storages)
    unbounded = replace(job.module, bounds=tuple(replace(b, upper=None) for b in job.module.bounds))
    plans = [
        device_job(unbounded, device.info, MemoryStore(), QUICK).build("generic", memory=m)
        for m in ("constant", "symbolic")
    ]
    assert plans[0].program.storages and plans[0].program.scalars == plans[1].program.scalars


@given(st.lists(st.lists(st.tuples(st.sampled_from("nmc"), st.integers(1, 3)), max_size=3), max_size=4))
def test_each_array_of_any_group_has_one_place(groups: list[list[tuple[str, int]]]) -> None:
    n, m = Var("n"), Var("m")
    expected: list[list[Expr]] = [[{"n": n, "m": m, "c": const(8)}[k] * f for k, f in g] for g in groups]
    sizes, places = overlay(expected, Env())
    assert len(sizes) == max(map(len, expected), default=0)
    for values in ({n: const(3), m: const(50)}, {n: const(70), m: const(2)}, {n: const(0), m: const(0)}):
        room = [as_int(substitute(s, values)) or 0 for s in sizes]
        for group, where in zip(expected, places, strict=True):
            assert len(set(where)) == len(group)
            assert all((as_int(substitute(e, values)) or 0) <= room[p] for e, p in zip(group, where, strict=True))


def test_memory_for_the_largest_sizes_is_a_setting_of_builds() -> None:
    """n <= 1024: two storages of 16 KiB, or none if results may overwrite arguments (the chain runs in its result)."""
    db = MemoryStore()
    for memory, expected in (("constant", [16384] * 2), ("constant-inplace", []), ("symbolic", [160] * 2)):
        program = rt.build(chain(1024), target="c", db=db, memory=memory).program
        values = evaluate(program.scalars, [10])
        assert [values[s] for s in program.storages] == expected
    with pytest.raises(UserError, match="memory= expects one of symbolic, constant"):
        rt.build(chain(1024), target="c", db=db, memory="large")
