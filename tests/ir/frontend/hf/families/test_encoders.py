"""Encoders of every family against the original framework, at weights drawn by name."""

from __future__ import annotations

import json
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.support.effort import thinned
from tests.support.encoder_folders import write_encoder

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

DATA = Path(__file__).parents[4] / "data"
MAKER = runpy.run_path(str(DATA / "make_tiny_families.py"))
Array = np.ndarray[Any, Any]


write = partial(write_encoder, DATA / "tiny_families.npz", MAKER)


@pytest.mark.parametrize("name", thinned(MAKER["MODELS"], 4))
def test_encoder_of_family_gives_the_results_of_torch(name: str, tmp_path: Path) -> None:
    results = write(tmp_path, name)
    bare = MAKER["MODELS"][name][0].endswith(("Model", "GenerationEncoder"))
    pooled = any(key.startswith("pooler_output") for key in results)
    module = load_hf(tmp_path, "none" if bare and not pooled else None)
    params = [p.name for p in module.graphs["main"].params]
    config = json.loads((tmp_path / "config.json").read_text())
    for form in (module, lower(module).module):
        for b, n in MAKER["SHAPES"]:
            inputs = MAKER["inputs"](b, n, config)
            actual = evaluate_function(form, [inputs[p] for p in params])
            expected = [
                results[key] for r in (*MAKER["RESULTS"], *MAKER["EMBEDS"]) if (key := f"{r}_{b}_{n}") in results
            ]
            parts = actual if isinstance(actual, tuple) else (actual,)
            for part, want in zip(parts, expected, strict=True):
                mask = inputs.get("attention_mask", np.zeros(0))
                visible = mask == 1 if want.shape[:2] == mask.shape else slice(None)
                np.testing.assert_allclose(part[visible], want[visible], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size: expected 0, got 3"),
        (
            "modernbert",
            {"layer_types": ["full_attention"]},
            "layer_types: expected .full_attention. or .* for",
        ),
        ("nomic_bert", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type: expected one of default, got 'yarn'"),
        ("layoutlmv3", {"coordinate_size": 4}, "coordinate_size: expected a size so that four"),
        ("layoutlmv3", {"visual_embed": False}, "visual_embed: expected True, got False"),
        ("layoutlmv3", {"architectures": ["LayoutLMv3ForMaskedLM"]}, "architectures: expected an encoder or one"),
        ("ernie", {"use_task_id": True}, "use_task_id: expected False, got True"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj: expected one of relu, gated-gelu"),
        ("dinov3", {"architectures": ["DINOv3ViTBackbone"]}, "architectures: expected an encoder or one with"),
        ("deberta", {"talking_head": True}, "talking_head: expected False, got True"),
        ("t5", {"dense_act_fn": "mish"}, "dense_act_fn: expected one of"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets: expected 32, got 64"),
        ("mobilebert", {"trigram_input": False}, "trigram_input: expected True, got False"),
        ("dinov2", {"image_size": 2}, "image_size: expected at least the size"),
        (
            "clip_vision",
            {"architectures": ["CLIPModelForWords"]},
            "head among ModelWithProjection, ForImageClassification",
        ),
        ("t5", {"architectures": ["T5ForQuestionAnswering"]}, "architectures: expected an encoder"),
    ],
)
def test_encoder_with_other_fields_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=message):
        load_hf(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_stored_head_of_words_replaces_a_tied_table(tied: bool, tmp_path: Path) -> None:
    results = write(tmp_path, "mpnet-untied", tie_word_embeddings=tied)
    inputs = MAKER["inputs"](2, 13, {})
    actual = evaluate_function(load_hf(tmp_path), [inputs["input_ids"], inputs["attention_mask"]])
    visible = inputs["attention_mask"] == 1
    np.testing.assert_allclose(actual[visible], results["logits_2_13"][visible], rtol=1e-4, atol=1e-4)


def test_model_of_images_has_no_other_symbols_and_pooling(tmp_path: Path) -> None:
    write(tmp_path, "dinov2_with_registers")
    assert [b.var.name for b in load_hf(tmp_path, bounds={"b": (1, 4)}).bounds] == ["b"]
    with pytest.raises(UserError, match=r"symbol b .batch., got n"):
        load_hf(tmp_path, bounds={"n": (1, 4)})
    with pytest.raises(UserError, match=r"pooling: expected .*got 'mean'"):
        load_hf(tmp_path, "mean")
    inputs = MAKER["inputs"](2, 1, {"image_size": 8})["pixel_values"]
    hidden, pooled = (evaluate_function(load_hf(tmp_path, how, False), [inputs]) for how in ("none", "cls"))
    np.testing.assert_allclose(pooled, hidden[:, 0], rtol=1e-6)


def test_table_of_rotations_in_the_file_is_read(tmp_path: Path) -> None:
    """Rows of sines, then of cosines; computed where the file has none."""
    write(tmp_path, "roformer")
    computed = load_hf(tmp_path).constants
    weights = load_file(tmp_path / "model.safetensors")
    name = "roformer.encoder.embed_positions.weight"
    sines, cosines = computed["rotary.sin"], computed["rotary.cos"]
    for factor in (1, 2):
        save_file({**weights, name: np.concatenate([factor * sines, cosines], 1)}, tmp_path / "model.safetensors")
        read = load_hf(tmp_path).constants
        np.testing.assert_array_equal(read["rotary.sin"], factor * sines)
        np.testing.assert_array_equal(read["rotary.cos"], cosines)
