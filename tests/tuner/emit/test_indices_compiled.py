"""Indices outside their dim: refused where they are parameters, defined where they are computed, alike in both evaluators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import DEVICES, opened

from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import i32, i64
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.create import Scalars
from relax_tune.ir.op.indexing.gather import GatherElements, GatherND
from relax_tune.ir.op.indexing.movement import Reshape, Slice, Take
from relax_tune.ir.op.indexing.scatter import ScatterElements, ScatterND
from relax_tune.ir.op.math.elementwise import Add, Cast, Mul
from relax_tune.ir.op.math.logic import Less, Where
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

Array = np.ndarray[Any, Any]
TABLE = np.arange(15, dtype=np.float32).reshape(5, 3)
UPDATES = np.ones((2, 3), np.float32)
OPERATORS: dict[str, tuple[OperatorSpec, tuple[int, ...], tuple[int, ...]]] = {
    "take": (Take(), (), (5,)),
    "gather_nd": (GatherND(), (2,), (5, 3)),
    "gather_elements": (GatherElements(0), (3,), (5,)),
    "scatter_nd": (ScatterND("add"), (1,), (5,)),
    "scatter_nd, replacing": (ScatterND(), (1,), (5,)),
    "scatter_elements": (ScatterElements("add", 0), (3,), (5,)),
    "scatter_elements, replacing": (ScatterElements("replace", 0), (3,), (5,)),
}
"""Each operator, the last dims of its indices, and the sizes of the dims that their columns index."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened(request.param) as found:
        yield found


def both(module: IRModule, device: Device, *inputs: Array) -> tuple[Any, Any]:
    """What the interpreter and the compiled program give: an array or the text of a refusal."""
    job = device_job(module, device.info, MemoryStore(), Settings(target=device.info.kind))
    program = job.build("generic").program
    names = {b.name for b in program.buffers if b.role == "const"}
    executor = Executor(program, device, {n: a for n, a in job.lowered.module.constants.items() if n in names})
    found: list[Any] = []
    for compute in (lambda: run_function(module, "main", list(inputs)), lambda: executor.run(list(inputs))[0]):
        try:
            found.append(compute())
        except UserError as error:
            found.append(str(error))
    executor.close()
    return found[0], found[1]


def indexed(name: str, symbolic: bool, computed: bool) -> IRModule:
    """One operator of OPERATORS over (5, 3); computed: the indices are the squares of the parameter."""
    op, last, _ = OPERATORS[name]
    g = GraphBuilder()
    n, m = g.symbol("n") if symbolic else 5, g.symbol("m")
    x, i = g.input("x", (n, 3)), g.input("i", (m, *last), i64)
    args: list[Value] = [x, g.call(Mul(), i, i) if computed else i]
    return g.finish(g.call(op, *args, *([g.input("u", (m, 3))] if name.startswith("scatter") else [])))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_parameter_outside_column_is_refused(device: Device, name: str, symbolic: bool) -> None:
    _, last, sizes = OPERATORS[name]
    module = indexed(name, symbolic, False)
    more = [UPDATES] if name.startswith("scatter") else []
    good = np.zeros((2, *last), np.int64)
    good[1] = np.array(sizes) - 1 if last else sizes[0] - 1
    wanted, found = both(module, device, TABLE, good, *more)
    np.testing.assert_array_equal(found, wanted)
    for column, size in enumerate(sizes):
        for wrong in (size, -1):
            given = good.copy()
            given[(1, column) if last else 1] = wrong
            at = f"1, {column}" if last else "1"
            for text in both(module, device, TABLE, given, *more):
                assert f"parameter i: expected values from 0 to {size - 1}" in text and f"got {wrong} at [{at}]" in text


@pytest.mark.pairwise
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_computed_index_outside_agrees(device: Device, name: str, symbolic: bool) -> None:
    _, last, _ = OPERATORS[name]
    given = np.zeros((2, *last), np.int64)
    given[1] = 3  # squared: 9
    more = [UPDATES] if name.startswith("scatter") else []
    wanted, found = both(indexed(name, symbolic, True), device, TABLE, given, *more)
    np.testing.assert_array_equal(found, wanted)
    if not more:
        np.testing.assert_array_equal(np.ravel(found)[-1], TABLE[4, 2])


@pytest.mark.parametrize("symbolic", [False, True])
def test_parameter_under_casts_and_wraps_is_refused_outside(device: Device, symbolic: bool) -> None:
    g = GraphBuilder()
    n = g.symbol("n") if symbolic else const(5)
    i = g.call(Cast(i64), g.input("i", (g.symbol("m"),), i32))
    zero = g.constant("zero", np.array(0, np.int64))
    wrapped = g.call(Where(), g.call(Less(), i, zero), g.call(Add(), i, g.call(Scalars((n,)))), i)
    module = g.finish(g.call(Take(), g.input("x", (n, 3)), wrapped))
    wanted, found = both(module, device, np.int32([-5, 4, -1]), TABLE)
    np.testing.assert_array_equal(wanted, TABLE[[0, 4, 4]])
    np.testing.assert_array_equal(found, wanted)
    for wrong in (-6, 5):
        for text in both(module, device, np.int32([0, wrong]), TABLE):
            assert "parameter i: expected values from -5 to 4" in text and f"got {wrong} at [1]" in text


def test_column_of_a_parameter_is_checked_alone(device: Device) -> None:
    g = GraphBuilder()
    m = g.symbol("m")
    column = g.call(Slice(1, const(1), const(2)), g.input("i", (m, 4), i64))
    module = g.finish(g.call(Take(), g.input("x", (g.symbol("n"), 3)), g.call(Reshape((m,)), column)))
    wanted, found = both(module, device, np.array([[99, 4, -9, 99]]), TABLE)
    np.testing.assert_array_equal(found, wanted)
    for text in both(module, device, np.array([[0, 5, 0, 0]]), TABLE):
        assert "parameter i: expected values from 0 to 4" in text and "got 5 at [0, 1]" in text
