"""Encoder-decoders from their folders to tokens: what an artifact generates is what transformers generates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.effort import GENERIC, thinned
from tests.support.encoder_decoders import BEAMS, GREEDY, MODELS, PROMPT, START, inputs, write_encoder_decoder
from tests.support.tiny_decoders import write
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.errors import UserError
from relax_tune.runtime.generation.sources import read_sources, stack_sources
from relax_tune.tuner.cli.app import app

pytestmark = [pytest.mark.ccompiler, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
IDS = {"decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 1}
BOUNDS = {"b": (1, 9)}
SOURCE: dict[str, Any] = inputs("t5", *PROMPT)[0]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[rt.Artifact, dict[str, Any], Path]:
    """One model untuned, what transformers gives, and the folder."""
    folder, wanted = write_encoder_decoder(tmp_path_factory.mktemp("t5"), "t5")
    return rt.build(rt.load_model(folder, BOUNDS), target="c", db="memory://", **GENERIC), wanted, folder


def check_tokens(model: rt.Model, source: Any, wanted: dict[str, Any]) -> None:
    """Compare the tokens behind the start with transformers' ones."""
    for settings, name in ((GREEDY, "greedy"), (BEAMS, "beams")):
        np.testing.assert_array_equal(rt.generate(model, source, **IDS, **settings), wanted[name][:, 1:], name)


@pytest.mark.heavy
def test_t5_gives_the_tokens_of_transformers(t5: tuple[rt.Artifact, dict[str, Any], Path]) -> None:
    with t5[0].open() as model:
        check_tokens(model, SOURCE, t5[1])


@pytest.mark.heavy
@pytest.mark.parametrize("name", thinned((m for m in MODELS if m != "t5"), 1))
def test_encoder_decoder_gives_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    folder, wanted = write_encoder_decoder(tmp_path, name)
    with rt.build(rt.load_model(folder, BOUNDS), target="c", db="memory://", **GENERIC).open() as model:
        check_tokens(model, inputs(name, *PROMPT)[0], wanted)


def test_sounds_of_unequal_length_are_padded_and_masked() -> None:
    sound = [np.arange(1, n + 1, dtype=np.float64) for n in (4, 2)]
    rows = read_sources({"input_values": sound, "attention_mask": [np.ones(4), np.ones(2)]})
    values, mask = stack_sources(rows, ("input_values", "attention_mask"))
    np.testing.assert_array_equal(values, [[1, 2, 3, 4], [1, 2, 0, 0]])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 1], [1, 1, 0, 0]])
    assert (values.dtype, mask.dtype) == (np.float32, np.int64)
    with pytest.raises(UserError, match="input_values: expected rows of one shape"):
        stack_sources(rows, ("input_values",))
    with pytest.raises(UserError, match="expected 0 and 1 for each of its input_values"):
        read_sources({"input_values": sound, "attention_mask": [[1], [1]]})


def test_sources_of_unequal_length_give_the_tokens_of_single_ones(t5: tuple[rt.Artifact, dict[str, Any], Path]) -> None:
    lengths = SOURCE["attention_mask"].sum(1)
    rows = [row[:n].tolist() for row, n in zip(SOURCE["input_ids"], lengths)]
    assert len(set(lengths)) == 3
    with t5[0].open() as model:
        together = rt.generate(model, {"input_ids": rows}, 6, **IDS)
        single = [rt.generate(model, {"input_ids": [row]}, 6, **IDS)[0] for row in rows]
        drawn = {"do_sample": True, "seed": 3, "num_return_sequences": 2}
        steps = list(rt.generate_steps(model, SOURCE, 6, **IDS, **drawn))
        sampled = rt.generate(model, SOURCE, 6, **IDS, **drawn)
    for found, one in zip(together, single, strict=True):
        np.testing.assert_array_equal(found, one)
    assert len({tuple(row) for row in together}) > 1
    np.testing.assert_array_equal(np.stack([step.tokens for step in steps], 1), sampled)
    assert len(sampled) == 6 and len({tuple(row) for row in sampled}) > 3


