"""Operators of torch with graphs of their own: `cond`, `while_loop`, `scan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax_tune.ir.frontend.shared.control import LoopBody, Values, branch, loop, row
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import TorchNode
from relax_tune.ir.frontend.torch.program import TorchGraph

Inside = Callable[[Writer, TorchGraph, Sequence[Any]], Values]
"""Imports a graph by a writer, with these arguments; returns its results."""


def _cond(inside: Inside, w: Writer, n: TorchNode) -> Values:
    then, orelse, operands = n.args[1], n.args[2], n.args[3] if len(n.args) > 3 else []
    return branch(w, n.item(0), lambda: inside(w, then, operands), lambda: inside(w, orelse, operands))


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
        raise n.refuse("wanted a tensor to scan, found none")

    def step(b: LoopBody) -> tuple[ImportedValue | None, Values, Values]:
        now = [b.w.of(row(b, item, 0, b.index)) for item in items]
        made = inside(b.w, combine, [*b.state, *now, *_outside(b, more)])
        return None, made[: len(initial)], made[len(initial) :]

    last, rows = loop(w, initial, step, w.number(items[0].shape[0]))
    return [*last, *rows]


def _tensors(n: TorchNode, values: Any) -> list[ImportedValue]:
    found = list(values)
    for value in found:
        if not isinstance(value, ImportedValue):
            raise n.refuse(
                f"wanted tensors as what an iteration takes, found {value!r:.60}; make it a tensor without dims"
            )
    return found


def _outside(b: LoopBody, values: Sequence[Any]) -> list[Any]:
    return [b.outside(v) if isinstance(v, ImportedValue) else v for v in values]


HANDLERS: Mapping[str, Callable[[Inside, Writer, TorchNode], Values]] = {
    "higher_order.cond": _cond,
    "higher_order.while_loop": _while_loop,
    "higher_order.scan": _scan,
}
