"""Expressions as WGSL, which has no implicit conversions, no conditional operator, and truth values that are not numbers.

Tests: `tests/ir/codegen/test_wgsl.py`, `tests/ir/codegen/test_tint.py`.
"""

from __future__ import annotations

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Poly, as_constant
from relax_tune.ir.codegen.lower.index_width import fits
from relax_tune.ir.codegen.lower.narrow_ints import power_of_two
from relax_tune.ir.codegen.print.addressing import C_INFIX
from relax_tune.ir.codegen.print.prelude import FUNCTIONS, computed, stored
from relax_tune.ir.codegen.print.values import Text, ValuePrinter
from relax_tune.ir.codegen.print.wgsl.prelude import WIDE_TYPES, WGSLPrelude
from relax_tune.ir.core.dtype import DType, bool_, f32, f64, i32, i64, u32, u64
from relax_tune.ir.core.expr import Expr, Load, Number, Op, Var
from relax_tune.ir.core.scalar_ops import BITS, MATH

NARROW = frozenset({"i8", "u8", "i16", "u16", "i32"})


class WGSLValues(ValuePrinter):
    """Printer of expressions in WGSL. A value of type int64 is a pair of words; an index or a size is an i32."""

    prelude: WGSLPrelude
    vector_types = frozenset({f32, i32})
    most: Expr

    @property
    def checks_most(self) -> bool:
        """Whether launches have to check that 32 bits hold the kernel's integers."""
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
                factor = self.wide_atom(atom)
                term = f"{self.prelude.wide('mul_wide')}({term}, {factor})" if term else factor
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
        if a in self.named:
            return self.named[a]
        if isinstance(a, Load):
            return self.uniform(a)
        if a.op == "cast":
            return self.cast(self.uniform(a.args[0]), a.args[0].dtype, i64)
        if a.op == "bitcast":
            return self.bits(self.uniform(a.args[0]), a.args[0].dtype, i64)
        parts = [self.wide(self.algebra.poly(x)) for x in (a.args[1:] if a.op == "select" else a.args)]
        if a.op == "select":
            return f"select({parts[1]}, {parts[0]}, {self.condition(a.args[0])})"
        return f"{self.prelude.wide(f'{a.op}_wide')}({', '.join(parts)})"

    def atom_text(self, a: Expr) -> str:
        if self.is_wide({(a,): 1}):
            return self.wide_atom(a)
        if a in self.named:
            return self.named[a]
        if isinstance(a, Op) and a.op == "select":
            x, y = (self.poly_text(self.algebra.poly(e)) for e in a.args[1:])
            return f"select({y}, {x}, {self.condition(a.args[0])})"
        if isinstance(a, Op) and a.op in ("min", "max") and any(self.is_wide(self.algebra.poly(x)) for x in a.args):
            return self._clamp(a)
        return super().atom_text(a)

    def _clamp(self, a: Op) -> str:
        """Return min or max of an int64 from memory and numbers that 32 bits hold; the result is assumed to fit 32 bits."""
        clamped: list[str] = []
        for e in a.args:
            if not self.is_wide(self.algebra.poly(e)):
                clamped.append(self.poly_text(self.algebra.poly(e)))
                continue
            parts = [_number(x) for x in e.args]
            texts = [
                self.poly_text(self.algebra.poly(x)) if not self.is_wide(self.algebra.poly(x))
                else None if n is None else self.uniform(n)
                for x, n in zip(e.args, parts)
            ]  # fmt: skip
            known = [x for x in texts if x is not None]
            if len(known) == len(texts):
                clamped.append(f"{self.prelude.helper(e.op, i32, 1)}({', '.join(known)})")
            else:
                wide = self.prelude.wide(f"{a.op}_wide")
                return f"bitcast<i32>({wide}({', '.join(self.wide(self.algebra.poly(x)) for x in a.args)}).x)"
        return f"{self.prelude.helper(a.op, i32, 1)}({', '.join(clamped)})"

    def slack_text(self, slack: Poly, most: int) -> str:
        if not self.is_wide(slack):
            return self.poly_text(slack)
        low, high = self.prelude.wide("min_wide"), self.prelude.wide("max_wide")
        inside = f"{high}({low}({self.wide_poly(slack)}, {self.wide_constant(most)}), {self.wide_constant(0)})"
        return f"bitcast<i32>({inside}.x)"

    def offset_text(self, p: Poly) -> str:
        """Return an offset. Offsets fit 32 bits, so the low words modulo 2^32 suffice."""
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
            return (None, True) if self.is_varying(e) else (self.wide(self.algebra.poly(e)), False)
        return super()._text(e)

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
        raise BuildError(f"the WGSL printer cannot print the operation {name!r} of {e!r}; add it to {__name__}")

    def _scalar_cast(self, e: Expr, text: str) -> str:
        source = e.args[0]
        if source.dtype is i64 and not isinstance(source, Load):
            p = self.algebra.poly(source)
            if not self.is_wide(p):
                return self.cast(f"({self.poly_text(p)})", i32, e.dtype)
        return self.cast(text, source.dtype, e.dtype)

    def cast(self, text: str, source: DType, target: DType) -> str:
        """Return a scalar converted to another type (docs/design/meaning.md defines the conversions)."""
        computed_source, computed_target = computed(source), computed(target)
        if target.is_packed:
            return self.rounded(self.cast(text, source, computed_target), computed_target, target, 1)
        if computed_source is target:
            return text
        if target is bool_:
            zero = "0.0f" if computed_source is f32 else self._const(0, computed_source)
            if computed_source in WIDE_TYPES:
                return f"{self.prelude.wide('ne_wide')}({text}, {zero})"
            return f"(!({text} == {zero}))"
        if target is f64 or computed_source is f64:
            self.prelude.storage(f64)
        if computed_source is bool_:
            return f"select({self._const(0, target)}, {self._const(1, target)}, {text})"
        if target is f32:
            if computed_source is u64:
                raise BuildError("WGSL kernels cannot cast uint64 to float32; cast to int64 first")
            return f"{self.prelude.wide('float_of_wide')}({text})" if computed_source is i64 else f"f32({text})"
        if computed_source is f32:
            if target is u64:
                raise BuildError("WGSL kernels cannot cast floats to uint64; cast to int64 first")
            if target is i64 or target is u32:
                text, computed_source = f"{self.prelude.helper('whole_i64', f32, 1)}({text})", i64
            else:
                text, computed_source = f"{self.prelude.helper('whole_i32', f32, 1)}({text})", i32
        return self._integer_cast(text, computed_source, target)

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

    # comparisons

    def _index_compare(self, op: str, p: Poly, q: Poly) -> str:
        if not self.is_wide(p) and not self.is_wide(q):
            return f"({self.poly_text(p)} {C_INFIX[op]} {self.poly_text(q)})"
        return f"{self.prelude.wide(f'{op}_wide')}({self.wide(p)}, {self.wide(q)})"

    def _scalar_compare(self, op: str, x: str, y: str, dtype: DType) -> str:
        if dtype not in WIDE_TYPES:
            return self._vector_comparison(op, x, y, dtype)
        if op == "le":
            return f"(!{self.prelude.helper('lt', dtype, 1)}({y}, {x}))"
        return f"{self.prelude.helper(op, dtype, 1)}({x}, {y})"

    def _vector_comparison(self, op: str, x: str, y: str, dtype: DType) -> str:
        # compilers may assume that no number is NaN, and `!=` may then be false for NaN
        if op == "ne" and computed(dtype).is_float:
            return f"(!({x} == {y}))"
        return f"({x} {C_INFIX[op]} {y})"

    # vectors

    def mask_text(self, text: str, varying: bool) -> str:
        return self.splat(text, varying, bool_)

    def widened(self, mask: str, dtype: DType) -> str:
        return mask

    def _vector_operation(self, e: Expr, args: list[tuple[str, bool]]) -> str | None:
        name, w, dtype = e.op, self.width, computed(e.dtype)
        if name == "not":
            return f"(!{args[0][0]})"
        if name == "select" and dtype in (*self.vector_types, bool_):
            a, b = (self.splat(*x, dtype) for x in args[1:])
            return f"select({b}, {a}, {args[0][0]})"
        if dtype not in self.vector_types:
            return None
        if name in ("add", "sub", "mul", "div"):
            a, b = (self.splat(*x, dtype) for x in args)
            return f"({a} {C_INFIX[name]} {b})"
        if name in ("floordiv", "floormod") and dtype is i32 and args[0][1]:
            shift = power_of_two(e.args[1])
            if shift is not None:
                by = f">> vec{w}<u32>({shift}u)" if name == "floordiv" else f"& vec{w}<i32>({(1 << shift) - 1})"
                return f"({args[0][0]} {by})"
        return f"{self.prelude.helper(name, f32, w)}({args[0][0]})" if name in FUNCTIONS and dtype is f32 else None

    def _converted(self, source: DType, target: DType, text: str) -> str | None:
        if source is target:
            return text
        if source is bool_ and target in self.vector_types:
            one, zero = (self.splat(self._const(x, target), False, target) for x in (1, 0))
            return f"select({zero}, {one}, {text})"
        if target is bool_ and source in self.vector_types:
            return f"(!({text} == {self.splat(self._const(0, source), False, source)}))"
        if source.short in NARROW and target in self.vector_types:
            return text if target is i32 else self.prelude.converted(text, self.prelude.vector(f32, self.width))
        if source is f32 and target is i32:
            return f"{self.prelude.helper('whole_i32', f32, self.width)}({text})"
        return None


def _number(e: Expr) -> Expr | None:
    """Return the operand of a cast to an index if 32 bits hold its type, else None."""
    inner = e.args[0] if e.op == "cast" else None
    return inner if inner is not None and inner.dtype.short in NARROW and not isinstance(inner, Var) else None
