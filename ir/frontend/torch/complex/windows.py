"""ATen operators that make windows of transforms, whose size is a number: constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from relax_tune.ir.frontend.shared.writer import Array, ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, number_of

Shape = Callable[[Array, Sequence[float]], Array]


def _cosines(*factors: float) -> Shape:
    """Make a sum of cosines of multiples of the place on the circle. Given numbers replace factors."""

    def shape(x: Array, given: Sequence[float]) -> Array:
        every = [*given, *factors[len(given) :]]
        return np.asarray(sum((-1) ** k * f * np.cos(2 * np.pi * k * x) for k, f in enumerate(every)))

    return shape


def _bartlett(x: Array, given: Sequence[float]) -> Array:
    return np.asarray(1 - np.abs(2 * x - 1))


def _kaiser(x: Array, given: Sequence[float]) -> Array:
    beta = given[0] if given else 12.0
    return np.asarray(np.i0(beta * np.sqrt(np.maximum(1 - (2 * x - 1) ** 2, 0))) / np.i0(beta))


def window(shape: Shape) -> Handler:
    """Make a handler of a window of a shape over 0 .. 1; a periodic one lacks the last element."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        size, periodic = n.number(0, "window_length"), bool(n.given(1, "periodic", True))
        given = [float(g) for g in map(number_of, n.args[2:]) if g is not None]
        steps = size if periodic else size - 1
        if len(given) != len(n.args[2:]):
            raise n.refuse("wanted numbers as parameters of a window")
        values = shape(np.arange(size) / steps, given) if size > 1 else np.ones(size)
        return w.constant(values.astype(n.dtype.numpy), n.name)

    return handler


SHAPES: Mapping[str, tuple[Shape, Sequence[str]]] = {
    "hann": (_cosines(0.5, 0.5), ()),
    "hamming": (_cosines(0.54, 0.46), ("periodic_alpha", "periodic_alpha_beta")),
    "blackman": (_cosines(0.42, 0.5, 0.08), ()), "bartlett": (_bartlett, ()), "kaiser": (_kaiser, ("beta",)),
}  # fmt: skip
"""Shape of each window, and the overloads of its operator beside the two that all have."""

HANDLERS: Mapping[str, Handler] = {
    f"aten.{name}_window.{overload}": window(shape)
    for name, (shape, more) in SHAPES.items()
    for overload in ("default", "periodic", *more)
}
