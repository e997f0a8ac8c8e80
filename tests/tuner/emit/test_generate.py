"""Decoders from their folders to tokens: what an artifact generates is what torch generates."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.effort import GENERIC, some, thinned
from tests.support.tiny_decoders import ADDED, GENERATED, MODELS, MORE, PROMPTS, VOCABULARY, generated, ids, write
from tests.support.tuner_models import job_dispatching, opened
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.database.records import VariantRecord
from relax_tune.errors import RelaxTuneWarning, UserError
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.runtime.calls.session import Session
from relax_tune.runtime.generate import beam_search, generate, generate_steps
from relax_tune.runtime.generation.decoder import Decoder, bounds
from relax_tune.runtime.model import Model
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.task.variants import TaskVariants

pytestmark = [pytest.mark.ccompiler, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
BOUNDS = {"b": (1, 4)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[rt.Artifact, dict[str, Any]]:
    """One model untuned, and what torch gives."""
    folder, wanted = write(tmp_path_factory.mktemp("llama"), "llama")
    return rt.build(rt.load_model(folder, BOUNDS), target="c", db="memory://", **GENERIC), wanted


@pytest.mark.parametrize("name", thinned((m for m in (*MODELS, *MORE) if m != "llama"), 12))
def test_tokens_of_torch(tmp_path: Path, name: str) -> None:
    folder, wanted = write(tmp_path, name)
    with rt.build(rt.load_model(folder, BOUNDS), target="c", db="memory://", **GENERIC).open() as model:
        for b, n in PROMPTS:
            np.testing.assert_array_equal(generate(model, ids(b, n), ADDED)[:, n:], wanted[f"tokens_{b}_{n}"])
        check_generated(model, name)


def check_generated(model: rt.Model, name: str, every: int = 3) -> None:
    """Beam search, and greedy generation for prompts of unequal length, give what transformers gives."""
    wanted, new = generated(name), GENERATED["ADDED"]
    for case, settings in some(GENERATED["SEARCHED"].items(), every):
        found = [h for row in beam_search(model, ids(2, 7), new, **settings) for h in row]
        scores = [h.score for h in found]
        np.testing.assert_allclose(scores, wanted[f"search/{case}/scores"], rtol=1e-5, atol=1e-5, err_msg=case)
        tokens = wanted[f"search/{case}/tokens"]
        filled = [
            np.pad(h.tokens, (0, tokens.shape[1] - len(h.tokens)), constant_values=GENERATED["PAD"]) for h in found
        ]
        np.testing.assert_array_equal(filled, tokens, case)
    np.testing.assert_array_equal(generate(model, ids(2, 7), new, **settings)[:, 7:], tokens)
    prompts = GENERATED["uneven"]()
    for case, settings in GENERATED["UNEVEN"].items():
        rows = [r[len(p) :] for p, r in zip(prompts, generate(model, prompts, new, **settings), strict=True)]
        filled = [np.pad(r, (0, new - len(r)), constant_values=settings["pad_token_id"]) for r in rows]
        np.testing.assert_array_equal(filled, wanted[f"uneven/{case}"], case)


def test_transformers_results_are_found_again(llama: tuple[rt.Artifact, dict[str, Any]]) -> None:
    with llama[0].open() as model:
        check_generated(model, "llama", 1)


class Exported:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.array if dtype is None else self.array.astype(dtype)


def test_generation_of_arrays_of_other_libraries_gives_the_same_tokens(
    llama: tuple[rt.Artifact, dict[str, Any]],
) -> None:
    prompts, mask = ids(2, 7).astype(np.int32), np.ones((2, 7), np.bool_)
    with llama[0].open() as model:
        expected = generate(model, prompts, 3)
        np.testing.assert_array_equal(generate(model, Exported(prompts), 3, attention_mask=Exported(mask)), expected)
        for found, row in zip(generate(model, [Exported(row) for row in prompts], 3), expected, strict=True):
            np.testing.assert_array_equal(found, row)
        steps = list(generate_steps(model, Exported(prompts), 3))
        np.testing.assert_array_equal(np.stack([s.tokens for s in steps], 1), expected[:, 7:])
        logits, *caches = model.run({"input_ids": Exported(prompts)}, "prefill")
        token = logits[:, -1:].argmax(-1).astype(np.int32)
        with model.session([Exported(c) for c in caches], "decode") as session:
            assert session.run([Exported(token)])["logits"][:, -1].argmax(-1).tolist() == expected[:, 8].tolist()


def test_padded_prompts_give_the_tokens_of_single_rows(llama: tuple[rt.Artifact, dict[str, Any]]) -> None:
    rows = GENERATED["uneven"]()
    longest = max(map(len, rows))
    starts = [(longest - len(r)) * (n % 2) for n, r in enumerate(rows)]  # padding after, before, after ...
    mask = np.array([[s <= i < s + len(r) for i in range(longest)] for s, r in zip(starts, rows)])
    ids_ = np.full(mask.shape, 1 << 40)  # which no model would take
    for at, kept, row in zip(ids_, mask, rows):
        at[kept] = row
    settings = {"eos_token_id": (3, 11, 20), "do_sample": True, "seed": 4, "top_p": 0.9}
    with llama[0].open() as model:
        alone = generate(model, rows, 12, **settings)
        assert len({len(a) - len(r) for a, r in zip(alone, rows)}) > 1
        together = generate(model, ids_, 12, attention_mask=mask, pad_token_id=-1, **settings)
        for found, whole, row in zip(alone, together, rows):
            added = whole[longest:]
            np.testing.assert_array_equal(added[added >= 0], found[len(row) :])
            assert (added[len(found) - len(row) :] == -1).all()
        steps = list(generate_steps(model, rows, 12, **settings))
        for n, (found, row) in enumerate(zip(alone, rows)):
            assert [s.tokens[n] for s in steps if s.live[n]] == found[len(row) :].tolist()
        assert (generate(model, rows, 12, **settings)[0] == alone[0]).all()
        more = generate(model, ids(1, 3), 8, do_sample=True, num_return_sequences=6, seed=1)
        assert more.shape == (6, 11) and len({tuple(r) for r in more}) > 3
        assert (more != generate(model, ids(1, 3), 8, do_sample=True, num_return_sequences=6, seed=2)).any()
        beams = [beam_search(model, ids(1, 3), 8, do_sample=True, num_beams=2, seed=s)[0][0] for s in (1, 1, 2)]
        assert beams[0].score == beams[1].score != beams[2].score


def test_ended_rows_leave_the_batch(llama: tuple[rt.Artifact, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, wanted = llama
    rows = wanted["tokens_2_7"]
    with artifact.open() as model:
        sizes = list[int]()
        for owner in (Model, Session):
            run = owner.run
            counted = lambda self, inputs, *a, run=run: (sizes.append(len(inputs[0])), run(self, inputs, *a))[1]
            monkeypatch.setattr(owner, "run", counted)
        for end in (int(rows[0, 3]), int(rows[1, 9])):
            lengths = [next((n + 1 for n, t in enumerate(row) if t == end), ADDED) for row in rows]
            sizes.clear()
            found = generate(model, ids(2, 7), ADDED, eos_token_id=end)[:, 7:]
            assert sizes == [2, *(sum(length > n for length in lengths) for n in range(1, max(lengths)))]
            filled = [[*row[:length], *[end] * (max(lengths) - length)] for row, length in zip(rows, lengths)]
            np.testing.assert_array_equal(found, filled)
        few, many = Decoder(model), Decoder(model)
        many.least_rows = 4  # as of a model of four rows
        states = [d.prefill(ids(2, 7)) for d in (few, many)]
        for state in states:
            state.extend(rows[:, 0])
        assert states[0].logits.shape == states[1].logits.shape == (2, VOCABULARY)
        np.testing.assert_allclose(states[0].logits, states[1].logits, atol=1e-4)


def test_generation_of_wrong_arguments_is_refused(llama: tuple[rt.Artifact, dict[str, Any]]) -> None:
    three = ids(1, 3)
    nan = np.full((1, VOCABULARY), np.nan, np.float32)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (three[0], {}, "expected token ids .rows, length., got an array of shape .3,."),
        ("text", {}, "got a str; tokenize text first"),
        ([[1, 2], []], {}, "expected at least one token in every row, got none in row 1"),
        ([[1.5]], {}, "row 0: expected a list of token ids"),
        ([[[1]]], {}, "row 0: expected a list of token ids"),
        (three, {"attention_mask": [[1, 0, 1]]}, "row 0: expected padding before or after the tokens"),
        (three, {"attention_mask": [[1, 1]]}, "expected 0 and 1 in the shape of the prompts"),
        (three, {"heat": 1}, "expected options among max_new_tokens, .*; got heat; leave it out"),
        (three, {"config": {}}, "expected a GenerationConfig, got a dict"),
        (three, {"stop_strings": "end"}, "expected a tokenizer to read the tokens by, got none"),
        (
            three,
            {"num_beams": 5},
            r"expected at most 4, .*, got 5; build it with bounds=\{'b': \(1, 5\)\}, or --bound b=1:5",
        ),
        (
            three,
            {"logits_processor": lambda i, s: s[:, 1:]},
            r"expected float32 scores of shape \(1, 37\), got float32",
        ),
        (three, {"logits_processor": lambda i, s: nan}, "got 37 NaN"),
        (three, {"logits_processor": lambda i, s: s - np.inf, "do_sample": True}, "got only -inf"),
        (three + 99, {}, "expected values from 0 to 36"),
        (ids(1, 65), {}, "expected n <= 64, got 65"),
    ]
    with llama[0].open() as model:
        for prompts, options, says in cases:
            with pytest.raises(UserError, match=says):
                generate(model, prompts, **{"max_new_tokens": 2, **options})
        with pytest.raises(UserError, match=r"one by one.*got 2"):
            generate_steps(model, three, num_beams=2)


def test_a_tuned_decoder_gives_the_same_tokens(tmp_path: Path) -> None:
    """Whatever was tuned is dispatched: a candidate of one task of every kind, drawn at random."""
    folder, wanted = write(tmp_path, "llama")
    module = rt.load_model(folder, BOUNDS | {"n": (1, 33), "m": (1, 60)})
    kinds: set[str] = set()

    def drawn(task_variants: TaskVariants, number: int) -> list[VariantRecord]:
        kind = task_variants.task.name.rstrip("_0123456789")
        if kind in kinds:
            return []
        kinds.add(kind)
        sketch_set, rng = task_variants.sketch_set, np.random.default_rng(number)
        (candidate,) = sketch_set.space.candidates(sketch_set.space.sample(rng, 1))
        return [sketch_set.record_of(candidate)]

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
        with pytest.raises(UserError, match="decode, prefill; got none"):
            model.run([ids(1, 3)])
        with pytest.raises(UserError, match="decode, prefill; got 'main'"):
            model.run([ids(1, 3)], "main")
        with pytest.raises(UserError, match=r"decode: expected 5 arguments .*, got 1"):
            model.run([ids(1, 1)], "decode")


def test_generation_ends(llama: tuple[rt.Artifact, dict[str, Any]]) -> None:
    artifact, wanted = llama
    tokens = wanted["tokens_1_1"][0]
    with artifact.open() as model:
        stop = int(tokens[5])
        first = int(np.flatnonzero(tokens == stop)[0])
        assert generate(model, ids(1, 1), ADDED, eos_token_id=stop).shape == (1, 1 + first + 1)
        assert generate(model, ids(1, 1), ADDED, stop_sequences=[tokens[3:6]]).shape == (1, 1 + 6)
        assert generate(model, ids(1, 1), 0).shape == generate(model, ids(1, 1), 0, num_beams=2).shape == (1, 1)
        steps = list(generate_steps(model, ids(2, 60), 99))
        assert len(steps) == 5, "64 positions: 60 given, and what follows each of the last five"
        assert all(s.tokens.shape == (2,) and s.tokens.dtype == np.int64 and s.live.all() for s in steps)
        assert all((s.tokens < VOCABULARY).all() for s in steps)
        assert generate(model, ids(2, 60), 99, num_beams=2).shape == (2, 65)


def test_generate_without_decoder_functions_is_refused() -> None:
    g = rt.GraphBuilder()
    x = g.input("x", (g.symbol("n"), 2))
    artifact = rt.build(g.finish(g.call(Relu(), x)), target="c", db="memory://")
    says = "expected a model with the functions prefill and decode, got main"
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
    prompt, short = (" ".join(f"w{i}" for i in ids(1, n)[0]) for n in (33, 1))
    run = ["run", str(path), "--text", prompt, "--model", str(tmp_path), "--json", "--max-new-tokens", "4"]

    def added(*extra: str) -> list[str]:
        done = CliRunner().invoke(app, [*run, *extra])
        assert done.exit_code == 0, done.output
        return [str(a) for a in json.loads(done.stdout)["added"]]

    expected = wanted["tokens_1_33"][0, :4]
    texts = ["".join(f" w{i}" for i in wanted[f"tokens_1_{n}"][0, :4]) for n in (33, 1)]
    assert added("--text", short, "--out", str(tmp_path / "out.npz")) == texts
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_array_equal(found["tokens0"], [[*ids(1, 33)[0], *expected]])
    done = CliRunner().invoke(app, [*(r for r in run if r != "--json"), "--text", short, "--stream"])
    assert done.stdout == f"{prompt}{texts[0]}\n{short}{texts[1]}\n"
    assert added("--text", short, "--stream") == texts
    stop = ("--stop", f"w{expected[1]}")
    assert added(*stop) == added(*stop, "--stream") == [f" w{expected[0]} "]
    assert (
        added("--seed", "1", "--temperature", "2")
        == added("--seed", "1", "--temperature", "2", "--stream")
        != texts[:1]
    )
    assert added("--top-k", "1") == added("--top-p", "0") == texts[:1]
    with artifact.open() as model:
        best = generate(model, ids(1, 33), 4, num_beams=3)[0, 33:]
    assert added("--beams", "3") == ["".join(f" w{i}" for i in best)]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [int(expected[1])]}))
    assert added() == added("--stream") == ["".join(f" w{i}" for i in expected[:1])]
    for extra, says in (
        (["--function", "decode"], "--function goes with --inputs"),
        (["--text", ""], "expects at least one token"),
        (["--max-new-tokens", "-1"], "max_new_tokens: expected a whole number, 0 or more, got -1"),
        (["--temperature", "0"], "without it and do_sample, the likeliest token is taken"),
        (["--stream", "--beams", "2"], "--stream expects --beams 1, got 2"),
    ):
        done = CliRunner().invoke(app, [*run, *extra])
        assert done.exit_code == 2 and says in done.output, done.output


def test_text_beyond_the_bounds_of_a_decoder_is_refused_or_said(
    llama: tuple[rt.Artifact, dict[str, Any]], tmp_path: Path
) -> None:
    """A prompt is not cut, and a text that ends for want of positions says so."""
    artifact, _ = llama
    path = artifact.save(tmp_path / "llama.rta")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with artifact.open() as model:
        decoder = Decoder(model)
        prefill = model.executors["prefill"].program
        _, most = bounds(prefill, prefill.buffers[prefill.inputs[0]].shape[1])
    assert decoder.room is not None and most is not None
    run = ["run", str(path), "--model", str(tmp_path), "--text"]
    done = CliRunner().invoke(app, [*run, " ".join(["w1"] * (most + 1))])
    assert done.exit_code == 2 and f"got {most + 1}" in " ".join(done.stderr.split()) and "'w1 w1" in done.stderr
    done = CliRunner().invoke(app, [*run, "w1 w2", "--truncate"])
    assert done.exit_code == 2 and "--truncate expects an encoder" in done.stderr
    short = " ".join(["w1"] * most)
    left = decoder.limit(most, 10**6)
    for extra in ([], ["--stream"]):
        with pytest.warns(RelaxTuneWarning, match=f"prompt 1 ends after {left} of {left + 5}"):
            assert CliRunner().invoke(app, [*run, short, "--max-new-tokens", str(left + 5), *extra]).exit_code == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert CliRunner().invoke(app, [*run, short, "--max-new-tokens", str(left), *extra]).exit_code == 0
    with artifact.open() as model:
        for options in ({}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}):
            prompts = [[1, 2], [1] * most]
            with pytest.warns(RelaxTuneWarning, match=f"prompt 2 ends after {left} of {left + 1}") as caught:
                rt.generate(model, prompts, left + 1, **options)  # type: ignore[arg-type]
            assert caught[0].filename == __file__


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
    assert done.exit_code == 2 and "expected a Hugging Face folder" in " ".join(done.output.split())
