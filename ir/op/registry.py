"""Table of all operators by printed name: every operator class of the listed modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

from relax_tune.ir.op import create, devices, shapes
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing import gather, movement, pad, scatter
from relax_tune.ir.op.math import bits, elementwise, logic, numeric, quantize
from relax_tune.ir.op.math.elementwise import Elementwise
from relax_tune.ir.op.neural import attention, decoder, fold, grid_sample, paged, resize, window
from relax_tune.ir.op.reduction import einsum, linalg, reduce, scan, trees

MODULES = (
    elementwise, numeric, logic, bits, quantize, movement, gather, scatter, pad, create, shapes, devices,
    reduce, scan, linalg, einsum, attention, decoder, paged, window, resize, fold, grid_sample,
    trees,
)  # fmt: skip


def operators_in(module: ModuleType) -> list[type[OperatorSpec]]:
    """Return the operators that a module defines: its subclasses of `OperatorSpec` that state a name."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, OperatorSpec)
        and value.__module__ == module.__name__
        and isinstance(vars(value).get("name"), str)
    ]


def registry(operators: Iterable[type[OperatorSpec]]) -> Mapping[str, type[OperatorSpec]]:
    """Index operators by name.

    Raises:
        ValueError: a name used twice.
    """
    table: dict[str, type[OperatorSpec]] = {}
    for operator in operators:
        if operator.name in table:
            raise ValueError(f"two operators are called {operator.name!r}: {table[operator.name]} and {operator}")
        table[operator.name] = operator
    return table


OPERATORS = registry(operator for module in MODULES for operator in operators_in(module))
ELEMENTWISE: Mapping[str, type[Elementwise]] = {
    name: operator for name, operator in OPERATORS.items() if issubclass(operator, Elementwise)
}
"""The operators that state their names in ONNX and torch."""
