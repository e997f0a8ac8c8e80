"""Expressions as C, OpenCL C and CUDA C++: operators on vectors, conditional operators, int32 masks.

Tests: `tests/ir/codegen/test_integers.py`, `tests/ir/codegen/test_extreme_chains.py`, `tests/ir/codegen/lower/test_narrow_ints.py`.
"""

from __future__ import annotations

import math

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Poly
from relax_tune.ir.codegen.lower.narrow_ints import fits_arithmetic, four_bits, power_of_two
from relax_tune.ir.codegen.print import integers
from relax_tune.ir.codegen.print.addressing import C_INFIX
from relax_tune.ir.codegen.print.prelude import FUNCTIONS, computed
from relax_tune.ir.codegen.print.values import ValuePrinter
from relax_tune.ir.core.dtype import DType, f32, f64, i8, i32, i64, u8, u64
from relax_tune.ir.core.expr import Expr, Number, const, loads, maximum, minimum, transform
from relax_tune.ir.core.scalar_ops import BITS, MATH, SCALAR_OPS, through

# Beyond every index, and far enough from the ends of int64 that sums with indices do not overflow.
FAR = 1 << 62


class CValues(ValuePrinter):
    """Printer of expressions in the languages of the C family.

    Attributes:
        chained: Widths of float32 vectors for which chains of min or max test for NaN once.
    """

    chained: frozenset[int] = frozenset()

    def temporary_type(self, dtype: DType, width: int) -> str:
        return self.prelude.vector(i32 if dtype.short == "bool" else dtype, width)

    def mask_text(self, text: str, varying: bool) -> str:
        return text if varying else f"{self.prelude.helper('splat', i32, self.width)}(-(int)({text}))"

    def widened(self, mask: str, dtype: DType) -> str:
        dtype = computed(dtype)
        return mask if dtype.bytes == 4 else self.prelude.converted(mask, self.prelude.mask(dtype, self.width))

    def by_lane(self, e: Expr) -> str:
        if e.dtype.short != "bool":
            return super().by_lane(e)
        parts = [f"-(int)({p})" for p in self.lanes_text(e)]
        return self.prelude.literal(self.prelude.vector(i32, self.width), parts)

    def _const(self, value: Number, dtype: DType) -> str:
        if dtype.is_float:
            return self.float_text(float(value), dtype)
        return integers.literal(int(value))

    # several operations as one

    def _fused_vector(self, e: Expr) -> str | None:
        return super()._fused_vector(e) or self._four_bits(e) or self._chain(e)

    def _chain(self, e: Expr) -> str | None:
        """Return the minimum or maximum of three or more float32 vectors; None for other expressions.

        The chain ignores NaN, and one test of all operands, pair by pair, sets it afterwards. A comparison and a selection for each
        operand would take twice as long.
        """
        if e.op not in ("min", "max") or e.dtype is not f32 or self.width not in self.chained:
            return None
        operands: list[Expr] = []

        def joined(x: Expr) -> str | None:
            known = self._memo.get(x, (None, False))[0]
            if x.op == e.op and (x is e or known is None or not known.isidentifier()):
                parts = [joined(a) for a in x.args]
                helper = self.prelude.helper("above" if e.op == "max" else "below", f32, self.width)
                return None if None in parts else f"{helper}({', '.join(map(str, parts))})"
            operands.append(x)
            text, varying = self.text(x)
            return None if text is None else self.splat(text, varying, f32)

        extreme = joined(e)
        tested = [x for x in dict.fromkeys(operands) if x.value is None or math.isnan(float(x.value))]
        if extreme is None or len(tested) < 3 or not any(self.text(x)[1] for x in tested):
            return None
        texts = [self.splat(text or "", varying, f32) for text, varying in map(self.text, tested)]
        unordered, bits, unbits = (self.prelude.helper(h, f32, self.width) for h in ("unordered", "bits", "unbits"))
        pairs = [f"{unordered}({a}, {b})" for a, b in zip(texts[::2], [*texts[1::2], texts[-1]])]
        return f"{unbits}({bits}({extreme}) | {' | '.join(pairs)})"

    def _four_bits(self, e: Expr) -> str | None:
        """Return the lookup of a vector of floats by four bits of each int32; None for other expressions."""
        if e.op != "cast" or e.dtype is not f32 or not e.args[0].dtype.is_int or not self.is_varying(e):
            return None
        field = four_bits(e.args[0], self._decided_branch)
        text, varying = (None, False) if field is None else self.text(field.source)
        if field is None or text is None or not varying:
            return None
        return f"{self.prelude.sixteen(field.values, self.width)}({text}{f' >> {field.shift}' if field.shift else ''})"

    def unsigned(self, p: Poly) -> str:
        return self.prelude.unsigned(i64) if self.magnitudes.may_overflow(p) else ""

    # scalars

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
            return self._cast(e, args[0])
        if name in ("floordiv", "floormod"):
            return f"{self.prelude.helper(name, e.dtype, 1)}({args[0]}, {args[1]})"
        if name == "pow":
            return self._power(e, args, 1)
        if name == "bitcast":
            return self.bits(args[0], e.args[0].dtype, e.dtype)
        if name in MATH or name in BITS:
            return f"{self.prelude.helper(name, e.dtype, 1)}({', '.join(args)})"
        raise BuildError(f"the C printers cannot print the operation {name!r} of {e!r}; add it to {__name__}")

    def _cast(self, e: Expr, text: str) -> str:
        if e.dtype.short == "bool":
            return f"({text} != 0)"
        source = computed(e.args[0].dtype)
        if source.is_float and e.dtype.is_int:
            wide = u64 if e.dtype is u64 else through(e.dtype)
            text = f"{self.prelude.helper(self.truncation(wide), source, 1)}({text})"
            if e.dtype is wide:
                return text
        if e.dtype.is_packed:
            return self.rounded(text, source, e.dtype, 1)
        return f"(({self.prelude.scalar(e.dtype)}){text})"

    def _extreme(self, e: Expr, args: list[str], width: int) -> str:
        if e.dtype.is_float and width == 1:
            sign = ">" if e.op == "max" else "<"
            for x, text, other in zip(e.args, args, args[::-1]):
                # one comparison suffices for a constant that is not NaN
                if x.value is not None and not math.isnan(float(x.value)) and other.isidentifier():
                    return f"({text} {sign} {other} ? {text} : {other})"
        return super()._extreme(e, args, width)

    def _scalar_compare(self, op: str, x: str, y: str, dtype: DType) -> str:
        return f"({x} {C_INFIX[op]} {y})"

    def _index_compare(self, op: str, p: Poly, q: Poly) -> str:
        return f"({self.poly_text(p)} {C_INFIX[op]} {self.poly_text(q)})"

    # vectors

    def _vector_operation(self, e: Expr, args: list[tuple[str, bool]]) -> str | None:
        name, w, helper = e.op, self.width, self.prelude.helper
        if name == "not":
            return f"(~{args[0][0]})"
        if computed(e.dtype) not in self.vector_types:
            return None
        if name in ("add", "sub", "mul", "div"):
            if name == "add" and e.args[1].op == "mul":
                args = args[::-1]
            if e.dtype is i32 and not fits_arithmetic(e):
                return f"{helper(name, i32, w)}({', '.join(self.splat(*x, i32) for x in args)})"
            return f"({args[0][0]} {C_INFIX[name]} {args[1][0]})"
        if name in ("floordiv", "floormod") and e.dtype is i32 and args[0][1]:
            shift = power_of_two(e.args[1])
            if shift is not None:
                # gcc shifts negative integers arithmetically (its manual, "Integers implementation"), so >> rounds
                # down as floordiv does.
                return f"({args[0][0]} {f'>> {shift}' if name == 'floordiv' else f'& {(1 << shift) - 1}'})"
        if e.dtype is i32 and name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
            return f"({args[0][0]} {SCALAR_OPS[name].c_name} {args[1][0]})"
        if name == "select":
            a, b = (self.splat(*x, e.dtype) for x in args[1:])
            if not args[0][1]:
                # The conditional operator needs one type, and vectors from memory have a type of smaller alignment.
                kind = self.prelude.vector(e.dtype, w)
                return f"({args[0][0]} ? ({kind}){a} : ({kind}){b})"
            mask = self.widened(args[0][0], e.dtype)
            return f"{helper('sel', e.dtype, w)}({mask}, {a}, {b})"
        return f"{helper(name, e.dtype, w)}({args[0][0]})" if name in FUNCTIONS and e.dtype.is_float else None

    def _converted(self, source: DType, target: DType, text: str) -> str | None:
        w = self.width
        if source is target:
            return text
        if source.short == "bool" and target in self.vector_types:
            one, zero = (self.splat(self._const(x, target), False, target) for x in (1, 0))
            return f"{self.prelude.helper('sel', target, w)}({self.widened(text, target)}, {one}, {zero})"
        if target.short == "bool":
            return f"({text} != 0)" if source in (f32, i32) else None
        if source in (i8, u8) and target in self.vector_types:
            text = f"{self.prelude.helper('widen', source, w)}({text})"
            if target is i32:
                return text
        elif source not in self.vector_types or target not in (f32, f64, i32, i8, u8):
            return None
        elif source.is_float and target.is_int:
            text = f"{self.prelude.helper('whole_i32', source, w)}({text})"
            if target is i32:
                return text
        return self.prelude.converted(text, self.prelude.vector(target, w))

    def _vector_comparison(self, op: str, x: str, y: str, dtype: DType) -> str:
        text = f"({x} {C_INFIX[op]} {y})"
        return self.prelude.converted(text, self.prelude.vector(i32, self.width)) if dtype is f64 else text

    def _lane_compare(self, e: Expr) -> str | None:
        comparison = super()._lane_compare(e)
        if comparison is not None:
            return comparison
        # The sum with an int64 from memory may overflow; with that number clamped it cannot.
        clamped = self._with_clamped_loads(e)
        return None if clamped is None else super()._lane_compare(clamped)

    def _with_clamped_loads(self, e: Expr) -> Expr | None:
        """Return a condition on indices with int64 numbers from memory clamped far outside of all indices; None without any."""
        clamped: dict[Expr, Expr] = {
            x: minimum(maximum(x, const(-FAR)), const(FAR)) for x in loads(e) if x.dtype is i64
        }
        return transform(e, clamped.get) if clamped else None
