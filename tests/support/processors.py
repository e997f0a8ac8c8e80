"""Processors that tests describe: rules, code and goldens are tested for each of them, whatever machine runs the tests.

`RELAX_TUNE_TEST_PROCESSOR=NAME` runs any tests as on the processor NAME: this process and those it starts read its instruction
sets instead of the machine's, and gcc compiles for it (`make test-processors`).
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from relax_tune.runtime.device import host
from relax_tune.schedules.target import HardwareInfo

VARIABLE = "RELAX_TUNE_TEST_PROCESSOR"
"""The variable that names the processor to stand in for this machine's."""
HERE = host.cpu_flags()
"""Instruction sets of this machine, read before anything stands in for it."""


@dataclass(frozen=True)
class Processor:
    """An x86-64 processor as tests describe it.

    flags: instruction sets, as Linux names them
    options: of gcc, to compile for it
    limits: what a C device tells of it, without caches and workers; written by hand, so that tests can compare
    """

    name: str
    flags: frozenset[str]
    options: tuple[str, ...]
    limits: Mapping[str, int]

    @property
    def machine(self) -> HardwareInfo:
        """The processor with two cores and caches of usual sizes."""
        caches = {"l1_bytes": 48 << 10, "l2_bytes": 1 << 20, "l3_bytes": 32 << 20}
        return HardwareInfo.from_limits("c", {"workers": 2, **caches, **self.limits})

    @property
    def cpuinfo(self) -> str:
        """What Linux says of its first core in /proc/cpuinfo."""
        return f"processor\t: 0\nmodel name\t: described {self.name}\nflags\t\t: {' '.join(sorted(self.flags))}\n\n"

    @property
    def runs_here(self) -> bool:
        """This machine can execute what is compiled for the processor."""
        return self.flags <= HERE

    @property
    def compiles_here(self) -> bool:
        """This machine's gcc knows the processor."""
        return _accepts(self.options)

    def stand_in(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        """Let this process and its children read the processor's instruction sets, and let gcc compile for it.

        Args:
            patch: undoes it
            folder: folder for the files of children
        """
        (folder / "cpuinfo").write_text(self.cpuinfo)
        gcc = folder / "gcc"
        words = " ".join(map(shlex.quote, self.options))
        gcc.write_text(
            f'#!/bin/sh\nn=$#\nfor a; do [ "$a" = -march=native ] && set -- "$@" {words} || set -- "$@" "$a"; done\n'
            f'shift $n\nexec {shlex.quote(_gcc())} "$@"\n'
        )
        gcc.chmod(0o755)
        module = "from pathlib import Path\nfrom relax_tune.runtime.device import host\n"
        (folder / "sitecustomize.py").write_text(f"{module}host._CPUINFO = Path({str(folder / 'cpuinfo')!r})\n")
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("CC", str(gcc))
        patch.setattr(host, "_CPUINFO", folder / "cpuinfo")


SSE2 = frozenset({"fpu", "sse", "sse2", "fxsr", "mmx", "cx8"})
AVX2 = SSE2 | {"pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "f16c", "fma", "avx2", "bmi1", "bmi2", "movbe"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
DOTS = AVX512 | {"avx512_vnni", "avx512_bf16"}
AMX = DOTS | {"amx_tile", "amx_int8", "amx_bf16"}
_V4 = "-march=x86-64-v4"


def _limits(vector_bits: int, registers: int, **products: int) -> Mapping[str, int]:
    return {
        "vector_bits": vector_bits, "max_vector_lanes": vector_bits // 32, "registers": registers,
        "max_local_bytes": 0, "max_group_size": 1, **products,
    }  # fmt: skip


PROCESSORS: Mapping[str, Processor] = {
    p.name: p
    for p in (
        Processor("sse2", SSE2, ("-march=x86-64",), _limits(128, 16)),
        Processor("avx2", AVX2, ("-march=x86-64-v3",), _limits(256, 16)),
        Processor("avx2-vnni", AVX2 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni"), _limits(256, 16, byte_dots=1)),
        Processor("avx512", AVX512, (_V4,), _limits(512, 32)),
        Processor("avx512-vnni", AVX512 | {"avx512_vnni"}, (_V4, "-mavx512vnni"), _limits(512, 32, byte_dots=1)),
        Processor(
            "avx512-vnni-bf16", DOTS, (_V4, "-mavx512vnni", "-mavx512bf16"), _limits(512, 32, byte_dots=1, bf16_dots=1)
        ),
        Processor(
            "amx",
            AMX,
            (_V4, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
            _limits(512, 32, byte_dots=1, bf16_dots=1, tile_products=1),
        ),
    )
}
"""The processors, by name."""


def described() -> list[Any]:
    """Return all processors as parameters; those that this machine cannot execute need a compiler for others (`cross`)."""
    return [pytest.param(p, id=p.name, marks=() if p.runs_here else pytest.mark.cross) for p in PROCESSORS.values()]


def executed() -> list[Any]:
    """Return those that this machine executes, as parameters."""
    return [pytest.param(p, id=p.name) for p in PROCESSORS.values() if p.runs_here]


def _gcc() -> str:
    return shutil.which(os.environ.get("CC", "gcc")) or "gcc"


@cache
def _accepts(options: tuple[str, ...]) -> bool:
    """Return whether gcc compiles for a processor."""
    try:
        command = [_gcc(), *options, "-x", "c", "-fsyntax-only", os.devnull]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def report() -> list[str]:
    """Return lines on the processor that runs the tests, and on what the described ones are tested by."""
    told = ("sse2", "avx", "avx2", "fma", "f16c", "avx_vnni", "asimd", "sve")
    sets = [f for f in sorted(HERE) if f in told or f.startswith(("avx512", "amx"))]
    named = PROCESSORS.get(os.environ.get(VARIABLE, ""))
    lines = [
        f"processor: {host.cpu_model() if named is None else platform.machine()}, {host.usable_cpus()} of {os.cpu_count()} cores; "
        f"{' '.join(sets) or 'no known instruction sets'}"
    ]
    if named is not None:
        lines.append(f"processor that stands in for it: {named.name}")
    ways = {"executed": [], "compiled only": [], "scheduled and printed only": []}  # type: dict[str, list[str]]
    for p in PROCESSORS.values():
        way = "scheduled and printed only" if not p.compiles_here else "executed" if p.runs_here else "compiled only"
        ways[way].append(p.name)
    return [*lines, "described processors: " + "; ".join(f"{way}: {', '.join(n)}" for way, n in ways.items() if n)]
