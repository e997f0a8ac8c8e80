"""Importing decoders of the Llama kind from their folders: against the original framework, and folders that are wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.support.effort import examples
from tests.support.tiny_decoders import LLAMA3, MODELS, MORE, SHAPES, VOCABULARY, ids, parts, write

from relax_tune.database.memory_store import MemoryStore
from relax_tune.errors import ParseError, RelaxTuneError, UserError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import bf16, f16
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import CallTIR
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.graph.mixed_precision import MixedPrecision
from relax_tune.ir.passes.library.library_lowering import library_forms
from relax_tune.ir.passes.pipeline import LoweredModule, lower
from relax_tune.ir.text.parser import parse_text
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.registry import open_device
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings


def prefill(module: IRModule, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The logits that a program gives for a prompt."""
    logits: np.ndarray[Any, Any] = evaluate_function(module, [tokens], "prefill")[0]
    return logits


def near(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], shape: tuple[int, ...]) -> None:
    """Assert the shape of logits, and that their last positions are the expected ones."""
    assert actual.shape == shape
    np.testing.assert_allclose(actual[:, -expected.shape[1] :], expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", (*MODELS, *MORE))
def test_logits_of_torch(tmp_path: Path, name: str) -> None:
    folder, logits = write(tmp_path, name)
    module = load_hf(folder, every_position=True)
    verify(module)
    lowered = lower(module)
    verify(lowered.module)
    for b, n in SHAPES:
        expected = logits[f"logits_{b}_{n}"]
        for stage in (module, lowered.module):
            near(prefill(stage, ids(b, n)), expected, (b, n, VOCABULARY))


@pytest.mark.ccompiler
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("name", ["llama3"])
def test_compiled_logits_of_torch(tmp_path: Path, name: str) -> None:
    """At every position; the tokens of the other models, compiled as well, are checked with generation."""
    folder, logits = write(tmp_path, name)
    device = open_device("c")
    try:
        module = load_hf(folder, bounds={"b": (1, 4)}, every_position=True)
        job = device_job(module, device.info, MemoryStore(), Settings(target="c"))
        with job.artifact(job.build("generic")).open(device) as model:
            for b, n in SHAPES:
                actual = model.run([ids(b, n)], "prefill")[0]
                near(actual, logits[f"logits_{b}_{n}"], (b, n, VOCABULARY))
    finally:
        device.close()


def callees(lowered: LoweredModule, name: str) -> list[str]:
    """What one of its functions calls, in order."""
    return [b.value.callee for b in lowered.functions[name].bindings if isinstance(b.value, CallTIR)]


@pytest.mark.slow
def test_tasks_of_a_decoder(tmp_path: Path) -> None:
    """What two equal layers come to; that both functions call the same products, and only those are left to libraries."""
    folder, _ = write(tmp_path, "llama")
    lowered = lower(load_hf(folder))
    assert lowered.checks == {"prefill": (), "decode": ()}
    layer = [
        "rms_norm", "matmul", "fused_rotary_permute", "matmul_1", "fused_rotary_permute_1", "matmul_1", "permute",
        "attention", "permute_1", "fused_matmul_add",
        "rms_norm", "matmul_2", "fused_matmul_sigmoid_mul_mul", "fused_matmul_add_1",
    ]  # fmt: skip
    prompt, step = callees(lowered, "prefill"), callees(lowered, "decode")
    assert prompt == ["take", *layer, *layer, "fused_slice_rms_norm", "matmul_3"]
    shared = {
        "take",
        "rms_norm",
        *(f"matmul{k}" for k in ("", "_1", "_2", "_3")),
        "fused_matmul_add",
        "fused_matmul_add_1",
    }
    assert set(prompt) & set(step) == shared | {"fused_matmul_sigmoid_mul_mul"}
    assert all(bool(library_forms(f)) == ("matmul" in n) for n, f in lowered.prims.items())


Run = Callable[[str, list[np.ndarray[Any, Any]]], Sequence[np.ndarray[Any, Any]]]


def steps(run: Run, tokens: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """The logits of the last `count` positions, all but the first of them decoded one by one."""
    start = tokens.shape[1] - count + 1
    logits, *cache = run("prefill", [tokens[:, :start]])
    parts = [logits]
    for at in range(start, tokens.shape[1]):
        logits, *cache = run("decode", [tokens[:, at : at + 1], *cache])
        assert all(part.shape[2] == at + 1 for part in cache)
        parts.append(logits)
    return np.concatenate(parts, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", (*MODELS, *MORE))
def test_decoding_gives_the_logits_of_torch(tmp_path: Path, name: str) -> None:
    folder, logits = write(tmp_path, name)
    module = load_hf(folder)
    for stage in (module, lower(module).module):
        verify(stage)
        run = partial(evaluate_function, stage)
        for b, n in SHAPES[1:3]:
            expected = logits[f"logits_{b}_{n}"]
            count = min(expected.shape[1], n - 1)
            actual = steps(lambda function, inputs, run=run: run(inputs, function), ids(b, n), count)
            np.testing.assert_allclose(actual, expected[:, -count:], atol=1e-4, rtol=0)


@pytest.mark.ccompiler
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("name", ["qwen2"])
def test_compiled_decoding_gives_the_logits_of_torch(tmp_path: Path, name: str) -> None:
    folder, logits = write(tmp_path, name)
    device = open_device("c")
    try:
        job = device_job(load_hf(folder, bounds={"b": (1, 4)}), device.info, MemoryStore(), Settings(target="c"))
        with job.artifact(job.build("generic")).open(device) as model:
            for b, n in SHAPES[1:]:
                expected = logits[f"logits_{b}_{n}"]
                count = min(expected.shape[1], n - 1)
                actual = steps(lambda function, inputs: model.run(inputs, function), ids(b, n), count)
                np.testing.assert_allclose(actual, expected[:, -count:], atol=1e-4, rtol=0)
    finally:
        device.close()


@pytest.mark.ccompiler
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_decoding_with_weights_and_caches_of_16_bits(tmp_path: Path) -> None:
    """Attention is one kernel, of 16-bit floats only. Two layers round a dozen values each: 16 roundings of the largest logit."""
    folder, logits = write(tmp_path, "llama")
    device = open_device("c")
    try:
        module = load_hf(folder, bounds={"b": (1, 4)}, cache_dtype="f16")
        job = device_job(module, device.info, MemoryStore(), Settings(target="c", precision="f16"))
        attentions = [f for n, f in job.lowered.prims.items() if "attention" in n]
        assert len(attentions) == 2 and {b.dtype for f in attentions for b in f.buffers} == {f16}
        with job.artifact(job.build("generic")).open(device) as model:
            for b, n in SHAPES[1:3]:
                expected = logits[f"logits_{b}_{n}"]
                count = min(expected.shape[1], n - 1)
                actual = steps(lambda function, inputs: model.run(inputs, function), ids(b, n), count)
                limit = 16 * f16.epsilon * np.abs(expected).max()
                np.testing.assert_allclose(actual, expected[:, -count:], atol=limit, rtol=0)
    finally:
        device.close()
    with pytest.raises(UserError, match=r"cache_dtype: expected .*got 'i8'"):
        load_hf(folder, cache_dtype="i8")  # type: ignore[arg-type]


@pytest.mark.slow
def test_decoding_needs_no_scalars(tmp_path: Path) -> None:
    """One new position: every kernel but those of the positions reads its sizes off its arrays."""
    lowered = lower(load_hf(write(tmp_path, "llama")[0]))
    with_scalars = {n for n, f in lowered.prims.items() if f.scalar_params}
    assert not with_scalars & set(callees(lowered, "prefill"))
    assert with_scalars == {n for n in callees(lowered, "decode") if "rotary" in n}


def test_bounds_of_decoders(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "llama")
    module = load_hf(folder, bounds={"n": (1, 9), "m": (1, 20)})
    assert {b.var.name: (b.lower, b.upper) for b in module.bounds} == {"b": (1, None), "n": (1, 9), "m": (1, 20)}
    assert module.constants["rotary.cos"].shape == (21, 4)
    with pytest.raises(UserError, match=r"bound of m: expected .*got 64"):
        load_hf(folder, bounds={"m": (1, 64)})
    with pytest.raises(UserError, match=r"bound of n: expected .*got 0"):
        load_hf(folder, bounds={"n": (0, 9)})


@pytest.mark.slow
def test_programs_print_and_parse(tmp_path: Path) -> None:
    module = load_hf(write(tmp_path, "qwen2")[0])
    for stage in (module, lower(module).module):
        text = print_text(stage)
        assert print_text(parse_text(text, OPERATORS, stage.constants)) == text


def test_later_positions_do_not_matter(tmp_path: Path) -> None:
    module = load_hf(write(tmp_path, "qwen2")[0], every_position=True)
    tokens = ids(2, 9)
    whole = prefill(module, tokens)
    np.testing.assert_allclose(prefill(module, tokens[:, :4]), whole[:, :4], rtol=1e-9, atol=1e-9)


def test_older_files_say_the_same(tmp_path: Path) -> None:
    """The fields that scale positions had other names."""
    config, _, _ = parts("llama3")
    rope = dict(config["rope_parameters"])
    expected = prefill(load_hf(write(tmp_path, "llama3")[0]), ids(2, 7))
    theta = rope.pop("rope_theta")
    for scaling in (rope, {**rope, "type": rope["rope_type"], "rope_type": ...}):
        fields = {k: v for k, v in scaling.items() if v is not ...}
        folder, _ = write(tmp_path, "llama3", rope_parameters=..., rope_theta=theta, rope_scaling=fields)
        np.testing.assert_array_equal(prefill(load_hf(folder), ids(2, 7)), expected)


def test_weights_in_bfloat16_and_in_parts(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "llama")
    _, weights, _ = parts("llama")
    rounded = {n: (a.astype(np.float32).view(np.uint32) >> 16).astype("<u2") for n, a in weights.items()}
    save_file(
        {n: (a.astype(np.uint32) << 16).view(np.float32) for n, a in rounded.items()}, folder / "model.safetensors"
    )
    expected = prefill(load_hf(folder), ids(2, 7))
    (folder / "model.safetensors").unlink()
    names, places = sorted(rounded), {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        header, body = {}, b""
        for n in chosen:
            raw = rounded[n].tobytes()
            header[n] = {"dtype": "BF16", "shape": rounded[n].shape, "data_offsets": [len(body), len(body) + len(raw)]}
            body, places[n] = body + raw, f"part-{part}.safetensors"
        text = json.dumps(header).encode()
        (folder / f"part-{part}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    module = load_hf(folder)
    np.testing.assert_array_equal(prefill(module, ids(2, 7)), expected)
    # a build in bfloat16 holds what the file does
    again = MixedPrecision(bf16)(module).constants["model.embed_tokens.weight.bf16"]
    np.testing.assert_array_equal(again.view(np.uint16), rounded["model.embed_tokens.weight"])


def test_bounds(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "llama")
    module = load_hf(folder, bounds={"n": (1, 9)})
    assert {b.var.name: (b.lower, b.upper) for b in module.bounds} == {"b": (1, None), "n": (1, 9), "m": (1, 63)}
    assert module.constants["rotary.cos"].shape == (64, 4)
    with pytest.raises(UserError, match=r"bound of n: expected .*got 65"):
        load_hf(folder, bounds={"n": (1, 65)})
    write(tmp_path, "llama", max_position_embeddings=2**31 - 1)
    with pytest.raises(UserError, match=r"bound of positions: expected .*got 2147483647"):
        load_hf(folder)
    assert load_hf(folder, bounds={"n": (1, 9), "m": (1, 9)}).bounds
    embeds = load_hf(folder, bounds={"n": (1, 9)}, pooling="cls")
    assert [p.name for p in embeds.graphs["main"].params] == ["input_ids", "attention_mask"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "mish"}, "hidden_act: expected .*got 'mish'"),
        ("llama", {"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
        ("llama", {"head_dim": 7}, "expected head_dim to be a multiple of 2, got 7"),
        ("llama", {"head_dim": None, "num_attention_heads": 6}, "multiple of num_attention_heads, got 32 and 6"),
        ("llama", {"head_dim": 2**31 - 2}, r"q_proj.weight': expected shape \(8589934584, 32\) by config.json"),
        ("llama", {"attention_bias": True}, "expected a tensor 'model.layers.0.self_attn.q_proj.bias' of shape"),
        ("llama", {"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp: expected 1, got 2"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: quant_method: .*got None"),
        ("llama", {"rms_norm_eps": -1}, r"rms_norm_eps: expected .*got -1"),
        ("llama", {"rope_parameters": {"rope_type": "ntk"}}, "rope_type: expected .*got 'ntk'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "short_factor: expected a list of 4"),
        ("llama", {"rope_parameters": {"full": {}}}, "rope_parameters: expected one set of parameters"),
        ("llama", {"rope_parameters": ..., "rope_theta": "big"}, "rope_theta: expected .*got 'big'"),
        ("llama3", {"rope_parameters": {**LLAMA3, "high_freq_factor": 1}}, "expected a number above low_freq_factor, 1.0"),
        ("llama3", {"rope_parameters": {**LLAMA3, "factor": 10**400}}, "factor: expected a number of at"),
        ("llama3", {"tie_word_embeddings": False}, "expected a tensor 'lm_head.weight'"),
        ("mistral", {"sliding_window": "far"}, "sliding_window: expected a whole number from 1"),
        ("mistral", {"sliding_window": ...}, "sliding_window: expected a number or null,"),
        ("qwen2", {"layer_types": ["full_attention"]}, "or 'sliding_attention' for each of 2 layers"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "or 'sliding_attention' for each of 2 layers"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "every layer where no sliding_window is used"),
        ("qwen3", {"max_window_layers": 0, "layer_types": ...}, "max_window_layers: expected a whole number"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation: expected 'gelu_pytorch_tanh', got 'relu'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected None, got True"),
        ("qwen2", {"num_key_value_heads": ...}, "num_key_value_heads: expected a whole number"),
        ("qwen2", {"model_type": "qwen9"}, "got 'qwen9'; the nearest known ones are qwen"),
    ],
)  # fmt: skip
def test_wrong_configurations(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    folder, _ = write(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=message):
        load_hf(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(0, 64),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(sorted(LLAMA3)), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=examples(60), deadline=None)
@given(name=st.sampled_from(MODELS), data=st.data())
def test_mutated_configurations(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    """A changed configuration still is a model, or is refused."""
    folder = tmp_path_factory.getbasetemp() / f"mutated-{name}"
    if not folder.exists():
        folder.mkdir()
        write(folder, name)
    config, _, _ = parts(name)
    fields = st.sampled_from([*sorted(config), "rope_scaling", "rope_theta", "quantization_config"])
    changes = data.draw(st.dictionaries(fields, JSON, min_size=1, max_size=3))
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    try:
        load_hf(folder)
    except RelaxTuneError as error:
        assert len(str(error)) < 2000
