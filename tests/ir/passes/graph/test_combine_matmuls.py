"""Products of one value with several weights, combined into one: which are, that results stay, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ir.frontend.hf.transformer.test_programs import ids, write
from tests.ir.frontend.torch.test_importer import recorded
from tests.ir.passes.test_graph_passes import Golden, operators, rand, same_results
from tests.support.programs import same
from tests.support.random_graphs import ALWAYS_THESE, Made, graphs

import relax_tune as rt
from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError, DeduceError, UserError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.expr import Expr, as_int, const, free_vars, substitute
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.plain_loops import block_loads, plain_blocks
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.indexing.movement import Permute, Reshape
from relax_tune.ir.op.math.elementwise import Add, Gelu, Mul, MulScalar, Relu, Sigmoid
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.fusion.symbol_interface import bind_symbols
from relax_tune.ir.passes.graph.cleanup import DeadCode, Deduce
from relax_tune.ir.passes.graph.combine_matmuls import CombineParallelMatmuls
from relax_tune.ir.passes.library.library_lowering import library_forms
from relax_tune.ir.passes.pipeline import LoweredModule, lower, passes_for
from relax_tune.ir.rewrite.emitter import tensor_info
from relax_tune.ir.text.printer import print_text

MERGED = passes_for("merged")


def encoder_layer(turned: bool = False, bias: tuple[bool, bool, bool] = (True, True, True)) -> IRModule:
    """Attention of an encoder: query, key and value are products of one value, each with or without a bias."""
    g = GraphBuilder()
    b, n = g.symbol("b", 1, 3), g.symbol("n", 1, 40)
    x = g.input("x", (b, n, 6))

    def heads(name: str, biased: bool) -> Value:
        y = g.call(Matmul(turned), x, g.constant(f"w{name}", rand(6, 6)))
        y = g.call(Add(), y, g.constant(f"b{name}", rand(6))) if biased else y
        return g.call(Permute((0, 2, 1, 3)), g.call(Reshape((b, n, const(2), const(3))), y))

    q, k, v = (heads(name, has) for name, has in zip("qkv", bias, strict=True))
    weights = g.call(Softmax(), g.call(MulScalar(0.5), g.call(Matmul(True), q, k)))
    mixed = g.call(Permute((0, 2, 1, 3)), g.call(Matmul(), weights, v))
    return g.finish(g.call(Reshape((b, n, const(6))), mixed))


def gated() -> IRModule:
    """A gated feed-forward layer of a decoder."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    gate, up = (g.call(Matmul(), x, g.constant(name, rand(4, 5))) for name in ("gate", "up"))
    return g.finish(g.call(Mul(), g.call(Mul(), gate, g.call(Sigmoid(), gate)), up))


def traffic(lowered: LoweredModule, size: int) -> int:
    """Bytes that the calls of one run read and write, with `size` for every symbol."""
    env = {v: const(size) for b in lowered.module.bounds for v in [b.var]}

    def number(e: Expr) -> int:
        nbytes = as_int(substitute(e, env))
        assert nbytes is not None
        return nbytes

    total = 0
    for call in lowered.calls():
        func = lowered.prims[call.callee]
        own = bind_symbols(func, [tensor_info(a) for a in call.args], call.out, call.scalars)
        for buffer in func.buffers:
            whole = math.prod(number(substitute(d, own)) for d in buffer.shape)
            touched = whole if buffer in func.output_buffers else 0
            for block in plain_blocks(func) or ():
                extents = {i.var: number(substitute(i.extent, own)) for i in block.iters}
                loads = [x for x in block_loads(block) if x.buffer is buffer]
                touched += sum(math.prod(extents.get(v, 1) for v in free_vars(*x.indices)) for x in loads)
            total += min(whole, touched) * buffer.dtype.bytes
    return total


def test_text_before_and_after(golden: Golden) -> None:
    module = encoder_layer(bias=(True, False, True))
    merged = CombineParallelMatmuls()(module)
    after = DeadCode()(merged)
    golden("passes/combine_matmuls.txt", f"# before\n{print_text(module)}\n# after\n{print_text(after)}")
    assert CombineParallelMatmuls()(merged) is merged
    assert sorted(after.constants) == ["merged_bias_wq", "merged_wq"]
    for b, n in ((1, 1), (3, 2)):
        same_results(module, merged, rand(b, n, 6))
        same_results(module, after, rand(b, n, 6))


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_combined_attention_reads_columns_in_place(turned: bool) -> None:
    """No call is a copy: one product, and the two of attention, which read its columns."""
    module = encoder_layer(turned)
    separate, merged = lower(module), lower(module, MERGED)
    assert len(separate.calls()) == 6
    assert [c.callee for c in merged.calls()] == [
        "fused_matmul_add", "fused_columns_permute_columns_permute_matmul_mul_scalar", "softmax",
        "fused_columns_permute_matmul_permute",
    ]  # fmt: skip
    assert all(bool(library_forms(f)) == ("matmul" in n) for n, f in merged.prims.items())
    for _, stage in merged.stages:
        verify(stage)
    for size in (1, 2, 40):
        assert traffic(merged, size) < traffic(separate, size)
    same_results(module, merged.module, rand(2, 3, 6))


