"""The libraries there are."""

from __future__ import annotations

from relax_tune.errors import BuildError
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.library.openblas import OpenBlas


def open_libraries() -> dict[str, Library]:
    """Every library that is installed here, by name."""
    found: dict[str, Library] = {}
    for kind in (OpenBlas,):
        try:
            library = kind()
        except BuildError:  # not installed: a program that needs it says so, with the extra to install
            continue
        found[library.name] = library
    return found
