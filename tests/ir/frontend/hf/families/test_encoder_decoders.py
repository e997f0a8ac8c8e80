"""Importing encoder-decoders: against the original framework, and folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.support.effort import thinned
from tests.support.encoder_decoders import MODELS, SHAPES, inputs, write_encoder_decoder

import relax_tune as rt
from relax_tune.errors import ParseError, RelaxTuneError, UserError
from relax_tune.ir.core.dtype import bf16
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.hf.families.encoder_decoders import ENCODER_DECODERS
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.interp.reference import evaluate_function

Array = np.ndarray[Any, Any]


def logits(module: IRModule, name: str, shape: tuple[int, int, int], prompted: int) -> Array:
    """The logits (b, n - prompted + 1, vocabulary) behind a prompt of `prompted` tokens, and behind each further one."""
    source, tokens = inputs(name, *shape)
    shared = [p.name for p in module.graphs["prefill"].params[1:] if p.name in source]
    cross = [source[name] for name in shared]
    cross += list(evaluate_function(module, list(source.values()), "encode"))
    last, *cache = evaluate_function(module, [tokens[:, :prompted], *cross], "prefill")
    parts = [last]
    for at in range(prompted, shape[2]):
        last, *cache = evaluate_function(module, [tokens[:, at : at + 1], *cross, *cache], "decode")
        parts.append(last)
    return np.concatenate(parts, axis=1)


def assert_near(actual: Array, expected: Array) -> None:
    np.testing.assert_allclose(actual, expected, atol=3e-5 * max(1.0, float(np.abs(expected).max())), rtol=0)


@pytest.mark.parametrize("name", thinned(MODELS, 4))
def test_encoder_decoder_has_the_logits_of_torch(tmp_path: Path, name: str) -> None:
    folder, expected = write_encoder_decoder(tmp_path, name)
    module, every = load_hf(folder), load_hf(folder, every_position=True)
    for b, s, n in SHAPES:
        one = expected[f"logits_{b}_{s}_{n}"]
        assert_near(logits(module, name, (b, s, n), 1), one)
        assert_near(logits(every, name, (b, s, n), n), one)
        assert_near(logits(module, name, (b, s, n), (n + 1) // 2), one[:, (n + 1) // 2 - 1 :])


def test_encoder_decoder_has_three_functions_and_bounds(tmp_path: Path) -> None:
    folder, _ = write_encoder_decoder(tmp_path, "bart")
    module = rt.load_model(folder, {"b": (1, 4), "s": (2, 8)})
    assert {b.var.name: (b.lower, b.upper) for b in module.bounds} == {
        "b": (1, 4),
        "s": (2, 8),
        "n": (1, 32),
        "m": (1, 31),
    }
    assert set(module.functions) == {"encode", "prefill", "decode"}
    with pytest.raises(UserError, match=r"bound of s: expected .*got 33"):
        load_hf(folder, bounds={"s": (1, 33)})
    with pytest.raises(UserError, match=r"bound of n: expected .*got 0"):
        load_hf(folder, bounds={"n": (0, 5)})


def test_model_of_speech_has_no_symbol_of_the_source(tmp_path: Path) -> None:
    folder, _ = write_encoder_decoder(tmp_path, "whisper")
    assert {b.var.name for b in load_hf(folder).bounds} == {"b", "n", "m"}
    with pytest.raises(UserError, match=r"b .batch., n .positions. and m .*got s"):
        load_hf(folder, bounds={"s": (1, 4)})


def test_stored_keys_and_values_have_the_wanted_type(tmp_path: Path) -> None:
    folder, expected = write_encoder_decoder(tmp_path, "t5")
    module = load_hf(folder, cache_dtype="bf16")
    decode = module.functions["decode"]
    assert isinstance(decode, Function)
    infos = [p.info for p in decode.params[2:]]
    assert all(isinstance(info, TensorInfo) and info.dtype is bf16 for info in infos) and len(infos) == 4
    one = expected["logits_2_7_4"]
    np.testing.assert_allclose(logits(module, "t5", SHAPES[0], 2), one[:, 1:], atol=0.03)


def test_stated_scale_of_t5_counts_before_tied_embeddings(tmp_path: Path) -> None:
    """Newer files write true for tied embeddings in every case."""
    folder, expected = write_encoder_decoder(
        tmp_path, "t5_gated", scale_decoder_outputs=False, tie_word_embeddings=True
    )
    assert_near(logits(load_hf(folder), "t5_gated", SHAPES[0], 4), expected["logits_2_7_4"][:, 3:])


def test_pooling_of_t5_reads_the_encoder_alone(tmp_path: Path) -> None:
    folder, _ = write_encoder_decoder(tmp_path, "t5")
    assert set(load_hf(folder, pooling="mean").functions) == {"main"}
    with pytest.raises(UserError, match="expected an encoder, got bart"):
        load_hf(write_encoder_decoder(tmp_path, "bart")[0], pooling="mean")


def test_embeddings_of_either_name_are_read(tmp_path: Path) -> None:
    """Files hold the shared table under one of several names."""
    folder, expected = write_encoder_decoder(tmp_path, "bart")
    path = folder / "model.safetensors"
    held = load_file(path)
    table = held.pop("model.shared.weight")
    bias = held.pop("final_logits_bias")  # absent, it is 0
    save_file({**held, **{f"model.{side}.embed_tokens.weight": table for side in ("encoder", "decoder")}}, path)
    actual = logits(load_hf(folder), "bart", SHAPES[0], 1)
    assert_near(actual + bias, expected["logits_2_7_4"])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bart", {"architectures": ["BartForSequenceClassification"]}, r"architectures: expected \['BartForConditionalGeneration'\]"),
        ("t5", {"architectures": ["T5ForQuestionAnswering"]}, "architectures: expected"),
        ("marian", {"architectures": ["MarianForCausalLM"]}, r"architectures: expected \['MarianMTModel'\]"),
        ("bart", {"is_decoder": True}, "is_decoder: expected False, got True"),
        ("bart", {"add_cross_attention": True}, "add_cross_attention: expected False, got True"),
        ("bart", {"is_encoder_decoder": False}, "is_encoder_decoder: expected True, got False"),
        ("bart", {"scale_embedding": 2}, "scale_embedding: expected true or false, got 2"),
        ("bart", {"activation_function": "mish"}, "activation_function: expected one of"),
        ("bart", {"decoder_attention_heads": 3}, "d_model .*multiple of decoder_attention_heads, got 16 and 3"),
        ("bart", {"max_position_embeddings": 1}, "max_position_embeddings: expected at least 2"),
        ("bart", {"encoder_layers": 10**6}, "encoder_layers: expected at most 4096 layers"),
        ("bart", {"encoder_layers": 2}, "expected a tensor 'model.encoder.layers.1"),
        ("bart", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings: expected True, got False"),
        ("bart", {"vocab_size": 40}, "expected shape .40, 16. .*got .41, 16."),
        ("bart", {"tie_word_embeddings": False}, "expected a tensor 'lm_head.weight'"),
        ("marian", {"decoder_vocab_size": 40}, "decoder_vocab_size: expected the vocab_size 41, as"),
        ("m2m_100", {"pad_token_id": -1}, "pad_token_id: expected .*got -1"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj: expected one of"),
        ("t5", {"relative_attention_max_distance": 4}, "relative_attention_max_distance: expected more than half of"),
        ("t5", {"relative_attention_num_buckets": 3}, "relative_attention_num_buckets: expected at least 4 buckets"),
        ("whisper", {"scale_embedding": True}, "scale_embedding: expected False, got True"),
        ("whisper", {"architectures": ["WhisperForAudioClassification"]}, "architectures: expected"),
        ("pair_bert", {"encoder": 3}, "encoder: expected an object, got 3"),
        ("pair_bert", {"decoder": {"model_type": "llama"}}, "decoder: model_type: expected one of bert, roberta"),
        ("pair_bert", {"model_type": "vision-encoder-decoder", "architectures": None}, "model_type: expected an encoder of im"),
        ("whisper", {"model_type": "led"}, "got 'led'; no known one is near"),
    ],
)  # fmt: skip
def test_wrong_fields_of_an_encoder_decoder(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    folder, _ = write_encoder_decoder(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=message):
        load_hf(folder)


def test_families_without_fields_are_refused(tmp_path: Path) -> None:
    folder, _ = write_encoder_decoder(tmp_path, "bart")
    for kind, family in ENCODER_DECODERS.items():
        fields = {"model_type": kind, "architectures": [family.architecture]}
        (folder / "config.json").write_text(json.dumps(fields))
        with pytest.raises(RelaxTuneError):
            load_hf(folder)
