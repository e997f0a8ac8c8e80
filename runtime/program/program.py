"""The executable form of a model or candidate: a `Program` of plain numbers and text.

A built model and a candidate under measurement have the same form, a `Program`. A model has many calls, each with
several variants and a scalar slot that says which variant this symbol binding dispatches; a candidate has one call with
one variant. So measuring and serving run through the same code.

Everything that depends on shapes is a *slot*: the index of an instruction in `Program.scalars` (see
`relax_tune.runtime.program.scalars`), one flat int64 list evaluated once per symbol binding. It refers to no IR object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np

from relax_tune.errors import ArtifactError
from relax_tune.runtime.program import scalars as scalar_list
from relax_tune.runtime.validation import (
    check_index,
    check_indices,
    check_list,
    check_schema,
    check_shown,
    parse_json,
    read_value,
    wrong,
)

SCHEMA = 1

Role = Literal["input", "output", "const", "packed", "temp", "view"]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A shape variable of the program: int64, `lower <= value` and, when declared, `value <= upper`."""

    name: str
    lower: int = 0
    upper: int | None = None


SIZE_LIMIT = (1 << 31) - 1
"""Largest value of a symbol without a declared upper bound: products of two sizes stay within int64."""


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
    """The random contents of an input or constant while measuring.

    normal: standard normal times `high`. integers: uniform in [low, high); kernels rely on this range, so a call with an
    input outside is refused. offsets: rising from 0 by `high` in the mean, as starts of rows; no kernel relies on them."""

    kind: Literal["normal", "integers", "offsets"] = "normal"
    low: float = 0
    high: float = 1


@dataclass(frozen=True, slots=True)
class InputRange:
    """Elements of an input that are used as indices: a call with one outside [low, high) is refused.

    buffer: its index; low, high: slots; of the flattened elements those at `column`, `column + every` ... are meant."""

    buffer: int
    low: int
    high: int
    every: int = 1
    column: int = 0


@dataclass(frozen=True, slots=True)
class CheckedIndex:
    """Elements of a computed array that an operator used as indices: a call with one outside [0, size) fails after its launches.

    buffer: its index; size: slot; of the flattened elements those at `column`, `column + every` ... are meant."""

    buffer: int
    operator: str
    size: int
    every: int = 1
    column: int = 0


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """An array. `shape` holds one scalar slot per dimension (none: a 0-d array).

    outer: the dimension stored outermost, before the others in their order; 0, as of a temporary array, is row-major

    role: `input` and `output` cross the call boundary; `const` is a named constant (a weight); `packed` is written once
    by `Program.prepare` from constants; `temp` is planned memory and lives in `storage` (an index into
    `Program.storages`, each a slot holding its bytes); `view` is a result that lies in the memory of another array, `base`
    (an index into `Program.buffers`), under other dims. One that is larger than the input it lies in extends it in place.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    storage: int | None = None
    fill: Fill = field(default_factory=Fill)
    base: int | None = None
    outer: int = 0

    @property
    def stored(self) -> tuple[int, ...]:
        """The slots of the dims in the order in memory, outermost first."""
        return (*self.shape[self.outer : self.outer + 1], *self.shape[: self.outer], *self.shape[self.outer + 1 :])


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One entry point. Its arguments are the step's buffers (pointers, in order), then the step's scalars (int64).

    language `c`: `void NAME(T0* restrict b0, ..., int64_t s0, ...)`, parallel inside (OpenMP). language `opencl`:
    `kernel void NAME(global T0* restrict b0, ..., long s0, ...)`, launched over the step's grid. language `cuda`:
    `extern "C" __global__ void NAME(T0* __restrict__ b0, ..., long long s0, ...)`, the same; `/*shared BYTES*/` in it
    declares the shared memory that a launch must request. language `webgpu`: a WGSL module with `@compute fn NAME`, the buffers as
    storage bindings 0, 1, ... of group 0, and behind them a uniform binding with the scalars as int32, if there are any.
    """

    name: str
    language: str
    source: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """One launch. `target` names a kernel of the program; for kind `library` a routine such as `openblas.sgemm`.

    buffers: indices into `Program.buffers`; scalars: slots, passed in order; grid: slots, number of work-groups per
    axis (OpenCL-like devices; empty on the C device); local: work-group size per axis (plain numbers).
    """

    kind: Literal["kernel", "library"]
    target: str
    buffers: tuple[int, ...]
    scalars: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    local: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallVariant:
    """One way to compute a call: steps in order. label: `tuned`, `library` or `generic`; key: key of its record."""

    label: str
    steps: tuple[LaunchStep, ...]
    key: str = ""


