"""The whole way from the command line: tune, build, run and bench a tiny model in real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray
from tests.tuner.cli.cli_model import HEADS, HIDDEN, LAYERS, SENTENCES, WORDS, make_bert
from typer.testing import CliRunner, Result

from relax_tune.database.store import open_store
from relax_tune.errors import DatabaseError
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.shapes import ShapeProfile
from relax_tune.tuner.cli.app import app

pytestmark = [pytest.mark.ccompiler, pytest.mark.self_test]
RUNNER = CliRunner()
BOUNDS = ("--bound", "b=1:2", "--bound", "n=1:24")


def inside(folder: Path, *arguments: str) -> Result:
    """`relax-tune` in this process, in another folder."""
    with contextlib.chdir(folder):
        return RUNNER.invoke(app, list(arguments))


def command(folder: Path, *arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """`relax-tune` in a process of its own, on one thread: the tests share the machine with others."""
    return subprocess.run(
        [sys.executable, "-c", "from relax_tune.tuner.cli.start import main; main()", *arguments],
        cwd=folder,
        env=_environment(folder, hash_seed),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _environment(folder: Path, hash_seed: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RELAX_TUNE_") and k != "COLUMNS"}
    cache = str(folder / "cache")
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed, "RELAX_TUNE_CACHE": cache}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with bert/, t.db and bert-c.rta, and what `tune --json` said."""
    folder = tmp_path_factory.mktemp("tuned")
    make_bert(folder / "bert")
    done = command(folder, *_tune(), "--json")
    assert done.returncode == 0, done.stderr
    assert "best tuned" in done.stderr  # plain progress lines, and none of them on stdout
    document: dict[str, Any] = json.loads(done.stdout)
    return folder, document


def _tune(*more: str) -> tuple[str, ...]:
    return ("tune", "bert", "--target", "c", "--db", "t.db", "--effort", "quick", "--trials", "2", *BOUNDS, *more)


@pytest.mark.process
def test_tune_measures_every_task_and_prints_dispatch(tuned: tuple[Path, dict[str, Any]]) -> None:
    folder, document = tuned
    assert (folder / "bert-c.rta").is_file() and document["artifact"] == "bert-c.rta"
    with open_store(f"sqlite:///{folder / 't.db'}", read_only=True) as store:
        (target,) = store.targets()
        assert target.key == document["target"]["key"]
        assert store.count(target.key) == document["measurements"] > 0
        assert [j.state for j in store.jobs()] == ["done"]
    program = load_artifact(folder / "bert-c.rta").program
    assert {c.task for c in program.calls} == {t["key"] for t in document["tasks"]}
    assert sum(t["calls"] for t in document["tasks"]) == len(program.calls)
    assert sum(t["share"] for t in document["tasks"]) == pytest.approx(1.0)
    for task in document["tasks"]:
        assert task["dispatch"][-1][0] in ("else", "always")
        assert all(shape["generic"] is not None for shape in task["shapes"])


