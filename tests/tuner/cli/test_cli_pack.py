"""`relax-tune pack` and `relax-tune install`: from a model on one machine to an artifact on another, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.tuner_models import feed_forward, feed_forward_reference
from tests.wrong_input.storage_cases import inside, refused

import relax_tune as rt
from relax_tune.ir.frontend.text import save_text
from relax_tune.tuner.pack.pack import read_pack

FRONTENDS = ("gguf", "hf", "load", "onnx", "text", "torch")
WITHOUT_FRONTENDS = f"""
import sys
sys.modules |= dict.fromkeys(("torch", "onnx", "gguf", *("relax_tune.ir.frontend." + n for n in {FRONTENDS!r})))
from relax_tune.tuner.cli.start import main
main()
"""

pytestmark = [pytest.mark.ccompiler, pytest.mark.process, pytest.mark.self_test]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and its pack made where nothing is on record."""
    found = tmp_path_factory.mktemp("pack")
    save_text(feed_forward(), found / "model.relax")
    done = inside(
        found, "pack", "model.relax", "--db", "memory://", "--effort", "quick", "--out", "model.rtp", "--json"
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["digest"] == read_pack(found / "model.rtp").digest and said["notes"] == []
    missing = inside(found, "pack", "model.relax", "--db", "none.db", "--out", "other.rtp")
    assert missing.exit_code == 2 and "none.db" in missing.output and not (found / "none.db").exists()
    return found


def install(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`relax-tune install` in a process in which no frontend can be imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RELAX_TUNE_") and k != "COLUMNS"}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_FRONTENDS, "install", *arguments],
        cwd=folder,
        env=kept | {"RELAX_TUNE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.heavy
@pytest.mark.slow
def test_install_imports_no_frontend_and_a_second_one_measures_nothing(folder: Path) -> None:
    more = ("model.rtp", "--target", "c", "--db", "here.db", "--budget", "3", "--digest")
    first = install(folder, *more, read_pack(folder / "model.rtp").digest, "--json")
    assert first.returncode == 0, first.stderr
    said = json.loads(first.stdout)
    assert said["artifact"] == "model-c.rta" and said["candidates"] == 3 and not said["warm"]
    assert said["secs"]["total"] == pytest.approx(sum(said["secs"][s] for s in ("read", "lower", "measure", "build")))
    assert "cold: 3 candidates timed" in first.stderr
    second = install(folder, *more[:-1], "--out", "again.rta")
    assert second.returncode == 0 and "warm: nothing measured" in second.stdout, second.stderr
    assert (folder / "again.rta").read_bytes() == (folder / "model-c.rta").read_bytes()
    x = np.random.default_rng(1).standard_normal((5, 24)).astype(np.float32)
    with rt.load(folder / "model-c.rta") as model:
        np.testing.assert_allclose(model.run([x])[0], feed_forward_reference(feed_forward(), x), rtol=1e-3, atol=1e-3)
    packed = inside(folder, "pack", "model.relax", "--db", "here.db", "--effort", "quick", "--out", "full.rtp")
    assert packed.exit_code == 0 and "measurements on " in packed.stdout, packed.output
    direct = rt.install(folder / "full.rtp", target="c", db="memory://", measure=False)
    assert direct.work.measurements == 0 and direct.artifact.functions == ("main",)
    told = install(folder, "full.rtp", "--target", "c", "--db", "other.db", "--no-measure", "--out", "planned.rta")
    assert told.returncode == 0 and "nothing timed, as asked" in told.stdout, told.stderr


def test_pack_and_install_refuse_wrong_files_and_places(folder: Path, tmp_path: Path) -> None:
    where = str(folder / "model.rtp")
    assert "no such file" in refused(tmp_path, "install", "none.rtp", "--target", "c")
    (tmp_path / "text.rtp").write_text("hello")
    assert "another kind of file" in refused(tmp_path, "install", "text.rtp", "--target", "c")
    assert "expected the hash abc" in refused(tmp_path, "install", where, "--target", "c", "--digest", "abc")
    (tmp_path / "model-c.rta").write_text("hello")
    assert "is no whole artifact" in refused(tmp_path, "install", where, "--target", "c")
    assert "--budget expects" in refused(tmp_path, "install", where, "--target", "c", "--budget", "-1")
    (tmp_path / "out.rtp").write_text("hello")
    pack = ("pack", str(folder / "model.relax"), "--db", "memory://", "--out")
    assert "is no whole pack" in refused(tmp_path, *pack, "out.rtp")
    assert "got a folder" in refused(tmp_path, *pack, ".")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model-c.rta", "out.rtp", "text.rtp"]
