"""ONNX operators of sequences: lists of tensors, of a known number or as many as a loop's iterations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.core.expr import Expr, add, as_int, const, floordiv, mul
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.shape import axis_of, expressions
from relax_tune.ir.frontend.onnx.shape_values import numbers
from relax_tune.ir.frontend.shared.compositions import permute, slice_axis
from relax_tune.ir.frontend.shared.indexing import gather
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.indexing.movement import Concat

LOOPED = "; collect its tensors as a scan output of the loop, or concatenate them before"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceValue(ImportedValue):
    """A sequence of tensors, which no tensor of the graph holds.

    parts: its tensors, where their number is known
    stack: its tensors of one shape along a new first dim, where a loop or a dim decides their number
    growing: identity of the loop that adds `parts` to it at each iteration; None outside of one
    """

    parts: tuple[ImportedValue, ...] = ()
    stack: ImportedValue | None = None
    growing: object = None


@dataclass(frozen=True, slots=True, eq=False)
class NothingValue(ImportedValue):
    """An optional without a value, which no tensor of the graph holds."""


def sequence(
    parts: Sequence[ImportedValue] = (), stack: ImportedValue | None = None, growing: object = None
) -> SequenceValue:
    """Make a sequence of tensors."""
    return SequenceValue("sequence", TensorInfo(None, None), parts=tuple(parts), stack=stack, growing=growing)


def begun(node: OnnxNode, item: SequenceValue, loop: object) -> SequenceValue:
    """Return what an iteration takes for a sequence that is in the state of a loop. Raises ParseError unless it is empty at first."""
    if item.parts or item.stack is not None or item.growing is not None:
        raise node.refuse("wanted a sequence that is empty before the loop, found one with tensors" + LOOPED)
    return sequence(growing=loop)


def added(node: OnnxNode, item: ImportedValue, loop: object) -> ImportedValue:
    """Return the tensor that an iteration adds to a sequence. Raises ParseError for another number of tensors."""
    if not isinstance(item, SequenceValue) or item.growing is not loop or len(item.parts) != 1:
        raise node.refuse("wanted iterations that each add one tensor to a sequence, found others" + LOOPED)
    return item.parts[0]


def refuse_sequences(node: OnnxNode, values: Sequence[ImportedValue | None]) -> None:
    """Raise ParseError if any value is a sequence, or an optional without a value."""
    if any(isinstance(v, NothingValue) for v in values):
        raise node.refuse("wanted tensors, found an optional without a value; ask OptionalHasElement before, in an If")
    if any(isinstance(v, SequenceValue) for v in values):
        raise node.refuse("wanted tensors, found a sequence of tensors; concatenate it (ConcatFromSequence)")


def _sequence_of(node: OnnxNode, known: bool = False) -> SequenceValue:
    """Return the sequence that a node takes. known: the number of its tensors must be known. Raises ParseError."""
    item = node.item(0)
    if not isinstance(item, SequenceValue):
        raise node.refuse("wanted a sequence of tensors, found a tensor")
    if known and item.stack is not None:
        raise node.refuse(
            "wanted a sequence of a known number of tensors, found one of as many as a loop or a dim says" + LOOPED
        )
    return item


def _read(node: OnnxNode, known: bool = False) -> SequenceValue:
    """Return the sequence that a node reads, which no loop is still adding to. Raises ParseError."""
    item = _sequence_of(node, known)
    if item.growing is not None:
        raise node.refuse("wanted a sequence that its loop is done with, found one that grows; read it behind the loop")
    return item


def _place(w: Writer, node: OnnxNode, position: int, count: int, default: int) -> int:
    """Return a position in a sequence of known length, from 0 to `count` - 1. Raises ParseError."""
    found = numbers(w.scalars(node.item(position))) if node.has(position) else [default]
    if not found or not -count <= found[0] < max(count, 1):
        raise node.refuse(f"wanted a constant position among {count}, found {found or 'values computed from tensors'}")
    return found[0] % max(count, 1)


def _empty(w: Writer, node: OnnxNode) -> ImportedValue:
    return sequence()


def _construct(w: Writer, node: OnnxNode) -> ImportedValue:
    return sequence([node.item(k) for k in range(len(node.inputs))])


def _insert(w: Writer, node: OnnxNode) -> ImportedValue:
    item, tensor = _sequence_of(node, known=True), node.item(1)
    if item.growing is not None and node.has(2):
        raise node.refuse("wanted tensors added at the end of a sequence that a loop makes, found a position" + LOOPED)
    count = len(item.parts)
    at = _place(w, node, 2, count + 1, count) if node.has(2) else count
    return replace(item, parts=(*item.parts[:at], tensor, *item.parts[at:]))


def _erase(w: Writer, node: OnnxNode) -> ImportedValue:
    item = _read(node, known=True)
    at = _place(w, node, 1, len(item.parts), -1)
    return sequence((*item.parts[:at], *item.parts[at + 1 :]))


def _at(w: Writer, node: OnnxNode) -> ImportedValue:
    item = _read(node)
    if item.stack is None and numbers(w.scalars(node.item(1))) is not None:
        return item.parts[_place(w, node, 1, len(item.parts), 0)]
    return gather(w, _stacked(w, node, item), 0, node.item(1))


def _stacked(w: Writer, node: OnnxNode, item: SequenceValue) -> ImportedValue:
    """Return the tensors of a sequence along a new first dim. Raises ParseError for tensors of several shapes."""
    if item.stack is not None:
        return item.stack
    same, first = w.g.deduction.same, item.parts[0] if item.parts else None
    if first is None or any(
        p.dtype is not first.dtype or p.ndim != first.ndim or not all(map(same, p.shape, first.shape))
        for p in item.parts
    ):
        raise node.refuse(
            "wanted a constant position, or tensors of one shape, found neither; read the tensors at constant positions"
        )
    rows = [w.reshape(w.tensor(p), (const(1), *p.shape)) for p in item.parts]
    return w.of(rows[0] if len(rows) == 1 else w.emit(Concat(0), *rows), all(p.natural for p in item.parts))


def _length(w: Writer, node: OnnxNode) -> ImportedValue:
    item = _read(node)
    return w.number(const(len(item.parts)) if item.stack is None else item.stack.shape[0])


def _concatenated(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ConcatFromSequence. The tensors of a stack have one shape, so one permutation and a reshape concatenate them."""
    item, new = _read(node), bool(node.attributes.get("new_axis", 0))
    if item.stack is None and not item.parts:
        raise node.refuse("wanted a sequence of one tensor or more, found an empty one")
    tensors = list(item.parts)
    ndim = (tensors[0].ndim if item.stack is None else item.stack.ndim - 1) + new
    axis = axis_of(node, int(node.attributes["axis"]), ndim)
    if item.stack is not None:
        order = list(range(1, item.stack.ndim))
        value = permute(w, w.tensor(item.stack), [*order[:axis], 0, *order[axis:]])
        if not new:
            count, dims = item.stack.shape[0], list(item.stack.shape[1:])
            value = w.reshape(value, [*dims[:axis], w.simplify(mul(count, dims[axis])), *dims[axis + 1 :]])
        return w.of(value, item.stack.natural)
    if new:
        tensors = [w.of(w.reshape(w.tensor(t), (*t.shape[:axis], const(1), *t.shape[axis:]))) for t in tensors]
    if len(tensors) == 1:
        return tensors[0]
    return w.of(w.emit(Concat(axis), *map(w.tensor, tensors)), all(t.natural for t in item.parts))