def test_matmuls_with_epilogues_are_not_combined() -> None:
    """Merged, they would write both parts to memory first. An option merges them all the same."""
    module = gated()
    assert CombineParallelMatmuls()(module) is module
    merged = CombineParallelMatmuls(epilogues=True)(module)
    assert operators(merged)["matmul"] == 1
    same_results(module, merged, rand(3, 4))
    separate, wide = lower(module), lower(merged)
    assert len(separate.calls()) == len(wide.calls()) == 2 and traffic(separate, 64) < traffic(wide, 64)


def test_shared_activation_is_combined_too() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    parts = [
        g.call(Add(), g.call(Matmul(), x, g.constant(f"w{i}", rand(4, 3))), g.constant(f"c{i}", rand(3))) for i in "ab"
    ]
    left, right = (g.call(Gelu(), y) for y in parts)
    last = [g.call(Matmul(), y, g.constant(f"v{i}", rand(3, 2))) for i, y in enumerate((left, right))]
    module = g.finish(g.call(Add(), *last))
    merged = lower(module, MERGED)
    assert [c.callee for c in merged.calls()] == [
        "fused_matmul_add_gelu",
        "fused_columns_matmul",
        "fused_columns_matmul_add",
    ]
    same_results(module, merged.module, rand(3, 4))


def test_unfit_matmuls_are_not_combined() -> None:
    """Products of different values, by a weight with other readers, and products that are returned."""
    g = GraphBuilder()
    n = g.symbol("n")
    x, y = g.input("x", (n, 4)), g.input("y", (n, 4))
    shared = g.constant("shared", rand(4, 4))
    products = [g.call(Matmul(), v, g.constant(f"w{v.name}", rand(4, 4))) for v in (x, y)]
    products += [g.call(Matmul(), x, shared), g.call(Matmul(), g.call(Relu(), x), shared)]
    returned = [g.call(Matmul(), x, g.constant(f"r{i}", rand(4, 4))) for i in range(2)]
    module = g.finish([*(g.call(Reshape((n * 4,)), p) for p in products), *returned])
    assert CombineParallelMatmuls()(module) is module


def models(folder: Path) -> dict[str, Callable[[], IRModule]]:
    return {
        "llama": lambda: load_hf(write(folder, "llama")[0]),
        "mistral": lambda: load_hf(write(folder, "mistral")[0]),
        "torch's bert": lambda: import_program(recorded("bert")[0]),
        "torch's qwen2": lambda: import_program(recorded("qwen2")[0]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "torch's bert", "torch's qwen2"])
def test_combined_models_make_fewer_calls_and_move_no_more_bytes(tmp_path: Path, name: str) -> None:
    """Two or three calls fewer in each of two layers, and no weight is stored twice."""
    module = models(tmp_path)[name]()
    separate, merged = lower(module), lower(module, MERGED)
    assert len(merged.calls()) == len(separate.calls()) - (4 if "torch" in name else 6)
    sizes = [sum(a.nbytes for a in x.module.constants.values()) for x in (separate, merged)]
    assert sizes[0] == sizes[1]
    assert traffic(merged, 1) <= traffic(separate, 1)  # with one row, less reading makes up for the copy
    if "qwen2" in name:  # copying columns costs as much as reading once saves, at any size
        assert all(traffic(merged, n) == traffic(separate, n) for n in (5, 40))
    else:
        assert traffic(merged, 5) < traffic(separate, 5)
    if name == "llama":
        actual, expected = (evaluate_function(x.module, [ids(2, 5)], "prefill") for x in (merged, separate))
        for f, w in zip(actual, expected, strict=True):
            np.testing.assert_allclose(f, w, rtol=1e-6, atol=1e-6)


@pytest.mark.ccompiler
def test_merged_qkv_setting_gives_equal_results(tmp_path: Path) -> None:
    module = encoder_layer()
    x = rand(2, 7, 6)
    db = MemoryStore()
    separate, artifact = (rt.build(module, target="c", db=db, qkv=how) for how in ("separate", "merged"))
    assert (len(separate.program.calls), len(artifact.program.calls)) == (6, 4)
    with rt.load(artifact.save(tmp_path / "merged.rtune")) as model:
        (actual,) = model.run([x])
    np.testing.assert_allclose(actual, run_function(module, "main", [x]), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="separate, merged"):
        rt.build(module, target="c", db=db, qkv="joined")


@pytest.mark.slow
@pytest.mark.parametrize(
    "passes", [(Deduce(), CombineParallelMatmuls(epilogues=True)), MERGED], ids=["pass", "pipeline"]
)
def test_combine_matmuls_random_programs_keep_values(passes: tuple[Any, ...]) -> None:
    fired = []

    @ALWAYS_THESE
    @given(graphs(steps=4, rich=False, first=["products", "heads"]), st.integers(0, 9))
    def check(program: Made, seed: int) -> None:
        args = program.arguments({"n": 1 + seed % 5, "m": seed % 3}, np.random.default_rng(seed))
        try:
            expected = run_function(program.module, "main", args)
            module = program.module
            after = lower(module, passes).module if passes is MERGED else module
            for step in () if passes is MERGED else (Inline(), *passes):
                after, module = step(after), after
        except (UserError, DeduceError, BuildError):
            return
        text = f"{print_text(program.module)}\n{print_text(after)}"
        fired.append(any("merged" in name for name in after.constants))
        verify(after)
        same(run_function(after, "main", args), expected, text, 1e-4)

    check()
    assert sum(fired) >= 2 and sum(fired) * 4 >= len(fired), fired
