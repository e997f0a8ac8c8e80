"""The C target: GCC vector extensions, a function per parallel loop, plain pointers.

Meant for `gcc -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math`; no header is included. The including source
may define `RT_PARALLEL_FOR(part, data, count, uneven, pays)`: if `pays` is true, it calls `part(data, from, to)` on several threads for
ranges that together cover 0 to `count`. Without the macro, loops run on the caller's thread.

Tests: `tests/ir/codegen/test_text.py`, `tests/ir/codegen/test_codegen.py`, `tests/ir/codegen/test_fused_loops.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isinf, isnan

import numpy as np

from relax_tune.ir.codegen.lower.affine import ONE, Algebra, Monomial, Poly
from relax_tune.ir.codegen.lower.guards import conditional_groups
from relax_tune.ir.codegen.lower.registers import RegisterLayout
from relax_tune.ir.codegen.print.addressing import Address, Lane, bracketed
from relax_tune.ir.codegen.print.c.prelude import AVX
from relax_tune.ir.codegen.print.c_values import CValues
from relax_tune.ir.codegen.print.cfamily import CFamilyPrinter, Grid
from relax_tune.ir.codegen.print.prelude import Prelude, stored
from relax_tune.ir.codegen.print.values import Text
from relax_tune.ir.codegen.work import FEW, at_least, steps
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, f32, f64, i32, i64, u32, u64
from relax_tune.ir.core.expr import Expr, Load, Var, postorder
from relax_tune.ir.core.stmt import BufferStore, For, Stmt, walk

# Macro of the extension that has vector registers, by f32 lanes.
REGISTERS = {4: "__SSE__", 8: "__AVX__", 16: "__AVX512F__"}
PIN = """#if defined({macro}) && defined(__GNUC__)
#define RT_KEEP_{width}(v) __asm__("" : "+v"(v))
#else
#define RT_KEEP_{width}(v)
#endif"""

# Characters of the varying part of an offset above which it gets a name: gcc took half of its time for repeated parts.
LONG_OFFSET = 40
# Loops of at most this many iterations are unrolled completely, by gcc at -O3 or by this printer.
UNROLLED_TRIPS = 32
# Passes of gcc 12 that are turned off for a function, by what it has. Explicit vectors are not affected.
# BRANCHES: conversion of branches to masks may give all vectors of a group of conditional reads the condition of the first (GCC PR
# 114375 is another defect of such groups).
# LANES: the vectoriser loses sums where lanes of a vector variable of 1024 bits are written under conditions in a loop, and takes 18 s
# for a loop whose vectors are stored lane by lane, so that it may replace them by scalars. Loop distribution prepares loops for it, and
# compared all of these stores with each other: half of the time for a convolution.
GCC_PASSES = {
    "BRANCHES": ("no-tree-loop-if-convert",),
    "LANES": ("no-tree-loop-if-convert", "no-tree-loop-vectorize", "no-tree-loop-distribution"),
}
KEEP = """#if defined(__GNUC__) && !defined(__clang__)
#define RT_KEEP_{0} __attribute__((optimize({1})))
#else
#define RT_KEEP_{0}
#endif"""

PARALLEL_FOR = """#if !defined(RT_PARALLEL_FOR)
#define RT_PARALLEL_FOR(part, data, count, uneven, pays) part(data, 0, count)
#endif"""
NAMES = re.compile(r"[A-Za-z_]\w*")


