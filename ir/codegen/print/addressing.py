"""Print names, integer expressions and addresses.

Tests: `tests/ir/codegen/test_text.py`, `tests/ir/codegen/test_data_ends.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import ONE, Algebra, Poly, as_constant, plus
from relax_tune.ir.codegen.lower.index_width import Spans
from relax_tune.ir.codegen.lower.overflow import Magnitudes
from relax_tune.ir.codegen.lower.registers import RegisterLayout
from relax_tune.ir.codegen.print.prelude import INDEX, Prelude, computed, stored
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, i64
from relax_tune.ir.core.expr import Expr, Load, Var, as_int
from relax_tune.ir.core.scalar_ops import BITS, INFIX, SCALAR_OPS
from relax_tune.ir.hardware.swizzle import LINE_BYTES, swizzled

C_INFIX = {name: SCALAR_OPS[name].c_name for name in INFIX}


@dataclass(frozen=True, slots=True)
class Lane:
    """The vector being printed: lanes start .. start + width - 1 of `var`.

    Attributes:
        symbol: Variable that stands for the number of the lane, 0 .. width - 1, in polynomials.
        count: Text of the number of active lanes; None if all are active.
        mask: Text of the mask of the active lanes.
        nontemporal: Whether whole vectors are stored with nontemporal hints, which bypass the caches.
    """

    var: Var
    start: Poly
    width: int
    symbol: Var
    count: str | None
    mask: str | None
    nontemporal: bool = False


@dataclass(slots=True)
class Prefetch:
    """The loop whose reads are prefetched `distance` iterations before, and the buffers and offsets issued so far."""

    var: Var
    distance: int
    issued: list[tuple[Buffer, Poly]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a vector in memory.

    Attributes:
        multiple: A divisor of the element offset; 0 if the offset is 0.
    """

    text: str
    multiple: int


def bracketed(text: str) -> str:
    """Return the text as an operand, in brackets unless it is a name, a number or bracketed already."""
    if text.isidentifier() or text.isdigit():
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text if c == ")" and i == len(text) - 1 else f"({text})"
    return text


