"""Expressions to text, for one lane or for a vector of lanes.

Integer expressions go through `Algebra`. A value that depends on the lane of the surrounding vectorised loop is
*moving* and printed as a vector. Other values stay scalar, and are broadcast where they meet vectors. Operations
without a vector form are printed lane by lane.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from relax_tune.errors import BuildError
from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.codegen.lower.affine import Algebra, Poly, as_constant, constant, plus
from relax_tune.ir.codegen.lower.guards import room_below
from relax_tune.ir.codegen.lower.narrow_ints import fits, fits_arithmetic, four_bits, power_of_two
from relax_tune.ir.codegen.lower.registers import RegisterLayout
from relax_tune.ir.codegen.print import integers
from relax_tune.ir.codegen.print.addressing import C_INFIX, AddressPrinter, bracketed
from relax_tune.ir.codegen.print.prelude import FUNCTIONS, Prelude, computed
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bf16, f32, f64, i8, i32, i64, u8, u64
from relax_tune.ir.core.expr import Const, Expr, Load, Number, Var, const, loads, maximum, minimum, transform
from relax_tune.ir.core.scalar_ops import BITS, MATH, SCALAR_OPS, through

VECTOR_TYPES = frozenset({f32, f64, i32})
FAR = 1 << 62


# The text of a value and whether it is a vector; no text where only single lanes can be printed.
Text = tuple[str | None, bool]


class ValuePrinter(AddressPrinter):
    """The expression half of the printer.

    chained: widths of float32 vectors whose chains of min or max look for NaN once
    """

    chained: frozenset[int] = frozenset()

    def __init__(self, prelude: Prelude, algebra: Algebra, layouts: dict[Buffer, RegisterLayout]) -> None:
        super().__init__(prelude, algebra, layouts)
        self._memo: dict[Expr, Text] = {}
        self._orders: dict[Expr, tuple[tuple[Expr, ...], frozenset[Expr]]] = {}

    # values

    def condition(self, e: Expr) -> str:
        """Return a scalar condition."""
        text, vector = self._fresh_text(e)
        assert text is not None and not vector
        return text

    def one(self, e: Expr) -> str:
        """Return the text of a value that does not depend on the lane, without temporaries."""
        text, vector = self._fresh_text(e)
        assert text is not None and not vector, e
        return text

    def _fresh_text(self, e: Expr) -> Text:
        memo, self._memo = self._memo, {}
        found = self.text(e)
        self._memo = memo
        return found

    def value(self, e: Expr) -> Text:
        """Return the text of a store's value; sub-expressions used twice become temporaries in front of it."""
        order, shared = self._order(e)
        self._memo = {}
        for n in order:
            found = self.text(n)
            if n in shared and found[0] is not None:
                name = self.fresh("t")
                width = self.lane.width if found[1] and self.lane is not None else 1
                kept = self.kept(n, order) if found[1] else ""
                declared = self.variable if kept else self.constant
                self.line(declared(self.held(n.dtype, width), name, found[0]))
                self._memo[n] = name, found[1]
                if kept:
                    self.line(f"{kept}({name});")
        return self.text(e)

    def kept(self, e: Expr, order: Sequence[Expr]) -> str:
        """Return the macro that keeps the compiler from reading a vector again at every use; empty without need."""
        return ""

    def held(self, dtype: DType, width: int) -> str:
        """Return the type of a temporary; truth values are masks."""
        return self.prelude.vector(i32 if dtype.short == "bool" else dtype, width)

    def _order(self, e: Expr) -> tuple[tuple[Expr, ...], frozenset[Expr]]:
        """Return value nodes under `e`, operands first, and the nodes worth a temporary. Indices belong to their loads."""
        known = self._orders.get(e)
        if known is not None:
            return known
        uses: dict[Expr, int] = {}
        order: list[Expr] = []
        stack: list[tuple[Expr, bool]] = [(e, False)]
        seen: set[Expr] = set()
        while stack:
            n, ready = stack.pop()
            if ready:
                order.append(n)
                continue
            if n in seen:
                continue
            seen.add(n)
            stack.append((n, True))
            if n.dtype is not i64:
                for c in n.args:
                    uses[c] = uses.get(c, 0) + 1
                    stack.append((c, False))
        shared = frozenset(n for n in order if uses.get(n, 0) > 1 and not isinstance(n, (Const, Var)))
        shared = frozenset(
            n for n in shared if not (isinstance(n, Load) and n.buffer in self.layouts) and n.dtype is not i64
        )
        self._orders[e] = tuple(order), shared
        return self._orders[e]

    def text(self, e: Expr) -> Text:
        found = self._memo.get(e)
        if found is None:
            found = self._memo[e] = self._text(e)
        return found

    def _text(self, e: Expr) -> Text:
        if e.value is not None:
            return self._const(e.value, e.dtype), False
        if e.dtype is i64 and not isinstance(e, Load):
            return (None, True) if self.moves(e) else (self._bracket(self.algebra.poly(e)), False)
        if isinstance(e, Load):
            return self._load(e)
        if isinstance(e, Var):
            return self.var_text(e), False
        if e.op in ("lt", "le", "eq", "ne"):
            return self._compare(e)
        taken = self._taken_branch(e)
        if taken is not None:
            return self.text(taken)
        found = self._four_bits(e) or self._counted_lanes(e) or self._chain(e)
        if found is not None:
            return found, True
        args = [self.text(a) for a in e.args]
        if not any(v for _t, v in args):
            return self._scalar(e, [t or "" for t, _v in args]), False
        if any(t is None for t, _v in args):
            return self.by_lane(e), True
        return self._vector(e, [(t or "", v) for t, v in args])

    def _taken_branch(self, e: Expr) -> Expr | None:
        """Return the branch that a select takes if its condition on indices is decided here, else None."""
        if e.op != "select" or not e.args[0].op or any(a.dtype is not i64 for a in e.args[0].args):
            return None
        known = self.algebra.decide(e.args[0])
        return None if known is Proof.UNKNOWN else e.args[1 if known is Proof.YES else 2]

    def _chain(self, e: Expr) -> str | None:
        """Return the least or largest of three or more vectors of float32. NaN is looked for once, pair by pair.

        None for other expressions. A comparison and a choice for each vector would take as long again.
        """
        if e.op not in ("min", "max") or e.dtype is not f32 or self.width not in self.chained:
            return None
        operands: list[Expr] = []

        def joined(x: Expr) -> str | None:
            held = self._memo.get(x, (None, False))[0]
            if x.op == e.op and (x is e or held is None or not held.isidentifier()):
                parts = [joined(a) for a in x.args]
                named = f"{self.prelude.helper('above' if e.op == 'max' else 'below', f32, self.width)}"
                return None if None in parts else f"{named}({', '.join(map(str, parts))})"
            operands.append(x)
            text, moving = self.text(x)
            return None if text is None else self.splat(text, moving, f32)

        found = joined(e)
        tested = [x for x in dict.fromkeys(operands) if x.value is None or math.isnan(float(x.value))]
        if found is None or len(tested) < 3 or not any(self.text(x)[1] for x in tested):
            return None
        texts = [self.splat(text or "", moving, f32) for text, moving in map(self.text, tested)]
        unordered, bits, unbits = (self.prelude.helper(h, f32, self.width) for h in ("unordered", "bits", "unbits"))
        pairs = [f"{unordered}({a}, {b})" for a, b in zip(texts[::2], [*texts[1::2], texts[-1]])]
        return f"{unbits}({bits}({found}) | {' | '.join(pairs)})"

    def _four_bits(self, e: Expr) -> str | None:
        """Return the lookup of a vector of floats by four bits of each int32; None for other expressions."""
        if e.op != "cast" or e.dtype is not f32 or not e.args[0].dtype.is_int or not self.moves(e):
            return None
        found = four_bits(e.args[0], self._taken_branch)
        text, moving = (None, False) if found is None else self.text(found.source)
        if found is None or text is None or not moving:
            return None
        return f"{self.prelude.sixteen(found.values, self.width)}({text}{f' >> {found.shift}' if found.shift else ''})"

    def _counted_lanes(self, e: Expr) -> str | None:
        """Return a vector of consecutive indices as int32 numbers; None for other expressions."""
        if e.op != "cast" or e.dtype is not i32 or e.args[0].dtype is not i64 or not self.moves(e):
            return None
        assert self.lane is not None
        p = self.algebra.poly(e.args[0])
        first = {m: c for m, c in p.items() if m != (self.lane.symbol,)}
        low, high = self.algebra.interval(first)
        if self.stride(p) != 1 or low is None or high is None or low < -(1 << 31) or high + self.width > 1 << 31:
            return None
        iota, splat = (self.prelude.helper(h, i32, self.width) for h in ("iota", "splat"))
        return f"({iota}() + {splat}({self.as_int32(self._bracket(first))}))"

    def _bracket(self, p: Poly) -> str:
        return bracketed(self.poly_text(p))

    def _const(self, value: Number, dtype: DType) -> str:
        if dtype.is_float:
            return self.float_text(float(value), dtype)
        return integers.literal(int(value))

    def _scalar(self, e: Expr, args: list[str]) -> str:
        name = e.op
        if name in ("add", "sub", "mul", "div"):
            if name == "add" and e.args[1].op == "mul":
                args = args[::-1]
            if e.dtype.is_int and not fits_arithmetic(e):
                return f"{self.prelude.helper(name, e.dtype, 1)}({args[0]}, {args[1]})"
            return f"({args[0]} {C_INFIX[name]} {args[1]})"
        if name in ("and", "or"):
            return f"({args[0]} {C_INFIX[name]} {args[1]})"
        if name == "not":
            return f"(!{args[0]})"
        if name in ("min", "max"):
            return self._extreme(e, args, 1)
        if name == "select":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        if name == "cast":
            if e.dtype.short == "bool":
                return f"({args[0]} != 0)"
            source = computed(e.args[0].dtype)
            if source.is_float and e.dtype.is_int:
                wide = u64 if e.dtype is u64 else through(e.dtype)
                args = [f"{self.prelude.helper(self.whole(wide), source, 1)}({args[0]})"]
                if e.dtype is wide:
                    return args[0]
            if e.dtype.is_packed:
                return self.rounded(args[0], source, e.dtype, 1)
            return f"(({self.prelude.scalar(e.dtype)}){args[0]})"
        if name in ("floordiv", "floormod"):
            return f"{self.prelude.helper(name, e.dtype, 1)}({args[0]}, {args[1]})"
        if name == "pow":
            return self._power(e, args, 1)
        if name == "bitcast":
            return self.bits(args[0], e.args[0].dtype, e.dtype)
        if name in MATH or name in BITS:
            return f"{self.prelude.helper(name, e.dtype, 1)}({', '.join(args)})"
        raise BuildError(
            f"wanted an operation the printers know, found {name!r} in {e!r}; add it to ir/codegen/print/values.py"
        )

    def rounded(self, text: str, source: DType, target: DType, width: int) -> str:
        """Return a value rounded to a 16-bit float or a small type."""
        if source is f64 and target.is_float and target is not bf16:  # rounding to f32 first must not make a tie
            text = f"{self.prelude.helper('odd', f64, width)}({text})"
        return self.unpacked(self.packed(text, target, width), target, width)

    def _extreme(self, e: Expr, args: list[str], width: int) -> str:
        """Return min or max that gives NaN for NaN. If an operand is known not to be NaN, one comparison suffices."""
        helper = "max" if e.op == "max" else "min"
        if e.dtype.is_float and width == 1:
            sign = ">" if helper == "max" else "<"
            for k in (0, 1):
                x = e.args[k]
                if x.value is not None and not math.isnan(float(x.value)):
                    other = args[1 - k]
                    if other.isidentifier():
                        return f"({args[k]} {sign} {other} ? {args[k]} : {other})"
        if e.args[1].value is not None:
            args = args[::-1]
        return f"{self.prelude.helper(helper, e.dtype, width)}({args[0]}, {args[1]})"

    def _power(self, e: Expr, args: list[str], width: int) -> str:
        exponent = e.args[1].value
        if exponent == 2 and args[0].isidentifier():
            return f"({args[0]} * {args[0]})"
        if exponent == 0.5:
            return f"{self.prelude.helper('sqrt', e.dtype, width)}({args[0]})"
        if width > 1:
            return self.by_lane(e)
        return f"{self.prelude.helper('pow', e.dtype, 1)}({args[0]}, {args[1]})"

    # vectors

    @property
    def width(self) -> int:
        return 1 if self.lane is None else self.lane.width

    def splat(self, text: str, moving: bool, dtype: DType) -> str:
        """Return a vector operand; scalars are broadcast."""
        return text if moving else f"{self.prelude.helper('splat', dtype, self.width)}({text})"

    def mask_text(self, text: str, moving: bool) -> str:
        return text if moving else f"{self.prelude.helper('splat', i32, self.width)}(-(int)({text}))"

    def _vector(self, e: Expr, args: list[tuple[str, bool]]) -> Text:
        name, w, helper = e.op, self.width, self.prelude.helper
        if name in ("and", "or"):
            a, b = (self.mask_text(*x) for x in args)
            return f"({a} {'&' if name == 'and' else '|'} {b})", True
        if name == "not":
            return f"(~{args[0][0]})", True
        if name == "cast":
            return self._convert(e, args[0][0])
        if computed(e.dtype) not in VECTOR_TYPES:
            return self.by_lane(e), True
        if name in ("add", "sub", "mul", "div"):
            if name == "add" and e.args[1].op == "mul":
                args = args[::-1]
            if e.dtype is i32 and not fits_arithmetic(e):
                return f"{helper(name, i32, w)}({', '.join(self.splat(*x, i32) for x in args)})", True
            return f"({args[0][0]} {C_INFIX[name]} {args[1][0]})", True
        if name in ("floordiv", "floormod") and e.dtype is i32 and args[0][1]:
            shift = power_of_two(e.args[1])
            if shift is not None:
                return f"({args[0][0]} {f'>> {shift}' if name == 'floordiv' else f'& {(1 << shift) - 1}'})", True
        if e.dtype is i32 and name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
            return f"({args[0][0]} {SCALAR_OPS[name].c_name} {args[1][0]})", True
        if name in ("min", "max"):
            return self._extreme(e, [self.splat(*x, e.dtype) for x in args], w), True
        if name == "select":
            a, b = (self.splat(*x, e.dtype) for x in args[1:])
            if not args[0][1]:
                # cast both to one type: a value from memory may have a type of other alignment
                kind = self.prelude.vector(e.dtype, w)
                return f"({args[0][0]} ? ({kind}){a} : ({kind}){b})", True
            mask = self.widened(args[0][0], e.dtype)
            return f"{helper('sel', e.dtype, w)}({mask}, {a}, {b})", True
        if name == "pow":
            return self._power(e, [self.splat(*x, e.dtype) for x in args], w), True
        if name in FUNCTIONS and e.dtype.is_float:
            return f"{helper(name, e.dtype, w)}({args[0][0]})", True
        return self.by_lane(e), True

    def widened(self, mask: str, dtype: DType) -> str:
        """Return an int32 mask as the mask type of `dtype`."""
        dtype = computed(dtype)
        return mask if dtype.bytes == 4 else self.prelude.converted(mask, self.prelude.mask(dtype, self.width))

    def _convert(self, e: Expr, text: str) -> Text:
        source, target = computed(e.args[0].dtype), computed(e.dtype)
        if target is i64:
            return None, True
        inner = e.args[0]
        if source in (i8, u8) and target in VECTOR_TYPES and inner.op == "cast":
            wide, moving = self.text(inner.args[0])
            if inner.args[0].dtype is i32 and wide is not None and moving and fits(inner.args[0], source):
                source, text = i32, wide  # there and back again
        odd = e.dtype.is_packed and source is f64 and target is f32
        found = None if odd else self._converted(source, target, text)
        if found is None:
            return self.by_lane(e), True
        return self.rounded(found, target, e.dtype, self.width) if e.dtype.is_packed else found, True

    def _converted(self, source: DType, target: DType, text: str) -> str | None:
        """Return a vector converted to another type; None where only single lanes can be converted."""
        w = self.width
        if source is target:
            return text
        if source.short == "bool" and target in VECTOR_TYPES:
            one, zero = (self.splat(self._const(x, target), False, target) for x in (1, 0))
            return f"{self.prelude.helper('sel', target, w)}({self.widened(text, target)}, {one}, {zero})"
        if target.short == "bool":
            return f"({text} != 0)" if source in (f32, i32) else None
        if source in (i8, u8) and target in VECTOR_TYPES:
            text = f"{self.prelude.helper('widen', source, w)}({text})"
            if target is i32:
                return text
        elif source not in VECTOR_TYPES or target not in (f32, f64, i32, i8, u8):
            return None
        elif source.is_float and target.is_int:
            text = f"{self.prelude.helper('whole_i32', source, w)}({text})"
            if target is i32:
                return text
        return self.prelude.converted(text, self.prelude.vector(target, w))

    def _compare(self, e: Expr) -> Text:
        a, b = e.args
        if not self.moves(e):
            sign = C_INFIX[e.op]
            if a.dtype is i64:
                return f"({self.poly_text(self.algebra.poly(a))} {sign} {self.poly_text(self.algebra.poly(b))})", False
            (x, xv), (y, yv) = self.text(a), self.text(b)
            if not xv and not yv:
                return f"({x} {sign} {y})", False
            return self._vector_compare(e, (x, xv), (y, yv))
        if a.dtype is i64:
            # a sum with a number from memory may wrap unless that is clamped
            ways = (way(c) for c in (e, self.without_far(e)) for way in (self._prefix, self._apart) if c is not None)
            return next(filter(None, ways), None) or self.by_lane(e), True
        return self._vector_compare(e, self.text(a), self.text(b))

    def _vector_compare(self, e: Expr, x: Text, y: Text) -> Text:
        dtype = computed(e.args[0].dtype)
        if x[0] is None or y[0] is None or dtype not in VECTOR_TYPES:
            return self.by_lane(e), True
        a, b = self.splat(x[0], x[1], dtype), self.splat(y[0], y[1], dtype)
        text = f"({a} {C_INFIX[e.op]} {b})"
        if dtype is f64:
            text = self.prelude.converted(text, self.prelude.vector(i32, self.width))
        return text, True

    def _prefix(self, e: Expr) -> str | None:
        """Return `x + lane < bound` as a comparison of lane numbers; None for other conditions."""
        lane = self.lane
        assert lane is not None
        room = room_below(e, self.algebra.poly) or {}
        step = room.get((lane.symbol,))
        rest = {m: c for m, c in room.items() if m != (lane.symbol,)}
        if step not in (1, -1) or self.algebra.depends(rest, (lane.symbol,)):
            return None
        iota = f"{self.prelude.helper('iota', i32, lane.width)}()"
        edge = rest if step == -1 else plus(constant(1), rest, -1)
        if self._may_wrap(edge):
            return None
        low, high = (self.prelude.helper(h, self.room_type(edge), 1) for h in ("max", "min"))
        limit = self.as_int32(f"{low}({high}({self.room_text(edge, lane.width)}, {lane.width}), 0)")
        splat = self.prelude.helper("splat", i32, lane.width)
        return f"({iota} {'<' if step == -1 else '>='} {splat}({limit}))"

    def _apart(self, e: Expr) -> str | None:
        """Return a condition on indices whose room differs between lanes by whole numbers as one comparison; None for others."""
        rooms = [room_below(e, self.algebra.poly) for _ in self._each_lane()]
        first = rooms[0]
        if first is None:
            return None
        found = [as_constant(plus(room, first, -1)) for room in rooms if room is not None]
        steps = [c for c in found if c is not None]
        least, most = min(steps), max(steps) - min(steps) + 1
        if len(steps) < len(rooms) or most > 1 << 30:
            return None
        edge = plus(constant(1 - least), first, -1)
        if self._may_wrap(edge):
            return None
        low, high = (self.prelude.helper(h, self.room_type(edge), 1) for h in ("max", "min"))
        limit = self.as_int32(f"{low}({high}({self.room_text(edge, most)}, {most}), 0)")
        numbers = self.prelude.literal(self.prelude.vector(i32, len(steps)), [str(c - least) for c in steps])
        return f"({numbers} >= {self.prelude.helper('splat', i32, len(steps))}({limit}))"

    def _may_wrap(self, edge: Poly) -> bool:
        """Return True if numbers from memory near the ends of int64 give another sum than the whole numbers do."""
        held = [m for m in edge if any(isinstance(a, Load) and a.dtype is i64 for a in m)]
        return bool(held) and edge != {held[0]: 1}

    def without_far(self, e: Expr) -> Expr | None:
        """Return a condition on indices whose int64 numbers from memory are clamped far outside of all indices; None without any."""
        held: dict[Expr, Expr] = {x: minimum(maximum(x, const(-FAR)), const(FAR)) for x in loads(e) if x.dtype is i64}
        return transform(e, held.get) if held else None

    def _each_lane(self) -> Iterator[int]:
        """Yield the number of every lane, as if it were printed alone."""
        lane = self.lane
        assert lane is not None
        memo, env = self._memo, self.algebra.env
        moving = env[lane.var]
        self.lane = None
        for k in range(lane.width):
            self._memo = {}
            env[lane.var] = plus(lane.start, constant(k))
            yield k
        env[lane.var] = moving
        self._memo, self.lane = memo, lane

    def lanes_text(self, e: Expr) -> list[str]:
        """Return the text of `e` for every lane; 0 for inactive lanes."""
        lane = self.lane
        assert lane is not None
        parts: list[str] = []
        for k in self._each_lane():
            text = self.text(e)[0]
            assert text is not None
            parts.append(text if lane.count is None else self.active(k, lane.count, text, e.dtype))
        return parts

    def by_lane(self, e: Expr) -> str:
        parts = self.lanes_text(e)
        if e.dtype.short == "bool":
            return self.prelude.literal(self.prelude.vector(i32, self.width), [f"-(int)({p})" for p in parts])
        return self.prelude.literal(self.prelude.vector(e.dtype, self.width), parts)

    def _load(self, e: Load) -> Text:
        """Print the read of a buffer."""
        raise NotImplementedError
