"""Operators of torch with graphs as arguments: `cond`, `while_loop`, `scan`.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.frontend.shared.handlers.control import LoopBody, Values, branch, loop, row
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import TorchNode
from relax_tune.ir.frontend.torch.program import TorchGraph

Inside = Callable[[Writer, TorchGraph, Sequence[Any]], Values]
"""Imports a graph with a writer and arguments; returns its results."""


def _cond(inside: Inside, w: Writer, n: TorchNode) -> Values:
    then, orelse, operands = n.args[1], n.args[2], n.args[3] if len(n.args) > 3 else []
    cond = n.args[0]
    if isinstance(cond, (bool, Expr)):  # a condition on sizes
        scalar = np.empty((), object)
        scalar[()] = const(cond) if isinstance(cond, bool) else cond
        cond = w.known(scalar, bool_)
    else:
        cond = n.item(0)
    return branch(w, cond, lambda: inside(w, then, operands), lambda: inside(w, orelse, operands))


def _while_loop(inside: Inside, w: Writer, n: TorchNode) -> Values:
    test, body, state, more = n.args

    def step(b: LoopBody) -> tuple[ImportedValue | None, Values, Values]:
        outside = _outside(b, more)
        new = inside(b.w, body, [*b.state, *outside])
        return inside(b.w, test, [*new, *outside])[0], new, []

    initial = _tensors(n, state)
    return loop(w, initial, step, going=inside(w, test, [*initial, *more])[0])[0]


def _scan(inside: Inside, w: Writer, n: TorchNode) -> Values:
    combine, state, scanned, more = n.args
    initial, items = _tensors(n, state), _tensors(n, scanned)
    if not items:
        raise n.refuse("expected a tensor to scan, got none")

    def step(b: LoopBody) -> tuple[ImportedValue | None, Values, Values]:
        now = [b.w.of(row(b, item, 0, b.index)) for item in items]
        values = inside(b.w, combine, [*b.state, *now, *_outside(b, more)])
        return None, values[: len(initial)], values[len(initial) :]

    last, rows = loop(w, initial, step, w.number(items[0].shape[0]))
    return [*last, *rows]


def _tensors(n: TorchNode, values: Any) -> list[ImportedValue]:
    tensors = list(values)
    for value in tensors:
        if not isinstance(value, ImportedValue):
            raise n.refuse(
                f"expected tensors as the state and inputs of an iteration, got {value!r:.60}; make it a tensor without dims"
            )
    return tensors


def _outside(b: LoopBody, values: Sequence[Any]) -> list[Any]:
    return [b.outside(v) if isinstance(v, ImportedValue) else v for v in values]


HANDLERS: Mapping[str, Callable[[Inside, Writer, TorchNode], Values]] = {
    "higher_order.cond": _cond, "higher_order.while_loop": _while_loop, "higher_order.scan": _scan,
}  # fmt: skip