@pytest.mark.process
def test_the_same_command_again_measures_nothing_and_writes_the_same_bytes(
    tuned: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = tuned
    done = command(folder, *_tune("--out", "again.rta"), hash_seed="1")
    assert done.returncode == 0, done.stderr
    assert "0 new measurements" in done.stdout
    assert (folder / "again.rta").read_bytes() == (folder / "bert-c.rta").read_bytes()


@pytest.mark.heavy
@pytest.mark.process
def test_build_from_records_repeats_bytes_and_obeys_policies(tuned: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = tuned
    for policy, kinds in (("measured", None), ("generic", {"generic"})):
        what = ("build", "bert", "--target", "c", "--db", "t.db", "--effort", "quick", *BOUNDS)
        arguments = (*what, "--policy", policy, "--out", "b.rta")
        done = command(folder, *arguments, hash_seed="2")
        assert done.returncode == 0, done.stderr
        if kinds is None:
            assert (folder / "b.rta").read_bytes() == (folder / "bert-c.rta").read_bytes()
        else:
            program = load_artifact(folder / "b.rta").program
            assert {v.label for c in program.calls for v in c.variants} == kinds
    done = inside(folder, "build", "bert", "--target", "c", "--db", "none.db", *BOUNDS, "--out", "b.rta", "--overwrite")
    assert done.exit_code == 2 and "none.db: no file exists" in " ".join(done.output.split())
    assert not (folder / "none.db").exists()
    what = ("build", "bert", "--target", "c", *BOUNDS, "--out", "b.rta", "--overwrite", "--require-measured", "--db")
    assert command(folder, *what, "t.db", "--effort", "quick").returncode == 0
    refused = command(folder, *what, "memory://")
    assert refused.returncode == 2 and "layer_norm" in refused.stderr


@pytest.mark.process
def test_run_on_arrays_gives_the_model_s_embeddings(tuned: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = tuned
    generator = np.random.default_rng(5)
    for b, n in ((1, 1), (2, 7), (1, 24)):
        ids = generator.integers(0, len(WORDS), (b, n))
        mask = np.ones((b, n), np.int64)
        mask[-1, n // 2 + 1 :] = 0
        np.savez(folder / "in.npz", input_ids=ids, attention_mask=mask)
        done = inside(
            folder, "run", "bert-c.rta", "--inputs", "in.npz", "--out", "out.npz", "--record-shapes", "s.json"
        )
        assert done.exit_code == 0, done.stderr
        with np.load(folder / "out.npz") as found:
            np.testing.assert_allclose(found["output0"], reference(folder / "bert", ids, mask), atol=1e-5)
    served = ShapeProfile.read(folder / "s.json").histograms["main"]
    assert {name: h.values for name, h in served.items()} == {"b": {1: 2, 2: 1}, "n": {1: 1, 7: 1, 24: 1}}


@pytest.mark.process
def test_run_on_sentences_tokenizes_pads_and_batches(tuned: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = tuned
    texts = [part for sentence in SENTENCES for part in ("--text", sentence)]
    done = inside(folder, "run", "bert-c.rta", "--model", "bert", *texts, "--out", "e.npz", "--json")
    assert done.exit_code == 0, done.stderr
    similarity = np.array(json.loads(done.stdout)["cosine"])
    wanted = []
    for sentence in SENTENCES:
        ids = np.array([[WORDS.index(w) for w in ("[CLS]", *sentence.split(), "[SEP]")]])
        wanted.append(reference(folder / "bert", ids, np.ones_like(ids))[0])
    with np.load(folder / "e.npz") as found:
        np.testing.assert_allclose(found["embeddings"], wanted, atol=1e-5)
    np.testing.assert_allclose(similarity, np.array(wanted) @ np.array(wanted).T, atol=1e-5)


@pytest.mark.process
def test_bench_times_every_artifact_at_every_shape(tuned: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = tuned
    (folder / "copy.rta").write_bytes((folder / "bert-c.rta").read_bytes())
    shapes = ("--shape", "b=1,n=8", "--shape", "b=2,n=24")
    done = inside(folder, "bench", "bert-c.rta", "copy.rta", *shapes, "--repeats", "4", "--json")
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)["latency"]
    assert [r["shape"] for r in rows] == [{"b": 1, "n": 8}, {"b": 2, "n": 24}]
    for row in rows:
        assert {name: len(samples) for name, samples in row["samples_secs"].items()} == {"bert-c": 4, "copy": 4}
        assert all(secs > 0 for secs in row["median_secs"].values())


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "bert-c.rta", "--shape", "b=1,n=25"), "n <= 24"),
        (("bench", "bert-c.rta", "--shape", "n=2"), "b"),
        (("bench", "bert-c.rta"), "--shape b=...,n=..."),
        (("run", "bert-c.rta", "--inputs", "missing.npz"), "missing.npz"),
        (("run", "bert-c.rta", "--inputs", "t.db"), "t.db"),
        (("run", "bert-c.rta", "--text", "a"), "--model"),
        (("run", "bert-c.rta", "--text", "a", "--model", "cache"), "tokenizer.json"),
        (("run", "bert-c.rta", "--inputs", "one.npz"), "attention_mask"),
        (("run", "bert-c.rta", "--inputs", "long.npz"), "n <= 24"),
    ],
)
def test_wrong_inputs_are_one_paragraph(
    tuned: tuple[Path, dict[str, Any]], arguments: tuple[str, ...], says: str
) -> None:
    folder, _ = tuned
    np.savez(folder / "one.npz", input_ids=np.ones((1, 2), np.int64))
    np.savez(folder / "long.npz", input_ids=np.ones((1, 25), np.int64), attention_mask=np.ones((1, 25), np.int64))
    done = inside(folder, *arguments)
    assert done.exit_code == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]  # tuned with other threads
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0], done.stderr


