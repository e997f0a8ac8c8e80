"""Print copies into shared memory as `cp.async` (PTX ISA, "cp.async").

Tests: `tests/schedules/rules/test_async_copies.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.codegen.lower.affine import Poly, constant, plus
from relax_tune.ir.codegen.lower.guards import split_conditions
from relax_tune.ir.codegen.lower.vectors import is_prefix
from relax_tune.ir.codegen.print.addressing import Address, Lane
from relax_tune.ir.codegen.print.grid import GridPrinter
from relax_tune.ir.core.expr import Expr, Load, conjuncts, transform
from relax_tune.ir.core.stmt import AsyncFence, BufferStore, For

# Sizes in bytes of one asynchronous copy (PTX ISA, "cp.async").
COPIED_BYTES = (4, 8, 16)

# Copy N elements to shared memory asynchronously, zeros after the first `count`. tests/cuda_emulation/emulation.h replaces these.
# `.cg`, which bypasses L1, exists for copies of 16 bytes only.
ASYNC_COPIES = """#if !defined(RT_WARPS) && __CUDA_ARCH__ >= 800
template <int N, class T> static __device__ __forceinline__ void rt_copy(T *to, const T *from, int count) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = count * (int)sizeof(T);
  if (N * sizeof(T) == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
    :: "r"(at), "l"(from), "n"(N * sizeof(T) == 8 ? 8 : 4), "r"(bytes) : "memory"); }
static __device__ __forceinline__ void rt_sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int most> static __device__ __forceinline__ void rt_arrived() {
  if (most) asm volatile("cp.async.wait_group %0;" :: "n"(most) : "memory");
  else asm volatile("cp.async.wait_all;" ::: "memory"); }
#elif !defined(RT_WARPS)
template <int N, class T> static __device__ __forceinline__ void rt_copy(T *to, const T *from, int count) {
  _Pragma("unroll") for (int k = 0; k < N; k++) to[k] = k < count ? from[k] : 0; }
static __device__ __forceinline__ void rt_sent() {}
template <int most> static __device__ __forceinline__ void rt_arrived() {}
#endif"""


class AsyncCopyPrinter(GridPrinter):
    """Printer of loops marked `async_copy`."""

    def vector_loop(self, f: For, size: int) -> None:
        if f.marks.async_copy and self._copied(f, size):
            self.effects.add((f.var, "async_copy"))
        else:
            super().vector_loop(f, size)

    def _copied(self, f: For, size: int) -> bool:
        """Print a copy into shared memory as one `cp.async`, with zeros out of bounds. Return False if the loop is no such copy."""
        around, s = split_conditions(f.body)
        conditions = [c for e in around for c in conjuncts(e)]
        if not isinstance(s, BufferStore) or size * s.buffer.dtype.bytes not in COPIED_BYTES:
            return False
        value: Expr = s.value
        selected: tuple[Expr, ...] = ()
        if s.value.op == "select":
            chosen, value, other = s.value.args
            if other.value != 0:
                return False
            selected = tuple(conjuncts(chosen))
        if not isinstance(value, Load) or value.dtype is not s.buffer.dtype or value.buffer in self.written:
            return False
        if (s.buffer.scope, value.buffer.scope) != ("shared", "global"):
            return False
        symbol = self.lane_symbol
        self.algebra.ranges[symbol] = (0, size - 1)
        with self.known(f.var, {(symbol,): 1}), self.lanes_of(Lane(f.var, {}, size, symbol, None, None)):
            lanes = [c for c in selected if self.is_varying(c)]
            uniform = [self._for_all(c, f, size) for c in conditions]
            if None in uniform or not all(is_prefix(c, f.var, self.algebra) for c in lanes):
                return False
            indices = self._within_bounds(value.indices, lanes)
            to, source = self.flat(s.buffer, s.indices), self.flat(value.buffer, indices)
            addresses = [self.address(b, p) for b, p in ((s.buffer, to), (value.buffer, source))]
            if (size > 1 and any(self.stride(p) != 1 for p in (to, source))) or any(
                a.multiple % size for a in addresses
            ):
                return False
            self.prelude.add("async_copies", ASYNC_COPIES)
            guards = [text for text in uniform if text]
            if not guards:
                self._copy(addresses, size, selected)
            else:
                with self.indented(f"if ({' && '.join(guards)}) {{"):
                    self._copy(addresses, size, selected)
        return True

    def _for_all(self, c: Expr, f: For, size: int) -> str | None:
        """Return a condition that holds for all lanes or none as text, "" if it always holds; None for other conditions."""
        if self.algebra.decide(c) is Proof.YES:
            return ""
        if not self.is_varying(c):
            return self.condition(c)
        if not is_prefix(c, f.var, self.algebra):
            return None
        rest = self.lane_slack(c)
        return f"{self.poly_text(rest)} > 0" if all(k % size == 0 for k in rest.values()) else None

    def _within_bounds(self, indices: Sequence[Expr], lanes: Sequence[Expr]) -> tuple[Expr, ...]:
        """Return indices without their clamps to bounds: elements out of bounds are not read."""
        ends: dict[Expr, Poly] = {}
        for c in lanes:
            last = self.algebra.static(c.args[1])
            ends[c.args[0]] = last if c.op == "le" else plus(last, constant(-1))

        def free(n: Expr) -> Expr | None:
            if n.op == "min" and self.algebra.static(n.args[1]) == ends.get(n.args[0]):
                return n.args[0]
            return None

        return tuple(transform(e, free) for e in indices)

    def _copy(self, addresses: Sequence[Address], size: int, selected: Sequence[Expr]) -> None:
        """Print the call that copies as many elements as the conditions allow.

        Args:
            addresses: Target and source.
        """
        count, flags = str(size), list[str]()
        for c in selected:
            proof = self.algebra.decide(c)
            if proof is not Proof.UNKNOWN:
                count = count if proof is Proof.YES else "0"
            elif not self.is_varying(c):
                flags.append(self.condition(c))
            else:
                few = self.clamped(self.lane_slack(c), size)
                count = few if count == str(size) else f"({few} < {count} ? {few} : {count})"
        if flags:
            count = f"({' && '.join(flags)} ? (int){count} : 0)"
        self.line(f"rt_copy<{size}>({', '.join(a.text for a in addresses)}, {count});")

    def async_fence(self, n: AsyncFence) -> None:
        self.prelude.add("async_copies", ASYNC_COPIES)
        self.line("rt_sent();" if n.pending is None else f"rt_arrived<{n.pending}>();")
