"""Closed-form expressions compiled once into a NumPy function over columns of tunables and shapes.

Arithmetic is in float64, exact for integers below 2**50; that holds for every size a device can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import Const, Expr, Load, Var, free_vars, postorder
from relax_tune.ir.core.scalar_ops import SCALAR_OPS
from relax_tune.schedules.sketch import Sketch

Array = NDArray[np.float64]
Compiled = Callable[[Mapping[str, Array]], list[Array]]

_TEMPLATES = {o.name: o.column_text for o in SCALAR_OPS.values() if o.column_text is not None}
_NAMES = ("floor", "minimum", "maximum", "logical_and", "logical_or", "logical_not", "where")


def compile_numpy(exprs: Sequence[Expr]) -> tuple[Compiled, tuple[Var, ...]]:
    """Return a function from `{variable name: float64 array}` to one array per expression, and its variables.

    Shared subexpressions are computed once. Arrays broadcast: give tunables as (R, 1) and shapes as (1, S).
    """
    variables = free_vars(*exprs)
    names: dict[Expr, str] = {}
    lines = ["def compiled(columns):"]
    for a, v in enumerate(variables):
        names[v] = f"v{a}"
        lines.append(f"    v{a} = columns[{v.name!r}]")
    for number, node in enumerate(postorder(exprs)):
        if isinstance(node, Var):
            continue
        if isinstance(node, Const):
            names[node] = repr(float(node.value))
            continue
        if isinstance(node, Load) or node.op not in _TEMPLATES:
            raise ValueError(f"expected an expression over shapes and tunables, got {node!r}")
        names[node] = f"t{number}"
        lines.append(f"    t{number} = " + _TEMPLATES[node.op].format(*(names[x] for x in node.args)))
    lines.append("    return [" + ", ".join(names[e] for e in exprs) + "]")
    scope: dict[str, object] = {n: getattr(np, n) for n in _NAMES}
    # the text is generated above from our own node types and literals only
    exec(compile("\n".join(lines), "<expressions>", "exec"), scope)
    inner = scope["compiled"]
    assert callable(inner)

    def run(columns: Mapping[str, Array]) -> list[Array]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return [np.asarray(x, dtype=np.float64) for x in inner(columns)]

    return run, variables


class ConstraintFunction:
    """True where every constraint of the sketch holds."""

    def __init__(self, sketch: Sketch) -> None:
        self._run, self.variables = compile_numpy(list(sketch.constraints))

    def __call__(self, tunables: Mapping[str, NDArray[np.int64]]) -> NDArray[np.bool_]:
        """Evaluate the constraints for each row of tunables (R,): (R,) bool."""
        rows = len(next(iter(tunables.values()))) if tunables else 1
        result = np.ones(rows, bool)
        columns = {n: np.asarray(a, np.float64) for n, a in tunables.items()}
        for value in self._run(columns):
            result &= value.astype(bool)
        return result
