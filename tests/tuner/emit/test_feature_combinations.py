"""Features in combination: results that are views, symbols of one name in several functions, many options."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
from tests.support.effort import thinned
from tests.support.programs import checked, ones, read, run, same
from tests.support.tiny_decoders import write
from tests.support.tuner_models import PAPER_DEVICE

from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.text import save_text
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.text.parser import parse_module
from relax_tune.tuner.api import build
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.program.program_builder import KernelStage
from relax_tune.tuner.settings import Precision, Settings

pytestmark = pytest.mark.ccompiler


def test_equal_views_are_results_more_than_once() -> None:
    """Views of a parameter, of a computed value, and of another result."""
    module = read("""
        @function
        def main(x: Tensor((n, 3), f32)) -> Object():
            with dataflow():
                r: Tensor((n, 3), f32) = op.relu(x)
                a: Tensor((n * 3,), f32) = op.flatten(r)
                b: Tensor((n * 3,), f32) = op.flatten(r)
                c: Tensor((n * 3,), f32) = op.flatten(b)
                d: Tensor((n * 3,), f32) = op.flatten(x)
                e: Tensor((n * 3,), f32) = op.flatten(x)
            return (a, b, r, c, d, e)
    """)
    x = -ones(2, 3)
    with build(module, target="c", db="memory://").open() as model:
        same(tuple(model.run([x])), run(module, x), "views")


def test_parameter_dims_from_callee_with_clashing_symbol_name() -> None:
    def began(name: str) -> tuple[GraphBuilder, GVar, GVar]:
        g = GraphBuilder(name)
        return g, g.input("x", (g.symbol("n", 0, 6), 3)), g.input("y", (g.symbol("m", 0, 4), 3))

    g, x, y = began("callee")
    callee = g.finish([g.call(Relu(), y), x])
    g, x, y = began("main")
    g.include(callee)
    z = g.parameter("z", TensorInfo(None, f32))
    module = checked(g.finish(g.call_function("callee", g.call(Relu(), x), z)))
    with build(module, target="c", db="memory://").open() as model:
        for n, m, k in ((1, 2, 3), (2, 2, 0)):
            args = ones(n, 3), ones(m, 3), -ones(k, 3)
            same(tuple(model.run(args)), run(module, *args), f"{n}, {m}, {k}")
        with pytest.raises(UserError, match="0 <= m <= 4, got m = 5"):
            model.run([np.zeros((d, 3), np.float32) for d in (1, 2, 5)])


def test_build_replays_record_as_tuning_job_did(tmp_path: Path) -> None:
    """A tuning job has the sketches at hand, a build replays traces with their values: of joined products in 16 bits too."""
    module = load_model(write(tmp_path, "llama")[0], {"b": (1, 2), "n": (1, 16), "m": (1, 20)})
    settings = Settings(target="c", effort="quick", precision="bf16", qkv="merged")
    rng = np.random.default_rng(3)
    tuning, building = (device_job(module, PAPER_DEVICE, MemoryStore(), settings).task_variants for _ in range(2))
    compared = 0
    for name, own in ((n, c) for n, c in tuning.items() if "columns" in n or "permute" in n):
        for candidate in own.sketch_set.space.candidates(own.sketch_set.space.sample(rng, 4)):
            record = own.sketch_set.record_of(candidate)
            (stage,), (again,) = own.stages(record), building[name].stages(record)
            assert isinstance(stage, KernelStage) and isinstance(again, KernelStage)
            assert structural_equal(stage.func, again.func), (name, record)
            compared += 1
    assert compared > 10


SHARED = """
    @function
    def straight(x: Tensor((n, 8), f32)) -> Tensor((n, 8), f32):
        with dataflow():
            y: Tensor((n, 8), f32) = op.matmul(x, const("w", Tensor((8, 8), f32)), transpose_b=True)
            z: Tensor((n, 8), f32) = op.matmul(x, const("v", Tensor((8, 8), f32)), transpose_b=True)
            s: Tensor((n, 8), f32) = op.add(y, z)
        return s

    @function
    def driven(c: Tensor((), bool), x: Tensor((k, 8), f32)) -> Tensor(None, f32, ndim=2):
        y: Tensor(None, f32, ndim=2)
        if c:
            with dataflow():
                a: Tensor((k, 8), f32) = op.matmul(x, const("w", Tensor((8, 8), f32)), transpose_b=True)
                b: Tensor((k, 8), f32) = op.matmul(x, const("v", Tensor((8, 8), f32)), transpose_b=True)
                d: Tensor((k, 8), f32) = op.mul(a, b)
            y = d
        else:
            y = const("w", Tensor((8, 8), f32))
        return y
"""


@pytest.mark.parametrize(("bits", "precision"), thinned([(None, "bf16"), (4, "f32")]))
def test_text_of_function_and_host_program_sharing_weights(
    tmp_path: Path, bits: int | None, precision: Precision
) -> None:
    """Neither is called main; weights are read by programs, by parts, and by the host program itself. Every option is on."""
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal((8, 8)).astype(np.float32) for n in ("w", "v")}
    module = checked(parse_module("module(version=1)\n" + textwrap.dedent(SHARED), OPERATORS, weights))
    module = module if bits is None else QuantizeWeights(bits)(module)
    save_text(module, tmp_path / "m.relax")
    result = [
        build(m, target="c", db="memory://", precision=precision, qkv="merged", memory="inplace", pack=True)
        for m in (module, load_model(tmp_path / "m.relax", {"k": (0, 3)}), load_model(tmp_path / "m.relax"))
    ]
    files = [a.save(tmp_path / f"{i}.rta").read_bytes() for i, a in enumerate(result)]
    assert files[0] == files[2] != files[1]
    x = rng.standard_normal((3, 8)).astype(np.float32)
    with result[2].open() as model:
        for function, args in (("straight", [x]), ("driven", [np.array(True), x]), ("driven", [np.array(False), x])):
            (y,) = model.run(args, function)
            np.testing.assert_allclose(y, run_function(module, function, args), rtol=0.05, atol=0.1)
