"""Paths of models, also inside installed packages. Imports no frontend.

Tests: `tests/ir/frontend/test_ways_in.py`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from relax_tune.errors import UserError

PACKAGE = "package:"


def _instead(model: object) -> str:
    """Return what to give in place of an object that is no model."""
    if isinstance(model, type):
        return "give an instance of it"
    if isinstance(model, Mapping):
        return "weights are no model: give the torch module that they belong to, or a folder with config.json"
    if callable(model):
        return "give a torch module that calls it"
    return "give a torch module, or text or a Path"


def find_model(model: object) -> Path:
    """Return the path of a model. `package:NAME/FOLDER` is looked up without importing the package.

    Raises:
        UserError: The package or the path in it does not exist.
    """
    if not isinstance(model, (str, os.PathLike)):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UserError(f"expected a model, or the path of one, got {kind}; {_instead(model)}")
    given = os.fsdecode(model)
    if not given.startswith(PACKAGE):
        return Path(given)
    name, _, inside = given.removeprefix(PACKAGE).partition("/")
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:  # a module that is no package, such as __main__
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise UserError(f"{given}: the package {name!r} is not installed; install it with pip")
    path = Path(places[0], inside)
    if not path_exists(path):
        raise UserError(f"{given}: {inside!r} does not exist in {places[0]}; correct the part after the /")
    return path


def path_exists(path: Path) -> bool:
    """Return True if a path exists. Raises UserError for an inaccessible path: a name too long, a folder without permission."""
    try:
        return path.exists()
    except OSError as error:
        raise UserError(f"{path!s:.200}: the path cannot be read: {error.strerror}; give another path") from None
