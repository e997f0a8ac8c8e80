"""The packages of the wheel and the README that a package index shows.

The packages are the top-level folders, which a checkout without symbolic links has too. The links in `src/relax_tune` show
the same folders to type checkers, and to Python where nothing is installed (`PYTHONPATH=src`).
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
FOLDERS = ("database", "ir", "runtime", "schedules", "tuner")


def readme() -> str:
    """Return README.md with its relative links pointing into the repository, at the tag of this version."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]
    base = f"{project['urls']['Repository']}/blob/v{project['version']}/"
    text = re.sub(r"\]\((?![a-z]+:|#)([^)]+\.svg)\)", rf"]({base}\1?raw=true)", (HERE / "README.md").read_text("utf-8"))
    return re.sub(r"\]\((?![a-z]+:|#)", rf"]({base}", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=[
        "relax_tune",
        *(f"relax_tune.{folder}" for folder in FOLDERS),
        *(f"relax_tune.{folder}.{package}" for folder in FOLDERS for package in find_packages(folder)),
    ],
    package_dir={"relax_tune": "src/relax_tune", **{f"relax_tune.{folder}": folder for folder in FOLDERS}},
)
