"""The library alternatives of this machine: our table and what installed packages add to it."""

from __future__ import annotations

from collections.abc import Collection

from relax_tune.errors import BuildError
from relax_tune.ir.passes.library.library_forms import ALTERNATIVES, Alternative
from relax_tune.runtime.library.registry import from_packages, open_libraries

GROUP = "relax_tune.alternatives"


def all_alternatives() -> tuple[Alternative, ...]:
    """Return our table, then the entries of installed packages. Raises BuildError for an invalid entry of a package."""
    found = list(ALTERNATIVES)
    for origin, given in from_packages(GROUP):
        for entry in given if isinstance(given, (tuple, list)) else (given,):
            if not isinstance(entry, Alternative):
                raise BuildError(
                    f"{origin}: wanted an Alternative or several, found {entry!r:.80}; correct or remove it"
                )
            if any(entry.routine == other.routine for other in found):
                raise BuildError(f"{origin}: wanted one entry for {entry.routine!r}, found a second; remove one")
            found.append(entry)
    return tuple(found)


def alternatives_here(language: str, libraries: Collection[str] | None = None) -> tuple[Alternative, ...]:
    """Return the alternatives whose library is installed and reaches devices of this language.

    libraries: names of the installed ones, when they are known."""
    here = open_libraries() if libraries is None else libraries
    return tuple(a for a in all_alternatives() if a.library in here and language in a.targets)
