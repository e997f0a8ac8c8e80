"""Expressions to text, for one lane or for a vector of lanes, in any language.

Integer expressions go through `Algebra`. A value that depends on the lane of the surrounding vectorised loop is *varying* and printed
as a vector. Other values are *uniform*: they stay scalar, and are broadcast where they meet vectors (the terms of ISPC, Pharr and Mark
2012). Operations without a vector form are printed lane by lane. The languages define the operations: `c_values.py`, `wgsl/values.py`.

Tests: `tests/ir/codegen/test_text.py`, `tests/ir/codegen/test_repeated_operands.py`, `tests/ir/codegen/test_lane_conditions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.codegen.lower.affine import Algebra, Poly, as_constant, constant, plus
from relax_tune.ir.codegen.lower.guards import slack_below
from relax_tune.ir.codegen.lower.narrow_ints import fits
from relax_tune.ir.codegen.lower.registers import RegisterLayout
from relax_tune.ir.codegen.print.addressing import AddressPrinter, bracketed
from relax_tune.ir.codegen.print.prelude import Prelude, computed
from relax_tune.ir.codegen.shared_values import shared_values
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bf16, f32, f64, i8, i32, i64, u8
from relax_tune.ir.core.expr import Expr, Load, Number, Var, loads, substitute

# The text of a value and whether it is varying. The text is None where the value can only be printed lane by lane.
Text = tuple[str | None, bool]


class ValuePrinter(AddressPrinter):
    """Printer of expressions. A language defines constants, scalar and vector operations, and masks.

    Attributes:
        in_value: Whether the value of a store is being printed.
        vector_types: Types whose arithmetic is printed as vectors.
    """

    in_value = False
    vector_types: frozenset[DType] = frozenset({f32, f64, i32})

    def __init__(self, prelude: Prelude, algebra: Algebra, layouts: dict[Buffer, RegisterLayout]) -> None:
        super().__init__(prelude, algebra, layouts)
        self._memo: dict[Expr, Text] = {}
        self._orders: dict[tuple[Expr, Var | None], tuple[tuple[Expr, ...], frozenset[Expr]]] = {}

    # the operations of a language

    def _const(self, value: Number, dtype: DType) -> str:
        """Return the text of a literal."""
        raise NotImplementedError

    def _scalar(self, e: Expr, args: list[str]) -> str:
        """Return an operation on uniform operands. Comparisons are printed by `_scalar_compare`."""
        raise NotImplementedError

    def _scalar_compare(self, op: str, x: str, y: str, dtype: DType) -> str:
        """Return the comparison of two uniform values of `dtype`."""
        raise NotImplementedError

    def _index_compare(self, op: str, p: Poly, q: Poly) -> str:
        """Return the comparison of two uniform indices."""
        raise NotImplementedError

    def _vector_operation(self, e: Expr, args: list[tuple[str, bool]]) -> str | None:
        """Return an operation with at least one varying operand; None if it can only be printed lane by lane.

        `_vector` prints casts, min, max, pow, "and" and "or".

        Args:
            args: (text, whether it is varying) of each operand.
        """
        raise NotImplementedError

    def _extreme(self, e: Expr, args: list[str], width: int) -> str:
        """Return min or max, of vectors if `width` > 1. It is NaN if an operand is."""
        if e.args[1].value is not None:
            args = args[::-1]
        return f"{self.prelude.helper(e.op, e.dtype, width)}({args[0]}, {args[1]})"

    def _vector_comparison(self, op: str, x: str, y: str, dtype: DType) -> str:
        """Return the comparison of two vectors of `dtype` as a mask."""
        raise NotImplementedError

    def _converted(self, source: DType, target: DType, text: str) -> str | None:
        """Return a vector converted to another type; None if it can only be converted lane by lane."""
        raise NotImplementedError

    def temporary_type(self, dtype: DType, width: int) -> str:
        """Return the type of a temporary."""
        return self.prelude.vector(dtype, width)

    def mask_text(self, text: str, varying: bool) -> str:
        """Return a truth value as a mask of the present width."""
        raise NotImplementedError

    def widened(self, mask: str, dtype: DType) -> str:
        """Return a mask as the mask type that selections of `dtype` take."""
        raise NotImplementedError

    def by_lane(self, e: Expr) -> str:
        """Return a vector whose lanes are printed one after the other."""
        parts = self.lanes_text(e)
        return self.prelude.literal(self.prelude.vector(e.dtype, self.width), parts)

    def _fused_vector(self, e: Expr) -> str | None:
        """Return several nested operations as one vector operation; None for other expressions."""
        return self._consecutive(e)

    def pin_macro(self, e: Expr, order: Sequence[Expr]) -> str:
        """Return the macro that pins a vector in a register, or "" if reading it again costs nothing.

        Args:
            order: All nodes of the value that `e` is part of.
        """
        return ""

    # values

    def condition(self, e: Expr) -> str:
        """Return a uniform condition."""
        return self.uniform(e)

    def uniform(self, e: Expr) -> str:
        """Return the text of a uniform value, without temporaries."""
        text, varying = self._text_in_place(e)
        assert text is not None and not varying, e
        return text

    def _text_in_place(self, e: Expr) -> Text:
        """Return the text of a value without the temporaries of the surrounding statement."""
        if self.in_value and not self.is_varying(e):  # temporaries of the store being printed are declared already
            return self.text(e)
        memo, self._memo = self._memo, {}
        text = self.text(e)
        self._memo = memo
        return text

    def value(self, e: Expr) -> Text:
        """Return the text of a store's value; sub-expressions used twice become temporaries in front of it."""
        e = self._with_known(e)
        order, shared = self._order(e)
        self._memo, self.named, self.in_value = {}, {}, True
        for n in order:
            if n.dtype is i64 and not isinstance(n, Load):
                if n in shared:
                    self._name_integer(n)
                continue
            text, varying = self.text(n)
            if n in shared and text is not None:
                name = self.fresh("t")
                width = self.lane.width if varying and self.lane is not None else 1
                pin = self.pin_macro(n, order) if varying else ""
                declare = self.variable if pin else self.constant
                self.line(declare(self.temporary_type(n.dtype, width), name, text))
                self._memo[n] = name, varying
                if pin:
                    self.line(f"{pin}({name});")
        result = self.text(e)
        self.named, self.in_value = {}, False
        return result

    def _with_known(self, e: Expr) -> Expr:
        """Substitute known variables in an expression that shares integers computed from data.

        `named` is keyed by expressions over resolved variables, so that the lookup must see them too.
        """
        if not any(n.dtype is i64 and not isinstance(n, Load) for n in self._order(e)[1]):
            return e
        lane = None if self.lane is None else self.lane.var
        return substitute(e, {v: self.algebra.expr(p) for v, p in self.algebra.env.items() if v is not lane})

    def _name_integer(self, e: Expr) -> None:
        """Declare a temporary for an integer computed from data that the algebra treats as an atom."""
        p = self.algebra.poly(e)
        atom = next((m[0] for m, factor in p.items() if len(p) == len(m) == factor == 1), None)
        if atom is None or isinstance(atom, (Var, Load)) or atom in self.named:
            return
        name, text = self.fresh("t"), self.poly_text(p)
        self.line(self.constant(self.prelude.storage(self.index_type(p)), name, text))
        self.named[atom] = name

    def _order(self, e: Expr) -> tuple[tuple[Expr, ...], frozenset[Expr]]:
        """Return the value nodes under `e`, operands first, and the nodes worth a temporary.

        Indices that are not computed from data belong to their loads.
        """
        key = e, None if self.lane is None else self.lane.var
        if key not in self._orders:
            self._orders[key] = shared_values(e, self._is_data, self.layouts)
        return self._orders[key]

    def _is_data(self, e: Expr) -> bool:
        """Return whether an integer is uniform and computed from elements of tensors, which the algebra knows nothing about."""
        return bool(loads(e)) and not self.is_varying(e)

    def text(self, e: Expr) -> Text:
        """Return the text of a value, computed once per statement."""
        text = self._memo.get(e)
        if text is None:
            text = self._memo[e] = self._text(e)
        return text

    def _text(self, e: Expr) -> Text:
        if e.value is not None:
            return self._const(e.value, e.dtype), False
        if e.dtype is i64 and not isinstance(e, Load):
            return (None, True) if self.is_varying(e) else (self._bracket(self.algebra.poly(e)), False)
        if isinstance(e, Load):
            return self._load(e)
        if isinstance(e, Var):
            return self.var_text(e), False
        if e.op in ("lt", "le", "eq", "ne"):
            return self._compare(e)
        branch = self._decided_branch(e)
        if branch is not None:
            return self.text(branch)
        fused = self._fused_vector(e)
        if fused is not None:
            return fused, True
        args = [self.text(a) for a in e.args]
        if not any(v for _t, v in args):
            return self._scalar(e, [t or "" for t, _v in args]), False
        if any(t is None for t, _v in args):
            return self.by_lane(e), True
        return self._vector(e, [(t or "", v) for t, v in args])

    def _decided_branch(self, e: Expr) -> Expr | None:
        """Return the branch of a select whose condition on indices can be decided statically; None for other expressions."""
        if e.op != "select" or not e.args[0].op or any(a.dtype is not i64 for a in e.args[0].args):
            return None
        known = self.algebra.decide(e.args[0])
        return None if known is Proof.UNKNOWN else e.args[1 if known is Proof.YES else 2]

    def _consecutive(self, e: Expr) -> str | None:
        """Return a vector of consecutive indices as int32 numbers; None for other expressions."""
        if e.op != "cast" or e.dtype is not i32 or e.args[0].dtype is not i64 or not self.is_varying(e):
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

    def rounded(self, text: str, source: DType, target: DType, width: int) -> str:
        """Return a value rounded to a 16-bit float or a small type."""
        if source is f64 and target.is_float and target is not bf16:
            # Rounding to nearest twice, f64 to f32 to f16, may turn a number just above a tie into the tie. Rounding to odd first
            # is exact for the second step (Boldo and Melquiond 2008).
            text = f"{self.prelude.helper('odd', f64, width)}({text})"
        return self.unpacked(self.packed(text, target, width), target, width)

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
        """Lanes of the vectors being printed; 1 outside of vectorised loops."""
        return 1 if self.lane is None else self.lane.width

    def splat(self, text: str, varying: bool, dtype: DType) -> str:
        """Return a vector operand; scalars are broadcast."""
        return text if varying else f"{self.prelude.helper('splat', dtype, self.width)}({text})"

    def _vector(self, e: Expr, args: list[tuple[str, bool]]) -> Text:
        """Return an operation with at least one varying operand."""
        name = e.op
        if name == "cast":
            return self._convert(e, args[0][0])
        text: str | None
        if name in ("and", "or"):
            a, b = (self.mask_text(*x) for x in args)
            text = f"({a} {'&' if name == 'and' else '|'} {b})"
        elif name in ("min", "max", "pow") and computed(e.dtype) in self.vector_types:
            print_vector = self._power if name == "pow" else self._extreme
            text = print_vector(e, [self.splat(*x, e.dtype) for x in args], self.width)
        else:
            text = self._vector_operation(e, args)
        return self.by_lane(e) if text is None else text, True

    def _convert(self, e: Expr, text: str) -> Text:
        """Return the cast `e` of the vector `text`."""
        source, target = computed(e.args[0].dtype), computed(e.dtype)
        if target is i64:
            return None, True
        inner = e.args[0]
        if source in (i8, u8) and target in self.vector_types and inner.op == "cast":
            wide, varying = self.text(inner.args[0])
            if inner.args[0].dtype is i32 and wide is not None and varying and fits(inner.args[0], source):
                source, text = i32, wide  # int32 to int8 and back is the identity for numbers that int8 holds
        needs_odd = e.dtype.is_packed and source is f64 and target is f32
        converted = None if needs_odd else self._converted(source, target, text)
        if converted is None:
            return self.by_lane(e), True
        return self.rounded(converted, target, e.dtype, self.width) if e.dtype.is_packed else converted, True

    # comparisons

    def _compare(self, e: Expr) -> Text:
        a, b = e.args
        if a.dtype is i64:
            if self.is_varying(e):
                return self._lane_compare(e) or self.by_lane(e), True
            return self._index_compare(e.op, self.algebra.poly(a), self.algebra.poly(b)), False
        x, y = self.text(a), self.text(b)
        if x[1] or y[1] or self.is_varying(e):
            return self._vector_compare(e, x, y)
        return self._scalar_compare(e.op, x[0] or "", y[0] or "", a.dtype), False

    def _vector_compare(self, e: Expr, x: Text, y: Text) -> Text:
        """Return the comparison of two values that are not indices, at least one of them varying."""
        dtype = computed(e.args[0].dtype)
        if x[0] is None or y[0] is None or dtype not in self.vector_types:
            return self.by_lane(e), True
        return self._vector_comparison(e.op, self.splat(x[0], x[1], dtype), self.splat(y[0], y[1], dtype), dtype), True

    def _lane_compare(self, e: Expr) -> str | None:
        """Return a varying condition on indices as one vector comparison; None if it has to be printed lane by lane."""
        return self._prefix_compare(e) or self._lane_constant_compare(e)

    def _prefix_compare(self, e: Expr) -> str | None:
        """Return `x + lane < bound` as a comparison of lane numbers; None for other conditions."""
        lane = self.lane
        assert lane is not None
        slack = slack_below(e, self.algebra.poly) or {}
        step = slack.get((lane.symbol,))
        rest = {m: c for m, c in slack.items() if m != (lane.symbol,)}
        if step not in (1, -1) or self.algebra.depends(rest, (lane.symbol,)):
            return None
        iota = f"{self.prelude.helper('iota', i32, lane.width)}()"
        edge = rest if step == -1 else plus(constant(1), rest, -1)
        if self._may_wrap(edge):
            return None
        limit = self._clamped_to_int32(edge, lane.width)
        splat = self.prelude.helper("splat", i32, lane.width)
        return f"({iota} {'<' if step == -1 else '>='} {splat}({limit}))"

    def _lane_constant_compare(self, e: Expr) -> str | None:
        """Return an index comparison whose slack differs between lanes by constants as one vector comparison; None for others."""
        slacks = [slack_below(e, self.algebra.poly) for _ in self._each_lane()]
        first = slacks[0]
        if first is None:
            return None
        differences = [as_constant(plus(slack, first, -1)) for slack in slacks if slack is not None]
        steps = [c for c in differences if c is not None]
        least, span = min(steps), max(steps) - min(steps) + 1
        if len(steps) < len(slacks) or span > 1 << 30:
            return None
        edge = plus(constant(1 - least), first, -1)
        if self._may_wrap(edge):
            return None
        limit = self._clamped_to_int32(edge, span)
        numbers = self.prelude.literal(self.prelude.vector(i32, len(steps)), [str(c - least) for c in steps])
        return f"({numbers} >= {self.prelude.helper('splat', i32, len(steps))}({limit}))"

    def _clamped_to_int32(self, edge: Poly, most: int) -> str:
        """Return an index clamped to 0 .. `most` as int32."""
        low, high = (self.prelude.helper(h, self.slack_type(edge), 1) for h in ("max", "min"))
        return self.as_int32(f"{low}({high}({self.slack_text(edge, most)}, {most}), 0)")

    def _may_wrap(self, edge: Poly) -> bool:
        """Return whether the sum may overflow int64 for elements of tensors near its ends."""
        from_memory = [m for m in edge if any(isinstance(a, Load) and a.dtype is i64 for a in m)]
        return bool(from_memory) and edge != {from_memory[0]: 1}

    # lane by lane

    def _each_lane(self) -> Iterator[int]:
        """Yield the number of every lane, while the lane's variable has its value in that lane and nothing is varying."""
        lane = self.lane
        assert lane is not None
        memo, env = self._memo, self.algebra.env
        vector = env[lane.var]
        self.lane = None
        for k in range(lane.width):
            self._memo = {}
            env[lane.var] = plus(lane.start, constant(k))
            yield k
        env[lane.var] = vector
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

    def _load(self, e: Load) -> Text:
        """Print the read of a buffer."""
        raise NotImplementedError
