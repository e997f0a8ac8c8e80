"""Settings of generation: their checks, and those of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import UserError
from relax_tune.runtime.generation.config import GenerationConfig

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": -1}, "max_new_tokens: expected a whole number, 0 or more, got -1"),
    ({"max_new_tokens": 2.0}, "max_new_tokens: expected a whole number"),
    ({"top_k": True}, "top_k: expected a whole number, 0 or more, got True"),
    ({"num_beams": 0}, "num_beams: expected a whole number, 1 or more, got 0"),
    (
        {"temperature": 0},
        "temperature: expected a number, above 0, got 0; without it and do_sample, the likeliest token is taken",
    ),
    ({"temperature": float("nan")}, "temperature: expected a number"),
    ({"top_p": 1.1}, "top_p: expected a number, 0 to 1, got 1.1"),
    ({"min_p": "x"}, "min_p: expected a number"),
    ({"length_penalty": float("inf")}, "length_penalty: expected a number, finite, got inf"),
    ({"do_sample": 1}, "do_sample: expected True or False, got 1"),
    ({"early_stopping": "soon"}, 'early_stopping: expected True, False or "never"'),
    ({"eos_token_id": -1}, "eos_token_id: expected a whole number, 0 or more, got -1"),
    ({"eos_token_id": "2"}, "eos_token_id: expected a list of token ids, got '2'"),
    ({"stop_sequences": [[]]}, "stop_sequences: expected at least 1 token id in each"),
    ({"stop_strings": [""]}, "stop_strings: expected words of at least one character"),
    ({"stop_strings": 3}, "stop_strings: expected a list of words, got 3"),
    ({"num_return_sequences": 2}, "num_return_sequences: expected at most 1 with greedy generation, got 2"),
    ({"num_return_sequences": 4, "num_beams": 3, "do_sample": True}, "expected at most 3 with num_beams, got 4"),
]


@pytest.mark.parametrize(("settings", "says"), WRONG, ids=[says[:30] for _, says in WRONG])
def test_settings_out_of_range_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        GenerationConfig(**settings)
    assert says in str(error.value)


def test_settings_of_numpy_and_lists_are_plain() -> None:
    config = GenerationConfig(
        eos_token_id=np.array([3, 4]), top_k=np.int64(5), stop_strings="end", stop_sequences=[[1, 2]]
    )  # type: ignore[arg-type]
    assert (config.eos_ids, config.stop_strings, config.stop_sequences) == ((3, 4), ("end",), ((1, 2),))
    assert config.filler == 3 and GenerationConfig().filler == 0 and GenerationConfig(pad_token_id=7).filler == 7
    assert hash(config) == hash(
        GenerationConfig(eos_token_id=[3, 4], top_k=5, stop_strings=["end"], stop_sequences=[(1, 2)])
    )  # type: ignore[arg-type]


def test_settings_of_a_folder_are_read_or_refused(tmp_path: Path) -> None:
    assert GenerationConfig.from_folder(tmp_path) == GenerationConfig()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 5, "top_k": 3}))
    assert GenerationConfig.from_folder(tmp_path) == GenerationConfig(eos_token_id=2, pad_token_id=5)
    said = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": None,
        "eos_token_id": [7, 8],
        "bos_token_id": 1,
        "typical_p": 1.0,
    }
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(said))
    wanted = GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=(7, 8), pad_token_id=5, seed=3)
    assert GenerationConfig.from_folder(tmp_path, seed=3) == wanted
    for content, says in (
        (
            {"bad_words_ids": [[1, 2]]},
            r"bad_words_ids: .*one that is not implemented",
        ),
        ({"temperature": -1}, "temperature: expected a number, above 0"),
        ([], "expected a JSON object, got a list"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=says):
            GenerationConfig.from_folder(tmp_path)
    path.write_text(json.dumps({"bad_words_ids": [[1, 2]]}))
    assert GenerationConfig.from_folder(tmp_path, bad_words_ids=None).pad_token_id == 5
    path.write_text(json.dumps({"bad_words_ids": [[6], [2]], "eos_token_id": 2, "suppress_tokens": [4]}))
    assert GenerationConfig.from_folder(tmp_path).suppress_tokens == (4, 6)
    assert GenerationConfig.from_folder(tmp_path, bad_words_ids=None).suppress_tokens == (4,)
    with pytest.raises(UserError, match=r"expected settings among .*; got heat"):
        GenerationConfig.from_folder(tmp_path, heat=None)


def test_tokens_to_force_and_suppress_are_read_from_one_file(tmp_path: Path) -> None:
    """As in transformers, config.json counts where there is no generation_config.json."""
    model = {"is_encoder_decoder": True, "bos_token_id": 4, "forced_bos_token_id": 6, "suppress_tokens": [1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(model))
    wanted = GenerationConfig(decoder_start_token_id=4, forced_bos_token_id=6, suppress_tokens=(1, 2))
    assert GenerationConfig.from_folder(tmp_path) == wanted
    said = {"decoder_start_token_id": 9, "forced_eos_token_id": 3, "begin_suppress_tokens": [7], "min_length": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    wanted = GenerationConfig(
        decoder_start_token_id=9, forced_eos_token_id=(3,), begin_suppress_tokens=(7,), min_length=5
    )
    assert GenerationConfig.from_folder(tmp_path) == wanted