@dataclass(frozen=True, slots=True)
class CallSite:
    """One call site. `choice` is the slot whose value is the index of the variant to dispatch; `task` is the workload
    key."""

    name: str
    task: str
    choice: int
    variants: tuple[CallVariant, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The whole program; see the module docstring. `inputs`/`outputs` are buffer indices in call order."""

    symbols: tuple[Symbol, ...]
    scalars: tuple[int, ...]
    checks: tuple[Check, ...]
    buffers: tuple[BufferSpec, ...]
    storages: tuple[int, ...]
    kernels: tuple[KernelSource, ...]
    prepare: tuple[LaunchStep, ...]
    calls: tuple[CallSite, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str = "main"
    schema: int = SCHEMA
    ranges: tuple[InputRange, ...] = ()
    checked: tuple[CheckedIndex, ...] = ()

    def to_json(self) -> str:
        """Return canonical JSON text: the same program gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


# types of at most 8 bits, a byte each; NumPy knows the names of ml_dtypes by its import
SMALL_FLOATS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn")
SMALL = (*SMALL_FLOATS, "int4", "uint4", "int2", "uint2")
FLOATING = ("float16", "float32", "float64", np.dtype(ml_dtypes.bfloat16).name, *SMALL_FLOATS)
INTEGERS = tuple(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u"))
DTYPES = ("bool", *INTEGERS, *FLOATING, *SMALL[len(SMALL_FLOATS) :])
LANGUAGES = ("c", "opencl", "cuda", "webgpu")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_ROUTINE = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
_DIMS_LIMIT = 32  # NumPy 1 has no more
_PLACEHOLDER = re.compile(r"\{(\d{1,6})\}")
# Flags come with the program: these steer code generation. None names a file, a plugin or an output, or changes the meaning of
# floating-point numbers.
_FLAG = re.compile(
    r"-O[0-3s]|-D[A-Za-z_]\w*(=[\w.+-]*)?|-m(arch|cpu|tune|prefer-vector-width)=[\w.+-]+"
    r"|-f(no-)?(inline|unroll-loops|peel-loops|split-loops|tree-vectorize|tree-slp-vectorize|move-loop-invariants|schedule-insns"
    r"|omit-frame-pointer|strict-aliasing|trapping-math|math-errno)"
    r"|-ffp-contract=(off|on|fast)|-cl-(mad-enable|no-signed-zeros|opt-disable|std=CL\d\.\d)"
)


def format_message(message: str, values: Sequence[int]) -> str:
    """Insert `values` for `{0}`, `{1}` ...; other braces stay as they are."""
    return _PLACEHOLDER.sub(lambda match: str(values[int(match[1])]), message)


def program_from_json(text: str) -> Program:
    """Read the text of `Program.to_json`; hostile text is refused, never repaired.

    Raises: ArtifactError saying where (a path such as `calls[3].variants[0].steps[1].target`), what was expected and what it got.
    """
    return _program(parse_json(text, "program"), "program")


def programs_from_json(text: str) -> tuple[Program, ...]:
    """Read a list of `Program.to_json` texts, with distinct names. Raises as `program_from_json`."""
    data = parse_json(text, "programs")
    check_list(data, "programs", "a list of programs")
    programs = tuple(_program(item, "program" if len(data) == 1 else f"programs[{i}]") for i, item in enumerate(data))
    verify_names(programs)
    return programs


def verify_names(programs: Sequence[Program]) -> None:
    """Raise ArtifactError unless the names are distinct and sorted."""
    names = [p.name for p in programs]
    if names != sorted(set(names)):
        raise wrong("programs", "distinct names in their order", names)


def _program(data: Any, where: str) -> Program:
    check_schema(data, SCHEMA, where)
    program: Program = read_value(Program, data, where)
    verify_program(program)
    return program


def _unique(names: Iterable[str], where: str, outside: Container[str] = ()) -> None:
    """Check that names are names, and used once.

    outside: names that the model has, such as `0.weight` of a weight or `input:0` of an input; these need only be printable
    """
    used: set[str] = set()
    for position, name in enumerate(names):
        if name in outside:
            check_shown(f"{where}[{position}].name", name)
        elif not _NAME.fullmatch(name.replace(".", "_").replace("/", "_")):
            raise wrong(f"{where}[{position}].name", "a name of letters, digits, _ . /", name)
        if name in used:
            raise wrong(f"{where}[{position}].name", "a name used once", name)
        used.add(name)


def _shown_texts(program: Program) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of all texts that may be printed."""
    yield "program.name", program.name
    for position, check in enumerate(program.checks):
        yield f"checks[{position}].message", check.message.replace("\n", " ")  # it may show lines of the program
    for position, computed in enumerate(program.checked):
        yield f"checked[{position}].operator", computed.operator
    for position, call in enumerate(program.calls):
        yield f"calls[{position}].name", call.name
        yield f"calls[{position}].task", call.task
        for number, variant in enumerate(call.variants):
            yield f"calls[{position}].variants[{number}].label", variant.label
            yield f"calls[{position}].variants[{number}].key", variant.key


def verify_program(program: Program) -> None:
    """Check every index, name and reference, so that executing can trust them. Raises ArtifactError saying where."""
    if program.schema != SCHEMA:
        raise ArtifactError(f"program: expected schema {SCHEMA}, got {program.schema}")
    for where, text in _shown_texts(program):
        check_shown(where, text)
    _unique((s.name for s in program.symbols), "symbols")
    for position, symbol in enumerate(program.symbols):
        top = scalar_list.INT64_MAX if symbol.upper is None else symbol.upper
        if not scalar_list.INT64_MIN <= symbol.lower <= top <= scalar_list.INT64_MAX:
            raise wrong(f"symbols[{position}]", "int64 lower <= upper", (symbol.lower, symbol.upper))
    scalar_list.verify(program.scalars, len(program.symbols))
    slots = len(program.scalars) // scalar_list.WIDTH
    for position, check in enumerate(program.checks):
        check_index(check.slot, slots, f"checks[{position}].slot", "scalar slot")
        check_indices(check.values, slots, f"checks[{position}].values", "scalar slot")
        for match in _PLACEHOLDER.finditer(check.message):
            check_index(int(match[1]), len(check.values), f"checks[{position}].message", "value")
    check_indices(program.storages, slots, "storages", "scalar slot")
    _verify_buffers(program, slots)
    _verify_kernels(program)
    _verify_calls(program, slots)
    _verify_boundary(program)


def _verify_buffers(program: Program, slots: int) -> None:
    _unique(
        (b.name for b in program.buffers),
        "buffers",
        {b.name for b in program.buffers if b.role in ("const", "input", "output")},
    )
    for position, buffer in enumerate(program.buffers):
        where = f"buffers[{position}]"
        if buffer.dtype not in DTYPES:
            raise wrong(f"{where}.dtype", "one of " + ", ".join(DTYPES), buffer.dtype)
        if buffer.role not in get_args(Role):
            raise wrong(f"{where}.role", "one of " + ", ".join(get_args(Role)), buffer.role)
        if len(buffer.shape) > _DIMS_LIMIT:
            raise wrong(f"{where}.shape", f"at most {_DIMS_LIMIT} dims", len(buffer.shape))
        check_indices(buffer.shape, slots, f"{where}.shape", "scalar slot")
        if buffer.outer:
            check_index(buffer.outer, len(buffer.shape), f"{where}.outer", "dim")
            if buffer.role not in ("input", "output", "view"):
                raise wrong(f"{where}.outer", "0 of an array within the program", buffer.outer)
        if (buffer.storage is not None) != (buffer.role == "temp"):
            raise wrong(f"{where}.storage", "a storage for a temp and for nothing else", (buffer.role, buffer.storage))
        if buffer.storage is not None:
            check_index(buffer.storage, len(program.storages), f"{where}.storage", "storage")
        if (buffer.base is not None) != (buffer.role == "view"):
            raise wrong(f"{where}.base", "a base for a view and for nothing else", (buffer.role, buffer.base))
        if buffer.base is not None:
            check_index(buffer.base, len(program.buffers), f"{where}.base", "buffer")
            base = program.buffers[buffer.base]
            # No view of a view, so that one step leads from a view to its memory.
            if base.role not in ("input", "output", "const") or base.dtype != buffer.dtype:
                expected = f"an input, output or constant of {buffer.dtype}"
                raise wrong(f"{where}.base", expected, f"{base.role} of {base.dtype}")


def _verify_kernels(program: Program) -> None:
    _unique((k.name for k in program.kernels), "kernels")
    for position, kernel in enumerate(program.kernels):
        where = f"kernels[{position}]"
        if not _NAME.fullmatch(kernel.name):
            raise wrong(f"{where}.name", "a C identifier", kernel.name)
        if kernel.language not in LANGUAGES:
            raise wrong(f"{where}.language", "one of " + ", ".join(LANGUAGES), kernel.language)
        if "\0" in kernel.source:
            raise wrong(f"{where}.source", "text without NUL characters", kernel.source)
        for flag in kernel.flags:
            if not _FLAG.fullmatch(flag):
                raise wrong(f"{where}.flags", "code generation flags only", flag)


def _verify_calls(program: Program, slots: int) -> None:
    """Check the steps of `prepare` and of every variant."""
    kernels = {k.name for k in program.kernels}
    for position, step in enumerate(program.prepare):
        _verify_step(step, program, kernels, slots, f"prepare[{position}]")
        # `prepare` runs once, before any call, when no input exists.
        for index in step.buffers:
            if program.buffers[index].role not in ("const", "packed"):
                raise wrong(f"prepare[{position}].buffers", "constants and packed buffers", program.buffers[index].name)
    for position, call in enumerate(program.calls):
        where = f"calls[{position}]"
        check_index(call.choice, slots, f"{where}.choice", "scalar slot")
        if not call.variants:
            raise wrong(f"{where}.variants", "at least one variant", ())
        for number, variant in enumerate(call.variants):
            for at, step in enumerate(variant.steps):
                _verify_step(step, program, kernels, slots, f"{where}.variants[{number}].steps[{at}]")


def _verify_step(step: LaunchStep, program: Program, kernels: set[str], slots: int, where: str) -> None:
    if step.kind == "kernel":
        if step.target not in kernels:
            raise wrong(f"{where}.target", "a kernel of the program", step.target)
    elif step.kind != "library" or not _ROUTINE.fullmatch(step.target):
        raise wrong(f"{where}.target", "kind library and a routine such as openblas.sgemm", (step.kind, step.target))
    check_indices(step.buffers, len(program.buffers), f"{where}.buffers", "buffer")
    check_indices(step.scalars, slots, f"{where}.scalars", "scalar slot")
    check_indices(step.grid, slots, f"{where}.grid", "scalar slot")
    if len(step.grid) != len(step.local) or len(step.grid) > 3:
        raise wrong(f"{where}.grid", "as many axes as local, at most 3", (step.grid, step.local))
    if any(not 1 <= size <= 2**31 for size in step.local):
        raise wrong(f"{where}.local", "work-group sizes >= 1", step.local)


def _verify_boundary(program: Program) -> None:
    for side, indices, roles in (
        ("inputs", program.inputs, ("input",)),
        ("outputs", program.outputs, ("output", "input", "const", "view")),
    ):
        check_indices(indices, len(program.buffers), side, "buffer")
        for position, index in enumerate(indices):
            if program.buffers[index].role not in roles:
                raise wrong(
                    f"{side}[{position}]", f"a buffer of role {' or '.join(roles)}", program.buffers[index].role
                )
    slots = len(program.scalars) // scalar_list.WIDTH
    for position, checked in enumerate(program.ranges):
        where = f"ranges[{position}]"
        if checked.buffer not in program.inputs:
            raise wrong(f"{where}.buffer", "an input", checked.buffer)
        check_indices((checked.low, checked.high), slots, f"{where}.low", "scalar slot")
        check_index(checked.column, checked.every, f"{where}.column", "column")
    for position, computed in enumerate(program.checked):
        where = f"checked[{position}]"
        check_index(computed.buffer, len(program.buffers), f"{where}.buffer", "buffer")
        # Temporary memory may hold another array by the time the indices are looked at.
        if program.buffers[computed.buffer].role not in ("output", "input", "const", "view"):
            raise wrong(f"{where}.buffer", "no temporary memory", program.buffers[computed.buffer].role)
        check_index(computed.size, slots, f"{where}.size", "scalar slot")
        check_index(computed.column, computed.every, f"{where}.column", "column")
    if len(set(program.inputs)) != len(program.inputs):
        raise wrong("inputs", "each buffer once", program.inputs)
    listed = set(program.inputs)
    for position, buffer in enumerate(program.buffers):
        if buffer.role == "input" and position not in listed:
            raise wrong(f"buffers[{position}]", "every input buffer in `inputs`", buffer.name)
