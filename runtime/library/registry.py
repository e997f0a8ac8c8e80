"""The registry of libraries: built-in ones, and ones from entry points of installed packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from relax_tune.errors import ArtifactError, BuildError
from relax_tune.runtime.library import clblast, cublas_api
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.library.clblast import ClBlast
from relax_tune.runtime.library.cublas import CuBlas
from relax_tune.runtime.library.cublaslt import CuBlasLt
from relax_tune.runtime.library.onednn import OneDnn
from relax_tune.runtime.library.openblas import OpenBlas
from relax_tune.runtime.program.program import Program

GROUP = "relax_tune.libraries"
OURS: Mapping[type[Library], str] = {
    ClBlast: clblast.INSTALL,
    CuBlas: cublas_api.INSTALL,
    CuBlasLt: cublas_api.INSTALL,
    OneDnn: "pip install 'relax-tune[onednn]'",
    OpenBlas: "pip install 'relax-tune[openblas]'",
}
"""Our libraries, each with the way to install it."""


def open_libraries() -> dict[str, Library]:
    """Open every installed library, by name: a class of the `Library` protocol that opens without arguments.

    Raises: BuildError for a package whose entry point gives something else, or a name twice.
    """
    found: dict[str, Library] = {}
    for origin, kind in (*(("relax-tune", k) for k in OURS), *from_packages(GROUP)):
        try:
            library: Library = kind()
        except BuildError:  # not installed: a program that needs it says so, with what installs it
            continue
        except TypeError as error:
            raise BuildError(
                f"{origin}: wanted a class that opens a library, found: {error}; correct or remove it"
            ) from None
        if library.name in found or not all(r.split(".")[0] == library.name for r in library.routines):
            raise BuildError(
                f"{origin}: wanted a library of a name of its own, which its routines begin with, found {library.name!r} with "
                f"{', '.join(library.routines) or 'no routines'}; correct or remove it"
            )
        found[library.name] = library
    return found


def needed_libraries(program: Program, given: Mapping[str, Library] | None) -> Mapping[str, Library]:
    """Return the libraries for a program's steps: those given, or those installed; none are opened for a program without such steps.

    Raises: BuildError for a library that is missing; ArtifactError for a routine that it lacks."""
    steps = [*program.prepare, *(s for call in program.calls for variant in call.variants for s in variant.steps)]
    routines = sorted({step.target for step in steps if step.kind == "library"})
    if not routines:
        return {}
    libraries = open_libraries() if given is None else given
    for routine in routines:
        name = routine.split(".")[0]
        if name not in libraries:
            raise BuildError(
                f"{program.name}: wanted the library {name}, found {sorted(libraries) or 'none'}; "
                f"{how_to_install(name)}"
            )
        if routine not in libraries[name].routines:
            raise ArtifactError(f"{program.name}: wanted a routine of {name}, found {routine}")
    return libraries


def library_facts(libraries: Mapping[str, Library]) -> tuple[tuple[str, str], ...]:
    """Return sorted (name, fingerprint as one text, parts separated by `; `), on which library times depend."""
    return tuple(
        sorted((n, "; ".join(f"{key} {value}" for key, value in x.fingerprint())) for n, x in libraries.items())
    )


def how_to_install(name: str) -> str:
    """Say how to install a library: a command, or a place to look."""
    known = {kind.name: what for kind, what in OURS.items()}
    return known.get(name, f"install the package that brings the library {name!r}")


def from_packages(group: str) -> Iterator[tuple[str, Any]]:
    """Load the entry points of a group, each with its origin, in the order of package and name.

    Raises: BuildError for an entry point that cannot be imported."""
    points = sorted(entry_points(group=group), key=lambda p: (p.dist.name if p.dist else "", p.name))
    for point in points:
        origin = f"package {point.dist.name if point.dist else '?'}, entry point {group} {point.name!r}"
        try:
            yield origin, point.load()
        except (ImportError, AttributeError) as error:
            raise BuildError(f"{origin}: wanted {point.value}, found: {error}; correct or remove the package") from None
