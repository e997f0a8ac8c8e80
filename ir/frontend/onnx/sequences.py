"""ONNX operators of sequences, lists of tensors whose number is known or the number of a loop's iterations, and of optionals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relax_tune.ir.core.expr import as_int, const, floordiv, mul
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode, integers
from relax_tune.ir.frontend.shared.handlers.indexing import gather
from relax_tune.ir.frontend.shared.handlers.shape import consecutive
from relax_tune.ir.frontend.shared.writer import SCALAR_LIMIT, ImportedValue, Writer

LOOPED = "; collect its tensors as a scan output of the loop, or concatenate them before"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceValue(ImportedValue):
    """A sequence of tensors, which no tensor of the graph holds.

    Attributes:
        parts: Tensors, where their number is known.
        stack: Tensors of one shape along a new first dim, where a loop or a dim decides their number.
        growing: The loop that adds `parts` to the sequence at each iteration; None outside of loops.
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
        raise node.refuse("expected a sequence that is empty before the loop, got one with tensors" + LOOPED)
    return sequence(growing=loop)


def added(node: OnnxNode, item: ImportedValue, loop: object) -> ImportedValue:
    """Return the tensor that an iteration adds to a sequence. Raises ParseError for another number of tensors."""
    if not isinstance(item, SequenceValue) or item.growing is not loop or len(item.parts) != 1:
        raise node.refuse("expected iterations that each add one tensor to a sequence, got others" + LOOPED)
    return item.parts[0]


def refuse_sequences(node: OnnxNode, values: Sequence[ImportedValue | None]) -> None:
    """Raise ParseError if any value is a sequence, or an optional without a value."""
    if any(isinstance(v, NothingValue) for v in values):
        raise node.refuse("expected tensors, got an optional without a value; ask OptionalHasElement before, in an If")
    if any(isinstance(v, SequenceValue) for v in values):
        raise node.refuse("expected tensors, got a sequence of tensors; concatenate it (ConcatFromSequence)")


def _sequence_of(node: OnnxNode) -> SequenceValue:
    """Return the sequence that a node takes. Raises ParseError."""
    item = node.item(0)
    if not isinstance(item, SequenceValue):
        raise node.refuse("expected a sequence of tensors, got a tensor")
    return item


def _parts_of(w: Writer, node: OnnxNode) -> SequenceValue:
    """Return the sequence that a node takes as tensors of their own. Raises ParseError where their number is unknown."""
    item = _sequence_of(node)
    if item.stack is None:
        return item
    count, dims = as_int(item.stack.shape[0]), item.stack.shape[1:]
    if count is None or count > SCALAR_LIMIT:
        raise node.refuse(
            "expected a sequence of a known number of tensors, got one whose number a loop or a dim decides" + LOOPED
        )
    rows = (w.slice(w.tensor(item.stack), 0, const(k), const(k + 1)) for k in range(count))
    return replace(item, stack=None, parts=tuple(w.of(w.reshape(r, dims), item.stack.natural) for r in rows))


def _read(node: OnnxNode) -> SequenceValue:
    """Return the sequence that a node reads, which no loop is still adding to. Raises ParseError."""
    item = _sequence_of(node)
    if item.growing is not None:
        raise node.refuse("expected a complete sequence, got one that a loop still extends; read it after the loop")
    return item


def _place(w: Writer, node: OnnxNode, position: int, count: int, default: int, inclusive: bool = False) -> int:
    """Return a position in a sequence of `count` tensors, negative ones counted from the back. Raises ParseError.

    Args:
        inclusive: Whether the position after the last tensor is allowed.
    """
    literals = integers(w.scalars(node.item(position))) if node.has(position) else [default]
    last = count if inclusive else count - 1
    if not literals or not -count <= literals[0] <= last:
        raise node.refuse(
            f"expected a constant position among {count}, from {-count} to {last}, "
            f"got {literals or w.unknown(node.item(position))}"
        )
    return literals[0] if literals[0] >= 0 else literals[0] + count


def _empty(w: Writer, node: OnnxNode) -> ImportedValue:
    return sequence()


def _construct(w: Writer, node: OnnxNode) -> ImportedValue:
    return sequence([node.item(k) for k in range(len(node.inputs))])


def _insert(w: Writer, node: OnnxNode) -> ImportedValue:
    item, tensor = _parts_of(w, node), node.item(1)
    # A tensor inserted at another place would move the tensors of earlier iterations, and a loop only appends rows.
    if item.growing is not None and node.has(2):
        raise node.refuse("expected tensors added at the end of a sequence that a loop makes, got a position" + LOOPED)
    count = len(item.parts)
    at = _place(w, node, 2, count, count, inclusive=True)
    return replace(item, parts=(*item.parts[:at], tensor, *item.parts[at:]))


