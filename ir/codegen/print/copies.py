"""Print copies of operands: masked loads with padding, and transposition of square tiles in registers.

Tests: `tests/ir/codegen/test_conditional_reads.py`, `tests/ir/codegen/test_schedules.py`.
"""

from __future__ import annotations

from math import gcd

from relax_tune.ir.codegen.lower.affine import Poly, constant, plus
from relax_tune.ir.codegen.lower.guards import slack_below
from relax_tune.ir.codegen.print.addressing import Address, Lane
from relax_tune.ir.codegen.print.memory import MemoryPrinter
from relax_tune.ir.codegen.print.transpose_registers import transposed_copy
from relax_tune.ir.codegen.print.values import Text
from relax_tune.ir.core.dtype import f32, i32, i64
from relax_tune.ir.core.expr import Expr, Load, Var, as_int, loads, postorder, transform
from relax_tune.ir.core.stmt import BufferStore, For


class CopyPrinter(MemoryPrinter):
    """Printer of padded and transposed copies."""

    def _text(self, e: Expr) -> Text:
        lane = self.lane
        if e.op == "select" and lane is not None and lane.count is None and self.is_varying(e.args[0]):
            masked = self._masked_load(e, lane)
            if masked is not None:
                return masked, True
        return super()._text(e)

    def _masked_load(self, e: Expr, lane: Lane) -> str | None:
        """Print `select(x < bound, f(b[min(x, bound - 1)]), other)` as a masked load: lanes out of bounds read nothing.

        Return None for any other selection.
        """
        condition, value = e.args[0], e.args[1]
        if condition.op != "lt" or condition.args[0].dtype is not i64:
            return None
        x, bound = condition.args
        last = plus(self.algebra.static(bound), constant(-1))
        clamped = {
            n
            for n in postorder((value,))
            if n.op == "min" and n.args[0] is x and self.algebra.static(n.args[1]) == last
        }
        slack = plus(self.algebra.poly(bound), self.algebra.poly(x), -1)
        rest = {m: c for m, c in slack.items() if m != (lane.symbol,)}
        if not clamped or slack.get((lane.symbol,)) != -1 or self.algebra.depends(rest, (lane.symbol,)):
            return None
        # the masked load does not access lanes out of bounds, so the clamp, which breaks the stride of one, can go
        value = transform(value, lambda n: x if n in clamped else None)
        if any(self.stride(self.flat(n.buffer, n.indices)) not in (0, 1) for n in loads(value)):
            return None
        count = self.clamped(rest, lane.width)
        self.lane = Lane(lane.var, lane.start, lane.width, lane.symbol, count, None)
        text, varying = self._text_in_place(value)
        self.lane = lane
        if text is None:
            return None
        text = self.splat(text, varying, e.dtype)
        other = e.args[2]
        if isinstance(value, Load) and varying and other.value == 0:
            return text  # lanes out of bounds load zeros
        iota, splat = (self.prelude.helper(h, i32, lane.width) for h in ("iota", "splat"))
        mask = self.widened(f"({iota}() < {splat}({self.as_int32(count)}))", e.dtype)
        padding, is_vector = self.text(other)
        assert padding is not None
        filled = self.splat(padding, is_vector, e.dtype)
        return f"{self.prelude.helper('sel', e.dtype, lane.width)}({mask}, {text}, {filled})"

    def lane_slack(self, c: Expr) -> Poly:
        """Return the number of lanes that meet a condition on the lane, which may be negative or exceed the width."""
        slack = slack_below(c, self.algebra.poly)
        assert slack is not None and self.lane is not None, f"{c!r} is no bound on lanes"
        return {m: k for m, k in slack.items() if m != (self.lane.symbol,)}

    def transposed(self, f: For) -> None:
        """Print a transposing copy: vectors along the outer loop, transposed in registers, stored along the inner loop."""
        copy = transposed_copy(f)
        assert copy is not None
        inner, condition, store = copy
        size = as_int(f.extent) or 0
        self.algebra.ranges[self.lane_symbol] = (0, size - 1)
        count = self._count(f, condition, size)
        squares = (as_int(inner.extent) or 0) // size
        if squares == 1:
            self._square(f, inner, store, {}, count)
        else:
            at = Var(f"{inner.var.name}_o")
            self.algebra.ranges[at] = (0, squares - 1)
            kind, name = self.counted(at, constant(squares))
            with self.indented(self.counting(kind, name, str(squares))):
                self._square(f, inner, store, {(at,): size}, count)

    def _square(self, f: For, inner: For, store: BufferStore, start: Poly, count: str | None) -> None:
        size, symbol, env = as_int(f.extent) or 0, self.lane_symbol, self.algebra.env
        exchange, kind = self.prelude.helper("exchange", f32, size), self.prelude.vector(f32, size)
        names = [self.fresh("row") for _ in range(size)]
        env[f.var] = {(symbol,): 1}
        self.lane = Lane(f.var, {}, size, symbol, count, None)
        for k, name in enumerate(names):
            env[inner.var] = plus(start, constant(k))
            text, varying = self.value(store.value)
            assert text is not None
            self.line(self.variable(kind, name, self.splat(text, varying, f32)))
        self.line(f"{exchange}({', '.join(f'&{n}' for n in names)});")
        env[inner.var] = plus(start, {(symbol,): 1})
        self.lane = Lane(inner.var, start, size, symbol, None, None)
        for k, name in enumerate(names):
            env[f.var] = constant(k)
            at = {m: c for m, c in self.flat(store.buffer, store.indices).items() if m != (symbol,)}
            address = Address(self.place(store.buffer, self.offset_text(at)), gcd(*at.values()))
            line = self.store_vector(store.buffer, address, name, self.lane)
            self.line(line if count is None else f"if ({k} < {count}) {{ {line} }}")
        self.lane = None
        del env[f.var], env[inner.var]

    def _count(self, f: For, condition: Expr | None, size: int) -> str | None:
        """Print the number of rows of the square under a condition, and return its name; None without a condition."""
        if condition is None:
            return None
        with self.known(f.var, {}):
            slack = plus(self.algebra.poly(condition.args[1]), self.algebra.poly(condition.args[0]), -1)
        return self.clamped(slack, size)

    def clamped(self, slack: Poly, most: int) -> str:
        """Print a number clamped to 0 .. `most`, and return its name."""
        kind = self.slack_type(slack)
        low, high = (self.prelude.helper(h, kind, 1) for h in ("min", "max"))
        name = self.fresh("n")
        text = f"{high}({low}({self.slack_text(slack, most)}, {most}), 0)"
        self.line(self.constant(self.prelude.storage(kind), name, text))
        return name
