"""ONNX operators with graphs of their own: branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relax_tune.ir.frontend.onnx.control.sequences import SequenceValue, added, begun, refuse_sequences, sequence
from relax_tune.ir.frontend.onnx.node import OnnxNode
from relax_tune.ir.frontend.onnx.shape import axis_of
from relax_tune.ir.frontend.shared.compositions import permute, reversed_along
from relax_tune.ir.frontend.shared.control import LoopBody, Values, branch, loop, row
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer

Env = Mapping[str, ImportedValue | None]
Inside = Callable[[Writer, Any, dict[str, ImportedValue | None]], Values]
"""Imports the nodes of a graph by a writer, with these values in scope; returns the results of the graph."""


@dataclass(frozen=True, slots=True)
class GraphScope:
    """The surroundings of a node with graphs of its own.

    env: values in scope by name
    inside: importer of a graph
    """

    w: Writer
    env: Env
    inside: Inside


def names_read(graph: Any) -> set[str]:
    """Return the names that a graph reads from outside, those of its inner graphs included."""
    made = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    read: set[str] = set()
    for n in graph.node:
        inner = (g for a in n.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs))
        read |= ({*n.input} | {name for g in inner for name in names_read(g)}) - made
        made |= {*n.output}
    return (read | ({o.name for o in graph.output} - made)) - {""}


def _if(s: GraphScope, node: OnnxNode) -> Values:
    cond = node.item(0)

    def side(name: str) -> Callable[[], Values]:
        def results() -> Values:
            found = s.inside(s.w, _graph(node, name, 0), dict(s.env))
            refuse_sequences(node, found)
            return found

        return results

    return branch(s.w, cond, side("then_branch"), side("else_branch"))


def _loop(s: GraphScope, node: OnnxNode) -> Values:
    graph = _graph(node, "body", None)
    state = [node.item(k) for k in range(2, len(node.inputs))]
    if len(graph.input) != 2 + len(state):
        raise node.refuse(f"wanted a body with {2 + len(state)} inputs, found {len(graph.input)}")
    if len(graph.output) < 1 + len(state):
        raise node.refuse(f"wanted a body with {1 + len(state)} results or more, found {len(graph.output)}")

    lists = {k: item for k, item in enumerate(state) if isinstance(item, SequenceValue)}
    tensors = [k for k in range(len(state)) if k not in lists]

    def step(body: LoopBody) -> tuple[ImportedValue | None, Values, Values]:
        local, now = _seen_by(body, graph, s.env), list(state)
        for k, item in zip(tensors, body.state, strict=True):
            now[k] = item
        for k, before in lists.items():
            now[k] = begun(node, before, body)
        given = (body.w.number(body.index), body.going, *now)
        local.update(zip((i.name for i in graph.input), given, strict=True))
        go, *rest = s.inside(body.w, graph, local)
        rows = [*(added(node, rest[k], body) for k in lists), *rest[len(state) :]]
        new = [rest[k] for k in tensors]
        refuse_sequences(node, [*new, *rows])
        return go, new, rows

    count, going = (node.inputs[k] if node.has(k) else None for k in (0, 1))
    last, rows = loop(s.w, [state[k] for k in tensors], step, count, going)
    found = dict(zip(tensors, last, strict=True))
    found.update((k, sequence(stack=r)) for k, r in zip(lists, rows, strict=False))
    return [*(found[k] for k in range(len(state))), *rows[len(lists) :]]


def _scan(s: GraphScope, node: OnnxNode) -> Values:
    graph, number = _graph(node, "body", None), int(node.attributes.get("num_scan_inputs", 0))
    if node.opset < 9:
        raise node.refuse(
            "wanted the Scan of opset 9 or later, found an earlier one, which has a batch dim; convert the model"
        )
    items = [node.item(k) for k in range(len(node.inputs))]
    if not 0 < number <= len(items) or len(graph.input) != len(items):
        raise node.refuse(
            f"wanted a body with an input for each of {len(items)} values, 1 or more of them scanned, found "
            f"{len(graph.input)} inputs and num_scan_inputs {number}"
        )
    state, scanned = items[:-number], items[-number:]
    stacked = len(graph.output) - len(state)
    if stacked < 0:
        raise node.refuse(f"wanted a body with {len(state)} results or more, found {len(graph.output)}")
    axes = [axis_of(node, a, i.ndim) for a, i in zip(_list(node, "scan_input_axes", number), scanned, strict=True)]
    back = _list(node, "scan_input_directions", number)
    length = scanned[0].shape[axes[0]]

    def step(body: LoopBody) -> tuple[ImportedValue | None, Values, Values]:
        local = _seen_by(body, graph, s.env)
        parts = [
            body.w.of(row(body, item, axis, length - 1 - body.index if backward else body.index))
            for item, axis, backward in zip(scanned, axes, back, strict=True)
        ]
        local.update(zip((i.name for i in graph.input), (*body.state, *parts), strict=True))
        made = s.inside(body.w, graph, local)
        refuse_sequences(node, made)
        return None, made[: len(state)], made[len(state) :]

    last, rows = loop(s.w, state, step, s.w.number(length))
    found = []
    forms = zip(
        rows, _list(node, "scan_output_axes", stacked), _list(node, "scan_output_directions", stacked), strict=True
    )
    for stack, axis, backward in forms:
        value = reversed_along(s.w, s.w.tensor(stack), 0) if backward else s.w.tensor(stack)
        at = axis_of(node, axis, stack.ndim)
        found.append(s.w.of(permute(s.w, value, [*range(1, at + 1), 0, *range(at + 1, stack.ndim)])))
    return [*last, *found]


def _seen_by(body: LoopBody, graph: Any, env: Env) -> dict[str, ImportedValue | None]:
    """Return the values from outside that a loop's graph reads, by name."""
    found: dict[str, ImportedValue | None] = {"": None}
    for name in sorted(names_read(graph)):
        item = env.get(name)
        if isinstance(item, SequenceValue):
            stack = None if item.stack is None else body.outside(item.stack)
            found[name] = replace(item, parts=tuple(map(body.outside, item.parts)), stack=stack)
        elif item is not None:
            found[name] = body.outside(item)
    return found


def _graph(node: OnnxNode, name: str, inputs: int | None) -> Any:
    graph = node.attributes.get(name)
    if graph is None or not hasattr(graph, "node"):
        raise node.refuse(f"wanted a graph in attribute {name}, found none")
    if inputs is not None and len(graph.input) != inputs:
        raise node.refuse(f"wanted {name} with {inputs} inputs, found {len(graph.input)}")
    return graph


def _list(node: OnnxNode, name: str, count: int) -> Sequence[int]:
    found = [int(v) for v in node.attributes.get(name, [0] * count)]
    if len(found) != count:
        raise node.refuse(f"wanted {count} numbers in {name}, found {len(found)}")
    return found


HANDLERS: Mapping[str, Callable[[GraphScope, OnnxNode], Values]] = {"If": _if, "Loop": _loop, "Scan": _scan}
