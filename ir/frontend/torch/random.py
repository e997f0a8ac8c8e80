"""ATen random numbers, the same at every call: a counter and the place of the node in the program decide them.

Tests: `tests/ir/frontend/torch/test_special.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_tune.ir.core.dtype import bool_, f32, f64
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers import random as random_numbers
from relax_tune.ir.frontend.shared.node import number_of
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, dim
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Mul, MulScalar


def _key(w: Writer) -> random_numbers.Key:
    return random_numbers.key_of(w, None)


def _element(n: TorchNode) -> None:
    if n.dtype not in random_numbers.PRECISION:
        raise n.refuse(f"expected random floats of 16 to 64 bits, got {n.dtype}; draw floats, and cast them")


def _float(n: TorchNode, position: int, name: str, default: float) -> float:
    value = number_of(n.argument(position, name, default))
    if value is None:
        raise n.refuse(f"expected {name} as a number, got {n.argument(position, name)}")
    return float(value)


def _uniform(w: Writer, n: TorchNode) -> ImportedValue:
    """Import rand, and uniform between two numbers."""
    _element(n)
    low, high = (_float(n, 1, "from", 0.0), _float(n, 2, "to", 1.0)) if n.op == "aten.uniform.default" else (0.0, 1.0)
    return w.of(random_numbers.uniform(w, n.dims, _key(w), n.dtype, low, high))


def _normal(w: Writer, n: TorchNode) -> ImportedValue:
    """Import randn, and normal with a mean and a deviation that are numbers or tensors."""
    _element(n)
    if "randn" in n.op:
        return w.of(random_numbers.normal(w, n.dims, _key(w), n.dtype))
    if n.op in ("aten.normal_functional.default", "aten.normal.default"):
        mean, scale = n.argument(1, "mean", 0.0), n.argument(2, "std", 1.0)
    else:
        mean, scale = n.argument(0, "mean", 0.0), n.argument(1, "std", 1.0)
    work = f64 if n.dtype is f64 else f32
    drawn = random_numbers.normal(w, n.dims, _key(w), work)
    for parameter, number, both in ((scale, MulScalar, Mul), (mean, AddScalar, Add)):
        if isinstance(parameter, ImportedValue):
            drawn = w.emit(both(), drawn, as_value(w, parameter, work))
        else:
            drawn = w.emit(number(float(number_of(parameter) or 0)), drawn)
    return w.of(w.cast(drawn, n.dtype))


def _integers(w: Writer, n: TorchNode) -> ImportedValue:
    """Import randint and random: integers in [low, high)."""
    arguments: Sequence[Any] = [a for a in n.args if not isinstance(a, (list, ImportedValue))][:2]
    bounds = [as_int(dim(a)) for a in arguments if a is not None]
    if not bounds or None in bounds:
        raise n.refuse(f"expected bounds that are numbers, got {arguments}; draw floats, and scale them")
    low, high = (0, bounds[0] or 0) if len(bounds) == 1 else (bounds[0] or 0, bounds[1] or 0)
    if not low < high:
        raise n.refuse(f"expected bounds of at least one integer, got {low} to {high}")
    return w.of(w.cast(random_numbers.integers(w, n.dims, _key(w), low, high), n.dtype), n.dtype.is_int and low >= 0)


def _bernoulli(w: Writer, n: TorchNode) -> ImportedValue:
    """Import Bernoulli: 1 with a probability that is a number, or a tensor of one for each element."""
    if n.op == "aten.bernoulli.p":
        chance = w.uniform(n.dims, _float(n, 1, "p", 0.5), f32)
    else:
        item = n.item(1) if n.op == "aten.bernoulli.Tensor" else n.item(0)
        work = f64 if item.dtype is f64 else f32
        chance = w.of(as_value(w, item, work))
    return w.of(w.cast(random_numbers.drawn_true(w, chance, _key(w)), n.dtype))


def _multinomial(w: Writer, n: TorchNode) -> ImportedValue:
    """Import classes drawn by weights (classes,) or (rows, classes)."""
    x, count = n.item(0), n.number(1, "num_samples")
    work = f64 if x.dtype is f64 else f32
    rows: Expr = x.shape[0] if x.ndim == 2 else const(1)
    weights = w.reshape(as_value(w, x, work), [rows, x.shape[-1]])
    draw = random_numbers.classes if n.argument(2, "replacement", False) else random_numbers.distinct_classes
    return w.of(w.reshape(draw(w, weights, const(count), _key(w)), n.dims), True)


def _dropout(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    """Import dropout; at inference the elements as they are."""
    x, ratio = n.item(0), _float(n, 1, "p", 0.5)
    if n.argument(2, "train", True) is False or ratio == 0:
        return [x, w.uniform(x.shape, True, bool_)]
    mask, y = random_numbers.dropped(w, x, ratio, _key(w))
    return [w.of(y), w.of(mask)]


def _exponential(w: Writer, n: TorchNode) -> ImportedValue:
    """Import exponentially distributed numbers: `-log(1 - u) / rate`, u in [0, 1)."""
    _element(n)
    work = f64 if n.dtype is f64 else f32
    u = random_numbers.uniform(w, n.dims, _key(w), work)
    logarithm = w.log(w.add(w.mul(u, -1.0), 1.0))
    return w.of(w.cast(w.mul(logarithm, -1.0 / _float(n, 1, "lambd", 1.0)), n.dtype))


def _permutation(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a permutation: the order of as many random numbers."""
    (size,) = n.dims
    drawn: Value = random_numbers.uniform(w, [size], _key(w), f64)
    return w.of(w.cast(w.top_k(drawn, size, 0), n.dtype), True)


HANDLERS: Mapping[str, Handler] = {
    "aten.rand.default": _uniform, "aten.rand_like.default": _uniform, "aten.uniform.default": _uniform,
    "aten.randn.default": _normal, "aten.randn_like.default": _normal, "aten.normal.float_float": _normal,
    "aten.normal.Tensor_float": _normal, "aten.normal.float_Tensor": _normal, "aten.normal.Tensor_Tensor": _normal,
    "aten.normal_functional.default": _normal, "aten.randint.default": _integers, "aten.randint.low": _integers,
    "aten.randint_like.default": _integers, "aten.randint_like.low_dtype": _integers, "aten.random.to": _integers,
    "aten.random.from": _integers, "aten.bernoulli.default": _bernoulli, "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.Tensor": _bernoulli, "aten.multinomial.default": _multinomial,
    "aten.native_dropout.default": _dropout, "aten.exponential.default": _exponential,
    "aten.randperm.default": _permutation,
}  # fmt: skip
