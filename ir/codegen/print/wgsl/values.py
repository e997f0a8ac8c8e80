"""Expressions as WGSL, which has no casts by context, no conditional operator, and truth values that are no numbers."""

from __future__ import annotations

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Poly, as_constant
from relax_tune.ir.codegen.lower.index_width import fits
from relax_tune.ir.codegen.lower.narrow_ints import power_of_two
from relax_tune.ir.codegen.print.addressing import C_INFIX
from relax_tune.ir.codegen.print.memory import MemoryPrinter
from relax_tune.ir.codegen.print.prelude import FUNCTIONS, computed, stored
from relax_tune.ir.codegen.print.values import Text
from relax_tune.ir.codegen.print.wgsl.prelude import WIDE_TYPES, WGSLPrelude
from relax_tune.ir.core.dtype import DType, bool_, f32, f64, i32, i64, u32, u64
from relax_tune.ir.core.expr import Expr, Load, Number, Op, Var
from relax_tune.ir.core.scalar_ops import BITS, MATH

VECTOR_TYPES = frozenset({f32, i32})
NARROW = frozenset({"i8", "u8", "i16", "u16", "i32"})


class WGSLValues(MemoryPrinter):
    """The expressions of a kernel. A value of type int64 is a pair of words, an index or a size an i32."""

    prelude: WGSLPrelude
    most: Expr

    @property
    def checks_most(self) -> bool:
        """Return whether launches have to check that 32 bits hold the kernel's integers."""
        return fits(self.most) is None

    # integers of 64 bits

    def is_wide(self, p: Poly) -> bool:
        """Return whether an integer may need 64 bits."""
        return self.index_type(p) is i64

    def poly_text(self, p: Poly) -> str:
        return self.wide_poly(p) if self.is_wide(p) else super().poly_text(p)

    def wide_constant(self, value: int) -> str:
        return f"vec2<u32>({value & 0xFFFFFFFF}u, {value >> 32 & 0xFFFFFFFF}u)"

    def wide(self, p: Poly) -> str:
        """Return an integer as a pair of words."""
        known = as_constant(p)
        if known is not None:
            return self.wide_constant(known)
        return self.wide_poly(p) if self.is_wide(p) else f"{self.prelude.wide('wide')}({super().poly_text(p)})"

    def wide_poly(self, p: Poly) -> str:
        text = ""
        for m, c in p.items():
            term = self.wide_constant(c) if not m else ""
            for atom in m:
                one = self.wide_atom(atom)
                term = f"{self.prelude.wide('mul_wide')}({term}, {one})" if term else one
            if m and c == -1:
                term = f"{self.prelude.wide('negative_wide')}({term})"
            elif m and c != 1:
                term = f"{self.prelude.wide('mul_wide')}({term}, {self.wide_constant(c)})"
            text = f"{self.prelude.wide('add_wide')}({text}, {term})" if text else term
        return text or self.wide_constant(0)

    def wide_atom(self, a: Expr) -> str:
        p: Poly = {(a,): 1}
        if not self.is_wide(p):
            return f"{self.prelude.wide('wide')}({self.atom_text(a)})"
        if isinstance(a, Var):
            return self.var_text(a)
        if isinstance(a, Load):
            return self.one(a)
        if a.op == "cast":
            return self.cast(self.one(a.args[0]), a.args[0].dtype, i64)
        if a.op == "bitcast":
            return self.bits(self.one(a.args[0]), a.args[0].dtype, i64)
        parts = [self.wide(self.algebra.poly(x)) for x in (a.args[1:] if a.op == "select" else a.args)]
        if a.op == "select":
            return f"select({parts[1]}, {parts[0]}, {self.condition(a.args[0])})"
        return f"{self.prelude.wide(f'{a.op}_wide')}({', '.join(parts)})"

    def atom_text(self, a: Expr) -> str:
        if self.is_wide({(a,): 1}):
            return self.wide_atom(a)
        if isinstance(a, Op) and a.op == "select":
            x, y = (self.poly_text(self.algebra.poly(e)) for e in a.args[1:])
            return f"select({y}, {x}, {self.condition(a.args[0])})"
        if isinstance(a, Op) and a.op in ("min", "max") and any(self.is_wide(self.algebra.poly(x)) for x in a.args):
            return self._clamp(a)
        return super().atom_text(a)

    def _clamp(self, a: Op) -> str:
        """Return a value from memory between bounds that 32 bits hold."""
        clamped: list[str] = []
        for e in a.args:
            if not self.is_wide(self.algebra.poly(e)):
                clamped.append(self.poly_text(self.algebra.poly(e)))
                continue
            parts = [_number(x) for x in e.args]
            texts = [
                self.poly_text(self.algebra.poly(x)) if not self.is_wide(self.algebra.poly(x))
                else None if n is None else self.one(n)
                for x, n in zip(e.args, parts)
            ]  # fmt: skip
            known = [x for x in texts if x is not None]
            if len(known) == len(texts):
                clamped.append(f"{self.prelude.helper(e.op, i32, 1)}({', '.join(known)})")
            else:
                wide = self.prelude.wide(f"{a.op}_wide")
                return f"bitcast<i32>({wide}({', '.join(self.wide(self.algebra.poly(x)) for x in a.args)}).x)"
        return f"{self.prelude.helper(a.op, i32, 1)}({', '.join(clamped)})"

    def room_text(self, room: Poly, most: int) -> str:
        if not self.is_wide(room):
            return self.poly_text(room)
        low, high = self.prelude.wide("min_wide"), self.prelude.wide("max_wide")
        inside = f"{high}({low}({self.wide_poly(room)}, {self.wide_constant(most)}), {self.wide_constant(0)})"
        return f"bitcast<i32>({inside}.x)"

    def without_far(self, e: Expr) -> Expr | None:
        """Return None: pairs of words are compared lane by lane."""
        return None

    def offset_text(self, p: Poly) -> str:
        """Return an offset. An element's place fits 32 bits, so the low words of values from memory suffice, wrapping."""
        if not self.is_wide(p):
            return self.poly_text(p)
        narrow = [(m, c) for m, c in p.items() if not any(self.is_wide({(a,): 1}) for a in m)]
        parts = [self.poly_text(dict(narrow))] if narrow else []
        for m, c in p.items():
            if (m, c) not in narrow:
                atoms = [
                    f"bitcast<i32>({self.wide_atom(a)}.x)" if self.is_wide({(a,): 1}) else self.atom_text(a) for a in m
                ]
                parts.append(" * ".join([*atoms, *([f"i32({c})"] if c != 1 else [])]))
        return " + ".join(parts)

    def as_int32(self, text: str) -> str:
        return text

    # values

    def held(self, dtype: DType, width: int) -> str:
        return self.prelude.vector(dtype, width)

    def active(self, lane: int, count: str, text: str, dtype: DType) -> str:
        zero = "false" if dtype is bool_ else f"{self.prelude.storage(dtype)}(0)"
        return f"select({zero}, {text}, {lane} < {count})"

    def _const(self, value: Number, dtype: DType) -> str:
        if dtype.is_float:
            return self.float_text(float(value), dtype)
        if dtype is bool_:
            return "true" if value else "false"
        if dtype in WIDE_TYPES:
            return self.wide_constant(int(value))
        if dtype is u32:
            return f"{int(value)}u"
        return f"i32({int(value)})" if value < 0 else str(int(value))

    def _text(self, e: Expr) -> Text:
        if e.value is None and e.dtype is i64 and not isinstance(e, Load):
            return (None, True) if self.moves(e) else (self.wide(self.algebra.poly(e)), False)
        return super()._text(e)

    def _four_bits(self, e: Expr) -> str | None:
        return None

    def _scalar(self, e: Expr, args: list[str]) -> str:
        name, dtype = e.op, e.dtype
        if name == "select":
            return f"select({args[2]}, {args[1]}, {args[0]})"
        if name == "cast":
            return self._scalar_cast(e, args[0])
        if name in ("add", "sub", "mul", "div", "and", "or"):
            if dtype in WIDE_TYPES:
                return f"{self.prelude.helper(name, dtype, 1)}({args[0]}, {args[1]})"
            if dtype is f64:
                self.prelude.storage(f64)
            text = f"({args[0]} {C_INFIX[name]} {args[1]})"
            return self.prelude.wrapped(text, dtype) if dtype.is_int else text
        if name == "bitcast":
            return self.bits(args[0], e.args[0].dtype, dtype)
        if name == "pow":
            return self._power(e, args, 1)
        if name in ("min", "max"):
            return self._extreme(e, args, 1)
        if name == "not":
            return f"(!{args[0]})"
        if name in MATH or name in BITS or name in ("floordiv", "floormod"):
            return f"{self.prelude.helper(name, dtype, 1)}({', '.join(args)})"
        raise BuildError(
            f"wanted an operation the WGSL printer knows, found {name!r} in {e!r}; add it to ir/codegen/print/wgsl/values.py"
        )

    def _scalar_cast(self, e: Expr, text: str) -> str:
        source = e.args[0]
        if source.dtype is i64 and not isinstance(source, Load):
            p = self.algebra.poly(source)
            if not self.is_wide(p):
                return self.cast(f"({self.poly_text(p)})", i32, e.dtype)
        return self.cast(text, source.dtype, e.dtype)

    def cast(self, text: str, given: DType, target: DType) -> str:
        """Return a scalar converted to another type, as docs/design/meaning.md has it."""
        source, kind = computed(given), computed(target)
        if target.is_packed:
            return self.rounded(self.cast(text, given, kind), kind, target, 1)
        if source is target:
            return text
        if target is bool_:
            zero = "0.0f" if source is f32 else self._const(0, source)
            if source in WIDE_TYPES:
                return f"{self.prelude.wide('ne_wide')}({text}, {zero})"
            return f"(!({text} == {zero}))"
        if target is f64 or source is f64:
            self.prelude.storage(f64)
        if source is bool_:
            return f"select({self._const(0, target)}, {self._const(1, target)}, {text})"
        if target is f32:
            if source is u64:
                raise BuildError("wanted casts that WGSL kernels have, found uint64 to float32; cast to int64 first")
            return f"{self.prelude.wide('float_of_wide')}({text})" if source is i64 else f"f32({text})"
        if source is f32:
            if target is u64:
                raise BuildError("wanted casts that WGSL kernels have, found a float to uint64; cast to int64 first")
            if target is i64 or target is u32:
                text, source = f"{self.prelude.helper('whole_i64', f32, 1)}({text})", i64
            else:
                text, source = f"{self.prelude.helper('whole_i32', f32, 1)}({text})", i32
        return self._integer_cast(text, source, target)

    def _integer_cast(self, text: str, source: DType, target: DType) -> str:
        if target in WIDE_TYPES:
            if source in WIDE_TYPES:
                return text
            return f"vec2<u32>({text}, 0u)" if source is u32 else f"{self.prelude.wide('wide')}({text})"
        word = f"{text}.x" if source in WIDE_TYPES else f"bitcast<u32>({text})" if source is not u32 else text
        if target is u32:
            return word
        number = text if source.short in NARROW else f"bitcast<i32>({word})"
        return number if source.short in NARROW and target.holds(source) else self.prelude.wrapped(number, target)

    def bits(self, text: str, source: DType, target: DType) -> str:
        if source.is_packed:
            text, source = self.packed(text, source, 1), i32
        if source is f32:
            text, source = f"bitcast<i32>({text})", i32
        if target.is_packed:
            return self.unpacked(self.prelude.wrapped(text, stored(target)), target, 1)
        if target is f32:
            return f"bitcast<f32>({text})"
        return self._integer_cast(text, source, target)

    def _extreme(self, e: Expr, args: list[str], width: int) -> str:
        if e.args[1].value is not None:
            args = args[::-1]
        return f"{self.prelude.helper(e.op, e.dtype, width)}({args[0]}, {args[1]})"

    # comparisons

    def _compare(self, e: Expr) -> Text:
        a, b = e.args
        if a.dtype is i64 and self.moves(e):
            return super()._compare(e)
        if a.dtype is i64:
            one, other = self.algebra.poly(a), self.algebra.poly(b)
            if not self.is_wide(one) and not self.is_wide(other):
                return f"({self.poly_text(one)} {C_INFIX[e.op]} {self.poly_text(other)})", False
            return f"{self.prelude.wide(f'{e.op}_wide')}({self.wide(one)}, {self.wide(other)})", False
        (x, xv), (y, yv) = self.text(a), self.text(b)
        if xv or yv:
            return self._vector_compare(e, (x, xv), (y, yv))
        if a.dtype in WIDE_TYPES:
            if e.op == "le":
                return f"(!{self.prelude.helper('lt', a.dtype, 1)}({y}, {x}))", False
            return f"{self.prelude.helper(e.op, a.dtype, 1)}({x}, {y})", False
        return self._compared(e.op, x or "", y or "", a.dtype), False

    def _compared(self, op: str, x: str, y: str, dtype: DType) -> str:
        """Return a comparison. WGSL's own `!=` of floats may say of NaN that it differs from nothing."""
        if op == "ne" and computed(dtype).is_float:
            return f"(!({x} == {y}))"
        return f"({x} {C_INFIX[op]} {y})"

    def _vector_compare(self, e: Expr, x: Text, y: Text) -> Text:
        dtype = computed(e.args[0].dtype)
        if x[0] is None or y[0] is None or dtype not in VECTOR_TYPES:
            return self.by_lane(e), True
        return self._compared(e.op, self.splat(x[0], x[1], dtype), self.splat(y[0], y[1], dtype), dtype), True

    # vectors

    def mask_text(self, text: str, moving: bool) -> str:
        return self.splat(text, moving, bool_)

    def widened(self, mask: str, dtype: DType) -> str:
        return mask

    def by_lane(self, e: Expr) -> str:
        return self.prelude.literal(self.prelude.vector(e.dtype, self.width), self.lanes_text(e))

    def _vector(self, e: Expr, args: list[tuple[str, bool]]) -> Text:
        name, w, helper, dtype = e.op, self.width, self.prelude.helper, computed(e.dtype)
        if name in ("and", "or"):
            a, b = (self.mask_text(*x) for x in args)
            return f"({a} {'&' if name == 'and' else '|'} {b})", True
        if name == "not":
            return f"(!{args[0][0]})", True
        if name == "cast":
            return self._convert(e, args[0][0])
        if name == "select" and dtype in (*VECTOR_TYPES, bool_):
            a, b = (self.splat(*x, dtype) for x in args[1:])
            return f"select({b}, {a}, {args[0][0]})", True
        if dtype not in VECTOR_TYPES:
            return self.by_lane(e), True
        if name in ("add", "sub", "mul", "div"):
            a, b = (self.splat(*x, dtype) for x in args)
            return f"({a} {C_INFIX[name]} {b})", True
        if name in ("floordiv", "floormod") and dtype is i32 and args[0][1]:
            shift = power_of_two(e.args[1])
            if shift is not None:
                by = f">> vec{w}<u32>({shift}u)" if name == "floordiv" else f"& vec{w}<i32>({(1 << shift) - 1})"
                return f"({args[0][0]} {by})", True
        if name in ("min", "max"):
            return self._extreme(e, [self.splat(*x, dtype) for x in args], w), True
        if name == "pow":
            return self._power(e, [self.splat(*x, dtype) for x in args], w), True
        if name in FUNCTIONS and dtype is f32:
            return f"{helper(name, f32, w)}({args[0][0]})", True
        return self.by_lane(e), True

    def _converted(self, source: DType, target: DType, text: str) -> str | None:
        if source is target:
            return text
        if source is bool_ and target in VECTOR_TYPES:
            one, zero = (self.splat(self._const(x, target), False, target) for x in (1, 0))
            return f"select({zero}, {one}, {text})"
        if target is bool_ and source in VECTOR_TYPES:
            return f"(!({text} == {self.splat(self._const(0, source), False, source)}))"
        if source.short in NARROW and target in VECTOR_TYPES:
            return text if target is i32 else self.prelude.converted(text, self.prelude.vector(f32, self.width))
        if source is f32 and target is i32:
            return f"{self.prelude.helper('whole_i32', f32, self.width)}({text})"
        return None


def _number(e: Expr) -> Expr | None:
    """Return the number that an index casts, where 32 bits hold every number of its type."""
    inner = e.args[0] if e.op == "cast" else None
    return inner if inner is not None and inner.dtype.short in NARROW and not isinstance(inner, Var) else None
