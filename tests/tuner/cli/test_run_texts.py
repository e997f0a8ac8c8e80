"""`run --text` with texts beyond what the artifact takes: refused, or cut with a word about each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.support.effort import GENERIC
from tests.tuner.cli.cli_model import WORDS, make_bert
from typer.testing import CliRunner, Result

import relax_tune as rt
from relax_tune.tuner.cli.app import app

pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra text)")
pytestmark = [pytest.mark.ccompiler, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
MOST = 6
LONG, OTHER = "the cat sat on the mat", "the cat sat on rain falls"
"""Eight tokens each, with the marks around them; the first six are the same."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT, its artifact of at most MOST tokens and of two texts, and one of a fixed length."""
    folder = make_bert(tmp_path_factory.mktemp("bert"))
    for name, bounds in (("m", (1, MOST)), ("fixed", (MOST, MOST))):
        module = rt.load_model(folder, {"b": (1, 2), "n": bounds})
        rt.build(module, target="c", db="memory://", self_test=False, **GENERIC).save(folder / f"{name}.rta")
    return folder


def run(folder: Path, *arguments: str, artifact: str = "m.rta") -> Result:
    return CliRunner().invoke(app, ["run", str(folder / artifact), "--model", str(folder), *arguments])


@pytest.mark.parametrize("others", [(), ("rain",), ("rain", "a dog", "rain falls slowly")])
def test_run_of_text_beyond_bound_is_refused(folder: Path, others: tuple[str, ...], tmp_path: Path) -> None:
    """Whichever of several texts is too long, and in whichever batch it is."""
    given = [part for text in (*others, LONG) for part in ("--text", text)]
    done = run(folder, *given, "--out", str(tmp_path / "e.npz"))
    assert done.exit_code == 2 and not done.stdout and not (tmp_path / "e.npz").exists()
    said = " ".join(done.stderr.split())
    for part in (repr(LONG), "got 8", "n <= 6", "--bound n=1:8", "--truncate"):
        assert part in said, (part, said)


def test_run_ignores_the_tokenizer_s_own_truncation(folder: Path, tmp_path: Path) -> None:
    """Many folders' tokenizers cut by themselves, without a word."""
    document = json.loads((folder / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["run", str(folder / "m.rta"), "--model", str(tmp_path), "--text", LONG])
    assert done.exit_code == 2 and "got 8" in " ".join(done.stderr.split())


def test_run_of_text_at_the_bound_is_whole(folder: Path) -> None:
    done = run(folder, "--text", "the cat sat on", "--text", "a dog ran home", "--json")
    assert done.exit_code == 0 and "truncate" not in done.stderr + done.stdout
    (_, similarity), _ = json.loads(done.stdout)["cosine"]
    assert similarity < 0.999


def test_run_truncated_names_each_cut(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "e.npz"
    done = run(folder, "--text", LONG, "--text", OTHER, "--text", "rain", "--truncate", "--json", "--out", str(out))
    assert done.exit_code == 0
    lines = [line for line in done.stderr.splitlines() if "is cut" in line]
    assert len(lines) == 2 and repr(LONG) in lines[0] and "2 of 8" in lines[0] and repr(OTHER) in lines[1]
    ids = np.array([[WORDS.index(w) for w in ("[CLS]", *LONG.split()[: MOST - 2], "[SEP]")]])
    with rt.load(folder / "m.rta") as model, np.load(out) as found:
        (wanted,) = model.run([ids, np.ones_like(ids)])
        np.testing.assert_allclose(found["embeddings"][0], wanted[0], atol=1e-5)


def test_run_of_text_beyond_a_fixed_length_names_no_bound(folder: Path) -> None:
    done = run(folder, "--text", LONG, artifact="fixed.rta")
    assert done.exit_code == 2 and "got 8" in " ".join(done.stderr.split())


def test_run_truncate_without_text_is_refused(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input_ids=np.ones((1, 3), np.int64))
    done = CliRunner().invoke(app, ["run", str(folder / "m.rta"), "--inputs", str(tmp_path / "x.npz"), "--truncate"])
    assert done.exit_code == 2 and "--truncate" in done.stderr
