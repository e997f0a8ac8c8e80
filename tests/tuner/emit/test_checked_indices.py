"""Builds with checks: a computed index outside its dim fails the call, in the interpreter and on devices, fused and unfused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.effort import thinned
from tests.support.programs import read
from tests.support.tuner_models import DEVICES, opened
from tests.tuner.emit.test_indices_compiled import OPERATORS, TABLE, UPDATES, indexed

from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import Reshape, Take
from relax_tune.ir.op.math.elementwise import Mul, Relu
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.program.program import program_from_json
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.settings import Settings

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened(request.param) as found:
        yield found


def job_of(module: IRModule, device: Device, checks: bool = True) -> DeviceJob:
    return device_job(module, device.info, MemoryStore(), Settings(target=device.info.kind, checks=checks))


def both(module: IRModule, device: Device, *inputs: Array, checks: bool = True, pack: bool = False) -> tuple[Any, Any]:
    """Results, or the text of the refusal, of the interpreter and of the opened artifact."""
    job = job_of(module, device, checks)
    found: list[Any] = []
    with job.artifact(job.build("generic"), pack).open(device) as model:
        for compute in (
            lambda: run_function(module, "main", list(inputs), checks=checks),
            lambda: model.run(list(inputs)),
        ):
            try:
                results = compute()
                found.append(list(results) if isinstance(results, (list, tuple)) else [results])
            except UserError as error:
                found.append(str(error))
    return found[0], found[1]


def agree(module: IRModule, device: Device, *inputs: Array, **how: bool) -> None:
    wanted, found = both(module, device, *inputs, **how)
    assert not isinstance(wanted, str) and not isinstance(found, str), (wanted, found)
    for w, f in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(f, w)


def refused(text: str, module: IRModule, device: Device, *inputs: Array, **how: bool) -> None:
    for found in both(module, device, *inputs, **how):
        assert isinstance(found, str) and text in found, found


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", thinned(OPERATORS, 2))
def test_computed_index_outside_fails_with_checks(device: Device, name: str, symbolic: bool) -> None:
    op, last, sizes = OPERATORS[name]
    module = indexed(name, symbolic, True)
    more = [UPDATES] if name.startswith("scatter") else []
    good = np.zeros((2, *last), np.int64)
    good[1] = np.array([2, 1][: last[0] if name == "gather_nd" else 1]) if last else 2  # squared: 4 and 1
    agree(module, device, TABLE, good, *more)
    for column, size in enumerate(sizes):
        given = good.copy()
        given[(1, column) if last else 1] = 3
        at = f"1, {column}" if last else "1"
        text = f"{op.name}: expected indices of at least 0 and below {size}, got 9 at [{at}]"
        refused(text, module, device, TABLE, given, *more)
        agree(module, device, TABLE, given, *more, checks=False)


def test_parameter_outside_fails_with_checks_as_without(device: Device) -> None:
    module = indexed("take", True, False)
    for checks in (False, True):
        refused("parameter i: expected values from 0 to 4", module, device, TABLE, np.array([0, 5]), checks=checks)


def chain(returned: bool) -> IRModule:
    """Two gathers, the second by what the first one found; the index is between operators that fuse with it, and maybe a result."""
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    x, hops, i = g.input("x", (n, 3)), g.input("hops", (n,), i64), g.input("i", (m,), i64)
    following = g.call(Mul(), g.call(Take(), hops, i), i)
    found = g.call(Relu(), g.call(Take(), g.call(Relu(), x), following))
    return g.finish([found, g.call(Reshape((const(1), m)), following)] if returned else found)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("returned", [False, True])
def test_index_inside_a_fused_chain_is_checked(device: Device, returned: bool, pack: bool) -> None:
    module, hops = chain(returned), np.array([1, 2, 1, 1, -1])
    agree(module, device, TABLE, hops, np.array([0, 1, 3]), pack=pack)
    text = "take: expected indices of at least 0 and below 5, got -4 at [2]"
    refused(text, module, device, TABLE, hops, np.array([0, 1, 4]), pack=pack)
    agree(module, device, TABLE, hops, np.array([0, 1, 4]), pack=pack, checks=False)


def test_constant_index_outside_fails_with_checks(device: Device) -> None:
    g = GraphBuilder()
    i = g.constant("i", np.array([0, 7]))
    module = g.finish(g.call(Take(), g.input("x", (5, g.symbol("k"))), i))
    refused("take: expected indices of at least 0 and below 5, got 7 at [1]", module, device, TABLE)


BRANCHES = """
    @function
    def main(c: Tensor((), bool), x: Tensor((n, 3), f32), i: Tensor((m,), i64)) -> Tensor((m, 3), f32):
        with dataflow():
            j: Tensor((m,), i64) = op.mul(i, i)
            t: Tensor((n, 3), f32) = op.relu(x)
        y: Tensor((m, 3), f32)
        if c:
            with dataflow():
                b: Tensor((m, 3), f32) = op.take(t, j)
            y = b
        else:
            with dataflow():
                e: Tensor((m, 3), f32) = op.take(t, i)
                k: Tensor((m,), i64) = op.add(j, j)
                d: Tensor((m, 3), f32) = op.take(t, k)
                f: Tensor((m, 3), f32) = op.add(d, e)
            y = f
        return y
"""


@pytest.mark.parametrize("symbolic", [False, True])
def test_index_in_branch_is_checked_where_taken(device: Device, symbolic: bool) -> None:
    text = BRANCHES if symbolic else BRANCHES.replace("(n, 3)", "(5, 3)")
    module, yes, no = read(text), np.array(True), np.array(False)
    for c in (yes, no):
        agree(module, device, c, TABLE, np.array([0, 1]))
    for checks in (False, True):
        text = "parameter i: expected values from 0 to 4"
        refused(text, module, device, no, TABLE, np.array([0, 5]), checks=checks)
    agree(module, device, yes, TABLE, np.array([0, 2]))
    agree(module, device, yes, TABLE, np.array([0, 3]), checks=False)
    agree(module, device, no, TABLE, np.array([0, 3]), checks=False)
    refused(
        "take: expected indices of at least 0 and below 5, got 9 at [1]",
        module,
        device,
        yes,
        TABLE,
        np.array([0, 3]),
    )
    refused(
        "take: expected indices of at least 0 and below 5, got 8 at [1]",
        module,
        device,
        no,
        TABLE,
        np.array([0, 2]),
    )


def test_build_without_checks_is_the_same_and_with_checks_the_interface_is(device: Device) -> None:
    module = chain(False)
    plain, checked = (job_of(module, device, checks) for checks in (False, True))
    assert plain.lowered.index_checks == {} and len(checked.lowered.index_checks["main"]) == 1
    programs = [job.build("generic").program for job in (plain, checked)]
    assert programs[0].checked == () and [c.operator for c in programs[1].checked] == ["take"]
    assert [len(p.outputs) for p in programs] == [1, 1]
    artifacts = [job.artifact(job.build("generic")) for job in (plain, checked)]
    assert artifacts[0].outputs == artifacts[1].outputs and artifacts[0].inputs == artifacts[1].inputs
    assert program_from_json(programs[1].to_json()) == programs[1]
