"""Scheduled functions as parts of the runtime's `Program`: the one place where live IR becomes numbers and text.

The same `ProgramBuilder` builds a candidate under measurement and a whole model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from relax_tune.errors import BuildError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.check.inplace import merge_aliased_params, reads_of, why_not_inplace
from relax_tune.ir.codegen.generate import CodeTarget, GeneratedKernel, generate, split_kernels
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i8, u8
from relax_tune.ir.core.expr import (
    Expr,
    Load,
    Var,
    as_int,
    const,
    free_vars,
    loads,
    mul,
    ne,
    postorder,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.scalar_ops import DIVISIONS, SCALAR_OPS
from relax_tune.ir.core.stmt import blocks
from relax_tune.runtime.program.program import (
    BufferSpec,
    CallSite,
    CallVariant,
    Check,
    CheckedIndex,
    Fill,
    InputRange,
    KernelSource,
    LaunchStep,
    Program,
    Role,
    Symbol,
)
from relax_tune.runtime.program.scalars import Opcode, ScalarBuilder
from relax_tune.tuner.program.prepack import PackingStep

_OPCODES = {o.name: Opcode[o.name.upper()] for o in SCALAR_OPS.values() if o.on_host}


SlotOf = Mapping[Var, int]

# A candidate is generated to see that it can be, to test it and for the model: the text is stored while its function lives.
_KERNELS: WeakKeyDictionary[PrimFunc, dict[CodeTarget, GeneratedKernel]] = WeakKeyDictionary()
_PARTS: WeakKeyDictionary[PrimFunc, tuple[PrimFunc, ...] | None] = WeakKeyDictionary()


def lower_scalar(builder: ScalarBuilder, e: Expr, symbols: SlotOf, unsure: Collection[Expr] = ()) -> int:
    """Return the slot of an integer or boolean expression over `symbols`.

    Args:
        unsure: Divisors that may be 0; the code divides by 1 instead of 0.

    Raises:
        BuildError: The expression has another type, or mentions other symbols.
    """
    slots: dict[Expr, int] = {}
    for node in postorder((e,)):
        if node.value is not None:
            slots[node] = builder.const(int(node.value))
        elif isinstance(node, Var):
            if node not in symbols:
                raise BuildError(f"the expression {e!r} mentions {node.name!r}, which no symbol of the call defines")
            slots[node] = symbols[node]
        elif node.op in _OPCODES:
            args = [slots[a] for a in node.args]
            if node.op in DIVISIONS and node.args[1] in unsure:
                # All slots are evaluated before a check is looked at. Dividing by 1 lets the check report the 0.
                args[1] = builder.op(Opcode.SELECT, args[1], args[1], builder.const(1))
            slots[node] = builder.op(_OPCODES[node.op], *args)
        elif node.op == "cast":
            slots[node] = slots[node.args[0]]
        else:
            raise BuildError(f"expected an integer expression over shape symbols, got {node!r}")
    return slots[e]


@dataclass(frozen=True, eq=False)
class KernelStage:
    """A scheduled function among a variant's stages.

    Attributes:
        arguments: For its parameters, the task's buffers or temporaries shared with other stages. A parameter without an entry is
            the task's own buffer.
        meaning: Its symbols as expressions over the task's; a symbol without an entry is the task's own.
    """

    func: PrimFunc
    arguments: Mapping[Buffer, Buffer] = field(default_factory=dict)
    meaning: Mapping[Var, Expr] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LibraryStage:
    """A library routine among a variant's stages, with buffers and integer arguments over the task's symbols.

    Attributes:
        once: It runs when the program is loaded, and packs constants into its last buffer.
    """

    routine: str
    buffers: tuple[Buffer, ...]
    scalars: tuple[Expr, ...]
    once: bool = False


Stage = KernelStage | LibraryStage


@dataclass
class ProgramBuilder:
    """A collector of the parts of one `Program`. Equal kernels and equal scalar expressions are stored once."""

    name: str
    target: CodeTarget
    scalars: ScalarBuilder = field(default_factory=ScalarBuilder)
    symbols: list[Symbol] = field(default_factory=list)
    buffers: list[BufferSpec] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    kernels: dict[str, KernelSource] = field(default_factory=dict)
    prepare: list[LaunchStep] = field(default_factory=list)
    packings: list[PackingStep | None] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    calls: list[CallSite] = field(default_factory=list)
    ranges: list[InputRange] = field(default_factory=list)
    checked: list[CheckedIndex] = field(default_factory=list)
    _ranges: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    _packed: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    _generated: dict[PrimFunc, GeneratedKernel] = field(default_factory=dict)
    _placed: dict[tuple[PrimFunc, tuple[tuple[Buffer, Buffer], ...]], PrimFunc] = field(default_factory=dict)
    _split: dict[PrimFunc, tuple[PrimFunc, ...]] = field(default_factory=dict)

    def symbol(self, name: str, lower: int = 0, upper: int | None = None) -> int:
        """Declare a program symbol; return its slot."""
        self.symbols.append(Symbol(name, lower, upper))
        slot = self.scalars.symbol(len(self.symbols) - 1)
        self._ranges[slot] = lower, upper
        return slot

    def slot(self, e: Expr, symbols: SlotOf) -> int:
        """Return the slot of an expression. A divisor that may be 0 is checked before its quotient is computed."""
        unsure = self._unsure(e, symbols)
        for divisor, whole in unsure.items():
            nonzero = lower_scalar(self.scalars, ne(divisor, 0), symbols, unsure)
            check = Check(nonzero, f"expected {divisor!r}, which divides in {whole!r}, other than 0, got 0", ())
            if all(c.slot != nonzero for c in self.checks):
                self.checks.append(check)
        return lower_scalar(self.scalars, e, symbols, unsure)

    def _unsure(self, e: Expr, symbols: SlotOf) -> Mapping[Expr, Expr]:
        """Return the divisors in `e` that may be 0, each with a quotient that uses it."""
        divisors = {n.args[1]: n for n in postorder((e,)) if n.op in DIVISIONS and n.args[1].value is None}
        if not divisors:
            return divisors
        env = Env({v: self._ranges[s] for v, s in symbols.items() if s in self._ranges})
        return {d: n for d, n in divisors.items() if prove(ne(d, 0), env) is not Proof.YES}

    def buffer(
        self,
        name: str,
        buffer: Buffer,
        role: Role,
        symbols: SlotOf,
        storage: int | None = None,
        fill: Fill | None = None,
        outer: int = 0,
    ) -> int:
        """Declare an array; return its index."""
        shape = tuple(self.slot(d, symbols) for d in buffer.shape)
        spec = BufferSpec(name, buffer.dtype.name, shape, role, storage, fill or Fill(), outer=outer)
        self.buffers.append(spec)
        return len(self.buffers) - 1

    def view(self, name: str, buffer: Buffer, base: int, symbols: SlotOf, outer: int = 0) -> int:
        """Return an array in the memory of another. Equal dims give the same array."""
        shape = tuple(self.slot(d, symbols) for d in buffer.shape)
        # Shapes are slots, and equal expressions share a slot, so equal tuples mean equal sizes at every shape.
        if shape == self.buffers[base].shape and outer == self.buffers[base].outer:
            return base
        view = BufferSpec(name, buffer.dtype.name, shape, "view", base=base, outer=outer)
        if view not in self.buffers:
            self.buffers.append(view)
        return self.buffers.index(view)

    def storage(self, nbytes: Expr, symbols: SlotOf) -> int:
        """Declare a planned piece of memory; return its index."""
        self.storages.append(self.slot(nbytes, symbols))
        return len(self.storages) - 1

    def workspaces(self, stages: Sequence[Stage], params: Iterable[Buffer]) -> tuple[Expr, ...]:
        """Return the bytes of every array that a variant's stages share, without the task's parameters."""
        shared, sizes = set(params), list[Expr]()

        def need(arrays: Iterable[Buffer], known: set[Buffer], meaning: Mapping[Var, Expr]) -> None:
            new = [b for b in dict.fromkeys(arrays) if b not in known]
            known.update(new)
            sizes.extend(substitute(nbytes(b), meaning) for b in new)

        for stage in stages:
            if isinstance(stage, LibraryStage):
                # Packed arrays are allocated once for the program, not in the workspace of a call.
                if stage.once:
                    shared.update(stage.buffers)
                need(stage.buffers, shared, {})
                continue
            need(stage.arguments.values(), shared, {})
            inner = set(stage.arguments) if stage.arguments else shared
            for part in self._parts(stage.func):
                if _runs_once(part):
                    inner.update(part.buffers)
                else:
                    need(_arrays(part), inner, stage.meaning)
        return tuple(sizes)

    def variant(
        self,
        label: str,
        key: str,
        stages: Sequence[Stage],
        arguments: Mapping[Buffer, int],
        symbols: SlotOf,
        workspaces: Sequence[int] = (),
    ) -> CallVariant:
        """Return the steps of one variant. `prepack` blocks become packed arrays that are written once.

        Args:
            arguments: Declared array of each parameter buffer of the task.
            workspaces: Storages of the arrays that `ProgramBuilder.workspaces` lists.
        """
        known = dict(arguments)
        steps: list[LaunchStep] = []
        left = iter(workspaces)
        for stage in stages:
            if isinstance(stage, LibraryStage):
                if stage.once:
                    self._prepare_by_library(stage, known, symbols)
                    continue
                self._declare(stage.buffers, known, left, symbols)
                scalars = tuple(self.slot(e, symbols) for e in stage.scalars)
                steps.append(LaunchStep("library", stage.routine, tuple(known[b] for b in stage.buffers), scalars))
                continue
            self._declare(tuple(stage.arguments.values()), known, left, symbols)
            inner = {p: known[b] for p, b in stage.arguments.items()} if stage.arguments else known
            slots = {v: self.slot(e, symbols) for v, e in stage.meaning.items()} if stage.meaning else symbols
            for part in self._parts(self._in_place(stage.func, inner)):
                if _runs_once(part):
                    self._prepare(part, inner, slots)
                    continue
                self._declare(_arrays(part), inner, left, slots)
                steps.append(self._step(part, inner, slots))
        return CallVariant(label, tuple(steps), key)

    def _declare(
        self, arrays: Sequence[Buffer], known: dict[Buffer, int], left: Iterator[int], symbols: SlotOf
    ) -> None:
        for b in arrays:
            if b not in known:
                known[b] = self.buffer(f"scratch{len(self.buffers)}", b, "temp", symbols, next(left))

    def _in_place(self, func: PrimFunc, known: Mapping[Buffer, int]) -> PrimFunc:
        """Merge inputs and outputs in the same memory into one pointer."""
        written = {known[b]: b for b in func.output_buffers if b in known}
        # OpenCL and CUDA kernels declare their pointers `restrict`: two parameters for one memory would be undefined
        # behaviour.
        same = {b: written[known[b]] for b in func.input_buffers if known.get(b) in written}
        if not same:
            return func
        key = func, tuple(same.items())
        if key not in self._placed:
            self._placed[key] = merge_aliased_params(func, same)
        return self._placed[key]

    def _parts(self, func: PrimFunc) -> tuple[PrimFunc, ...]:
        """Return the kernels of a function, split once for all calls."""
        if func not in self._split:
            if func not in _PARTS:
                parts = split_kernels(func)
                _PARTS[func] = None if parts == (func,) else parts
            self._split[func] = _PARTS[func] or (func,)
        return self._split[func]

    def _prepare(self, part: PrimFunc, known: dict[Buffer, int], symbols: SlotOf) -> None:
        target = next(b for b in part.buffers if any(x.body.buffer is b for x in blocks(part.body)))
        name = self._kernel(part).name
        sources = tuple(known[b] for b in part.buffers if b is not target)
        # Two calls that pack one weight in one way share the array: tied weights, or variants with equal packing.
        packed = self._packed.get((name, sources))
        if packed is None:
            packed = self.buffer(f"packed{len(self._packed)}", target, "packed", symbols)
            self._packed[(name, sources)] = packed
            known[target] = packed
            self.prepare.append(self._step(part, known, symbols))
            self.packings.append(PackingStep(part, target, sources, packed))
        known[target] = packed

    def _prepare_by_library(self, stage: LibraryStage, known: dict[Buffer, int], symbols: SlotOf) -> None:
        *inputs, target = stage.buffers
        sources = tuple(known[b] for b in inputs)
        name = f"{stage.routine}{stage.scalars}"
        packed = self._packed.get((name, sources))
        if packed is None:
            packed = self.buffer(f"packed{len(self._packed)}", target, "packed", symbols)
            self._packed[(name, sources)] = packed
            scalars = tuple(self.slot(e, symbols) for e in stage.scalars)
            self.prepare.append(LaunchStep("library", stage.routine, (*sources, packed), scalars))
            self.packings.append(None)
        known[target] = packed

    def _kernel(self, func: PrimFunc) -> GeneratedKernel:
        """Return the kernel of a function, generated once. Its name hashes its text, so that equal kernels are one."""
        kernel = self._generated.get(func)
        if kernel is None:
            kernel = _named_kernel(func, self.target)
            self.kernels.setdefault(kernel.name, KernelSource(kernel.name, self.target.language, kernel.source))
            self._generated[func] = kernel
        return kernel

    def _step(self, func: PrimFunc, known: Mapping[Buffer, int], symbols: SlotOf) -> LaunchStep:
        kernel = self._kernel(func)
        return LaunchStep(
            "kernel",
            kernel.name,
            tuple(known[b] for b in kernel.buffers),
            tuple(self.slot(e, symbols) for e in kernel.scalars),
            tuple(self.slot(e, symbols) for e in kernel.grid),
            tuple(kernel.local),
        )

    def finish(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
        used = {s.target for c in self.calls for v in c.variants for s in v.steps} | {s.target for s in self.prepare}
        return Program(
            symbols=tuple(self.symbols),
            scalars=self.scalars.code,
            checks=tuple(self.checks),
            buffers=tuple(self.buffers),
            storages=tuple(self.storages),
            kernels=tuple(k for n, k in sorted(self.kernels.items()) if n in used),
            prepare=tuple(self.prepare),
            calls=tuple(self.calls),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            name=self.name,
            ranges=tuple(self.ranges),
            checked=tuple(self.checked),
        )


def _named_kernel(func: PrimFunc, target: CodeTarget) -> GeneratedKernel:
    """Return the kernel of a function, named by its text and generated once for all builders that meet the function."""
    kernels = _KERNELS.setdefault(func, {})
    if target not in kernels:
        # The text contains the kernel's name. Hashing it with a fixed name, which occurs nowhere else in it, makes
        # equal kernels of different functions one kernel.
        kernel = generate(replace(func, name="named_by_its_text"), target)
        digest = hashlib.blake2b(kernel.source.replace(kernel.name, "@").encode(), digest_size=8).hexdigest()
        kernels[target] = replace(kernel, name=f"k{digest}", source=kernel.source.replace(kernel.name, f"k{digest}"))
    return kernels[target]


def nbytes(buffer: Buffer) -> Expr:
    """Return the bytes of a buffer, over the symbols of its shape."""
    total: Expr = const(buffer.dtype.bytes)
    for d in buffer.shape:
        total = mul(total, d)
    return total


def place_obstacle(stages: Sequence[Stage], output: Buffer, source: Buffer) -> str | None:
    """Return why a variant may not write its task's `output` in the memory of the input `source`; None if it may."""
    written = read = False
    for stage in stages:
        if isinstance(stage, LibraryStage):
            if source in stage.buffers:
                return f"{stage.routine} reads {source.name}"
            written = written or output in stage.buffers
            continue
        arguments = stage.arguments or {b: b for b in stage.func.buffers}
        sources = [p for p in stage.func.input_buffers if arguments.get(p) is source]
        targets = [p for p in stage.func.output_buffers if arguments.get(p) is output]
        if any(x.buffer in sources for b in blocks(stage.func.body) for x in reads_of(b)):
            if written or read or not targets:
                return f"{stage.func.name} reads {source.name} separately from writing {output.name}"
            read = True
            obstacles = [why for p in sources if (why := why_not_inplace(stage.func, targets[0], p)) is not None]
            if obstacles:
                return obstacles[0]
        written = written or bool(targets)
    return None


