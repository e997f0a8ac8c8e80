"""The library routines that tasks may use: a built-in table, and entries of installed packages.

Tests: `tests/tuner/emit/test_library_packages.py`.
"""

from __future__ import annotations

from collections.abc import Collection

from relax_tune.ir.passes.library.library_forms import ALTERNATIVES, Alternative
from relax_tune.plugins import load_plugins
from relax_tune.runtime.library.registry import open_libraries

GROUP = "relax_tune.alternatives"


def all_alternatives() -> tuple[Alternative, ...]:
    """Return the built-in table, then the entries of installed packages.

    Raises:
        BuildError: A package cannot be imported, or has an invalid entry.
    """
    alternatives = list(ALTERNATIVES)
    for plugin in load_plugins(GROUP, strict=True):
        for entry in plugin.value if isinstance(plugin.value, (tuple, list)) else (plugin.value,):
            if not isinstance(entry, Alternative):
                raise plugin.refusal("an Alternative or several", f"{entry!r:.80}")
            if any(entry.routine == other.routine for other in alternatives):
                raise plugin.refusal(f"one entry for {entry.routine!r}", "a second")
            alternatives.append(entry)
    return tuple(alternatives)


def alternatives_here(language: str, libraries: Collection[str] | None = None) -> tuple[Alternative, ...]:
    """Return the alternatives whose library is installed and supports devices of this language.

    Args:
        libraries: Names of the installed libraries; None: they are looked up.
    """
    installed = open_libraries() if libraries is None else libraries
    return tuple(a for a in all_alternatives() if a.library in installed and language in a.targets)
