"""Models of images, of speech, and of images with text against the original framework, at weights drawn by name."""

from __future__ import annotations

import json
import runpy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.support.effort import GENERIC, thinned
from tests.support.encoder_folders import write_encoder

from relax_tune import build
from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.encoders import read_encoder
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.frontend.hf.towers import TOWERS
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

DATA = Path(__file__).parents[3] / "data"
MAKER = runpy.run_path(str(DATA / "make_tiny_senses.py"))
Array = np.ndarray[Any, Any]


write = partial(write_encoder, DATA / "tiny_senses.npz", MAKER)


@pytest.mark.parametrize("name", thinned(MAKER["MODELS"], 8))
def test_model_gives_the_results_of_torch(name: str, tmp_path: Path) -> None:
    results = write(tmp_path, name)
    module = load_hf(tmp_path)
    params = [p.name for p in module.graphs["main"].params]
    config = json.loads((tmp_path / "config.json").read_text())
    forms = [lower(module).module]
    forms += [module] if list(module.graphs) == ["main"] else []  # the reference runs no calls of functions
    for form in forms:
        for number, case in enumerate(MAKER["MODELS"][name][2]):
            inputs = MAKER["inputs"](case, config)
            actual = evaluate_function(form, [inputs[p] for p in params])
            parts = actual if isinstance(actual, tuple) else (actual,)
            expected = [results[key] for k in range(9) if (key := f"{number}/{k}") in results]
            assert [part.shape for part in parts] == [want.shape for want in expected]
            for part, want in zip(parts, expected, strict=True):
                atol = 1e-4 * max(1.0, np.nanmax(np.abs(want)))
                np.testing.assert_allclose(np.where(np.isnan(want), want, part), want, rtol=1e-4, atol=atol)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("resnet", {"layer_type": "wide"}, "layer_type: expected .*got 'wide'"),
        ("resnet", {"depths": [1]}, "depths: expected a list of 2"),
        (
            "resnet",
            {"architectures": ["ResNetForSemanticSegmentation"]},
            "name ends in Model, ForImageClassification, Back",
        ),
        ("regnet", {"architectures": ["RegNetBackbone"]}, "architectures: expected one whose name ends"),
        ("resnet-early", {"out_features": ["stage3"]}, "out_features: expected names among stem, stage1, stage2"),
        ("convnext", {"hidden_act": "mish"}, "hidden_act: expected one of gelu"),
        ("convnext", {"layer_scale_init_value": "big"}, "layer_scale_init_value: expected a number"),
        ("efficientnet", {"strides": [1, 3]}, "strides: expected strides of 1 or 2"),
        ("efficientnet", {"hidden_dim": 640}, "hidden_dim: expected 320, .*got 640"),
        (
            "efficientnet",
            {"kernel_sizes": [3, 1]},
            "kernel_sizes: expected kernels of at least",
        ),
        ("efficientnet", {"pooling_type": "sum"}, "pooling_type: expected one of mean, max"),
        ("poolformer", {"pool_size": 4}, "pool_size: expected an odd number, got 4"),
        ("segformer", {"reshape_last_stage": False}, "reshape_last_stage: expected True, got False"),
        ("swin", {"window_size": 6}, "window_size: expected .*got 6"),
        ("swin-bare", {"image_size": 15}, "image_size: expected a multiple of patch_size"),
        ("swin", {"architectures": ["SwinForMaskedImageModeling"]}, "architectures: expected one whose name ends in"),
    ],
)
def test_model_of_images_with_other_fields_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=message):
        load_hf(tmp_path)