def _arrays(part: PrimFunc) -> tuple[Buffer, ...]:
    """Return every array that a kernel takes: its parameters, and its intermediates in global memory."""
    return (*part.buffers, *(a for a in part.allocs if a.scope == "global"))


def _runs_once(part: PrimFunc) -> bool:
    """Return True if a kernel only prepares constants."""
    all_blocks = blocks(part.body)
    # A kernel with other blocks than packing depends on the inputs, so it runs at every call.
    return bool(all_blocks) and all(b.role == "prepack" for b in all_blocks)


def is_constant(func: PrimFunc, buffer: Buffer) -> bool:
    """Return True if a parameter is a weight of fixed size, which can be prepacked.

    A weight whose size depends on a symbol is an input.
    """
    return buffer in func.consts and not free_vars(*buffer.shape)


ROW_ELEMENTS = 8
"""Elements of each row while measuring a function whose input is an array of row starts."""


def _starts_rows(func: PrimFunc, buffer: Buffer, indices: Sequence[Expr]) -> bool:
    """Return True if an array is one of row starts: a block reads its elements i and i + 1, and clamped indices come from them."""
    direct = [e for e in indices if not _is_element(e)]
    if not direct or not all(_uncast(e).op in ("min", "max") for e in direct):
        return False
    for block in blocks(func.body):
        places = [n.indices[0] for n in loads(block.body.value) if n.buffer is buffer and len(n.indices) == 1]
        if any(as_int(simplify(sub(b, a))) == 1 for a in places for b in places if a is not b):
            return True
    return False