def _erase(w: Writer, node: OnnxNode) -> ImportedValue:
    _read(node)
    item = _parts_of(w, node)
    at = _place(w, node, 1, len(item.parts), -1)
    return sequence((*item.parts[:at], *item.parts[at + 1 :]))


def _at(w: Writer, node: OnnxNode) -> ImportedValue:
    item = _read(node)
    if item.stack is None and integers(w.scalars(node.item(1))) is not None:
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
            "expected a constant position, or tensors of one shape, got neither; read the tensors at constant positions"
        )
    rows = [w.reshape(w.tensor(p), (const(1), *p.shape)) for p in item.parts]
    return w.of(rows[0] if len(rows) == 1 else w.concat(0, *rows), all(p.natural for p in item.parts))


def _length(w: Writer, node: OnnxNode) -> ImportedValue:
    item = _read(node)
    return w.number(const(len(item.parts)) if item.stack is None else item.stack.shape[0])


def _concatenated(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ConcatFromSequence. The tensors of a stack have one shape, so one permutation and a reshape concatenate them."""
    item, new = _read(node), node.flag("new_axis")
    if item.stack is None and not item.parts:
        raise node.refuse("expected a sequence of one tensor or more, got an empty one")
    tensors = list(item.parts)
    ndim = (tensors[0].ndim if item.stack is None else item.stack.ndim - 1) + new
    axis = node.axis(ndim)
    if item.stack is not None:
        # The dim of the sequence moves in front of the axis and is merged with it.
        order = list(range(1, item.stack.ndim))
        value = w.permute(w.tensor(item.stack), [*order[:axis], 0, *order[axis:]])
        if not new:
            count, dims = item.stack.shape[0], list(item.stack.shape[1:])
            value = w.reshape(value, [*dims[:axis], w.simplify(mul(count, dims[axis])), *dims[axis + 1 :]])
        return w.of(value, item.stack.natural)
    if new:
        tensors = [w.of(w.reshape(w.tensor(t), (*t.shape[:axis], const(1), *t.shape[axis:]))) for t in tensors]
    if len(tensors) == 1:
        return tensors[0]
    return w.of(w.concat(axis, *map(w.tensor, tensors)), all(t.natural for t in item.parts))


def _split(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import SplitToSequence; without `split`, into slices of size 1."""
    x = node.item(0)
    axis = node.axis(x.ndim, 0)
    n, others = x.shape[axis], [p for p in range(x.ndim) if p != axis]
    if not node.has(1):
        # Slices of size 1 have equal shapes, so that their number may be a symbol.
        rows = w.permute(w.tensor(x), [axis, *others])
        if node.flag("keepdims", True):
            rows = w.reshape(rows, [n, *(const(1) if p == axis else d for p, d in enumerate(x.shape))])
        return sequence(stack=w.of(rows, x.natural))
    sizes = node.expressions(w, 1)
    if node.item(1).ndim == 0:
        size, whole = sizes[0], as_int(n)
        step = as_int(size)
        if step is None or step < 1 or whole is None:
            if as_int(count := w.simplify(floordiv(n, size))) is None:
                raise node.refuse(
                    f"expected a known number of parts, got {n!r} elements in parts of {size!r}; give the size of each part"
                )
            sizes = [size] * (as_int(count) or 0)
        else:
            sizes = [const(min(step, whole - at)) for at in range(0, whole, step)]
    return sequence(consecutive(w, x, w.tensor(x), axis, sizes))


def _optional(w: Writer, node: OnnxNode) -> ImportedValue:
    return node.item(0) if node.has(0) else NothingValue("nothing", TensorInfo(None, None))


def _get(w: Writer, node: OnnxNode) -> ImportedValue:
    item = node.item(0)
    if isinstance(item, NothingValue):
        raise node.refuse("expected an optional with a value, got one without; ask OptionalHasElement before, in an If")
    return item


def _has(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.constant(np.asarray(node.has(0) and not isinstance(node.item(0), NothingValue)), node.outputs[0])


HANDLERS: Mapping[str, Handler] = {
    "SequenceEmpty": _empty, "SequenceConstruct": _construct, "SequenceInsert": _insert, "SequenceErase": _erase,
    "SequenceAt": _at, "SequenceLength": _length, "ConcatFromSequence": _concatenated, "SplitToSequence": _split,
    "Optional": _optional, "OptionalGetElement": _get, "OptionalHasElement": _has,
}  # fmt: skip

TAKING = frozenset(
    {*HANDLERS, "SequenceMap", "Identity", "Loop", "Optional", "OptionalGetElement", "OptionalHasElement"}
)
"""Operators that take sequences."""
