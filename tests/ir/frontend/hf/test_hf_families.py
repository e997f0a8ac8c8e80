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

DATA = Path(__file__).parents[3] / "data"
MADE = runpy.run_path(str(DATA / "make_tiny_families.py"))
Array = np.ndarray[Any, Any]


write = partial(write_encoder, DATA / "tiny_families.npz", MADE)


@pytest.mark.parametrize("name", thinned(MADE["MODELS"], 4))
def test_encoder_of_family_gives_the_results_of_torch(name: str, tmp_path: Path) -> None:
    results = write(tmp_path, name)
    bare = MADE["MODELS"][name][0].endswith("Model")
    pooled = any(key.startswith("pooler_output") for key in results)
    module = load_hf(tmp_path, "none" if bare and not pooled else None)
    params = [p.name for p in module.graphs["main"].params]
    config = json.loads((tmp_path / "config.json").read_text())
    for form in (module, lower(module).module):
        for b, n in MADE["SHAPES"]:
            given = MADE["inputs"](b, n, config)
            found = evaluate_function(form, [given[p] for p in params])
            wanted = [results[key] for r in (*MADE["RESULTS"], *MADE["EMBEDS"]) if (key := f"{r}_{b}_{n}") in results]
            parts = found if isinstance(found, tuple) else (found,)
            for part, want in zip(parts, wanted, strict=True):
                mask = given.get("attention_mask", np.zeros(0))
                seen = mask == 1 if want.shape[:2] == mask.shape else slice(None)
                np.testing.assert_allclose(part[seen], want[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size: wanted 0, found 3"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types: wanted 2 kinds among full_attention"),
        ("nomic_bert", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type: wanted 'default', found 'yarn'"),
        ("ernie", {"use_task_id": True}, "use_task_id: wanted False, found True"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj: wanted one of relu, gated-gelu"),
        ("mobilebert", {"trigram_input": False}, "trigram_input: wanted True, found False"),
        ("dinov2", {"image_size": 2}, "image_size: wanted at least the size of a patch"),
        (
            "clip_vision",
            {"architectures": ["CLIPModelForWords"]},
            "head among ModelWithProjection, ForImageClassification",
        ),
        ("t5", {"architectures": ["T5ForQuestionAnswering"]}, "architectures: wanted an encoder"),
    ],
)
def test_encoder_with_other_fields_is_refused(name: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=says):
        load_hf(tmp_path)


def test_model_of_images_has_no_other_symbols_and_pooling(tmp_path: Path) -> None:
    write(tmp_path, "dinov2_with_registers")
    assert [b.var.name for b in load_hf(tmp_path, bounds={"b": (1, 4)}).bounds] == ["b"]
    with pytest.raises(UserError, match=r"symbol b .batch., found n"):
        load_hf(tmp_path, bounds={"n": (1, 4)})
    with pytest.raises(UserError, match="pooling: wanted none or cls of a model of images, found 'mean'"):
        load_hf(tmp_path, "mean")
    given = MADE["inputs"](2, 1, {"image_size": 8})["pixel_values"]
    hidden, pooled = (evaluate_function(load_hf(tmp_path, how, False), [given]) for how in ("none", "cls"))
    np.testing.assert_allclose(pooled, hidden[:, 0], rtol=1e-6)


def test_table_of_rotations_in_the_file_is_read(tmp_path: Path) -> None:
    """Rows of sines, then of cosines; computed where the file has none."""
    write(tmp_path, "roformer")
    computed = load_hf(tmp_path).constants
    weights = load_file(tmp_path / "model.safetensors")
    name = "roformer.encoder.embed_positions.weight"
    sines, cosines = computed["rotary_sin_10000"], computed["rotary_cos_10000"]
    for factor in (1, 2):
        save_file({**weights, name: np.concatenate([factor * sines, cosines], 1)}, tmp_path / "model.safetensors")
        read = load_hf(tmp_path).constants
        np.testing.assert_array_equal(read["rotary_sin_10000"], factor * sines)
        np.testing.assert_array_equal(read["rotary_cos_10000"], cosines)
