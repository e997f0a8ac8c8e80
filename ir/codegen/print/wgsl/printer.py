"""The WebGPU target: one WGSL module per kernel.

Arrays are storage buffers in the order of the kernel's parameters, and its integers one uniform buffer after them. Elements of 8 and 16
bits share words: kernels that only read such an array shift, and writing kernels use atomic operations on its words. Indices have 32
bits: spans prove that they suffice, or the launch checks their largest value. Values of 64 bits are pairs of words.

Tests: `tests/ir/codegen/test_wgsl.py`, `tests/ir/codegen/test_tint.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Poly
from relax_tune.ir.codegen.print.addressing import Address, Lane
from relax_tune.ir.codegen.print.c.printer import float_literal
from relax_tune.ir.codegen.print.cfamily import Grid
from relax_tune.ir.codegen.print.grid import GridPrinter, launched_items, product
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
    """Printer of one WGSL kernel.

    Attributes:
        accessors: Text of the functions that read and write elements and vectors of the kernel's arrays, by name.
    """

    prelude: WGSLPrelude
    accessors: dict[str, str]
    has_nontemporal = False

    # names and loops

    def constant(self, kind: str, name: str, text: str) -> str:
        return f"let {name}: {kind} = {text};"

    def variable(self, kind: str, name: str, text: str = "") -> str:
        return f"var {name}: {kind} = {text};" if text else f"var {name}: {kind};"

    def counting(self, kind: str, name: str, end: str) -> str:
        if kind == PAIR:
            raise BuildError(
                f"the loop over {name} ends at a value from memory, which 32 bits may not hold; bound it by a size"
            )
        return f"for (var {name}: {kind} = 0; {name} < {end}; {name}++) {{"

    def offers(self, intrinsic: Intrinsic) -> bool:
        return False

    def barrier(self, n: Barrier) -> None:
        for scope in sorted(n.scopes & BARRIERS.keys()):
            self.line(BARRIERS[scope])

    def index(self, kind: str, axis: int) -> str:
        if kind == "item":
            return f"i32(rt_item.{'xyz'[axis]})"
        if not self._is_linear():
            return f"i32(rt_group.{'xyz'[axis]})"
        return self.delinearized("rt_number", axis)

    def _is_linear(self) -> bool:
        """Return whether groups are numbered over rows of at most `AXIS_LIMIT` groups."""
        return self.exceeds(AXIS_LIMIT, self.groups)

    def launched(self, groups: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Return the extents of the launch: rows of at most `AXIS_LIMIT` groups if an axis might have more."""
        if not groups or not self._is_linear():
            return groups
        total = product(groups)
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
        """Return the type of an element in memory; packed elements of global arrays are words."""
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

    def _element_type(self, b: Buffer) -> str:
        """Return the type of an element as the accessors take and return it."""
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
        self.accessors.setdefault(name, f"fn {name}(i: i32) -> {self._element_type(b)} {{ return {text}; }}")
        return name

    def _setter(self, b: Buffer) -> str:
        """Return the function that writes an element into its word.

        It is atomic, since other work-items may write the word's other elements at the same time.
        """
        name, array, bits = f"rt_set_{self.buffers[b]}", self.buffers[b], 8 * b.dtype.bytes
        word, ones = f"{array}[u32(i) >> {1 if bits == 16 else 2}u]", (1 << bits) - 1
        value = "select(0u, 1u, v)" if b.dtype.short == "bool" else f"(bitcast<u32>(v) & {ones}u)"
        self.accessors.setdefault(
            name,
            f"fn {name}(i: i32, v: {self._element_type(b)}) {{\n  let k = (u32(i) & {32 // bits - 1}u) * {bits}u;\n"
            f"  atomicAnd(&{word}, ~({ones}u << k));\n  atomicOr(&{word}, {value} << k);\n}}",
        )
        return name

    def _vector_of(self, b: Buffer, width: int) -> str:
        element = self._element_type(b)
        return f"array<{element}, {width}>" if element == PAIR else f"vec{width}<{element}>"

    def load_vector(self, b: Buffer, at: Address, lane: Lane) -> str:
        kind, element = self._vector_of(b, lane.width), self._element_type(b)
        one = f"{self._getter(b)}(i{{}})" if self.in_words(b) else f"{self.buffers[b]}[i{{}}]"
        parts = [one.format(f" + {k}" if k else "") for k in range(lane.width)]
        name, count, arguments = f"rt_get{lane.width}_{self.buffers[b]}", "", at.text
        if lane.count is not None:
            zero = "false" if element == "bool" else f"{element}(0)"
            parts = [f"select({zero}, {x}, n > {k})" for k, x in enumerate(parts)]
            name, count, arguments = f"rt_first{lane.width}_{self.buffers[b]}", ", n: i32", f"{at.text}, {lane.count}"
        self.accessors.setdefault(name, f"fn {name}(i: i32{count}) -> {kind} {{ return {kind}({', '.join(parts)}); }}")
        return f"{name}({arguments})"

    def store_vector(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        base, count, arguments = self.buffers[b], "", f"{at.text}, {value}"
        name = f"rt_put{lane.width}_{base}"
        if lane.count is not None:
            name, count, arguments = f"rt_put_first{lane.width}_{base}", ", n: i32", f"{arguments}, {lane.count}"
        lines = []
        for k in range(lane.width):
            place = f"i + {k}" if k else "i"
            line = f"{self._setter(b)}({place}, v[{k}]);" if self.in_words(b) else f"{base}[{place}] = v[{k}];"
            lines.append(f"  if (n > {k}) {{ {line} }}" if count else f"  {line}")
        head = f"fn {name}(i: i32, v: {self._vector_of(b, lane.width)}{count}) {{\n"
        self.accessors.setdefault(name, head + "\n".join(lines) + "\n}")
        return f"{name}({arguments});"

    def truths(self, text: str, width: int) -> str:
        return text

    def truth(self, text: str) -> str:
        return text

    def declare_array(self, b: Buffer, name: str, size: int) -> None:
        """Collect an array; all are declared at module scope, where functions can access them."""
        self.shared.append((b, name, max(size, 1)))

    def shared_arrays(self, arrays: Sequence[tuple[Buffer, str, int]]) -> list[str]:
        spaces = {"shared": "workgroup", "local": "private"}
        return [f"var<{spaces[b.scope]}> {name}: array<{self.element(b)}, {size}>;" for b, name, size in arrays]

    # the kernel

    def kernel(
        self, name: str, buffers: tuple[Buffer, ...], written: frozenset[Buffer], body: Stmt
    ) -> tuple[str, Grid]:
        self.accessors = {}
        grid = self.begin(name, buffers, written, body)
        self.statement(body)
        lines = self.lines
        self.lines = []
        # rows are complete, so the last one may have groups beyond the grid
        if grid.groups and self._is_linear():
            self.line("let rt_number: i32 = i32(rt_group.x) + i32(rt_group.y) * " + f"{AXIS_LIMIT};")
            self.line(f"if (rt_number >= {self.poly_text(self.algebra.poly(product(grid.groups)))}) {{ return; }}")
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
        """Yield the module's declarations: arrays, integers, workgroup and private memory, accessors."""
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

    def slack_type(self, slack: Poly) -> DType:
        return INDEX
