"""The packages of the base install are enough to run, time and describe artifacts by commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from tests.support.tuner_models import row_scale

import relax_tune as rt

pytestmark = [pytest.mark.process, pytest.mark.ccompiler, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
BASE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def required(names: list[str]) -> set[str]:
    """The distributions that these require, and those that they require, without extras."""
    known = set[str]()
    while names:
        name = re.match(r"[\w.-]+", names.pop())
        assert name is not None
        if name[0] not in known:
            known.add(name[0])
            needs = metadata.distribution(name[0]).requires or []
            names += [n for n in needs if "extra ==" not in n and "Windows" not in n and "python_version <" not in n]
    return known


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of the base install, an artifact and inputs."""
    folder = tmp_path_factory.mktemp("base")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "this.pth").write_text(f"{ROOT / 'src'}\n")
    for name in required(list(BASE)):
        found = metadata.distribution(name)
        for part in {Path(f.parts[0]) for f in found.files or () if f.parts[0] not in ("..", "__pycache__")}:
            (site / part).symlink_to(Path(str(found.locate_file(part))))
    rt.build(row_scale(), target="c", db="memory://", self_test=False).save(folder / "m.rta")
    shape = [4 if isinstance(d, str) else d for d in rt.load_artifact(folder / "m.rta").inputs[0].shape]  # type: ignore[union-attr]
    np.savez(folder / "in.npz", **{rt.load_artifact(folder / "m.rta").inputs[0].name: np.ones(shape, np.float32)})
    return folder


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (python,) = (folder / "venv" / "bin").glob("python")
    hidden = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "RELAX_TUNE_"))}
    environment = hidden | {"RELAX_TUNE_CACHE": str(folder / "cache"), "HOME": str(folder)}
    return subprocess.run(
        [str(python), "-m", "relax_tune", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (("--help",), "run "),
        (("run", "--help"), "--inputs"),
        (("run", "m.rta", "--inputs", "in.npz"), "output0: float32"),
        (("bench", "m.rta", "--repeats", "1", "--shape", "n=4"), "n=4"),
        (("export", "m.rta", "--c", "sources"), "wrote main"),
        (("devices",), "gcc"),
        (("doctor",), "this installation runs artifacts"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_base_install_command_works(folder: Path, arguments: tuple[str, ...], shows: str) -> None:
    done = command(folder, *arguments)
    assert done.returncode == 0 and shows in done.stdout + done.stderr, done.stdout + done.stderr


def test_base_install_command_of_the_tuner_names_the_extra(folder: Path) -> None:
    for arguments in (("tune", "m.relax"), ("build", "m.relax"), ("db", "stats")):
        done = command(folder, *arguments)
        assert (done.returncode, done.stdout) == (2, "") and "pip install 'relax-tune[tune]'" in done.stderr
    done = command(folder, "serve", "m.rta")
    assert (done.returncode, done.stdout) == (2, "") and "pip install 'relax-tune[serve]'" in done.stderr
