"""A model that loads in several ways gives the same tensor functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.ir.frontend.onnx.onnx_models import check, model
from tests.ir.frontend.torch.test_importer import recorded

from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import Ref, TorchCall, TorchProgram, TorchSymbol, TorchTensor
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.pipeline import lower

BERT = {
    "model_type": "bert", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 48, "type_vocab_size": 2,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 48,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48}


def keys(module: IRModule) -> dict[str, str]:
    """The name of each tensor function by its key."""
    return {workload_key(f): name for name, f in lower(module).prims.items()}


def folder_of(path: Path, program: TorchProgram, config: dict[str, Any]) -> Path:
    """The weights of a recorded program as a Hugging Face folder."""
    (path / "config.json").write_text(json.dumps(config))
    weights = {n.removeprefix("inner."): np.ascontiguousarray(a) for n, a in program.weights.items()}
    save_file(
        {n: a for n, a in weights.items() if a.dtype == np.float32 and n != "rotary_emb.inv_freq"},
        path / "model.safetensors",
    )
    return path


@pytest.mark.slow
def test_bert_of_torch_and_folder_has_the_same_functions(tmp_path: Path) -> None:
    program, _ = recorded("bert")
    folder = load_hf(folder_of(tmp_path, program, BERT), pooling="none")
    assert keys(import_program(program)) == keys(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name, config", [("llama_prefill", LLAMA), ("gpt2_eager", GPT2)])
def test_products_of_decoders_of_torch_and_folder_are_the_same(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    program, _ = recorded(name)
    folder, ours = keys(load_hf(folder_of(tmp_path, program, config))), keys(import_program(program))
    products = [key for key, name in ours.items() if "matmul" in name and "attention" not in name]
    assert len(products) >= 4
    assert [ours[key] for key in products if key not in folder] == []


def test_parts_of_a_joint_projection_of_torch_can_be_quantised() -> None:
    program, cases = recorded("gpt2_eager")
    module = import_program(program)
    found = QuantizeWeights(bits=8)(module)
    parts = [n for n, a in found.constants.items() if "c_attn" in n and a.dtype == np.int8]
    assert len(parts) == 6  # queries, keys and values of two layers
    inputs, wanted = cases[1]
    assert np.abs(run_function(found, "main", inputs) - wanted[0]).max() < 0.2


NORMED = """(float[b, 3, h, w] x) => (float[b, 4, i, j] y)
  <float[4, 3, 3, 3] k, float[4] c, float[4] gamma, float[4] beta, float[4] mean, float[4] var> {
  d = Conv<kernel_shape = [3, 3]>(x, k, c)
  n = BatchNormalization(d, gamma, beta, mean, var)
  y = Relu(n) }"""
FOLDED = """(float[b, 3, h, w] x) => (float[b, 4, i, j] y) <float[4, 3, 3, 3] k, float[4] c> {
  d = Conv<kernel_shape = [3, 3]>(x, k, c)
  y = Relu(d) }"""


def with_weights(proto: Any, weights: dict[str, np.ndarray[Any, Any]]) -> Any:
    from onnx.numpy_helper import from_array

    del proto.graph.initializer[:]
    proto.graph.initializer.extend(from_array(a, n) for n, a in weights.items())
    return proto


def conv_program(weights: dict[str, np.ndarray[Any, Any]]) -> TorchProgram:
    x, y = TorchTensor(("b", 3, "h", "w"), f32), TorchTensor(("b", 4, ["add", "h", -2], ["add", "w", -2]), f32)
    pair = lambda v: [v, v]
    conv = (Ref("x"), Ref("k"), Ref("c"), pair(1), pair(0), pair(1), False, pair(0), 1)
    norm = (Ref("d"), *map(Ref, ("gamma", "beta", "mean", "var")), 0.1, 1e-5)
    nodes = (
        TorchCall("d", "aten.convolution.default", conv, {}, y),
        TorchCall("n", "aten._native_batch_norm_legit_no_training.default", norm, {}, [y, None, None]),
        TorchCall("f", "getitem", (Ref("n"), 0), {}, y),
        TorchCall("r", "aten.relu.default", (Ref("f"),), {}, y),
    )
    symbols = (TorchSymbol("b", 1, None), TorchSymbol("h", 3, None), TorchSymbol("w", 3, None))
    return TorchProgram(symbols, (("x", x),), {n: n for n in weights}, weights, nodes, (("y", Ref("r")),))


def test_normalised_convolutions_of_every_way_are_one_function() -> None:
    g = np.random.default_rng(3)
    weights = {
        n: g.standard_normal(s).astype(np.float32)
        for n, s in (("k", (4, 3, 3, 3)), ("c", 4), ("gamma", 4), ("beta", 4), ("mean", 4))
    }
    weights["var"] = g.random(4).astype(np.float32) + np.float32(0.5)
    x = g.standard_normal((2, 3, 7, 6)).astype(np.float32)
    bounds = {"h": (3, 64), "w": (3, 64)}
    normed = check(with_weights(model(NORMED), weights), [x], bounds=bounds)
    program = import_program(conv_program(weights), bounds)
    folded = check(with_weights(model(FOLDED), {n: weights[n] for n in "kc"}), [x], bounds=bounds)
    assert list(keys(normed)) == list(keys(program)) == list(keys(folded))
    np.testing.assert_allclose(run_function(program, "main", [x]), run_function(normed, "main", [x]), atol=1e-5)


ATTENTION = """(float[b, 2, n, 4] q, float[b, 2, m, 4] k, float[b, 2, m, 4] v, bool[b, 1, 1, m] seen) => (float[b, 2, n, 4] y)
  <float s = {0.5}, float zero = {0.0}, float low = {LOW}> {
  t = Transpose<perm = [0, 1, 3, 2]>(k)
  p = MatMul(q, t)
  c = Mul(p, s)
  mask = Where(seen, zero, low)
  a = Add(c, mask)
  w = Softmax<axis = -1>(a)
  gone = IsNaN(w)
  kept = Where(gone, zero, w)
  y = MatMul(kept, v) }"""


@pytest.mark.parametrize("low, boolean", [("-inf", True), ("-3.4028234e38", False)])
def test_onnx_attention_of_hidden_rows_follows_the_mask(low: str, boolean: bool) -> None:
    """Rows without a column are 0 under an infinite mask, and a mean of the values under a finite one."""
    g = np.random.default_rng(4)
    q, k, v = (g.standard_normal((2, 2, n, 4)).astype(np.float32) for n in (3, 5, 5))
    seen = np.array([[1, 0, 1, 1, 0], [0] * 5], bool).reshape(2, 1, 1, 5)
    text = ATTENTION.replace("{LOW}", "{0.0}")
    proto = model(text)
    from onnx.numpy_helper import from_array

    for t in proto.graph.initializer:
        if t.name == "low":
            t.CopyFrom(from_array(np.asarray(float(low), np.float32), "low"))
    module = check(proto, [q, k, v, seen])
    calls = [
        b.value
        for b in module.graphs["main"].bindings
        if isinstance(b.value, Call) and isinstance(b.value.op, Attention)
    ]
    assert len(calls) == 1
    assert (calls[0].args[3].info.dtype.name == "bool") == boolean  # type: ignore[union-attr]
