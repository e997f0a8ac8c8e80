"""Models of images, of speech, and of images beside text against the original framework, at weights drawn by name."""

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
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.encoder_families import encoder_spec
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.frontend.hf.towers import TOWERS
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

DATA = Path(__file__).parents[3] / "data"
MADE = runpy.run_path(str(DATA / "make_tiny_senses.py"))
Array = np.ndarray[Any, Any]


write = partial(write_encoder, DATA / "tiny_senses.npz", MADE)


@pytest.mark.parametrize("name", thinned(MADE["MODELS"], 8))
def test_model_gives_the_results_of_torch(name: str, tmp_path: Path) -> None:
    results = write(tmp_path, name)
    module = load_hf(tmp_path)
    params = [p.name for p in module.graphs["main"].params]
    config = json.loads((tmp_path / "config.json").read_text())
    forms = [lower(module).module]
    forms += [module] if list(module.graphs) == ["main"] else []  # the reference runs no calls of functions
    for form in forms:
        for number, case in enumerate(MADE["MODELS"][name][2]):
            given = MADE["inputs"](case, config)
            found = evaluate_function(form, [given[p] for p in params])
            parts = found if isinstance(found, tuple) else (found,)
            wanted = [results[key] for k in range(9) if (key := f"{number}/{k}") in results]
            assert [part.shape for part in parts] == [want.shape for want in wanted]
            for part, want in zip(parts, wanted, strict=True):
                np.testing.assert_allclose(part, want, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("resnet", {"layer_type": "wide"}, "layer_type: wanted one of basic, bottleneck, found 'wide'"),
        ("resnet", {"depths": [1]}, "depths: wanted a list of 2 whole numbers of at least 1"),
        (
            "resnet",
            {"architectures": ["ResNetForSemanticSegmentation"]},
            "name ends in Model, ForImageClassification, Back",
        ),
        ("regnet", {"architectures": ["RegNetBackbone"]}, "architectures: wanted one whose name ends in Model"),
        ("resnet-early", {"out_features": ["stage3"]}, "out_features: wanted names among stem, stage1, stage2"),
        ("convnext", {"hidden_act": "mish"}, "hidden_act: wanted one of gelu"),
        ("convnext", {"layer_scale_init_value": "big"}, "layer_scale_init_value: wanted a number"),
        ("efficientnet", {"strides": [1, 3]}, "strides: wanted strides of 1 or 2"),
        ("efficientnet", {"hidden_dim": 640}, "hidden_dim: wanted 320, the channels behind the last layer, found 640"),
        ("efficientnet", {"kernel_sizes": [3, 1]}, "kernel_sizes: wanted kernels of at least 2 where the stride is 2"),
        ("efficientnet", {"pooling_type": "sum"}, "pooling_type: wanted one of mean, max"),
        ("poolformer", {"pool_size": 4}, "pool_size: wanted an odd number, found 4"),
        ("segformer", {"reshape_last_stage": False}, "reshape_last_stage: wanted True, found False"),
        ("swin", {"window_size": 6}, "window_size: wanted at most 5, the least side of the image in stage 2, found 6"),
        ("swin-bare", {"image_size": 15}, "image_size: wanted a multiple of patch_size"),
        ("swin", {"architectures": ["SwinForMaskedImageModeling"]}, "architectures: wanted one whose name ends in"),
    ],
)
def test_model_of_images_with_other_fields_is_refused(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=says):
        load_hf(tmp_path)


def test_bounds_of_image_beyond_the_layers_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "efficientnet")
    assert [(b.var.name, b.lower, b.upper) for b in load_hf(tmp_path).bounds] == [
        ("b", 1, None), ("h", 4, 1280), ("w", 4, 1280),
    ]  # fmt: skip
    fixed = load_hf(tmp_path, bounds={"h": (64, 64), "b": (1, 8)})
    assert [(b.lower, b.upper) for b in fixed.bounds] == [(1, 8), (64, 64), (4, 1280)]
    for name, span in (("h", (3, 64)), ("w", (4, 1281))):
        with pytest.raises(UserError, match=f"bound of {name}: wanted 4 to 1280, sizes this model can take, found"):
            load_hf(tmp_path, bounds={name: span})
    with pytest.raises(UserError, match=r"symbols b .batch., h .height., w .width., found n"):
        load_hf(tmp_path, bounds={"n": (1, 4)})
    with pytest.raises(UserError, match="pooling and normalize: wanted an encoder, found efficientnet"):
        load_hf(tmp_path, "cls")


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("wav2vec2", {"add_adapter": True}, "add_adapter: wanted False, found True"),
        ("wav2vec2-stable", {"adapter_attn_dim": 16}, "adapter_attn_dim: wanted None, found 16"),
        ("wav2vec2", {"feat_extract_norm": "batch"}, "feat_extract_norm: wanted one of group, layer"),
        ("wav2vec2", {"conv_stride": [3]}, "conv_stride: wanted a list of 2 whole numbers"),
        (
            "wav2vec2",
            {"num_conv_pos_embedding_groups": 3},
            "wanted hidden_size to be a multiple of num_conv_pos_embedding_",
        ),
        (
            "wavlm",
            {"architectures": ["WavLMForXVector"]},
            "head among ForCTC, ForSequenceClassification, ForAudioFrame",
        ),
        ("hubert", {"conv_pos_batch_norm": False}, "parametrizations.weight.original0' of shape .1, 1, 6., found none"),
        ("spectrogram", {"max_length": 3}, "patch_size: wanted at most the sides of a spectrogram"),
        ("beit", {"image_size": [12, 8]}, "image_size: wanted one number"),
        ("beit", {"architectures": ["BeitForMaskedImageModeling"]}, "architectures: wanted an encoder"),
    ],
)
def test_encoder_of_sound_or_images_with_other_fields_is_refused(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=says):
        load_hf(tmp_path)


