"""Reductions of both formats, and elements that are sorted by value.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from relax_tune.ir.core.dtype import bool_, u8
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.node import Node, SharedHandler
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.reduction.reduce import Reduce

Function = Callable[[Writer, Value], Value]


def reduced(
    make: Callable[[tuple[int, ...], bool], Reduce], before: Function | None = None, after: Function | None = None
) -> SharedHandler:
    """Make a handler of a reduction, of functions of the elements before it and of the result after it."""

    def handler(w: Writer, n: Node) -> ImportedValue:
        x = n.typed(w, 0)
        axes, keepdims = n.reduction(w, x.ndim)
        if not axes and before is after is None:
            return w.of(w.tensor(x), x.natural)
        value = ordered(w, x)
        value = value if before is None else before(w, value)
        value = w.emit(make(axes, keepdims), value) if axes else value
        value = value if after is None else after(w, value)
        return w.of(w.cast(value, x.dtype) if x.dtype is bool_ else value, x.natural)

    return handler


def ordered(w: Writer, x: ImportedValue) -> Value:
    """Return a tensor for comparisons and extremes; bools become bytes.

    Over no elements, the maximum of uint8 is 0 (false) and the minimum 255 (true).
    """
    return w.cast(w.tensor(x), u8 if x.dtype is bool_ else x.dtype)


def elements_at(w: Writer, x: ImportedValue, places: Value, axis: int) -> list[ImportedValue]:
    """Return (values, places) of elements at places along an axis."""
    return [w.of(w.gather_elements(w.tensor(x), places, axis), x.natural), w.of(places, True)]
