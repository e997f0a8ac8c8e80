"""Dims that turn out to be 1 only at run time broadcast in compiled code as in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
from tests.support.tuner_models import DEVICES, opened

from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Add, Relu
from relax_tune.ir.op.math.logic import Where
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

Array = np.ndarray[Any, Any]
SIZES = [*product((1, 3), repeat=2), (2, 3)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened(request.param) as found:
        yield found


def normal(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def matmul(epilogue: bool, fixed: bool) -> tuple[IRModule, Callable[[int, int], list[Array]]]:
    g = GraphBuilder()
    n, m = g.symbol("n"), 3 if fixed else g.symbol("m")
    y = g.call(Matmul(epilogue), g.input("x", (n, 2, 4)), g.input("y", (m, 5, 4) if epilogue else (m, 4, 5)))
    sizes = (5, 4) if epilogue else (4, 5)
    return g.finish(g.call(Relu(), y) if epilogue else y), lambda a, b: [normal(a, 2, 4), normal(b, *sizes)]


def two_batch_dims() -> tuple[IRModule, Callable[[int, int], list[Array]]]:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    y = g.call(Matmul(), g.input("x", (n, m, 2, 4)), g.input("y", (m, n, 4, 3)))
    return g.finish(y), lambda a, b: [normal(a, b, 2, 4), normal(b, a, 4, 3)]


def einsum() -> tuple[IRModule, Callable[[int, int], list[Array]]]:
    g = GraphBuilder()
    y = g.call(Einsum("bij,bjk->bik"), g.input("x", (g.symbol("n"), 2, 4)), g.input("y", (g.symbol("m"), 4, 3)))
    return g.finish(y), lambda a, b: [normal(a, 2, 4), normal(b, 4, 3)]


def attention() -> tuple[IRModule, Callable[[int, int], list[Array]]]:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    keys = [g.input(name, (m, 2, 6, 8)) for name in "kv"]
    y = g.call(Attention(0.5), g.input("q", (n, 4, 5, 8)), *keys)
    return g.finish(y), lambda a, b: [normal(a, 4, 5, 8), normal(b, 2, 6, 8), normal(b, 2, 6, 8) + 1]


def where() -> tuple[IRModule, Callable[[int, int], list[Array]]]:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    x = g.input("x", (m, 4))
    y = g.call(Where(), g.input("c", (n, 1), bool_), g.call(Add(), x, g.input("z", (n, 4))), x)
    return g.finish(y), lambda a, b: [normal(a, 1) > 0, normal(b, 4), normal(a, 4)]


CASES: dict[str, Callable[[], tuple[IRModule, Callable[[int, int], list[Array]]]]] = {
    "matmul": lambda: matmul(False, False),
    "matmul with a number": lambda: matmul(False, True),
    "transposed, with an epilogue": lambda: matmul(True, False),
    "two batch dims": two_batch_dims,
    "einsum": einsum,
    "attention": attention,
    "where": where,
}


def result(compute: Callable[[Sequence[Array]], Any], arrays: Sequence[Array]) -> Array | None:
    """What a call gives; None for a refusal."""
    try:
        found = compute(arrays)
    except UserError:
        return None
    return np.asarray(found)


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", ["generic", "library"])
@pytest.mark.parametrize("case", CASES)
def test_broadcast_with_dims_of_one_at_run_time_agrees_with_numpy(
    device: Device, case: str, policy: Literal["generic", "library"]
) -> None:
    module, inputs = CASES[case]()
    job = device_job(module, device.info, MemoryStore(), Settings(target=device.info.kind))
    program = job.build(policy).program
    executor = Executor(program, device, {})
    for sizes in SIZES:
        given = inputs(*sizes)
        wanted = result(lambda a: run_function(module, "main", a), given)
        found = result(lambda a: executor.run(a)[0], given)
        assert (wanted is None) is (found is None), (sizes, wanted, found)
        if wanted is not None and found is not None:
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=str(sizes))
    executor.close()