def test_bounds_of_image_beyond_the_layers_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "efficientnet")
    assert [(b.var.name, b.lower, b.upper) for b in load_hf(tmp_path).bounds] == [
        ("b", 1, None), ("h", 4, 1280), ("w", 4, 1280),
    ]  # fmt: skip
    fixed = load_hf(tmp_path, bounds={"h": (64, 64), "b": (1, 8)})
    assert [(b.lower, b.upper) for b in fixed.bounds] == [(1, 8), (64, 64), (4, 1280)]
    for name, span in (("h", (3, 64)), ("w", (4, 1281))):
        with pytest.raises(UserError, match=f"bound of {name}: .*(least 4|most 1280)"):
            load_hf(tmp_path, bounds={name: span})
    with pytest.raises(UserError, match=r"h .rows. and w .columns., got n"):
        load_hf(tmp_path, bounds={"n": (1, 4)})
    with pytest.raises(UserError, match="expected an encoder, got efficientnet"):
        load_hf(tmp_path, "cls")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hubert", {"add_adapter": True}, "add_adapter: expected False, got True"),
        ("wav2vec2-stable", {"add_adapter": True}, "add_adapter: expected false with this head, got True"),
        ("wav2vec2-stable", {"adapter_attn_dim": 16}, "adapter_attn_dim: expected None, got 16"),
        ("wav2vec2", {"feat_extract_norm": "batch"}, "feat_extract_norm: expected one of group, layer"),
        ("wav2vec2", {"conv_stride": [3]}, "conv_stride: expected a list of 2"),
        (
            "wav2vec2",
            {"num_conv_pos_embedding_groups": 3},
            "expected hidden_size to be a multiple of num_conv_pos_embedding_",
        ),
        (
            "wavlm",
            {"architectures": ["WavLMForXVector"]},
            "head among ForCTC, ForSequenceClassification, ForAudioFrame",
        ),
        ("hubert", {"conv_pos_batch_norm": False}, "parametrizations.weight.original0' of shape .1, 1, 6., got none"),
        ("spectrogram", {"max_length": 3}, "patch_size: expected at most the sides"),
        ("parakeet", {"encoder_config": None}, "encoder_config: expected an object"),
        ("parakeet-bare", {"subsampling_factor": 6}, "subsampling_factor: expected a power of 2"),
        ("parakeet-bare", {"num_mel_bins": 7}, "num_mel_bins: expected a multiple of 2"),
        ("parakeet-bare", {"conv_kernel_size": 4}, "conv_kernel_size: expected an odd number"),
        ("beit", {"image_size": [12, 8]}, "image_size: expected one number"),
        ("beit", {"architectures": ["BeitForMaskedImageModeling"]}, "architectures: expected an encoder"),
    ],
)
def test_encoder_of_sound_or_images_with_other_fields_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=message):
        load_hf(tmp_path)


def test_mask_of_sound_follows_the_preprocessor(tmp_path: Path) -> None:
    write(tmp_path, "wav2vec2-bare")
    inputs = MAKER["inputs"]((2, 101), {"conv_dim": []})
    whole = evaluate_function(load_hf(tmp_path), [inputs["input_values"], np.ones((2, 101), np.int64)])
    (tmp_path / "preprocessor_config.json").write_text('{"return_attention_mask": false}')
    bare = load_hf(tmp_path, bounds={"n": (50, 16000)})
    assert [p.name for p in bare.graphs["main"].params] == ["input_values"]
    assert [(b.lower, b.upper) for b in bare.bounds] == [(1, None), (50, 16000)]
    np.testing.assert_allclose(evaluate_function(bare, [inputs["input_values"]]), whole, rtol=1e-5, atol=1e-5)
    (tmp_path / "preprocessor_config.json").write_text('{"return_attention_mask": "no"}')
    with pytest.raises(ParseError, match="return_attention_mask: expected true or false, got 'no'"):
        load_hf(tmp_path)


def test_older_form_of_weight_norm_gives_the_same_results(tmp_path: Path) -> None:
    results = write(tmp_path, "wav2vec2")
    stored = load_file(tmp_path / "model.safetensors")
    forms = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    for new, old in forms.items():
        path = "wav2vec2.encoder.pos_conv_embed.conv."
        stored[path + old] = stored.pop(path + new)
    save_file(stored, tmp_path / "model.safetensors")
    inputs = MAKER["inputs"]((3, 101), {"conv_dim": [], "feat_extract_norm": "group"})
    actual = evaluate_function(load_hf(tmp_path), [inputs["input_values"]])
    np.testing.assert_allclose(actual, results["1/0"], rtol=1e-4, atol=1e-4)


def test_options_and_bounds_of_no_model_of_sound_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "wav2vec2")
    with pytest.raises(UserError, match=r"bound of n: expected .*got 10"):
        load_hf(tmp_path, bounds={"n": (10, 99)})
    with pytest.raises(UserError, match=r"b .batch. and n .samples., got h"):
        load_hf(tmp_path, bounds={"h": (10, 99)})
    with pytest.raises(UserError, match=r"pooling: expected .*got 'mean'"):
        load_hf(tmp_path, "mean")


