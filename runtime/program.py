"""What the runtime executes: one `Program`, as plain numbers and text.

A built model and a candidate under measurement are the same thing here: a `Program`. A model has many calls, each with
several variants and a scalar slot that says which variant this symbol binding dispatches; a candidate has one call with
one variant. So measuring and serving run through the same code.

Everything that depends on shapes is a *slot*: the index of an instruction in `Program.scalars`
(see `relax_tune.runtime.scalars`), one flat int64 list evaluated once per symbol binding. No live IR object is held.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1

Role = Literal["input", "output", "const", "packed", "temp"]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A shape variable of the program: int64, `lower <= value` and, when declared, `value <= upper`."""

    name: str
    lower: int = 0
    upper: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A run-time check: scalar slot `slot` must be non-zero for every symbol binding.

    `message` is a complete sentence; `{0}`, `{1}` ... are replaced by the values of the slots in `values`.
    """

    slot: int
    message: str
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fill:
    """How measuring makes random contents for an input or constant: `normal` (standard normal times `high`) or
    `integers` (uniform in [low, high), both also the range the kernel may rely on)."""

    kind: Literal["normal", "integers"] = "normal"
    low: float = 0
    high: float = 1


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A row-major array. `shape` holds one scalar slot per dimension (none: a 0-d array).

    role: `input` and `output` cross the call boundary; `const` is a named constant (a weight); `packed` is written once by
    `Program.prepare` from constants; `temp` is planned memory and lives in `storage` (an index into `Program.storages`).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    storage: int | None = None
    fill: Fill = field(default_factory=Fill)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One entry point. Its arguments are the step's buffers (pointers, in order), then the step's scalars (int64).

    language `c`: `void NAME(T0* restrict b0, ..., int64_t s0, ...)`, parallel inside (OpenMP).
    language `opencl`: `kernel void NAME(global T0* restrict b0, ..., long s0, ...)`, launched over the step's grid.
    """

    name: str
    language: str
    source: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One launch. `target` names a kernel of the program, or for kind `library` a routine such as `openblas.sgemm`.

    buffers: indices into `Program.buffers`; scalars: slots, passed in order; grid: slots, number of work-groups per axis
    (OpenCL-like devices; empty on the C device); local: work-group size per axis.
    """

    kind: Literal["kernel", "library"]
    target: str
    buffers: tuple[int, ...]
    scalars: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    local: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """What a bucket dispatches: steps in order. `label` is `tuned`, `library` or `generic`; `key` identifies the record."""

    label: str
    steps: tuple[Step, ...]
    key: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One call site. `choice` is the slot whose value is the index of the variant to dispatch; `task` is the workload key."""

    name: str
    task: str
    choice: int
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The whole program; see the module docstring. `inputs`/`outputs` are buffer indices in call order."""

    symbols: tuple[Symbol, ...]
    scalars: tuple[int, ...]
    checks: tuple[Check, ...]
    buffers: tuple[BufferSpec, ...]
    storages: tuple[int, ...]
    kernels: tuple[KernelSource, ...]
    prepare: tuple[Step, ...]
    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str = "main"
    schema: int = SCHEMA

    def to_json(self) -> str:
        """Canonical JSON text: the same program gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
