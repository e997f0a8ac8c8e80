"""Print loads and stores of scalars and vectors.

Tests: `tests/ir/codegen/test_schedules.py`, `tests/ir/codegen/test_memory_safety.py`.
"""

from __future__ import annotations

from dataclasses import replace

from relax_tune.ir.codegen.lower.affine import Poly, as_constant, constant, plus
from relax_tune.ir.codegen.print.addressing import Address, Lane
from relax_tune.ir.codegen.print.prelude import computed, stored
from relax_tune.ir.codegen.print.values import Text, ValuePrinter
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import INTEGERS, DType, f32, f64, i64, u8
from relax_tune.ir.core.expr import Expr, Load
from relax_tune.ir.core.stmt import BufferStore

# Types in memory that are stored as vectors; int64 holds indices, which are computed one at a time.
STORED_VECTORS = frozenset({*INTEGERS, f32, f64}) - {i64}
LINE_BYTES = 64
"""Bytes of a cache line, which is what one prefetch fetches."""


class MemoryPrinter(ValuePrinter):
    """Printer of a kernel's memory accesses. A language defines single accesses.

    Attributes:
        pairs: Widths for which the language can load every second element by shuffling two vectors.
        spaced: Element types of vectors that the language can load from and store to every n-th element.
        dead_lanes: Buffers in registers whose lanes beyond a bound are never read, so that stores need no mask.
        stores_lanes: Whether the text so far stores the lanes of vectors one at a time, or stores lanes of registers under
            conditions.
    """

    pairs: frozenset[int] = frozenset()
    spaced: frozenset[DType] = frozenset()
    dead_lanes: frozenset[Buffer] = frozenset()
    stores_lanes = False

    def _load(self, e: Load) -> Text:
        p = self.flat(e.buffer, e.indices)
        step = self.stride(p)
        b = e.buffer
        if b in self.layouts:
            name, at, width = self.register(b, p)
            if step == 0:
                return (name if width == 1 else f"{name}[{at}]"), False
            return name, True
        if step == 0:
            return self.load_one(b, self.offset_text(p)), False
        lane = self.lane
        assert lane is not None
        if b.dtype is i64:
            return None, True
        if step == 1:
            self._prefetch(b, p)
            text = self.load_vector(b, self.address(b, p), lane)
            if b.dtype.short == "bool":
                text = self.truths(text, lane.width)
            return self.unpacked(text, b.dtype, lane.width), True
        if step == 2 and b.dtype is f32 and lane.count is None and lane.width in self.pairs:
            # The second vector ends at the last lane: one that began at p + width would read one element too many.
            starts = (p, plus(p, constant(lane.width - 1)))
            parts = (self.load_vector(b, self.address(b, q), lane) for q in starts)
            return f"{self.prelude.helper('alternate', f32, lane.width)}({', '.join(parts)})", True
        distance = self.lane_step(p) if b.dtype in self.spaced else None
        if distance:
            return self.load_spaced(b, self.address(b, p), self.poly_text(distance), lane), True
        return self.by_lane(e), True

    def truths(self, text: str, width: int) -> str:
        """Return the mask of a vector of truth values that was loaded from memory, a byte each."""
        return f"({self.prelude.helper('widen', u8, width)}({text}) != 0)"

    def truth(self, text: str) -> str:
        """Return the truth value of one lane of a mask."""
        return f"({text} != 0)"

    def _prefetch(self, b: Buffer, p: Poly, elements: int = 1) -> None:
        """Prefetch the elements that a later iteration of the marked loop reads. An address out of bounds is harmless.

        A line is prefetched at most once per iteration. Lines are assumed to start at the first element that was prefetched.

        Args:
            elements: Number of consecutive elements that are read together.
        """
        prefetch = self.prefetch
        if prefetch is None or b.scope != "global" or b in self.written:
            return
        dependent = [m for m in p if any(prefetch.var in self.algebra.free(a) for a in m)]
        if dependent != [(prefetch.var,)]:
            return
        later: Poly = constant(p[(prefetch.var,)] * prefetch.distance)
        for start in range(0, elements * b.dtype.bytes, LINE_BYTES):
            q = plus(p, constant(start // b.dtype.bytes))
            ahead = (as_constant(plus(q, known, -1)) for other, known in prefetch.issued if other is b)
            if any(d is not None and 0 <= d * b.dtype.bytes < LINE_BYTES for d in ahead):
                continue
            text = self.prefetch_statement(self.address(b, plus(q, later)).text)
            if text is not None:
                prefetch.issued.append((b, q))
                self.effects.add((prefetch.var, "prefetch_distance"))
                self.line(text)

    def prefetch_statement(self, at: str) -> str | None:
        """Return a statement that prefetches an address; None if the language has none."""
        return None

    def load_one(self, b: Buffer, offset: str) -> str:
        return self.unpacked(f"{self.buffers[b]}[{offset}]", b.dtype, 1)

    def load_vector(self, b: Buffer, at: Address, lane: Lane) -> str:
        raise NotImplementedError

    def store_vector(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        raise NotImplementedError

    def store_nontemporal(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        """Return a store of a whole vector past the caches."""
        raise NotImplementedError

    def load_spaced(self, b: Buffer, at: Address, step: str, lane: Lane) -> str:
        """Return a vector of every `step`-th element."""
        raise NotImplementedError

    def store_spaced(self, b: Buffer, at: Address, step: str, value: str, lane: Lane) -> str:
        """Return a store of a vector to every `step`-th element."""
        raise NotImplementedError

    def store_one(self, b: Buffer, offset: str, value: str) -> str:
        return f"{self.buffers[b]}[{offset}] = {self.packed(value, b.dtype, 1)};"

    def store(self, s: BufferStore) -> None:
        """Print one store for the current lane or vector of lanes."""
        p = self.flat(s.buffer, s.indices)
        step = self.stride(p)
        lane, b = self.lane, s.buffer
        if b.dtype.is_packed and b not in self.layouts:  # the store rounds; a cast in front of it would round twice
            s = replace(s, value=_before_rounding(s.value, b.dtype))
        if lane is None or (step == 0 and not self.is_varying(s.value)):
            text, _moving = self.value(s.value)
            assert text is not None
            self.assign(b, p, text)
            return
        text, varying = self.value(s.value)
        if b in self.layouts and step == 1 and text is not None:
            name, _at, _width = self.register(b, p)
            new = self.splat(text, varying, b.dtype)
            if lane.mask is not None and b not in self.dead_lanes:
                new = f"{self.prelude.helper('sel', b.dtype, lane.width)}({self.widened(lane.mask, b.dtype)}, {new}, {name})"
            self.line(f"{name} = {new};")
            return
        if step == 1 and text is not None and stored(b.dtype) in STORED_VECTORS:
            address = self.address(b, p)
            new = self.packed(self.splat(text, varying, b.dtype), b.dtype, lane.width)
            streamed = lane.nontemporal and self.has_nontemporal and b.scope == "global"
            if streamed:
                self.effects.add((lane.var, "nontemporal"))
            if not streamed:
                self.line(self.store_vector(b, address, new, lane))
            elif lane.count is None:
                self.line(self.store_nontemporal(b, address, new, lane))
            else:
                name = self.fresh("t")
                self.line(self.constant(self.prelude.vector(stored(b.dtype), lane.width), name, new))
                full, partial = (f(b, address, name, lane) for f in (self.store_nontemporal, self.store_vector))
                self.line(f"if ({lane.count} == {lane.width}) {full} else {partial}")
            return
        self._scatter(s, text, varying, lane)

    def assign(self, b: Buffer, p: Poly, text: str) -> None:
        """Print the store of one element."""
        self.line(self.assignment(b, p, text))

    def assignment(self, b: Buffer, p: Poly, text: str) -> str:
        if b not in self.layouts:
            return self.store_one(b, self.offset_text(p), text)
        name, at, width = self.register(b, p)
        return f"{name if width == 1 else f'{name}[{at}]'} = {text};"

    def _scatter(self, s: BufferStore, text: str | None, varying: bool, lane: Lane) -> None:
        """Print a store lane by lane."""
        env = self.algebra.env
        self.stores_lanes |= lane.count is not None and s.buffer in self.layouts
        vector: str | None = None
        if text is not None and s.buffer not in self.layouts and s.buffer.dtype in self.spaced:
            p = self.flat(s.buffer, s.indices)
            step = self.lane_step(p)
            if step:
                value = self.splat(text, varying, s.buffer.dtype)
                self.line(self.store_spaced(s.buffer, self.address(s.buffer, p), self.poly_text(step), value, lane))
                self.stores_lanes = True
                return
        if text is not None and varying:
            vector, self.stores_lanes = self.fresh("t"), True
            self.line(self.constant(self.temporary_type(s.value.dtype, lane.width), vector, text))
        old = env[lane.var]
        for k in range(lane.width):
            env[lane.var] = plus(lane.start, constant(k))
            self.lane = None
            value = f"{vector}[{k}]" if vector is not None else text if text is not None else self.uniform(s.value)
            if vector is not None and s.value.dtype.short == "bool":
                value = self.truth(value)
            line = self.assignment(s.buffer, self.flat(s.buffer, s.indices), value)
            self.line(line if lane.count is None else f"if ({k} < {lane.count}) {{ {line} }}")
        env[lane.var] = old
        self.lane = lane


def _before_rounding(e: Expr, dtype: DType) -> Expr:
    """Return the operand of a cast from the type `dtype` is computed in to `dtype`, and other values as they are."""
    return e.args[0] if e.op == "cast" and e.dtype is dtype and e.args[0].dtype is computed(dtype) else e
