"""Decoders from their folders to tokens: what an artifact generates is what torch generates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.effort import thinned
from tests.support.tiny_decoders import ADDED, MODELS, PROMPTS, VOCABULARY, ids, write
from tests.support.tuner_models import job_dispatching, opened
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.database.records import VariantRecord
from relax_tune.errors import UserError
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.runtime.generate import generate, greedy
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.task.task import Choices

pytestmark = [pytest.mark.ccompiler, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
BOUNDS = {"b": (1, 2)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[rt.Artifact, dict[str, Any]]:
    """One model untuned, and what torch gives."""
    folder, wanted = write(tmp_path_factory.mktemp("llama"), "llama")
    return rt.build(rt.load_model(folder, BOUNDS), target="c", db="memory://"), wanted


@pytest.mark.parametrize("name", thinned(m for m in MODELS if m != "llama"))
def test_tokens_of_torch(tmp_path: Path, name: str) -> None:
    folder, wanted = write(tmp_path, name)
    with rt.build(rt.load_model(folder, BOUNDS), target="c", db="memory://").open() as model:
        for b, n in PROMPTS:
            np.testing.assert_array_equal(generate(model, ids(b, n), ADDED)[:, n:], wanted[f"tokens_{b}_{n}"])


def test_a_tuned_decoder_gives_the_same_tokens(tmp_path: Path) -> None:
    """Whatever was tuned is dispatched: a candidate of one task of every kind, drawn at random."""
    folder, wanted = write(tmp_path, "llama")
    module = rt.load_model(folder, BOUNDS | {"n": (1, 33), "m": (1, 60)})
    kinds: set[str] = set()

    def drawn(choices: Choices, number: int) -> list[VariantRecord]:
        kind = choices.task.name.rstrip("_0123456789")
        if kind in kinds:
            return []
        kinds.add(kind)
        return [choices.tuned(choices.space.candidates(choices.space.sample(np.random.default_rng(number), 1))[0])]

    with opened("c") as device:
        job = job_dispatching(device.info, module, drawn)
        with job.artifact(job.build()).open(device) as model:
            for b, n in PROMPTS:
                np.testing.assert_array_equal(generate(model, ids(b, n), ADDED)[:, n:], wanted[f"tokens_{b}_{n}"])
            bound = [b for e in model.executors.values() for b in e._bindings.values()]
    tuned = {call for b in bound for call, label in b.choices if label == "tuned"}
    assert len(kinds) > 8 and len(tuned) >= len(kinds)


def test_weights_are_on_the_device_once(llama: tuple[rt.Artifact, dict[str, Any]]) -> None:
    with llama[0].open() as model:
        first, second = (model.executors[n] for n in ("prefill", "decode"))
        names = [{b.name for b in e.program.buffers if b.role == "const"} for e in (first, second)]
        both = names[0] & names[1]
        assert len(both) > 20
        assert all(first.buffer(name) is second.buffer(name) for name in both)


def test_an_artifact_of_two_functions(llama: tuple[rt.Artifact, dict[str, Any]], tmp_path: Path) -> None:
    artifact, wanted = llama
    path = artifact.save(tmp_path / "llama.rta")
    assert rt.load_artifact(path).save(tmp_path / "again.rta").read_bytes() == path.read_bytes()
    with rt.load(path) as model:
        assert model.functions == ("decode", "prefill")
        for b, n in PROMPTS:
            np.testing.assert_array_equal(generate(model, ids(b, n), ADDED)[:, n:], wanted[f"tokens_{b}_{n}"])
        with pytest.raises(UserError, match="wanted one of its functions, decode, prefill; found none named"):
            model.run([ids(1, 3)])
        with pytest.raises(UserError, match="wanted one of its functions, decode, prefill; found 'main'"):
            model.run([ids(1, 3)], "main")
        with pytest.raises(UserError, match=r"decode: wanted 5 arguments .*, found 1"):
            model.run([ids(1, 1)], "decode")


def test_generation_ends(llama: tuple[rt.Artifact, dict[str, Any]]) -> None:
    artifact, wanted = llama
    tokens = wanted["tokens_1_1"][0]
    with artifact.open() as model:
        stop = int(tokens[5])
        first = int(np.flatnonzero(tokens == stop)[0])
        assert generate(model, ids(1, 1), ADDED, [stop]).shape == (1, 1 + first + 1)
        assert generate(model, ids(1, 1), 0).shape == (1, 1)
        whole = list(greedy(model, ids(2, 60)))
        assert len(whole) == 5, "64 positions: 60 given, and what follows each of the last five"
        assert all(t.shape == (2,) and t.dtype == np.int64 and (t < VOCABULARY).all() for t in whole)


def test_generate_without_decoder_functions_is_refused() -> None:
    g = rt.GraphBuilder()
    x = g.input("x", (g.symbol("n"), 2))
    artifact = rt.build(g.finish(g.call(Relu(), x)), target="c", db="memory://")
    says = "wanted a model with the functions prefill and decode, found main"
    with artifact.open() as model, pytest.raises(UserError, match=says):
        generate(model, ids(1, 3), 4)


def test_text_goes_on(llama: tuple[rt.Artifact, dict[str, Any]], tmp_path: Path) -> None:
    artifact, wanted = llama
    path = artifact.save(tmp_path / "llama.rta")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    prompt = " ".join(f"w{i}" for i in ids(1, 33)[0])
    run = ["run", str(path), "--text", prompt, "--model", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, [*run, "--tokens", "4", "--out", str(tmp_path / "out.npz")])
    assert done.exit_code == 0, done.output
    expected = wanted["tokens_1_33"][0, :4]
    assert json.loads(done.stdout)["added"] == [" ".join(f"w{i}" for i in expected)]
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_array_equal(found["tokens0"], [[*ids(1, 33)[0], *expected]])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [int(expected[1])]}))
    done = CliRunner().invoke(app, run)
    assert json.loads(done.stdout)["added"] == [" ".join(f"w{i}" for i in expected[:1])]
    for extra, says in (
        (["--function", "decode"], "--function goes with --inputs"),
        (["--text", ""], "wants at least one token"),
        (["--tokens", "-1"], "wanted how many tokens to add, 0 or more, found -1"),
    ):
        done = CliRunner().invoke(app, [*run, *extra])
        assert done.exit_code == 2 and says in done.output


def test_caches_of_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the option says: what comes out as a cache and goes in again is of that type."""
    monkeypatch.chdir(tmp_path)
    folder, _ = write(tmp_path, "llama")
    path = tmp_path / "llama.rta"
    build = ["build", "--target", "c", "--db", f"sqlite:///{tmp_path / 'records.db'}", "--out", str(path)]
    rt.open_database(str(tmp_path / "records.db")).close()
    done = CliRunner().invoke(app, [*build, str(folder), "--bound", "b=1:2", "--cache-dtype", "bf16"])
    assert done.exit_code == 0, done.output
    with rt.load(path) as model:
        _, *caches = model.run([ids(1, 7)], "prefill")
        assert len(caches) > 1 and {str(c.dtype) for c in caches} == {"bfloat16"}
        assert generate(model, ids(1, 7), 3).shape == (1, 10)
    text = tmp_path / "model.relax"
    rt.save_model(rt.load_model(folder, BOUNDS), text)
    done = CliRunner().invoke(app, [*build, str(text), "--overwrite", "--cache-dtype", "bf16"])
    assert done.exit_code == 2 and "wanted a Hugging Face folder" in " ".join(done.output.split())