def test_mask_of_sound_follows_the_preprocessor(tmp_path: Path) -> None:
    write(tmp_path, "wav2vec2-bare")
    given = MADE["inputs"]((2, 101), {"conv_dim": []})
    whole = evaluate_function(load_hf(tmp_path), [given["input_values"], np.ones((2, 101), np.int64)])
    (tmp_path / "preprocessor_config.json").write_text('{"return_attention_mask": false}')
    bare = load_hf(tmp_path, bounds={"n": (50, 16000)})
    assert [p.name for p in bare.graphs["main"].params] == ["input_values"]
    assert [(b.lower, b.upper) for b in bare.bounds] == [(1, None), (50, 16000)]
    np.testing.assert_allclose(evaluate_function(bare, [given["input_values"]]), whole, rtol=1e-5, atol=1e-5)
    (tmp_path / "preprocessor_config.json").write_text('{"return_attention_mask": "no"}')
    with pytest.raises(ParseError, match="return_attention_mask: wanted true or false, found 'no'"):
        load_hf(tmp_path)


def test_older_form_of_weight_norm_gives_the_same_results(tmp_path: Path) -> None:
    results = write(tmp_path, "wav2vec2")
    stored = load_file(tmp_path / "model.safetensors")
    forms = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    for new, old in forms.items():
        path = "wav2vec2.encoder.pos_conv_embed.conv."
        stored[path + old] = stored.pop(path + new)
    save_file(stored, tmp_path / "model.safetensors")
    given = MADE["inputs"]((3, 101), {"conv_dim": [], "feat_extract_norm": "group"})
    found = evaluate_function(load_hf(tmp_path), [given["input_values"]])
    np.testing.assert_allclose(found, results["1/0"], rtol=1e-4, atol=1e-4)


def test_options_and_bounds_of_no_model_of_sound_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "wav2vec2")
    with pytest.raises(UserError, match="bound of n: wanted at least 11, the samples of one frame, found 10"):
        load_hf(tmp_path, bounds={"n": (10, 99)})
    with pytest.raises(UserError, match=r"symbols b .batch. and n .samples., found h"):
        load_hf(tmp_path, bounds={"h": (10, 99)})
    with pytest.raises(UserError, match="pooling: wanted none of a model of sound, found 'mean'"):
        load_hf(tmp_path, "mean")


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_towers_run_alone_give_the_vectors_of_both(name: str, tmp_path: Path) -> None:
    results, given = write(tmp_path, name), MADE["inputs"]((2, 3, 13), {"vision_config": {}})
    module = load_hf(tmp_path, bounds={"t": (1, 8), "n": (2, 16)})
    assert sorted((b.var.name, b.lower, b.upper) for b in module.bounds) == [("b", 1, None), ("n", 2, 16), ("t", 1, 8)]
    lowered = lower(module).module
    assert sorted(lowered.graphs) == ["image", "main", "text"]
    for form in (module, lowered):
        words = evaluate_function(form, [given["input_ids"], given["attention_mask"]], "text")
        pixels = evaluate_function(form, [given["pixel_values"]], "image")
        np.testing.assert_allclose(words, results["1/2"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(pixels, results["1/3"], rtol=1e-4, atol=1e-5)


def test_older_configuration_of_clip_stands_in_place_of_the_newer(tmp_path: Path) -> None:
    write(tmp_path, "clip-classes")
    config = json.loads((tmp_path / "config.json").read_text())
    older = {**config, "vision_config_dict": config["vision_config"], "vision_config": {"hidden_size": 7}}
    given = MADE["inputs"]((2, 3, 13), config)["pixel_values"]
    wanted = evaluate_function(load_hf(tmp_path), [given])
    (tmp_path / "config.json").write_text(json.dumps(older))
    np.testing.assert_array_equal(evaluate_function(load_hf(tmp_path), [given]), wanted)


def test_towers_without_fields_are_as_large_as_the_first_models() -> None:
    fields = ConfigFields({"vision_config": {"model_type": "siglip_vision_model"}}, "config.json")
    found = encoder_spec(TOWERS["siglip"].part(fields, "vision"), "config.json")
    assert (found.hidden, found.inner, found.heads, len(found.layers), found.inputs.positions) == (
        768,
        3072,
        12,
        12,
        196,
    )
    found = encoder_spec(TOWERS["clip"].part(fields, "text"), "config.json")
    assert (found.hidden, found.words.vocabulary, found.words.positions, found.projection) == (
        512, 49408, 77, ("text_projection", 512),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("clip", {"text_config": [1]}, "text_config: wanted an object, found .1."),
        (
            "clip",
            {"architectures": ["CLIPForSegmentation"]},
            "architectures: wanted one whose name ends in Model or ForIm",
        ),
        ("clip", {"projection_dim": 7}, "text_projection.weight': wanted shape .7, 12. by config.json, found .6, 12."),
        ("siglip", {"vision_config": {"hidden_act": "mish"}}, "hidden_act: wanted one of gelu"),
    ],
)
def test_towers_with_other_fields_are_refused(name: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=says):
        load_hf(tmp_path)


def test_bounds_and_options_of_no_towers_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "clip")
    with pytest.raises(UserError, match=r"symbols b .images., t .texts. and n .positions., found h"):
        load_hf(tmp_path, bounds={"h": (1, 2)})
    with pytest.raises(UserError, match="bound of n: wanted at most 18, the positions this model has, found 19"):
        load_hf(tmp_path, bounds={"n": (1, 19)})
    with pytest.raises(UserError, match="pooling and normalize: wanted an encoder, found clip"):
        load_hf(tmp_path, "cls")
