"""The environment for conda: its extras are extras of the package, its Python is one that the package supports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra cluster)")
ROOT = Path(__file__).parents[2]


def test_environment_of_conda_names_extras_and_a_supported_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = yaml.safe_load((ROOT / "deploy" / "environment.yml").read_text())
    *packages, of_pip = environment["dependencies"]
    (installed,) = of_pip["pip"]
    path, extras = re.fullmatch(r"--editable (\S+)\[([\w,]+)\]", installed).groups()  # type: ignore[union-attr]
    assert (ROOT / "deploy" / path).resolve() == ROOT
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (python,) = (p.partition("=")[2] for p in packages if p.startswith("python="))
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