@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("name", ["siglip2", "siglip2-classes", "parakeet"])
def test_compiled_model_gives_the_results_of_torch(name: str, tmp_path: Path) -> None:
    results, case = write(tmp_path, name), MAKER["MODELS"][name][2][1]
    inputs = MAKER["inputs"](case, json.loads((tmp_path / "config.json").read_text()))
    expected = [results[key] for k in range(9) if (key := f"1/{k}") in results]
    module = load_hf(tmp_path)
    params = [p.name for p in module.graphs["main"].params]
    with build(module, target="c", db="memory://", **GENERIC).open() as model:
        actual = model.run([inputs[p] for p in params], "main")
    for part, want in zip(actual, expected, strict=True):
        atol = 1e-4 * max(1.0, np.nanmax(np.abs(want)))
        np.testing.assert_allclose(np.where(np.isnan(want), want, part), want, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_towers_run_alone_give_the_vectors_of_both(name: str, tmp_path: Path) -> None:
    results, inputs = write(tmp_path, name), MAKER["inputs"]((2, 3, 13), {"vision_config": {}})
    module = load_hf(tmp_path, bounds={"t": (1, 8), "n": (2, 16)})
    assert sorted((b.var.name, b.lower, b.upper) for b in module.bounds) == [("b", 1, None), ("n", 2, 16), ("t", 1, 8)]
    lowered = lower(module).module
    assert sorted(lowered.graphs) == ["image", "main", "text"]
    for form in (module, lowered):
        words = evaluate_function(form, [inputs["input_ids"], inputs["attention_mask"]], "text")
        pixels = evaluate_function(form, [inputs["pixel_values"]], "image")
        np.testing.assert_allclose(words, results["1/2"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(pixels, results["1/3"], rtol=1e-4, atol=1e-5)


def test_older_configuration_of_clip_stands_in_place_of_the_newer(tmp_path: Path) -> None:
    write(tmp_path, "clip-classes")
    config = json.loads((tmp_path / "config.json").read_text())
    older = {**config, "vision_config_dict": config["vision_config"], "vision_config": {"hidden_size": 7}}
    inputs = MAKER["inputs"]((2, 3, 13), config)["pixel_values"]
    expected = evaluate_function(load_hf(tmp_path), [inputs])
    (tmp_path / "config.json").write_text(json.dumps(older))
    np.testing.assert_array_equal(evaluate_function(load_hf(tmp_path), [inputs]), expected)


def test_towers_without_fields_are_as_large_as_the_first_models() -> None:
    fields = ConfigFields({"vision_config": {"model_type": "siglip_vision_model"}}, "config.json")
    stack = read_encoder(TOWERS["siglip"].part(fields, "vision"), "config.json")
    assert (stack.hidden, stack.inner, stack.heads, len(stack.layers), stack.positions) == (
        768,
        3072,
        12,
        12,
        196,
    )
    stack = read_encoder(TOWERS["clip"].part(fields, "text"), "config.json")
    assert (stack.hidden, stack.vocabulary, stack.positions, stack.outputs.projection) == (
        512, 49408, 77, ("text_projection", 512),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("clip", {"text_config": [1]}, "text_config: expected an object, got .1."),
        (
            "clip",
            {"architectures": ["CLIPForSegmentation"]},
            "architectures: expected one whose name ends",
        ),
        ("clip", {"projection_dim": 7}, "text_projection.weight': expected shape .7, 12."),
        ("siglip", {"vision_config": {"hidden_act": "mish"}}, "hidden_act: expected one of gelu"),
    ],
)
def test_towers_with_other_fields_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=message):
        load_hf(tmp_path)


def test_bounds_and_options_of_no_towers_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "clip")
    with pytest.raises(UserError, match=r"t .texts. and n .positions., got h"):
        load_hf(tmp_path, bounds={"h": (1, 2)})
    with pytest.raises(UserError, match=r"bound of n: expected .*got 19"):
        load_hf(tmp_path, bounds={"n": (1, 19)})
    with pytest.raises(UserError, match="expected an encoder, got clip"):
        load_hf(tmp_path, "cls")