def _split(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import SplitToSequence; without `split`, into slices of size 1, as many as the dim says."""
    x = node.item(0)
    axis = axis_of(node, int(node.attributes.get("axis", 0)), x.ndim)
    n, others = x.shape[axis], [p for p in range(x.ndim) if p != axis]
    if not node.has(1):
        rows = permute(w, w.tensor(x), [axis, *others])
        if node.attributes.get("keepdims", 1):
            rows = w.reshape(rows, [n, *(const(1) if p == axis else d for p, d in enumerate(x.shape))])
        return sequence(stack=w.of(rows, x.natural))
    sizes = expressions(w, node, 1)
    if node.item(1).ndim == 0:
        size, whole = sizes[0], as_int(n)
        step = as_int(size)
        if step is None or step < 1 or whole is None:
            if as_int(count := w.simplify(floordiv(n, size))) is None:
                raise node.refuse(
                    f"wanted a known number of parts, found {n!r} elements in parts of {size!r}; give the size of each part"
                )
            sizes = [size] * (as_int(count) or 0)
        else:
            sizes = [const(min(step, whole - at)) for at in range(0, whole, step)]
    begin: Expr = const(0)
    parts = []
    for size in sizes:
        end = w.simplify(add(begin, size))
        parts.append(w.of(slice_axis(w, w.tensor(x), axis, begin, end), x.natural))
        begin = end
    return sequence(parts)


HANDLERS: Mapping[str, Handler] = {
    "SequenceEmpty": _empty, "SequenceConstruct": _construct, "SequenceInsert": _insert, "SequenceErase": _erase,
    "SequenceAt": _at, "SequenceLength": _length, "ConcatFromSequence": _concatenated, "SplitToSequence": _split,
}  # fmt: skip

TAKING = frozenset(
    {*HANDLERS, "SequenceMap", "Identity", "Loop", "Optional", "OptionalGetElement", "OptionalHasElement"}
)
"""Operators that take sequences."""
