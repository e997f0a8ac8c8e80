"""The WebGPU target: one WGSL module per kernel.

Arrays are storage buffers in the order of the kernel's parameters, and its integers one uniform buffer behind them. Elements of 8 and 16
bits share words: kernels that only read such an array shift, and writing kernels use atomic operations on its words. Indices have 32
bits: spans prove that they suffice, or the launch checks their largest value. Values of 64 bits are pairs of words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Poly
from relax_tune.ir.codegen.print.addressing import Address, Lane
from relax_tune.ir.codegen.print.c import float_literal
from relax_tune.ir.codegen.print.cfamily import Grid
from relax_tune.ir.codegen.print.grid import GridPrinter, launched_items
from relax_tune.ir.codegen.print.prelude import INDEX
from relax_tune.ir.codegen.print.wgsl.prelude import WGSLPrelude
from relax_tune.ir.codegen.print.wgsl.values import WGSLValues
from relax_tune.ir.codegen.print.wgsl.wide import PAIR
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr, const, floordiv, minimum
from relax_tune.ir.core.stmt import Barrier, Stmt
from relax_tune.ir.hardware.intrinsic import Intrinsic

# groups along an axis of a launch (WebGPU, maxComputeWorkgroupsPerDimension)
AXIS_LIMIT = 65535
BARRIERS = {"shared": "workgroupBarrier();", "global": "storageBarrier();"}


class WGSLPrinter(WGSLValues, GridPrinter):
    """Printer of one WGSL kernel. accessors: functions of elements and vectors of its arrays."""

    prelude: WGSLPrelude
    accessors: dict[str, str]

    # names and loops

    def constant(self, kind: str, name: str, text: str) -> str:
        return f"let {name}: {kind} = {text};"

    def variable(self, kind: str, name: str, text: str = "") -> str:
        return f"var {name}: {kind} = {text};" if text else f"var {name}: {kind};"

    def counting(self, kind: str, name: str, end: str) -> str:
        if kind == PAIR:
            raise BuildError(
                f"wanted a loop over {name} whose end 32 bits hold, found a value from memory; bound it by a size"
            )
        return f"for (var {name}: {kind} = 0; {name} < {end}; {name}++) {{"

    @contextmanager
    def lanes_of(self, lane: Lane) -> Iterator[None]:
        with super().lanes_of(replace(lane, nontemporal=False)):
            yield

    def offers(self, intrinsic: Intrinsic) -> bool:
        return False

    def barrier(self, n: Barrier) -> None:
        for scope in sorted(n.scopes & BARRIERS.keys()):
            self.line(BARRIERS[scope])

    def index(self, kind: str, axis: int) -> str:
        if kind == "item":
            return f"i32(rt_item.{'xyz'[axis]})"
        if not self._along_one():
            return f"i32(rt_group.{'xyz'[axis]})"
        text = "rt_number"
        for e in self.groups[:axis]:
            text += f" / {self._groups_text(e)}"
        return text if axis == len(self.groups) - 1 else f"{text} % {self._groups_text(self.groups[axis])}"

    def _groups_text(self, e: Expr) -> str:
        return f"({self.poly_text(self.algebra.poly(e))})"

    def _along_one(self) -> bool:
        """Return whether groups have one number, from which quotients and remainders give the indices per axis."""
        tops = [self.algebra.interval(self.algebra.static(e))[1] for e in self.groups]
        return any(top is None or top > AXIS_LIMIT for top in tops)

    def launched(self, groups: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Return the launch: all groups in rows of at most `AXIS_LIMIT`, where an axis might have more."""
        if not groups or not self._along_one():
            return groups
        total = _product(groups)
        rows = floordiv(total + (AXIS_LIMIT - 1), const(AXIS_LIMIT))
        return (minimum(total, const(AXIS_LIMIT)), rows)

    # memory

    def space(self, buffer: Buffer) -> str:
        return ""

    def float_text(self, value: float, dtype: DType) -> str:
        text = float_literal(value, dtype, "inf", "nan")
        if "inf" in text:
            return text.replace("inf", f"{self.prelude.function('inf')}()")
        return f"{self.prelude.function('not_a_number')}()" if "nan" in text else text

    def element(self, b: Buffer) -> str:
        """Return the type of an element: of one that has bits of its own in memory these bits."""
        if b.scope == "global" and b.dtype.bytes < 4:
            return "u32"
        return "i32" if b.dtype.is_packed else self.prelude.storage(b.dtype)

    def in_words(self, b: Buffer) -> bool:
        """Return whether several elements share a word."""
        return b.scope == "global" and b.dtype.bytes < 4

    def place(self, b: Buffer, offset: str) -> str:
        return offset

    def load_one(self, b: Buffer, offset: str) -> str:
        text = f"{self._getter(b)}({offset})" if self.in_words(b) else f"{self.buffers[b]}[{offset}]"
        return self.unpacked(text, b.dtype, 1)

    def store_one(self, b: Buffer, offset: str, value: str) -> str:
        if not self.in_words(b):
            return super().store_one(b, offset, value)
        return f"{self._setter(b)}({offset}, {self.packed(value, b.dtype, 1)});"

    def _held(self, b: Buffer) -> str:
        """Return the type by which functions of a buffer take and give elements."""
        return "i32" if b.dtype.is_packed else self.prelude.storage(b.dtype)

    def _getter(self, b: Buffer) -> str:
        """Return the function that reads an element out of its word."""
        name, array, bits = f"rt_get_{self.buffers[b]}", self.buffers[b], 8 * b.dtype.bytes
        word = f"{array}[u32(i) >> {1 if bits == 16 else 2}u]"
        word = f"atomicLoad(&{word})" if b in self.written else word
        text = f"({word} >> ((u32(i) & {32 // bits - 1}u) * {bits}u))"
        if b.dtype.short == "bool":
            text = f"({text} & 255u) != 0u"
        elif b.dtype.is_int and not b.dtype.is_unsigned and not b.dtype.is_packed:
            text = f"extractBits(bitcast<i32>{text}, 0u, {bits}u)"
        else:
            text = f"i32({text} & {(1 << bits) - 1}u)"
        self.accessors.setdefault(name, f"fn {name}(i: i32) -> {self._held(b)} {{ return {text}; }}")
        return name

    def _setter(self, b: Buffer) -> str:
        """Return the function that writes an element into its word, whose other elements may be others' work."""
        name, array, bits = f"rt_set_{self.buffers[b]}", self.buffers[b], 8 * b.dtype.bytes
        word, ones = f"{array}[u32(i) >> {1 if bits == 16 else 2}u]", (1 << bits) - 1
        value = "select(0u, 1u, v)" if b.dtype.short == "bool" else f"(bitcast<u32>(v) & {ones}u)"
        self.accessors.setdefault(
            name,
            f"fn {name}(i: i32, v: {self._held(b)}) {{\n  let k = (u32(i) & {32 // bits - 1}u) * {bits}u;\n"
            f"  atomicAnd(&{word}, ~({ones}u << k));\n  atomicOr(&{word}, {value} << k);\n}}",
        )
        return name

    def _vector_of(self, b: Buffer, width: int) -> str:
        held = self._held(b)
        return f"array<{held}, {width}>" if held == PAIR else f"vec{width}<{held}>"

    def load_vector(self, b: Buffer, at: Address, lane: Lane) -> str:
        kind, held = self._vector_of(b, lane.width), self._held(b)
        one = f"{self._getter(b)}(i{{}})" if self.in_words(b) else f"{self.buffers[b]}[i{{}}]"
        parts = [one.format(f" + {k}" if k else "") for k in range(lane.width)]
        name, count, given = f"rt_get{lane.width}_{self.buffers[b]}", "", at.text
        if lane.count is not None:
            zero = "false" if held == "bool" else f"{held}(0)"
            parts = [f"select({zero}, {x}, n > {k})" for k, x in enumerate(parts)]
            name, count, given = f"rt_first{lane.width}_{self.buffers[b]}", ", n: i32", f"{at.text}, {lane.count}"
        self.accessors.setdefault(name, f"fn {name}(i: i32{count}) -> {kind} {{ return {kind}({', '.join(parts)}); }}")
        return f"{name}({given})"

    def store_vector(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        base, count, given = self.buffers[b], "", f"{at.text}, {value}"
        name = f"rt_put{lane.width}_{base}"
        if lane.count is not None:
            name, count, given = f"rt_put_first{lane.width}_{base}", ", n: i32", f"{given}, {lane.count}"
        lines = []
        for k in range(lane.width):
            place = f"i + {k}" if k else "i"
            line = f"{self._setter(b)}({place}, v[{k}]);" if self.in_words(b) else f"{base}[{place}] = v[{k}];"
            lines.append(f"  if (n > {k}) {{ {line} }}" if count else f"  {line}")
        head = f"fn {name}(i: i32, v: {self._vector_of(b, lane.width)}{count}) {{\n"
        self.accessors.setdefault(name, head + "\n".join(lines) + "\n}")
        return f"{name}({given});"

    def store_nontemporal(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        return self.store_vector(b, at, value, lane)

    def truths(self, text: str, width: int) -> str:
        return text

    def truth(self, text: str) -> str:
        return text

    def declare_array(self, b: Buffer, name: str, size: int) -> None:
        """Keep an array; all stand at the start of the module, where functions reach them."""
        self.shared.append((b, name, max(size, 1)))

    def shared_arrays(self, found: Sequence[tuple[Buffer, str, int]]) -> list[str]:
        spaces = {"shared": "workgroup", "local": "private"}
        return [f"var<{spaces[b.scope]}> {name}: array<{self.element(b)}, {size}>;" for b, name, size in found]

    # the kernel

    def kernel(
        self, name: str, buffers: tuple[Buffer, ...], written: frozenset[Buffer], body: Stmt
    ) -> tuple[str, Grid]:
        self.accessors = {}
        grid = self.begin(name, buffers, written, body)
        self.statement(body)
        lines = self.lines
        self.lines = []
        if grid.groups and self._along_one():
            self.line("let rt_number: i32 = i32(rt_group.x) + i32(rt_group.y) * " + f"{AXIS_LIMIT};")
            self.line(f"if (rt_number >= {self.poly_text(self.algebra.poly(_product(grid.groups)))}) {{ return; }}")
        assert self.spans is not None
        symbols = [self.names[v] for v in self.symbols]
        head = [self.constant("i32", x, f"rt_scalars.{x}") for x in symbols]
        self.lines = [*(self.indent + x for x in head), *self.lines, *lines]
        self.most = self.spans.most(self.symbols)
        groups, items = self.launched(grid.groups), launched_items(grid)
        text = self.finish("\n".join([*self._module(buffers, symbols), self.head(name, (), items)]))
        axes = max(len(groups), len(items))
        return text, Grid(
            (*groups, *(const(1) for _ in range(axes - len(groups)))), (*items, *(1 for _ in range(axes - len(items))))
        )

    def _module(self, buffers: tuple[Buffer, ...], symbols: Sequence[str]) -> Iterator[str]:
        """Yield the module's declarations: arrays, integers, memory of a group and of an item, functions of elements."""
        for at, b in enumerate(buffers):
            access, kind = ("read_write" if b in self.written else "read"), self.element(b)
            if self.in_words(b) and b in self.written:
                kind = f"atomic<{kind}>"
            yield f"@group(0) @binding({at}) var<storage, {access}> {self.buffers[b]}: array<{kind}>;"
        fields = [*symbols, *(["rt_most"] if self.checks_most else [])]
        if fields:
            yield f"struct rt_Scalars {{ {', '.join(f'{x}: i32' for x in fields)} }}"
            yield f"@group(0) @binding({len(buffers)}) var<uniform> rt_scalars: rt_Scalars;"
        yield from self.shared_arrays(self.shared)
        yield from self.accessors.values()

    def head(self, name: str, parameters: Sequence[str], items: Sequence[int]) -> str:
        inputs = "@builtin(workgroup_id) rt_group: vec3<u32>, @builtin(local_invocation_id) rt_item: vec3<u32>"
        return f"@compute @workgroup_size({', '.join(map(str, items))})\nfn {name}({inputs})"

    def room_type(self, room: Poly) -> DType:
        return INDEX


def _product(groups: Sequence[Expr]) -> Expr:
    total: Expr = const(1)
    for e in groups:
        total = total * e
    return total
