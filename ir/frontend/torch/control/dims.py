"""Arithmetic and conditions on symbolic dims (sym.*), and what exports ask of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import f64
from relax_tune.ir.core.expr import (
    FALSE,
    TRUE,
    Expr,
    add,
    and_,
    as_int,
    const,
    eq,
    floordiv,
    floormod,
    le,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    not_,
    or_,
    sub,
)
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, Result, TorchNode, as_item, as_value, dim
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.elementwise import Add, Div, Mul, Sqrt, Sub


def known(fn: Callable[..., Expr], floats: OperatorSpec | None = None) -> Handler:
    """Make a handler of arithmetic on dims and integers. floats: the operator on a quotient of dims, a float64"""

    def handler(w: Writer, n: TorchNode) -> Result:
        if any(isinstance(a, (ImportedValue, float)) for a in n.args):
            if floats is not None and all(not isinstance(a, ImportedValue) or a.dtype is f64 for a in n.args):
                return w.of(w.emit(floats, *(as_value(w, a, f64) for a in n.args)))
            raise n.refuse("wanted dims and whole numbers: sizes that depend on data are not supported")
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
        if as_int(divisor) == 0 or not w.natural(sub(divisor, 1)):
            raise n.refuse(f"wanted a divisor that is at least 1, found {divisor!r}")
        return known(fn)(w, n)

    return handler


def _size(w: Writer, n: TorchNode) -> Result:
    x = n.item(0)
    return x.shape[n.axis(1, "dim", x.ndim)]


def _quotient(w: Writer, n: TorchNode) -> Result:
    """Import the quotient of dims as a float64 without dims."""
    return w.of(w.emit(Div(), *(as_value(w, a, f64) for a in n.args)))


def _assert_scalar(w: Writer, n: TorchNode) -> Result:
    """Require a condition on dims: an undecided one becomes a run-time check, a false one raises ParseError."""
    cond = n.args[0]
    if cond is FALSE or cond is False or (isinstance(cond, Expr) and not w.require(cond)):
        raise n.refuse("wanted a condition that can hold, found one that never does")
    return None


def _offset(w: Writer, n: TorchNode) -> Result:
    """Import where a tensor begins in its storage, where that depends on data: each tensor has a storage of its own."""
    return const(0)


HANDLERS: Mapping[str, Handler] = {
    "aten._assert_tensor_metadata.default": lambda w, n: None, "aten._assert_scalar.default": _assert_scalar,
    "aten.sym_constrain_range_for_size.default": lambda w, n: None, "aten.sym_constrain_range.default": lambda w, n: None,
    "aten.sym_size.int": _size, "aten.sym_storage_offset.default": _offset,
    "sym.known": lambda w, n: w.simplify(dim(n.args[0])), "sym.truediv": _quotient,
    "sym.float": lambda w, n: as_item(w, n.args[0], f64), "sym.sqrt": lambda w, n: w.of(w.emit(Sqrt(), as_value(w, n.args[0], f64))),
    "sym.add": known(add, Add()), "sym.sub": known(sub, Sub()), "sym.mul": known(mul, Mul()), "sym.neg": known(lambda a: mul(a, -1)),
    "sym.floordiv": _whole(floordiv), "sym.mod": _whole(floormod), "sym.max": known(maximum), "sym.min": known(minimum),
    "sym.eq": decided(eq), "sym.ne": decided(ne), "sym.lt": decided(lt), "sym.le": decided(le),
    "sym.gt": decided(lambda a, b: lt(b, a)), "sym.ge": decided(lambda a, b: le(b, a)), "sym.and_": decided(and_),
    "sym.or_": decided(or_), "sym.not": decided(not_),
}  # fmt: skip