@pytest.mark.process
def test_interrupted_tune_exits_130_and_keeps_records(tmp_path: Path) -> None:
    make_bert(tmp_path / "bert")
    arguments = ("tune", "bert", "--target", "c", "--db", "t.db", "--effort", "quick", "--trials", "500", *BOUNDS)
    process = subprocess.Popen(
        [sys.executable, "-c", "from relax_tune.tuner.cli.start import main; main()", *arguments],
        cwd=tmp_path,
        env=_environment(tmp_path, "0"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        give_up = time.monotonic() + 120
        while time.monotonic() < give_up and process.poll() is None and not _records(tmp_path / "t.db"):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "the same command again" in errors and "Traceback" not in errors
    assert _records(tmp_path / "t.db") > 0
    with open_store(f"sqlite:///{tmp_path / 't.db'}", read_only=True) as store:
        assert [j.state for j in store.jobs()] == ["interrupted"]


def _records(path: Path) -> int:
    if not path.exists():
        return 0
    with contextlib.suppress(DatabaseError), open_store(f"sqlite:///{path}", read_only=True) as store:
        return sum(store.count(t.key) for t in store.targets())
    return 0  # not made to the end yet


def reference(folder: Path, ids: NDArray[Any], mask: NDArray[Any]) -> NDArray[np.float64]:
    """The encoder in plain NumPy: (b, n) ids and mask to (b, HIDDEN) unit-length embeddings."""
    w = {k: v.astype(np.float64) for k, v in safetensors.numpy.load_file(folder / "model.safetensors").items()}

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return np.asarray(scaled * w[f"{name}.weight"] + w[f"{name}.bias"])

    def linear(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return np.asarray(x @ w[f"{name}.weight"].T + w[f"{name}.bias"])

    def heads(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x.reshape(*x.shape[:2], HEADS, HIDDEN // HEADS).transpose(0, 2, 1, 3)

    # erf to 1e-7 by integrating its derivative on a fine grid: nothing beyond NumPy is at hand
    grid = np.linspace(-6, 6, 24_001)
    density = np.exp(-(grid**2)) * 2 / np.sqrt(np.pi)
    steps = (density[1:] + density[:-1]) / 2 * np.diff(grid)
    integral = np.concatenate([[0.0], np.cumsum(steps)]) - 1

    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]] + w["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        q, k, v = (heads(linear(x, f"{layer}.attention.self.{part}")) for part in ("query", "key", "value"))
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(HIDDEN // HEADS)
        scores = np.where(mask[:, None, None, :] == 1, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        context = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = norm(x + linear(context, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        inner = linear(x, f"{layer}.intermediate.dense")
        inner = inner * (1 + np.interp(inner / np.sqrt(2), grid, integral)) / 2
        x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    admitted = mask[:, :, None].astype(np.float64)
    pooled = (x * admitted).sum(1) / admitted.sum(1)
    return np.asarray(pooled / np.linalg.norm(pooled, axis=1, keepdims=True))