def test_first_tokens_of_a_text_stand_before_the_added_ones(t5: tuple[rt.Artifact, dict[str, Any], Path]) -> None:
    first = np.array([[3], [3], [3]])
    with t5[0].open() as model:
        plain = rt.generate(model, SOURCE, 5, **IDS)
        given = rt.generate(model, {**SOURCE, "decoder_input_ids": first}, 5)
        longer = rt.generate(model, {**SOURCE, "decoder_input_ids": given[:, :3]}, 3)
        uneven = {**SOURCE, "decoder_input_ids": [[3], given[1, :2], given[2, :3]]}
        rows = rt.generate(model, {n: list(v) for n, v in uneven.items()}, 2)
        beams = rt.beam_search(model, SOURCE, 4, num_beams=2, min_length=5, **IDS)
    np.testing.assert_array_equal(given, np.concatenate([first, plain], axis=1))
    np.testing.assert_array_equal(longer, given)
    for length, (found, whole) in enumerate(zip(rows, given, strict=True), 3):
        np.testing.assert_array_equal(found, whole[:length])
    assert all(len(best.tokens) == 4 for (best,) in beams)


def test_wrong_sources_are_refused(t5: tuple[rt.Artifact, dict[str, Any], Path], tmp_path: Path) -> None:
    ids, mask = SOURCE["input_ids"], SOURCE["attention_mask"]
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (ids, IDS, "expected the encoder's inputs by name, got token ids; give a dict of input_ids, attention_mask"),
        (SOURCE, {}, "decoder_start_token_id: expected the first token of a text, got None"),
        ({"input_features": np.zeros((1, 2, 3))}, IDS, "expected the encoder's inputs input_ids, attention_mask by name"),
        ({"input_ids": "text"}, IDS, "input_ids: expected an array or a list of rows, got a str; tokenize text first"),
        ({"input_ids": [[1], []]}, IDS, "input_ids: expected at least one token in every row, got none in row 1"),
        ({"input_ids": [[0.5]]}, IDS, "input_ids: row 0: expected a list of token ids, whole numbers, got float64"),
        ({"input_ids": ids, "attention_mask": mask[:2]}, IDS, "with equal numbers of rows, got {'input_ids': 3, 'attention_mask': 2}"),
        ({"input_ids": ids, "attention_mask": 2 * mask}, IDS, "attention_mask: row 0: expected 0 and 1 for each of its input_ids"),
        ({"input_ids": ids, "attention_mask": mask[:, :2]}, IDS, "attention_mask: row 0: expected 0 and 1"),
        (SOURCE, {**IDS, "attention_mask": mask}, "attention_mask: expected it once, got it among the encoder's inputs too"),
        (SOURCE, {**IDS, "forced_bos_token_id": 999}, "forced_bos_token_id: expected a token below 41, got 999"),
        (SOURCE, {**IDS, "suppress_tokens": range(41)}, "got only -inf"),
    ]  # fmt: skip
    with t5[0].open() as model:
        for prompts, settings, says in cases:
            with pytest.raises(UserError) as error:
                rt.generate(model, prompts, 2, **settings)
            assert says in str(error.value), str(error.value)
    folder, _ = write(tmp_path, "llama")
    with rt.build(rt.load_model(folder, {"b": (1, 4)}), target="c", db="memory://", **GENERIC).open() as model:
        with pytest.raises(UserError, match=r"token ids.*inputs of an encoder"):
            rt.generate(model, SOURCE, 2)
        with pytest.raises(UserError, match=r"decoder_start_token_id.*encoder"):
            rt.generate(model, [[1]], 2, decoder_start_token_id=3)


def test_text_of_an_encoder_decoder_is_written_alone(
    t5: tuple[rt.Artifact, dict[str, Any], Path], tmp_path: Path
) -> None:
    artifact, _, folder = t5
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(41)}, "unk_token": "w0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    path, rows = artifact.save(tmp_path / "t5.rta"), [[5, 6, 7], [8]]
    texts = [" ".join(f"w{i}" for i in row) for row in rows]
    with artifact.open() as model:
        settings = {n: v for n, v in START.items() if n != "bos_token_id"}
        wanted = [
            " ".join(f"w{i}" for i in row if i != 2) for row in rt.generate(model, {"input_ids": rows}, 4, **settings)
        ]
    run = [
        "run",
        str(path),
        "--model",
        str(folder),
        "--max-new-tokens",
        "4",
        *(part for t in texts for part in ("--text", t)),
    ]
    for extra in ([], ["--stream"]):
        done = CliRunner().invoke(app, [*run, *extra])
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines() == wanted
