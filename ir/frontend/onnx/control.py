"""ONNX operators whose attributes are graphs: branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relax_tune.ir.frontend.onnx.file import names_read
from relax_tune.ir.frontend.onnx.node import OnnxNode
from relax_tune.ir.frontend.onnx.sequences import SequenceValue, added, begun, refuse_sequences, sequence
from relax_tune.ir.frontend.shared.handlers.control import LoopBody, Values, branch, loop, row
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer

Env = Mapping[str, ImportedValue | None]


Inside = Callable[[Writer, Any, dict[str, ImportedValue | None]], Values]
"""Imports the nodes of a graph with a writer and values by name; returns the results of the graph."""


@dataclass(frozen=True, slots=True)
class GraphScope:
    """The surroundings of a node whose attributes are graphs.

    Attributes:
        env: Values in scope by name.
        inside: Importer of a graph.
    """

    w: Writer
    env: Env
    inside: Inside


def _if(s: GraphScope, node: OnnxNode) -> Values:
    cond = node.item(0)

    def side(name: str) -> Callable[[], Values]:
        def results() -> Values:
            values = s.inside(s.w, _graph(node, name, 0), dict(s.env))
            refuse_sequences(node, values)
            return values

        return results

    return branch(s.w, cond, side("then_branch"), side("else_branch"))


def _loop(s: GraphScope, node: OnnxNode) -> Values:
    graph = _graph(node, "body", None)
    state = [node.item(k) for k in range(2, len(node.inputs))]
    if len(graph.input) != 2 + len(state):
        raise node.refuse(f"expected a body with {2 + len(state)} inputs, got {len(graph.input)}")
    if len(graph.output) < 1 + len(state):
        raise node.refuse(f"expected a body with {1 + len(state)} results or more, got {len(graph.output)}")

    # A sequence that a loop extends is no state for the loop of the graph: its tensors become rows that the loop
    # collects.
    lists = {k: item for k, item in enumerate(state) if isinstance(item, SequenceValue)}
    tensors = [k for k in range(len(state)) if k not in lists]

    def step(body: LoopBody) -> tuple[ImportedValue | None, Values, Values]:
        local, now = _outer_values(body, graph, s.env), list(state)
        for k, item in zip(tensors, body.state, strict=True):
            now[k] = item
        for k, before in lists.items():
            now[k] = begun(node, before, body)
        arguments = (body.w.number(body.index), body.going, *now)
        local.update(zip((i.name for i in graph.input), arguments, strict=True))
        go, *rest = s.inside(body.w, graph, local)
        rows = [*(added(node, rest[k], body) for k in lists), *rest[len(state) :]]
        new = [rest[k] for k in tensors]
        refuse_sequences(node, [*new, *rows])
        return go, new, rows

    count, going = (node.inputs[k] if node.has(k) else None for k in (0, 1))
    last, rows = loop(s.w, [state[k] for k in tensors], step, count, going)
    final = dict(zip(tensors, last, strict=True))
    final.update((k, sequence(stack=r)) for k, r in zip(lists, rows, strict=False))
    return [*(final[k] for k in range(len(state))), *rows[len(lists) :]]


def _scan(s: GraphScope, node: OnnxNode) -> Values:
    graph, number = _graph(node, "body", None), node.integer("num_scan_inputs", 0)
    if node.opset < 9:
        raise node.refuse(
            "expected the Scan of opset 9 or later, got an earlier one, which has a batch dim; convert the model"
        )
    items = [node.item(k) for k in range(len(node.inputs))]
    if not 0 < number <= len(items) or len(graph.input) != len(items):
        raise node.refuse(
            f"expected a body with an input for each of {len(items)} values, 1 or more of them scanned, got "
            f"{len(graph.input)} inputs and num_scan_inputs {number}"
        )
    state, scanned = items[:-number], items[-number:]
    stacked = len(graph.output) - len(state)
    if stacked < 0:
        raise node.refuse(f"expected a body with {len(state)} results or more, got {len(graph.output)}")
    axes = [node.normalised(a, i.ndim) for a, i in zip(_list(node, "scan_input_axes", number), scanned, strict=True)]
    back = _list(node, "scan_input_directions", number)
    length = scanned[0].shape[axes[0]]

    def step(body: LoopBody) -> tuple[ImportedValue | None, Values, Values]:
        local = _outer_values(body, graph, s.env)
        parts = [
            body.w.of(row(body, item, axis, length - 1 - body.index if backward else body.index))
            for item, axis, backward in zip(scanned, axes, back, strict=True)
        ]
        local.update(zip((i.name for i in graph.input), (*body.state, *parts), strict=True))
        values = s.inside(body.w, graph, local)
        refuse_sequences(node, values)
        return None, values[: len(state)], values[len(state) :]

    last, rows = loop(s.w, state, step, s.w.number(length))
    results = []
    forms = zip(
        rows, _list(node, "scan_output_axes", stacked), _list(node, "scan_output_directions", stacked), strict=True
    )
    for stack, axis, backward in forms:
        value = s.w.reversed(s.w.tensor(stack), 0) if backward else s.w.tensor(stack)
        at = node.normalised(axis, stack.ndim)
        # Rows are collected along the first dim, which moves to the axis that the model states.
        results.append(s.w.of(s.w.permute(value, [*range(1, at + 1), 0, *range(at + 1, stack.ndim)])))
    return [*last, *results]


def _outer_values(body: LoopBody, graph: Any, env: Env) -> dict[str, ImportedValue | None]:
    """Return the values from outside that a loop's graph reads, by name."""
    values: dict[str, ImportedValue | None] = {"": None}
    # Sorted, so that two imports of a file give the same program text.
    for name in sorted(names_read(graph)):
        item = env.get(name)
        if isinstance(item, SequenceValue):
            stack = None if item.stack is None else body.outside(item.stack)
            values[name] = replace(item, parts=tuple(map(body.outside, item.parts)), stack=stack)
        elif item is not None:
            values[name] = body.outside(item)
    return values


def _graph(node: OnnxNode, name: str, inputs: int | None) -> Any:
    graph = node.attributes.get(name)
    if graph is None or not hasattr(graph, "node"):
        raise node.refuse(f"expected a graph in attribute {name}, got none")
    if inputs is not None and len(graph.input) != inputs:
        raise node.refuse(f"expected {name} with {inputs} inputs, got {len(graph.input)}")
    return graph


def _list(node: OnnxNode, name: str, count: int) -> Sequence[int]:
    numbers = [int(v) for v in node.attributes.get(name, [0] * count)]
    if len(numbers) != count:
        raise node.refuse(f"expected {count} numbers in {name}, got {len(numbers)}")
    return numbers


HANDLERS: Mapping[str, Callable[[GraphScope, OnnxNode], Values]] = {
    "If": _if, "Loop": _loop, "Scan": _scan,
}  # fmt: skip
