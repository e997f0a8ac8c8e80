"""ONNX optimisers of the domain ai.onnx.preview.training: one step for each of several tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.compositions import cast_to
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Div, Mul, MulScalar, Sqrt, Sub
from relax_tune.ir.op.math.logic import Less, Where
from relax_tune.ir.op.math.numeric import Power


class Arithmetic:
    """Arithmetic of tensors and numbers of one element type."""

    def __init__(self, w: Writer, node: OnnxNode) -> None:
        self.w, self.node, self.element = w, node, node.item(2).dtype

    def number(self, name: str, default: float) -> float:
        return float(self.node.attributes.get(name, default))

    def rate(self) -> Value:
        item = self.node.item(0)
        return self.w.reshape(cast_to(self.w, self.w.tensor(item), item.dtype, self.element), [])

    def step(self) -> Value:
        item = self.node.item(1)
        return self.w.reshape(cast_to(self.w, self.w.tensor(item), item.dtype, self.element), [])

    def add(self, a: Value, b: Value) -> Value:
        return self.w.emit(Add(), a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return self.w.emit(Sub(), a, b)

    def mul(self, a: Value, b: Value | float) -> Value:
        return self.w.emit(MulScalar(b), a) if isinstance(b, float) else self.w.emit(Mul(), a, b)

    def div(self, a: Value, b: Value) -> Value:
        return self.w.emit(Div(), a, b)

    def root(self, a: Value, more: float = 0.0) -> Value:
        """Return the square root, and a number added to it."""
        return self.w.emit(AddScalar(more), self.w.emit(Sqrt(), a))

    def regularised(self, x: Value, g: Value) -> Value:
        """Return the gradient with that of `norm_coefficient / 2 * x^2`."""
        return self.add(self.mul(x, self.number("norm_coefficient", 0.0)), g)

    def after_first(self, then: Value, first: Value) -> Value:
        """Return one value at steps above 0 and another at step 0."""
        above = self.w.emit(Less(), self.w.literal(0, self.element), self.step())
        return self.w.emit(Where(), above, then, first)


Update = Callable[[Arithmetic, Sequence[Value]], Sequence[Value]]


def _each(update: Update, states: int) -> Handler:
    """Make a handler of an optimiser whose inputs are the rate, the step, and lists of tensors, gradients and states."""

    def handler(w: Writer, node: OnnxNode) -> list[ImportedValue]:
        lists = 2 + states
        count, rest = divmod(len(node.inputs) - 2, lists)
        if rest or count < 1:
            raise node.refuse(
                f"wanted a rate, a step and {lists} lists of as many tensors, found {len(node.inputs)} inputs"
            )
        a = Arithmetic(w, node)
        found: list[Sequence[Value]] = [
            update(a, [w.tensor(node.item(2 + k * count + i)) for k in range(lists)]) for i in range(count)
        ]
        return [w.of(values[k]) for k in range(1 + states) for values in found]

    return handler


def _adagrad(a: Arithmetic, given: Sequence[Value]) -> Sequence[Value]:
    """Emit a step of Adagrad (Duchi et al. 2011)."""
    x, g, h = given
    decayed = a.w.emit(AddScalar(1.0), a.mul(a.step(), a.number("decay_factor", 0.0)))
    g = a.regularised(x, g)
    h = a.add(h, a.mul(g, g))
    return a.sub(x, a.div(a.mul(g, a.div(a.rate(), decayed)), a.root(h, a.number("epsilon", 1e-6)))), h


def _adam(a: Arithmetic, given: Sequence[Value]) -> Sequence[Value]:
    """Emit a step of Adam (Kingma and Ba 2015)."""
    x, g, v, h = given
    alpha, beta = a.number("alpha", 0.9), a.number("beta", 0.999)
    g = a.regularised(x, g)
    v = a.add(a.mul(v, alpha), a.mul(g, 1 - alpha))
    h = a.add(a.mul(h, beta), a.mul(a.mul(g, g), 1 - beta))
    one = a.w.literal(1, a.element)
    left = [a.sub(one, a.w.emit(Power(), a.w.literal(base, a.element), a.step())) for base in (beta, alpha)]
    rate = a.after_first(a.div(a.mul(a.rate(), a.root(left[0])), left[1]), a.rate())
    x = a.sub(x, a.mul(a.div(v, a.root(h, a.number("epsilon", 1e-6))), rate))
    return a.mul(x, 1 - a.number("norm_coefficient_post", 0.0)), v, h


def _momentum(a: Arithmetic, given: Sequence[Value]) -> Sequence[Value]:
    """Emit a step of gradient descent with momentum, by Polyak (1964) or Nesterov (1983)."""
    x, g, v = given
    alpha, beta = a.number("alpha", 0.9), a.number("beta", 1.0)
    nesterov = a.node.choice("mode", "standard", "nesterov") == "nesterov"
    g = a.regularised(x, g)
    v = a.add(a.mul(v, alpha), a.after_first(a.mul(g, beta), g))
    return a.sub(x, a.mul(a.add(g, a.mul(v, alpha)) if nesterov else v, a.rate())), v


DOMAIN = "ai.onnx.preview.training"
HANDLERS: Mapping[tuple[str, str], Handler] = {
    (DOMAIN, "Adagrad"): _each(_adagrad, 1), (DOMAIN, "Adam"): _each(_adam, 2), (DOMAIN, "Momentum"): _each(_momentum, 1),
}  # fmt: skip
