"""Registry of libraries: the built-in ones and the plug-ins of installed distributions.

Tests: `tests/tuner/emit/test_library_packages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.errors import ArtifactError, BuildError
from relax_tune.plugins import Plugin, load_plugins
from relax_tune.runtime.library import clblast, cublas_api
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.library.clblast import ClBlast
from relax_tune.runtime.library.cublas import CuBlas
from relax_tune.runtime.library.cublaslt import CuBlasLt
from relax_tune.runtime.library.onednn import OneDnn
from relax_tune.runtime.library.openblas import OpenBlas
from relax_tune.runtime.program.program import KernelSource, Program

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

    Raises:
        BuildError: A plug-in cannot be imported, is not such a class, or has a name that is in use.
    """
    libraries: dict[str, Library] = {}
    for plugin in (*(Plugin(k.name, k, "relax-tune") for k in OURS), *load_plugins(GROUP, strict=True)):
        try:
            library: Library = plugin.value()
        except BuildError:  # not installed: a program that needs it says so, with what installs it
            continue
        except TypeError as error:
            raise plugin.refusal("a class that opens a library", error) from None
        if library.name in libraries or not all(r.split(".")[0] == library.name for r in library.routines):
            routines = ", ".join(library.routines) or "no routines"
            raise plugin.refusal(
                "a library of an unused name that its routines begin with", f"{library.name!r} with {routines}"
            )
        libraries[library.name] = library
    return libraries


def _routines(program: Program) -> list[str]:
    """Return the routines of libraries that a program calls."""
    steps = [*program.prepare, *(s for call in program.calls for variant in call.variants for s in variant.steps)]
    return sorted({step.target for step in steps if step.kind == "library"})


def needed_libraries(program: Program, given: Mapping[str, Library] | None) -> Mapping[str, Library]:
    """Return the libraries for a program's steps: those given, or those installed; none are opened for a program without such steps.

    Raises: BuildError for a library that is missing; ArtifactError for a routine that it lacks."""
    routines = _routines(program)
    if not routines:
        return {}
    libraries = open_libraries() if given is None else given
    for routine in routines:
        name = routine.split(".")[0]
        if name not in libraries:
            raise BuildError(
                f"{program.name}: expected the library {name}, got {sorted(libraries) or 'none'}; "
                f"{how_to_install(name)}"
            )
        if routine not in libraries[name].routines:
            raise ArtifactError(f"{program.name}: expected a routine of {name}, got {routine}")
    return libraries


def library_kernels(programs: Sequence[Program]) -> list[KernelSource]:
    """Return the kernels in C that our libraries compile on target `c` for the steps of some programs."""
    used = {routine.split(".")[0] for program in programs for routine in _routines(program)}
    return list(OpenBlas.kernels) if OpenBlas.name in used else []


def library_facts(libraries: Mapping[str, Library]) -> tuple[tuple[str, str], ...]:
    """Return sorted (name, fingerprint as one text, parts separated by `; `), on which library times depend."""
    return tuple(
        sorted((n, "; ".join(f"{key} {value}" for key, value in x.fingerprint())) for n, x in libraries.items())
    )


def how_to_install(name: str) -> str:
    """Say how to install a library: a command, or a place to look."""
    known = {kind.name: what for kind, what in OURS.items()}
    return known.get(name, f"install the package that brings the library {name!r}")
