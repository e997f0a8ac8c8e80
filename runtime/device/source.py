"""Putting several kernels into one translation unit.

Each `KernelSource.source` can be compiled on its own. Text that the printer repeats in every kernel (types, polynomial
functions) is between the lines `/*prelude*/` and `/*end prelude*/`. Each distinct prelude appears once.

Tests: `tests/runtime/device/test_sources.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from relax_tune.errors import BuildError
from relax_tune.runtime.program.program import KernelSource

PRELUDE, END_PRELUDE = "/*prelude*/", "/*end prelude*/"
_PRELUDE = re.compile(
    rf"^[ \t]*{re.escape(PRELUDE)}[ \t]*\n(.*?)^[ \t]*{re.escape(END_PRELUDE)}[ \t]*$\n?", re.DOTALL | re.MULTILINE
)
# a definition of a prelude, after its guard's `#ifndef`
_PARTS = re.compile(r"^#ifndef (?=RT_)", re.MULTILINE)

# Name of the last scalar of kernels with 32-bit integers, and its largest value for which 32 bits suffice.
NARROW, INT_MOST = "rt_most", (1 << 31) - 1
# compiles kernels with 64-bit integers
WIDE_FLAG = "-DRT_WIDE"

_SHARED = re.compile(r"/\*shared (\d{1,9})\*/")


def dynamic_shared_bytes(source: str) -> int:
    """Return the shared memory that launches of a CUDA kernel must request, as its text declares."""
    match = _SHARED.search(source)
    return 0 if match is None else int(match[1])


def wide_form(kernel: KernelSource) -> KernelSource | None:
    """Return the kernel for launches that need 64-bit integers; None if it has them already."""
    if NARROW not in kernel.source or WIDE_FLAG in kernel.flags:
        return None
    return replace(kernel, flags=(*kernel.flags, WIDE_FLAG))


def join_sources(kernels: Iterable[KernelSource]) -> str:
    """Join kernels to one translation unit: distinct preludes once, in order of first use, then the kernels' own text.

    A `#line` directive makes compiler messages name the kernel.

    Raises BuildError where two preludes define one name in two ways: the compiler would take the first for both.
    """
    preludes: dict[str, None] = {}
    defined: dict[str, str] = {}
    bodies: list[str] = []
    for kernel in kernels:
        for match in _PRELUDE.finditer(kernel.source):
            if match[1] not in preludes:
                preludes[match[1]] = None
                _check_definitions(kernel.name, match[1], defined)
        body = _PRELUDE.sub("", kernel.source).strip("\n")
        bodies.append(f'#line 1 "{kernel.name}"\n{body}\n')
    return "".join(preludes) + "".join(bodies)


def _check_definitions(kernel: str, prelude: str, defined: dict[str, str]) -> None:
    """Add the parts of a prelude, each with its guard, to the parts by name."""
    for part in _PARTS.split(prelude)[1:]:
        name = part.split("\n", 1)[0].strip()
        if defined.setdefault(name, part.rstrip()) != part.rstrip():
            raise BuildError(
                f"kernel {kernel}: expected one definition of {name} in a translation unit, got two that differ; build the artifact again "
                "with this version"
            )


def group_by_flags(kernels: Iterable[KernelSource]) -> dict[tuple[str, ...], list[KernelSource]]:
    """Group kernels by their flags, in the order given. A group may share a translation unit."""
    groups: dict[tuple[str, ...], list[KernelSource]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.flags, []).append(kernel)
    return groups
