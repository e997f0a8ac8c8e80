"""Print the statements of lowered functions in C, OpenCL, CUDA and WGSL. `values.py` prints expressions.

Tests: `tests/ir/codegen/test_text.py`, `tests/ir/codegen/test_names.py`, `tests/ir/codegen/test_schedules.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.codegen.lower.affine import Algebra, Poly, constant, plus
from relax_tune.ir.codegen.lower.lowered import combined_load
from relax_tune.ir.codegen.lower.registers import RegisterLayout
from relax_tune.ir.codegen.lower.vectors import chunks, is_expanded, loop_lanes
from relax_tune.ir.codegen.print.addressing import Lane, Prefetch, bracketed
from relax_tune.ir.codegen.print.copies import CopyPrinter
from relax_tune.ir.codegen.print.intrinsic_calls import match_call, require_shared, split_swizzle
from relax_tune.ir.codegen.print.prelude import INDEX, Prelude
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bool_, i32, i64
from relax_tune.ir.core.expr import Expr, Var, as_int, conjuncts, const
from relax_tune.ir.core.stmt import (
    AsyncFence,
    Barrier,
    BufferStore,
    Declare,
    For,
    IfThenElse,
    Let,
    Seq,
    Stmt,
    loops,
    stores,
    unknown,
)
from relax_tune.ir.hardware.intrinsic import Intrinsic

# Names without a meaning in any of the languages or their headers: one letter, or a word, an underscore and a number.
FREE = re.compile(r"[A-Za-z](_\d+)?|\w*[a-z]\w*_\d+")


@dataclass(frozen=True, slots=True)
class Grid:
    """The launch of a kernel that has a grid.

    Attributes:
        groups: Work-groups along each axis.
        items: Work-items of a group along each axis.
    """

    groups: tuple[Expr, ...] = ()
    items: tuple[int, ...] = ()


def meaningless(name: str) -> str:
    """Append an underscore to names that could have a meaning. No keyword, type, function or macro of the languages ends in one."""
    return name if FREE.fullmatch(name) else f"{name}_"


def numbered(base: str, number: int) -> str:
    """Return the name of one of several objects with the same base name."""
    return meaningless(f"{base.rstrip('_')}_{number}")


LEAST_PREFETCHED = 16
"""Smallest operand of an intrinsic, in bytes, that is prefetched. Smaller ones are consecutive elements of a row."""


class CFamilyPrinter(CopyPrinter):
    """Printer of one kernel. A language defines loops over threads, declarations and barriers.

    Attributes:
        unset: Initialiser of registers before their first store.
        most: Upper bound of the kernel's integers if these have 32 bits.
        irregular: Variables of thread loops whose iterations differ in work.
    """

    unset = ""
    most: Expr = const(0)
    irregular: frozenset[Var] = frozenset()

    def __init__(self, prelude: Prelude, algebra: Algebra, lanes: int, layouts: dict[Buffer, RegisterLayout]) -> None:
        super().__init__(prelude, algebra, layouts)
        self.lanes = lanes
        self.in_threads = False
        self.parts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._registers: dict[tuple[str, int], str] = {}

    # names

    def fresh(self, hint: str) -> str:
        """Return an unused identifier without a meaning in any language."""
        base = re.sub(r"[^A-Za-z0-9_]", "_", hint)
        # rt_ begins the names of the prelude
        if not base or not base[0].isalpha() or base.startswith("rt_"):
            base = f"v{base}"
        name = base = meaningless(base)
        while name in self._numbers:
            self._numbers[base] += 1
            name = numbered(base, self._numbers[base])
        self._numbers[name] = 0
        return name

    def register_name(self, b: Buffer, offset: int) -> str:
        key = self.buffers[b], offset
        if key not in self._registers:
            self._registers[key] = self.fresh(f"{self.buffers[b].rstrip('_')}_{offset}")
        return self._registers[key]

    # statements

    def statement(self, n: Stmt) -> None:
        if type(n) not in STATEMENTS:
            raise unknown(n, "the C printer")
        STATEMENTS[type(n)](self, n)

    def sequence(self, n: Seq) -> None:
        for s in n.stmts:
            self.statement(s)

    def barrier(self, n: Barrier) -> None:
        """Print the line that makes the work-items of a group wait."""
        raise NotImplementedError

    def async_fence(self, n: AsyncFence) -> None:
        """Print the line about asynchronous copies, in languages that have these."""

    def bind(self, n: Let) -> None:
        value = self.algebra.poly(n.value)
        small = all(len(m) <= 1 and isinstance(a, Var) for m in value for a in m) and len(value) <= 1
        if small:
            # Substituted instead of declared, so that expressions over it fold.
            with self.known(n.var, value):
                self.statement(n.body)
            return
        with self.indented("{"):
            text = self.poly_text(value)
            kind, name = self.counted(n.var, plus(value, constant(1)))
            self.line(self.constant(kind, name, text))
            self.statement(n.body)

    def branch(self, n: IfThenElse) -> None:
        """Print a condition.

        Conjuncts that can be decided vanish, varying conjuncts become a masked region, and the others become an `if`.
        """
        uniform: list[Expr] = []
        lanes: list[Expr] = []
        for c in conjuncts(n.cond):
            proof = self.algebra.decide(c)
            if proof is Proof.NO:
                if n.orelse is not None:
                    self.statement(n.orelse)
                return
            if proof is Proof.UNKNOWN:
                (lanes if self.is_varying(c) else uniform).append(c)
        if uniform:
            text = bracketed(" && ".join(self.condition(c) for c in uniform))
            with self.indented(f"if {text} {{"):
                self.masked(lanes, n.then)
            if n.orelse is not None:
                with self.indented("else {"):
                    self.statement(n.orelse)
            return
        self.masked(lanes, n.then)

    def masked(self, conds: list[Expr], body: Stmt) -> None:
        """Print `body` for the lanes below every bound."""
        if not conds:
            self.statement(body)
            return
        lane = self.lane
        assert lane is not None
        count = lane.count
        parts = [] if count is None else [count]
        kind = INDEX if self.spans is not None else i64
        nonempty = count is None
        within = count is None and len(conds) == 1
        for c in conds:
            slack = self.lane_slack(c)
            low, high = self.algebra.interval(slack)
            nonempty = nonempty and low is not None and low > 0
            within = within and high is not None and high <= lane.width
            kind = i64 if self.slack_type(slack) is i64 else kind
            parts.append(self.slack_text(slack, lane.width))
        smallest = parts[0]
        for p in parts[1:]:
            smallest = f"{self.prelude.helper('min', kind, 1)}({smallest}, {p})"
        if nonempty and within and smallest.isidentifier():  # in the scope around it, whose offsets it shares
            self.active_lanes(smallest, body)
            return
        name = self.fresh("n")
        with self.indented("{"):
            if nonempty and smallest.isdigit():
                name = str(min(int(smallest), lane.width))
            else:
                least = self.prelude.helper("min", kind, 1)
                self.line(self.constant(self.prelude.storage(kind), name, f"{least}({smallest}, {lane.width})"))
            # without active lanes the region is skipped: its bounds may be negative, and its addresses out of bounds
            with self.indented("{" if nonempty else f"if ({name} > 0) {{"):
                self.active_lanes(name, body)

    def active_lanes(self, count: str, body: Stmt) -> None:
        """Print `body` for the first `count` lanes."""
        lane, mask = self.lane, self.fresh("m")
        assert lane is not None
        iota = self.prelude.helper("iota", i32, lane.width)
        splat = self.prelude.helper("splat", i32, lane.width)
        active = f"{iota}() < {splat}({self.as_int32(count)})"
        self.line(self.constant(self.temporary_type(bool_, lane.width), mask, active))
        begin = len(self.lines)
        with self.lanes_of(Lane(lane.var, lane.start, lane.width, lane.symbol, count, mask, lane.nontemporal)):
            self.statement(body)
        if not any(re.search(rf"\b{mask}\b", line) for line in self.lines[begin:]):
            del self.lines[begin - 1]  # masked loads and stores take the number of lanes

    def declare(self, n: Declare) -> None:
        with self.indented("{"):
            for b in n.buffers:
                self.declare_buffer(b)
            self.statement(n.body)

    def declare_buffer(self, b: Buffer) -> None:
        layout = self.layouts.get(b)
        base = self.buffers[b] = self.fresh(b.name)
        if layout is None:
            size = 1
            for d in b.shape:
                size *= as_int(d) or 0
            self.declare_array(b, base, size)
            return
        for register, width in self.registers(b, layout):
            self.line(self.variable(self.prelude.vector(b.dtype, width), f"{register}{self.unset}"))

    def declare_array(self, b: Buffer, name: str, size: int) -> None:
        raise NotImplementedError

    # loops

    def loop(self, f: For) -> None:
        extent = self.algebra.poly(f.extent)
        size = as_int(self.algebra.expr(extent))
        if size is not None and size <= 0:
            return
        self.printed_loops.add(f.var)
        if f.marks.intrinsic and self.intrinsic(f):
            self.effects.add((f.var, "intrinsic"))
            return
        if f.marks.warp_reduce:
            self.warp_reduce(f)
            return
        if f.kind in ("parallel", "group", "item"):
            self.thread_loop(f, extent)
        elif size == 1 and f.kind != "vectorized":
            self.effects.add((f.var, "unrolled"))
            with self.known(f.var, {}):
                self.statement(f.body)
        elif f.marks.transpose:
            self.effects.update((m.var, "vectorized") for m in loops(f, "vectorized"))
            self.transposed(f)
        elif f.kind == "vectorized" and size is not None:
            self.effects.add((f.var, "vectorized"))
            self.vector_loop(f, size)
        elif f.marks.tree_reduce and size is not None and self.tree_reduce(f, size):
            self.effects |= {(f.var, "vectorized"), (f.var, "unrolled")}
        elif f.kind == "unrolled" and size is not None and is_expanded(f, self.lanes):
            self.effects.add((f.var, "unrolled"))
            for k in range(size):
                with self.known(f.var, constant(k)):
                    self.statement(f.body)
        else:
            self.serial_loop(f, extent)

    def intrinsic(self, f: For) -> bool:
        """Print the call of the intrinsic that the loop is marked with. Return False if the nest no longer matches it."""
        call = None if self.lane is not None else match_call(f, self.algebra)
        if call is None or not self.offers(call.intrinsic):
            require_shared(f)
            return False
        names: list[str] = []
        phases: list[str] = []
        sizes = list(call.sizes)
        for (b, at), operand in zip(call.operands, call.intrinsic.semantics.buffers, strict=True):
            start = self.algebra.resolve(at)
            row, phase = split_swizzle(b, start)
            offset = self.poly_text(plus(start, phase, -1))
            if (elements := prod(call.extent(d) for d in operand.shape)) * b.dtype.bytes >= LEAST_PREFETCHED:
                self._prefetch(b, start, elements)
            names.append(self.buffers[b] if offset == "0" else f"{self.buffers[b]} + {offset}")
            if call.intrinsic.of_warp and b.scope == "shared":
                phases.append(self.poly_text(phase))
                sizes.append((f"{operand.name.lower()}_row", row))
        names += [self.poly_text(self.algebra.resolve(s)) for s in call.strides] + phases
        kinds = [(self.space(b), b.dtype) for b, _ in call.operands]
        name = self.prelude.intrinsic(call.intrinsic, kinds, sizes)
        slacks = [self.algebra.resolve(r) for r in call.slacks]
        bounds = [self.algebra.interval(r) for r in slacks]
        if any(high is not None and high <= 0 for _, high in bounds):
            require_shared(f)
            return False
        # the intrinsic covers whole tiles; where bounds may cut a tile, the loops run instead
        open_ = [self.poly_text(r) for r, (low, _) in zip(slacks, bounds, strict=True) if low is None or low <= 0]
        if not open_:
            self.line(f"{name}({', '.join(names)});")
            return True
        with self.indented(f"if ({' && '.join(f'{r} > 0' for r in dict.fromkeys(open_))}) {{"):
            self.line(f"{name}({', '.join(names)});")
        with self.indented("else {"):
            self.loop(f.marked(intrinsic=""))
        return True

    def offers(self, intrinsic: Intrinsic) -> bool:
        """Return whether this kernel can call an intrinsic."""
        return intrinsic.language in ("", self.prelude.language)

    def tree_reduce(self, f: For, size: int) -> bool:
        """Print a reduction over the lanes of vector registers as a tree. Return False if the elements are not in registers."""
        (s,) = stores(f.body)
        source = combined_load(s)
        assert source is not None
        layout, op, dtype = self.layouts.get(source.buffer), s.value.op, s.buffer.dtype
        if layout is None or self.lane is not None or source.dtype is not dtype or dtype not in self.vector_types:
            return False
        lanes: dict[str, int] = {}
        widths: dict[int, list[str]] = {}
        for k in range(size):
            with self.known(f.var, constant(k)):
                name, _at, width = self.register(source.buffer, self.flat(source.buffer, source.indices))
            if name not in lanes:
                widths.setdefault(width, []).append(name)
            lanes[name] = lanes.get(name, 0) + 1
        # A register that holds other lanes too must not be reduced whole.
        if max(widths) == 1 or any(lanes[name] != width for width, names in widths.items() for name in names):
            return False
        old = self.uniform(s.value.args[0])
        total = self.combine(op, dtype, 1, old, self.reduced_registers(op, dtype, widths))
        self.assign(s.buffer, self.flat(s.buffer, s.indices), total)
        return True

    def reduced_registers(self, op: str, dtype: DType, widths: dict[int, list[str]]) -> str:
        """Return the reduction of all lanes of several registers.

        A wide register is halved until it can be combined with registers of the next width. If those have fewer than four lanes,
        it is folded to a scalar instead.

        Args:
            widths: Names of the registers of each width.
        """
        singles: list[str] = []
        wide: list[str] = []
        width = max(widths)
        while width > 1:
            wide += widths.get(width, [])
            while len(wide) > 1:
                pairs = [self.combine(op, dtype, width, a, b) for a, b in zip(wide[::2], wide[1::2], strict=False)]
                wide = pairs + ([wide[-1]] if len(wide) % 2 else [])
            below = max((w for w in widths if w < width), default=1)
            if wide and below < 4:
                singles.append(f"{self.prelude.helper(f'fold_{op}', dtype, width)}({wide.pop()})")
            elif wide:
                wide = [f"{self.prelude.helper(f'half_{op}', dtype, width)}({wide[0]})"]
            width //= 2
        singles += widths.get(1, [])
        total = singles[0]
        for x in singles[1:]:
            total = self.combine(op, dtype, 1, total, x)
        return total

    def combine(self, op: str, dtype: DType, width: int, a: str, b: str) -> str:
        if op in ("add", "mul") and not dtype.is_int:
            return f"({a} {'+' if op == 'add' else '*'} {b})"
        return f"{self.prelude.helper(op, dtype, width)}({a}, {b})"

    def warp_reduce(self, f: For) -> None:
        """Print an all-reduce over the work-items of a warp."""
        raise NotImplementedError

    def thread_loop(self, f: For, extent: Poly) -> None:
        """Print a loop over threads, work-groups or work-items."""
        raise NotImplementedError

    def serial_loop(self, f: For, extent: Poly, head: str = "") -> None:
        if head:
            self.line(head)
        text = self.poly_text(extent)
        kind, name = self.counted(f.var, extent)
        outer = self.prefetch
        self.prefetch = Prefetch(f.var, f.marks.prefetch_distance) if f.marks.prefetch_distance else outer
        with self.indented(self.counting(kind, name, text)):
            self.statement(f.body)
        self.prefetch = outer

    def vector_loop(self, f: For, size: int) -> None:
        lanes = loop_lanes(f, self.lanes)
        pieces = chunks(size, lanes)
        if not is_expanded(f, self.lanes):
            full = sum(1 for _at, w in pieces if w == lanes)
            outer = Var(f"{f.var.name}_o")
            self.algebra.ranges[outer] = (0, full - 1)
            kind, name = self.counted(outer, constant(full))
            with self.indented(self.counting(kind, name, str(full))):
                self.vector(f, {(outer,): lanes}, lanes)
            pieces = pieces[full:]
        for at, width in pieces:
            self.vector(f, constant(at), width)

    def vector(self, f: For, start: Poly, width: int) -> None:
        """Print one vector of a vectorised loop."""
        if width == 1:
            with self.known(f.var, start):
                self.statement(f.body)
            return
        symbol = self.lane_symbol
        self.algebra.ranges[symbol] = (0, width - 1)
        with (
            self.known(f.var, plus(start, {(symbol,): 1})),
            self.lanes_of(Lane(f.var, start, width, symbol, None, None, f.marks.nontemporal)),
        ):
            self.statement(f.body)

    @contextmanager
    def lanes_of(self, lane: Lane) -> Iterator[None]:
        """Print the statements of the block for a vector of lanes."""
        old, self.lane = self.lane, lane
        yield
        self.lane = old

    # the kernel

    def kernel(
        self, name: str, buffers: tuple[Buffer, ...], written: frozenset[Buffer], body: Stmt
    ) -> tuple[str, Grid]:
        raise NotImplementedError

    def finish(self, head: str) -> str:
        """Return the whole text: prelude, functions that the kernel calls, signature, body."""
        return f"{self.prelude.text()}{''.join(self.parts)}{head} {{\n" + "\n".join(self.lines) + "\n}\n"


# The method that prints each class of statement. Lambdas look the method up at the call, so that a language may override it.
STATEMENTS: Mapping[type[Stmt], Callable[[CFamilyPrinter, Any], None]] = {
    BufferStore: lambda printer, n: printer.store(n),
    Seq: lambda printer, n: printer.sequence(n),
    For: lambda printer, n: printer.loop(n),
    IfThenElse: lambda printer, n: printer.branch(n),
    Let: lambda printer, n: printer.bind(n),
    Declare: lambda printer, n: printer.declare(n),
    AsyncFence: lambda printer, n: printer.async_fence(n),
    Barrier: lambda printer, n: printer.barrier(n),
}
