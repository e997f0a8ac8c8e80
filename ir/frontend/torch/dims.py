"""Arithmetic and conditions on symbolic dims (sym.*), and what exports ask of them.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core import expr as ex
from relax_tune.ir.core.dtype import f64
from relax_tune.ir.core.expr import FALSE, TRUE, Expr, as_int, const
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, Result, TorchNode, as_item, as_value, dim
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.elementwise import Add, Mul, Sub


def known(fn: Callable[..., Expr], floats: OperatorSpec | None = None) -> Handler:
    """Make a handler of arithmetic on dims and integers. floats: the operator on a quotient of dims, a float64"""

    def handler(w: Writer, n: TorchNode) -> Result:
        if any(isinstance(a, (ImportedValue, float)) for a in n.args):
            if floats is not None and all(not isinstance(a, ImportedValue) or a.dtype is f64 for a in n.args):
                return w.of(w.emit(floats, *(as_value(w, a, f64) for a in n.args)))
            raise n.refuse("expected dims and whole numbers: sizes that depend on data are not supported")
        return w.simplify(fn(*map(dim, n.args)))

    return handler


def decided(fn: Callable[..., Expr]) -> Handler:
    """Make a handler of a condition on dims, simplified to true or false if decided."""

    def handler(w: Writer, n: TorchNode) -> Result:
        cond = fn(
            *(a if isinstance(a, Expr) else dim(a) if not isinstance(a, bool) else TRUE if a else FALSE for a in n.args)
        )
        proof = w.g.deduction.proves(cond)
        return TRUE if proof is Proof.YES else FALSE if proof is Proof.NO else cond

    return handler


def _whole(fn: Callable[[Expr, Expr], Expr]) -> Handler:
    def handler(w: Writer, n: TorchNode) -> Result:
        divisor = dim(n.args[1])
        if as_int(divisor) == 0 or not w.natural(ex.sub(divisor, 1)):
            raise n.refuse(f"expected a divisor that is at least 1, got {divisor!r}")
        return known(fn)(w, n)

    return handler


def _power(w: Writer, n: TorchNode) -> Result:
    """Import a power: of a dim by a known whole number a dim, otherwise a float64 without dims."""
    base, exponent = n.args[0], n.args[1]
    number = as_int(exponent) if isinstance(exponent, (int, Expr)) else None
    if number is not None and 0 <= number <= 8 and not isinstance(base, (ImportedValue, float)):
        y: Expr = const(1)
        for _ in range(number):
            y = ex.mul(y, dim(base))
        return w.simplify(y)
    return w.of(w.power(as_value(w, base, f64), as_value(w, exponent, f64)))


def _shift(fn: Callable[[Expr, Expr], Expr]) -> Handler:
    """Make a handler of a shift of a dim by a known number of bits: a product or a quotient."""

    def handler(w: Writer, n: TorchNode) -> Result:
        bits = n.number(1, "bits")
        if not 0 <= bits < 32:
            raise n.refuse(f"expected 0 to 31 bits, got {bits}")
        return w.simplify(fn(dim(n.args[0]), const(1 << bits)))

    return handler


def _remainder(w: Writer, n: TorchNode) -> Result:
    """Import the remainder of dims; a divisor of 0 counts as 1, as where torch rolls a dim without elements."""
    divisor = dim(n.args[1])
    if as_int(divisor) != 0 and w.natural(divisor):
        return w.simplify(ex.floormod(dim(n.args[0]), ex.maximum(divisor, 1)))
    return _whole(ex.floormod)(w, n)


def _size(w: Writer, n: TorchNode) -> Result:
    x = n.item(0)
    return x.shape[n.axis_at(1, "dim", x.ndim)]


def _quotient(w: Writer, n: TorchNode) -> Result:
    """Import the quotient of dims as a float64 without dims."""
    return w.of(w.div(*(as_value(w, a, f64) for a in n.args)))


def _assert_scalar(w: Writer, n: TorchNode) -> Result:
    """Require a condition on dims: an undecided one becomes a run-time check, a false one raises ParseError."""
    cond = n.args[0]
    if cond is FALSE or cond is False or (isinstance(cond, Expr) and not w.require(cond)):
        raise n.refuse("expected a condition that can hold, got one that never does")
    return None


def _offset(w: Writer, n: TorchNode) -> Result:
    """Import where a tensor begins in its storage, where that depends on data: no two tensors share a storage."""
    return const(0)


HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(("aten._assert_tensor_metadata.default", "aten._assert_async.msg"), lambda w, n: None),
    "aten._assert_scalar.default": _assert_scalar,
    "aten.sym_constrain_range_for_size.default": lambda w, n: None, "aten.sym_constrain_range.default": lambda w, n: None,
    "aten.sym_size.int": _size, "aten.sym_storage_offset.default": _offset,
    "sym.known": lambda w, n: w.simplify(dim(n.args[0])), "sym.truediv": _quotient,
    "sym.float": lambda w, n: as_item(w, n.args[0], f64),
    "sym.sqrt": lambda w, n: w.of(w.sqrt(as_value(w, n.args[0], f64))), "sym.add": known(ex.add, Add()),
    "sym.sub": known(ex.sub, Sub()), "sym.mul": known(ex.mul, Mul()), "sym.neg": known(lambda a: ex.mul(a, -1)),
    "sym.floordiv": _whole(ex.floordiv), "sym.lshift": _shift(ex.mul), "sym.rshift": _shift(ex.floordiv),
    "sym.mod": _remainder, "sym.pow": _power, "sym.max": known(ex.maximum),
    "sym.min": known(ex.minimum),
    "sym.eq": decided(ex.eq), "sym.ne": decided(ex.ne), "sym.lt": decided(ex.lt), "sym.le": decided(ex.le),
    "sym.gt": decided(lambda a, b: ex.lt(b, a)), "sym.ge": decided(lambda a, b: ex.le(b, a)), "sym.and_": decided(ex.and_),
    "sym.or_": decided(ex.or_), "sym.not": decided(ex.not_),
}  # fmt: skip