def _uncast(e: Expr) -> Expr:
    while e.op == "cast":
        (e,) = e.args
    return e


def _is_element(e: Expr) -> bool:
    """Return True if an index is an element of an array, possibly cast."""
    return isinstance(_uncast(e), Load)


def input_fill(func: PrimFunc, buffer: Buffer) -> Fill:
    """Return random contents of an input.

    Integers stay inside the dimension that they index. Bytes that index nothing take all values. An array of row starts, as in
    CSR, gets rows of ROW_ELEMENTS: with empty rows every kernel would be fast.
    """
    if not buffer.dtype.is_int:
        return Fill()
    read = (node for block in blocks(func.body) for node in loads(block.body.value))
    indexed = [
        (e, d) for n in read for e, d in zip(n.indices, n.buffer.shape) if any(x.buffer is buffer for x in loads(e))
    ]
    if _starts_rows(func, buffer, [e for e, _ in indexed]):
        return Fill("offsets", 0, ROW_ELEMENTS)
    limit = min((int(d.value) for _, d in indexed if d.value is not None), default=None)
    if limit is None and buffer.dtype in (i8, u8):  # quantised numbers, possibly two in a byte: every bit matters
        return Fill("integers", -128, 128) if buffer.dtype is i8 else Fill("integers", 0, 256)
    if limit is None:  # a dim may have a single element, so an unclamped index must be 0
        limit = 1 if any(_is_element(e) for e, _ in indexed) else 2
    return Fill("integers", 0, limit)