class CPrinter(CValues, CFamilyPrinter):
    """Printer of one C function, and of a function for each parallel loop, which runs a range of the loop.

    Attributes:
        declared: C type of each name that the text so far declares.
        offsets: For each open block, the text of the varying part of each offset that it computes.
        holding: The loop whose vectors stay in registers (`LoopMarks.hold_vectors`), while its statements are printed.
        vectors: The names of such vectors by their text, with the open block in which they are declared.
        early: For each factor of the offsets so far, whether it reads nothing, and whether its divisors are never 0.
        is_certain: Whether the store being printed accesses memory unconditionally.
        is_masked: Whether the store being printed has inactive lanes.
    """

    streamed = False
    spaced = frozenset({f32, f64, i32})
    pairs = frozenset({4, 8, 16})
    # gcc treats the result of a masked operation over an uninitialised register as uninitialised in all lanes
    unset = " = {0}"
    chained = frozenset(AVX)
    kernel_name: str
    body: Stmt
    is_certain = False
    is_masked = False
    casts_back: bool | None = None

    def __init__(self, prelude: Prelude, algebra: Algebra, lanes: int, layouts: dict[Buffer, RegisterLayout]) -> None:
        super().__init__(prelude, algebra, lanes, layouts)
        self.declared: dict[str, str] = {}
        self.offsets: list[dict[frozenset[tuple[Monomial, int]], str]] = [{}]
        self.holding: Var | None = None
        self.vectors: dict[str, tuple[str, object]] = {}
        self.early: dict[Expr, tuple[bool, bool]] = {}

    def constant(self, kind: str, name: str, text: str) -> str:
        self.declared[name] = kind
        return super().constant(kind, name, text)

    def variable(self, kind: str, name: str, text: str = "") -> str:
        self.declared[name] = kind
        return super().variable(kind, name, text)

    @contextmanager
    def indented(self, head: str) -> Iterator[None]:
        with super().indented(head):
            self.offsets.append({})
            yield
            self.offsets.pop()

    def offset_text(self, p: Poly) -> str:
        """Return the offset of an element. Offsets that differ by a constant share the text of the rest, under a name if it is long."""
        offset = p.get(ONE, 0)
        rest = {m: c for m, c in p.items() if m}
        if not rest or abs(offset) > 1 << 62 or not self.can_compute_early(rest):
            return self.poly_text(p)
        key = frozenset(rest.items())
        text = next((known[key] for known in reversed(self.offsets) if key in known), None)
        if text is None:
            text = self.poly_text(rest)
            if len(text) > LONG_OFFSET:
                name = self.fresh("at")
                self.line(self.constant("i64", name, text))
                text = name
            self.offsets[-1][key] = text
        return f"{text} {'-' if offset < 0 else '+'} {abs(offset)}" if offset else text

    def can_compute_early(self, p: Poly) -> bool:
        """Return whether an offset may be computed in front of the statement of its access.

        It may if it reads nothing, and divides by no number that may be 0 where the access has a condition.
        """
        return all(self._can_compute_early(a) for a in {a for m in p for a in m if not isinstance(a, Var)})

    def _can_compute_early(self, atom: Expr) -> bool:
        if atom not in self.early:
            nodes = list(postorder((atom,)))
            lows = [
                self.algebra.interval(self.algebra.poly(e.args[1]))[0]
                for e in nodes
                if e.op in ("floordiv", "floormod")
            ]
            reads = any(isinstance(e, Load) or e.dtype.is_float for e in nodes)
            self.early[atom] = not reads, all(low is not None and low > 0 for low in lows)
        reads_nothing, is_defined = self.early[atom]
        # the first of several masked lanes is active, and any later one may not be
        certain = self.is_certain and (self.lane is not None or not self.is_masked)
        return reads_nothing and (is_defined or certain)

    def store(self, s: BufferStore) -> None:
        outer = self.is_certain, self.is_masked
        self.is_certain = not any(e.op in ("select", "and", "or") for e in postorder((s.value, *s.indices)))
        self.is_masked = self.lane is not None and self.lane.count is not None
        super().store(s)
        self.is_certain, self.is_masked = outer

    def counting(self, kind: str, name: str, end: str) -> str:
        self.declared[name] = kind
        return super().counting(kind, name, end)

    def space(self, buffer: Buffer) -> str:
        return ""

    def pin_macro(self, e: Expr, order: Sequence[Expr]) -> str:
        """Pin the operands of minima and maxima. gcc would otherwise read them from memory again in each instruction."""
        used = any(e in m.args for m in order if m.op in ("min", "max"))
        return self.pin() if used and isinstance(e, Load) and e.dtype is f32 and self.width in REGISTERS else ""

    def pin(self) -> str:
        """Return the macro that pins a vector of floats of the present width in a register."""
        width = self.width
        self.prelude.add(f"pin_{width}", PIN.format(width=width, macro=REGISTERS[width]))
        return f"RT_KEEP_{width}"

    def serial_loop(self, f: For, extent: Poly, head: str = "") -> None:
        outer = self.holding, self.vectors
        self.holding, self.vectors = f.var if f.marks.hold_vectors else None, {}
        super().serial_loop(f, extent, head)
        self.holding, self.vectors = outer

    def text(self, e: Expr) -> Text:
        text, varying = super().text(e)
        if self.holding is None or not varying or text is None or not isinstance(e, Load) or e.dtype is not f32:
            return text, varying
        # A vector under a condition is not read in front of it.
        free = self.is_certain and not self.is_masked and e.buffer not in self.written and e.buffer not in self.layouts
        if not free or self.width not in REGISTERS:
            return text, varying
        name, block = self.vectors.get(text, ("", None))
        if not any(block is known for known in self.offsets):
            name = self.fresh("t")
            self.line(self.variable(self.temporary_type(e.dtype, self.width), name, text))
            self.line(f"{self.pin()}({name});")
            self.vectors[text] = name, self.offsets[-1]
            self.effects.add((self.holding, "hold_vectors"))
        self._memo[e] = name, varying
        return name, varying

    def is_short(self, f: For) -> bool:
        """Return whether gcc or this printer may unroll the loop completely."""
        high = self.algebra.interval(self.algebra.poly(f.extent))[1]
        return f.kind == "unrolled" or (high is not None and 1 < high <= UNROLLED_TRIPS)

    def float_text(self, value: float, dtype: DType) -> str:
        return float_literal(value, dtype, "__builtin_inff()", '__builtin_nanf("")')

    def load_vector(self, b: Buffer, at: Address, lane: Lane) -> str:
        dtype = stored(b.dtype)
        name = self.prelude.vector(dtype, lane.width)
        if lane.count is not None:
            return f"{self.prelude.helper('loadm', dtype, lane.width)}({at.text}, {lane.count})"
        return f"(*(const {name}u *)({at.text}))"

    def store_vector(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        dtype = stored(b.dtype)
        name = self.prelude.vector(dtype, lane.width)
        if lane.count is not None:
            return f"{self.prelude.helper('storem', dtype, lane.width)}({at.text}, {value}, {lane.count});"
        return f"*({name}u *)({at.text}) = {value};"

    def load_spaced(self, b: Buffer, at: Address, step: str, lane: Lane) -> str:
        name, count = ("gather", "") if lane.count is None else ("gatherm", f", {lane.count}")
        return f"{self.prelude.helper(name, b.dtype, lane.width)}({at.text}, {step}{count})"

    def store_spaced(self, b: Buffer, at: Address, step: str, value: str, lane: Lane) -> str:
        name, count = ("scatter", "") if lane.count is None else ("scatterm", f", {lane.count}")
        return f"{self.prelude.helper(name, b.dtype, lane.width)}({at.text}, {step}, {value}{count});"

    def store_nontemporal(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        self.streamed = True
        return f"{self.prelude.helper('stream', stored(b.dtype), lane.width)}({at.text}, {value});"

    def prefetch_statement(self, at: str) -> str:
        return f"__builtin_prefetch({at});"

    def declare_array(self, b: Buffer, name: str, size: int) -> None:
        self.declared[name] = self.pointer(b)
        self.line(f"{self.prelude.storage(b.dtype)} {name}[{max(size, 1)}] __attribute__((aligned(64)));")

    def pointer(self, b: Buffer) -> str:
        return f"{'' if b in self.written else 'const '}{self.prelude.storage(b.dtype)} *restrict "

    def thread_loop(self, f: For, extent: Poly) -> None:
        if f.kind == "item" or self.in_threads:
            self.serial_loop(f, extent)
            return
        self.effects.add((f.var, f.kind))
        self.in_threads = True
        pays = at_least(steps(f, lambda e: self.poly_text(self.algebra.poly(e)), self.lanes), FEW)
        if pays:
            self.parallel_loop(f, extent, "" if pays is True else pays)
        else:
            with self.indented(self.counting(*self.counted(f.var, extent), self.poly_text(extent))):
                self.statement(f.body)
                self.fence()
        self.in_threads = False

    def parallel_loop(self, f: For, extent: Poly, condition: str) -> None:
        """Print a loop as a function of a range of iterations, and its call on several threads.

        The function reads the surrounding variables it uses from a struct. Two perfectly nested loops become one range.

        Args:
            condition: C condition under which threads pay; "" if they always do.
        """
        inner = f.body
        nested = inner if isinstance(inner, For) and inner.kind in ("parallel", "group") else None
        if nested is not None and f.var in self.algebra.free(nested.extent):
            nested = None
        # The body is printed first: only then it is known which surrounding names it uses and the struct must have.
        around, lines, indent = dict(self.declared), self.lines, self.indent
        lanes_outside, self.stores_lanes = self.stores_lanes, False
        self.lines, self.indent = [], "  "
        self.offsets.append({})
        count = self.part_body(f, extent, nested)
        self.offsets.pop()
        attribute = self.attribute_of(f)
        self.stores_lanes = lanes_outside
        body, self.lines, self.indent = self.lines, lines, indent

        around |= {self.names[v]: "i64" for v in self.symbols}
        used = set(NAMES.findall("\n".join(body)))
        shared = {name: kind for name, kind in around.items() if name in used}
        number = f"{len(self.parts)}_{self.kernel_name}"
        part, data = f"rt_part_{number}", f"struct rt_data_{number}"
        members = [f"  {kind} {name};" for name, kind in shared.items()] or ["  char none;"]
        copies = [
            f"  {kind if '*' in kind else f'const {kind}'} {name} = rt_data->{name};" for name, kind in shared.items()
        ]
        head = f"{attribute}static void {part}(const void *rt_shared, i64 rt_from, i64 rt_to) {{"
        copies = [f"  const {data} *rt_data = ({data} *)rt_shared;", *copies] if copies else ["  (void)rt_shared;"]
        self.parts.append("\n".join([f"{data} {{", *members, "};", head, *copies, *body, "}", ""]))

        self.prelude.add("parts", PARALLEL_FOR)
        with self.indented("{"):
            self.line(f"const {data} rt_data = {{{', '.join(shared) or '0'}}};")
            uneven = int(f.var in self.irregular)
            self.line(f"RT_PARALLEL_FOR({part}, &rt_data, {count}, {uneven}, {condition or 1});")

    def part_body(self, f: For, extent: Poly, nested: For | None) -> str:
        """Print the iterations from `rt_from` to `rt_to` of a loop, and return the total number of iterations as C text."""
        (kind, name), text = self.counted(f.var, extent), self.poly_text(extent)
        if nested is None:
            with self.indented(f"for ({kind} {name} = ({kind})rt_from; {name} < ({kind})rt_to; {name}++) {{"):
                self.statement(f.body)
                self.fence()
            return text
        self.printed_loops.add(nested.var)
        self.effects.add((nested.var, nested.kind))
        below = self.algebra.poly(nested.extent)
        (narrow, again), more = self.counted(nested.var, below), bracketed(self.poly_text(below))
        self.line("if (rt_from >= rt_to) return;")
        self.line(f"{kind} {name} = ({kind})(rt_from / {more});")
        self.line(f"{narrow} {again} = ({narrow})(rt_from % {more});")
        # The two indices count along, so that only the start of a range is divided.
        with self.indented("for (i64 rt_at = rt_from; rt_at < rt_to; rt_at++) {"):
            self.statement(nested.body)
            self.fence()
            self.line(f"if (++{again} == {more}) {again} = 0, {name}++;")
        return f"(i64){bracketed(text)} * {more}"

    def attribute_of(self, body: Stmt) -> str:
        """Return the attribute that turns off the passes of gcc that would miscompile a body or not end in time; "" for none."""
        if not self.stores_lanes and not conditional_groups(body, self.is_short):
            return ""
        name = "LANES" if self.stores_lanes else "BRANCHES"
        flags = ", ".join(f'"{flag}"' for flag in GCC_PASSES[name])
        self.prelude.add(name.lower(), KEEP.format(name, flags))
        return f"RT_KEEP_{name} "

    def truncation(self, target: DType) -> str:
        # gcc folds (float)(int)x to trunc(x), which differs for -0.5: -0.0 instead of 0.0 (`integers.truncated_gcc`)
        if self.casts_back is None:
            nodes = postorder(tuple(e for n in walk(self.body) for e in n.own_exprs))
            self.casts_back = any(
                n.op == "cast" and n.dtype.is_float and n.args[0].dtype in (i32, u32, i64, u64) for n in nodes
            )
        return f"whole_back_{target}" if self.casts_back else super().truncation(target)

    def fence(self) -> None:
        """Order nontemporal stores before everything that follows (`sfence`)."""
        if self.streamed:
            text = "void rt_fence(void) {\n#ifdef __SSE__\n  __builtin_ia32_sfence();\n#endif\n}"
            self.prelude.add("rt_fence", f"{self.prelude.inline} {text}")
            self.line("rt_fence();")
            self.streamed = False

    def kernel(
        self, name: str, buffers: tuple[Buffer, ...], written: frozenset[Buffer], body: Stmt
    ) -> tuple[str, Grid]:
        self.written, self.body, self.kernel_name = written, body, name
        for b in buffers:
            self.buffers[b] = self.fresh(b.name)
            self.declared[self.buffers[b]] = self.pointer(b)
        parameters = [self.pointer(b) + self.buffers[b] for b in buffers]
        self.statement(body)
        self.fence()
        parameters += [f"i64 {self.names[v]}" for v in self.symbols]
        return self.finish(f"{self.attribute_of(body)}void {name}({', '.join(parameters) or 'void'})"), Grid()


def float_literal(value: float, dtype: DType, infinity: str, nan: str) -> str:
    """Return a literal that a compiler reads as the same number of `dtype`; 16-bit floats are literals of float32."""
    if isnan(value):
        return f"({nan})"
    if isinf(value):
        return infinity if value > 0 else f"(-{infinity})"
    if dtype is f32 or dtype.is_packed:
        rounded = np.float32(value)
        if np.isinf(rounded):
            return infinity if value > 0 else f"(-{infinity})"
        # NumPy's text of a float32 is the shortest one that reads back as the same float32; the text of the float64 is
        # longer.
        text = f"{float(str(rounded))!r}f"
    else:
        text = repr(value)
    return f"({text})" if text[0] == "-" else text