class AddressPrinter:
    """The state of a kernel being printed, and the text of its integers and addresses.

    Attributes:
        lane: The vector being printed; None outside of vectorised loops.
        written: Buffers that the kernel stores to.
        symbols: Size symbols that the kernel uses, in order of first use.
        bound: Variables that loops and Lets of the kernel define.
        spans: Bounds that decide whether 32 bits hold the kernel's integers; None if indices have 64 bits.
        named: Temporaries of the present statement that hold integers computed from data.
        printed_loops: Variables of the loops that are in the text, as a loop or in another form.
        effects: Kinds and marks of loops that changed the text.
        has_nontemporal: Whether the language has non-temporal stores.
    """

    has_nontemporal = True

    def __init__(self, prelude: Prelude, algebra: Algebra, layouts: dict[Buffer, RegisterLayout]) -> None:
        self.prelude = prelude
        self.algebra = algebra
        self.layouts = layouts
        self.lane: Lane | None = None
        self.prefetch: Prefetch | None = None
        self.printed_loops: set[Var] = set()
        self.effects: set[tuple[Var, str]] = set()
        self.written: frozenset[Buffer] = frozenset()
        self.lane_symbol = Var("lane")
        self.lines: list[str] = []
        self.indent = "  "
        self.names: dict[Var, str] = {}
        self.symbols: dict[Var, None] = {}
        self.bound: set[Var] = set()
        self.buffers: dict[Buffer, str] = {}
        self.spans: Spans | None = None
        self.magnitudes = Magnitudes(algebra)
        self.named: dict[Expr, str] = {}
        self._flat: dict[tuple[Buffer, tuple[Expr, ...]], Poly] = {}
        self._shapes: dict[Buffer, list[Poly]] = {}

    # C's syntax, which other languages override

    def constant(self, kind: str, name: str, text: str) -> str:
        """Return the definition of a constant."""
        return f"const {kind} {name} = {text};"

    def variable(self, kind: str, name: str, text: str = "") -> str:
        """Return the definition of a variable; without a text it is uninitialised."""
        return f"{kind} {name} = {text};" if text else f"{kind} {name};"

    def counting(self, kind: str, name: str, end: str) -> str:
        """Return the head of a loop that counts from 0 to below `end`."""
        return f"for ({kind} {name} = 0; {name} < {end}; {name}++) {{"

    def as_int32(self, text: str) -> str:
        """Return an index or a truth value as int32."""
        return f"(int){text}"

    def active(self, lane: int, count: str, text: str, dtype: DType) -> str:
        """Return the text of a lane, or 0 for a lane that is not among the first `count`."""
        return f"({lane} < {count} ? {text} : 0)"

    def slack_type(self, slack: Poly) -> DType:
        """Return the type in which the slack of a bound on lanes is computed."""
        return self.index_type(slack)

    def slack_text(self, slack: Poly, most: int) -> str:
        """Return the slack of a bound on lanes; the text need not be exact above `most`."""
        return self.poly_text(slack)

    def offset_text(self, p: Poly) -> str:
        """Return the offset of an element in its array."""
        return self.poly_text(p)

    def place(self, b: Buffer, offset: str) -> str:
        """Return the address of a vector at an offset."""
        return f"{self.buffers[b]} + {offset}" if offset != "0" else self.buffers[b]

    def line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    @contextmanager
    def indented(self, head: str) -> Iterator[None]:
        self.line(head)
        self.indent += "  "
        yield
        self.indent = self.indent[:-2]
        self.line("}")

    def fresh(self, hint: str) -> str:
        raise NotImplementedError

    def space(self, buffer: Buffer) -> str:
        """Return the address space of a buffer with a trailing blank, or "" if the language has none."""
        raise NotImplementedError

    def float_text(self, value: float, dtype: DType) -> str:
        raise NotImplementedError

    def name(self, v: Var) -> str:
        """Return the identifier of a variable bound by a loop or a Let."""
        if v not in self.names:
            self.names[v] = self.fresh(v.name)
        self.bound.add(v)
        return self.names[v]

    @contextmanager
    def known(self, var: Var, value: Poly) -> Iterator[None]:
        """Set the value of a variable inside the block."""
        env = self.algebra.env
        old = env.get(var)
        env[var] = value
        yield
        if old is None:
            del env[var]
        else:
            env[var] = old

    # integers

    def index_type(self, *numbers: Poly) -> DType:
        """Return the type in which indices are computed."""
        if self.spans is None or any(self.spans.note(p) is None for p in numbers):
            return i64
        return INDEX

    def counted(self, v: Var, extent: Poly) -> tuple[str, str]:
        """Return the type and the name of a loop's variable."""
        self.magnitudes.variable(v, extent)
        if self.spans is not None:
            self.spans.variable(v, extent)
        return self.prelude.storage(self.index_type(extent)), self.name(v)

    def var_text(self, v: Var) -> str:
        name = self.names.get(v)
        if name is None:
            name = self.names[v] = self.fresh(v.name)
        if v not in self.bound:
            self.symbols.setdefault(v)
        return name

    def poly_text(self, p: Poly) -> str:
        if self.spans is not None:
            self.spans.note(p)
        parts: list[str] = []
        offset, unsigned = 0, self.unsigned(p)
        for m, c in p.items():
            if not m:
                offset = c
                continue
            names = unsigned + " * ".join(self.atom_text(a) for a in m)
            size = abs(c)
            term = names if size == 1 else f"{names} * {size}"
            if parts:
                parts.append(f" {'-' if c < 0 else '+'} {term}")
            else:
                parts.append(f"-{term}" if c < 0 else term)
        if offset == -(1 << 63):  # C parses -N as the negation of N, and int64 does not hold 2^63
            parts.append(f"{' - ' if parts else '-'}{-(offset + 1)} - 1")
        elif offset or not parts:
            parts.append(str(offset) if not parts else f" {'-' if offset < 0 else '+'} {abs(offset)}")
        text = "".join(parts)
        return f"({self.prelude.storage(i64)})({text})" if unsigned else text

    def unsigned(self, p: Poly) -> str:
        """Return the cast of the first factors of a polynomial whose terms may overflow; "" for others."""
        return ""

    def atom_text(self, a: Expr) -> str:
        if isinstance(a, Var):
            return self.var_text(a)
        if a in self.named:
            return self.named[a]
        if isinstance(a, Load) or a.dtype is not i64:
            return self.uniform(a)
        if a.op in ("floordiv", "floormod"):
            top, bottom = (self.algebra.poly(x) for x in a.args)
            low, under = self.algebra.interval(top)[0], self.algebra.interval(bottom)[0]
            x, y = self.poly_text(top), self.poly_text(bottom)
            # C's operators truncate towards zero, which is the floor only where neither number is negative.
            if low is not None and low >= 0 and under is not None and under >= 0:
                return f"({bracketed(x)} {C_INFIX[a.op]} {bracketed(y)})"
            return f"{self.prelude.helper(a.op, self.index_type(top, bottom), 1)}({x}, {y})"
        if a.op in ("min", "max"):
            one, other = (self.algebra.poly(x) for x in a.args)
            x, y = self.poly_text(one), self.poly_text(other)
            return f"{self.prelude.helper(a.op, self.index_type(one, other), 1)}({x}, {y})"
        if a.op == "select":
            one, other = (self.algebra.poly(x) for x in a.args[1:])
            x, y, kind = self.poly_text(one), self.poly_text(other), self.prelude.storage(self.index_type(one, other))
            return f"({self.condition(a.args[0])} ? ({kind})({x}) : ({kind})({y}))"
        if a.op == "cast":
            source = computed(a.args[0].dtype)
            if source.is_float:
                return f"{self.prelude.helper(self.truncation(i64), source, 1)}({self.uniform(a.args[0])})"
            return f"(({self.prelude.storage(i64)})({self.uniform(a.args[0])}))"
        if a.op == "bitcast":
            return self.bits(self.uniform(a.args[0]), a.args[0].dtype, i64)
        if a.op in ("add", "sub", "mul") or a.op in BITS:  # an atom for the algebra only if it may overflow
            x, y = (self.poly_text(self.algebra.poly(x)) for x in a.args)
            return f"{self.prelude.helper(a.op, i64, 1)}({x}, {y})"
        if a.op == "abs":
            inner = self.algebra.poly(a.args[0])
            return f"{self.prelude.helper('abs', self.index_type(inner), 1)}({self.poly_text(inner)})"
        raise BuildError(f"expected an index of + - * // % min max select cast, got {a!r}; rewrite the index")

    def bits(self, text: str, source: DType, target: DType) -> str:
        """Return the bits of a number as a number of another type."""
        source, text = stored(source), self.packed(text, source, 1)
        if source.is_float:
            text = f"{self.prelude.helper('bits', source, 1)}({text})"
        if stored(target).is_float:
            return f"{self.prelude.helper('unbits', target, 1)}({text})"
        return self.unpacked(f"(({self.prelude.storage(target)}){text})", target, 1)

    def packed(self, text: str, dtype: DType, width: int) -> str:
        """Return a value converted to its type in memory."""
        return f"{self.prelude.helper(f'to_{dtype}', computed(dtype), width)}({text})" if dtype.is_packed else text

    def unpacked(self, text: str, dtype: DType, width: int) -> str:
        """Return a value converted from its type in memory."""
        return f"{self.prelude.helper(f'from_{dtype}', computed(dtype), width)}({text})" if dtype.is_packed else text

    def truncation(self, target: DType) -> str:
        """Return the name of the helper that truncates a float to an integer."""
        return f"whole_{target}"

    def is_varying(self, e: Expr) -> bool:
        """Return whether `e` depends on the lane."""
        return self.lane is not None and self.lane.var in self.algebra.free(e)

    def condition(self, e: Expr) -> str:
        """Return a uniform condition."""
        raise NotImplementedError

    def uniform(self, e: Expr) -> str:
        """Return the text of a uniform value, without temporaries."""
        raise NotImplementedError

    # memory

    def flat(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Poly:
        """Return the element offset of an access."""
        key = (buffer, indices)
        static = self._flat.get(key)
        if static is None:
            shape = self._shapes.get(buffer)
            if shape is None:
                shape = self._shapes[buffer] = [self.algebra.static(d) for d in buffer.shape]
            static = {}
            # Horner's rule: ((i0 * d1 + i1) * d2 + i2) ...
            for d, i in enumerate(self._stored(buffer, indices)):
                static = plus(self.algebra.times(static, shape[d]) if d else static, self.algebra.static(i))
            static = self._flat[key] = self.algebra.joined(static)
        return self.algebra.resolve(static)

    def _stored(self, buffer: Buffer, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Return the indices of an element after swizzling."""
        size = buffer.swizzle
        vectors = (as_int(buffer.shape[-1]) or 0) // size if size and len(indices) > 1 else 0
        if not vectors:
            return indices
        row = indices[0]
        for i, d in zip(indices[1:-1], buffer.shape[1:-1]):
            row = row * d + i
        line = LINE_BYTES // (size * buffer.dtype.bytes)
        # normal forms, so that accesses to one element print the same address
        row, vector = (self.algebra.expr(self.algebra.static(e)) for e in (row, indices[-1] // size))
        vector = swizzled(row, vector, vectors, line)
        return (*indices[:-1], vector * size + indices[-1] % size)

    def address(self, buffer: Buffer, p: Poly) -> Address:
        """Return the address of the first lane of a vector, given the offset of a lane."""
        first = p if self.lane is None else {m: c for m, c in p.items() if self.lane.symbol not in m}
        return Address(self.place(buffer, self.offset_text(first)), gcd(*first.values()))

    def stride(self, p: Poly) -> int | None:
        """Return the distance of neighbouring lanes in elements; None if it is not constant."""
        if self.lane is None:
            return 0
        symbol = self.lane.symbol
        step = p.get((symbol,), 0)
        if any(symbol in self.algebra.free(a) for m in p if m and m != (symbol,) for a in m):
            return None
        return step

    def lane_step(self, p: Poly) -> Poly | None:
        """Return the distance of neighbouring lanes in elements, which may depend on sizes; None if lanes are not evenly spaced."""
        assert self.lane is not None
        symbol = self.lane.symbol
        step: Poly = {}
        for m, c in p.items():
            others = tuple(a for a in m if a is not symbol)
            if any(symbol in self.algebra.free(a) for a in others) or len(m) - len(others) > 1:
                return None
            if len(others) < len(m):
                step[others] = c
        return step

    def registers(self, b: Buffer, layout: RegisterLayout) -> Iterable[tuple[str, int]]:
        """Yield the registers of a buffer: name and width."""
        rows = 1
        for d in b.shape[:-1]:
            value = as_constant(self.algebra.static(d))
            rows *= value or 0
        size = len(layout.unit)
        for r in range(rows):
            for start, width in dict.fromkeys(layout.unit):
                yield self.register_name(b, r * size + start), width

    def register_name(self, b: Buffer, offset: int) -> str:
        raise NotImplementedError

    def register(self, b: Buffer, p: Poly) -> tuple[str, int, int]:
        """Return (name of the register, lane in it, its width) of an access to a buffer in registers."""
        layout = self.layouts[b]
        offset = p.get(ONE, 0)
        row, column = divmod(offset, len(layout.unit))
        start, width = layout.unit[column]
        return self.register_name(b, row * len(layout.unit) + start), column - start, width