def candidate_program(
    func: PrimFunc,
    label: str,
    stages: Sequence[Stage],
    target: CodeTarget,
    symbol_names: Mapping[Var, str],
    names: Sequence[str] = (),
) -> Program:
    """Return the program of one variant of a function: one call, one variant.

    Args:
        symbol_names: Names of the symbols.
        names: Names of the parameters; by default p0, p1 ..., by which the inputs of a measurement are drawn.
    """
    builder = ProgramBuilder(func.name, target)
    symbols: dict[Var, int] = {v: builder.symbol(symbol_names[v]) for v in func.symbols}
    arguments: dict[Buffer, int] = {}
    inputs, outputs = [], []
    for number, b in enumerate(func.buffers):
        role: Role = "const" if is_constant(func, b) else "output" if b in func.output_buffers else "input"
        name = names[number] if names else f"p{number}"
        arguments[b] = builder.buffer(name, b, role, symbols, fill=input_fill(func, b))
        if role == "input":
            inputs.append(arguments[b])
        elif role == "output":
            outputs.append(arguments[b])
    storages = [builder.storage(size, symbols) for size in builder.workspaces(stages, func.buffers)]
    variant = builder.variant(label, "", stages, arguments, symbols, storages)
    builder.calls.append(CallSite(func.name, "", builder.scalars.const(0), (variant,)))
    return builder.finish(inputs, outputs)
