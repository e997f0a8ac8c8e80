"""Tensors of a model as the arrays of its program, each read once and shared by all functions.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.frontend.hf.transformer.rope import Rope
from relax_tune.ir.frontend.hf.transformer.spec import Names, Stack

Array = NDArray[Any]
Rows = NDArray[np.int64] | slice


class Weights(Protocol):
    """Tensors of a file or folder, by name."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""

    def get(self, name: str, shape: Sequence[int]) -> Array:
        """Read a tensor as float32. Raises ParseError naming it, the expected and the actual shape."""


class Below:
    """The tensors of a file whose names have a prefix, by the rest of their names."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights, self._prefix = weights, prefix
        self.names = frozenset(n.removeprefix(prefix) for n in weights.names if n.startswith(prefix))

    def get(self, name: str, shape: Sequence[int]) -> Array:
        """Read a tensor, as `Weights` does."""
        return self._weights.get(self._prefix + name, shape)


class Parameters:
    """Arrays of a program by name, and the tensors that they are read from.

    Args:
        prefix: stands before the names of tensors
        label: stands before the names of arrays
        arrays: the arrays so far, shared with other parameters
    """

    def __init__(
        self, weights: Weights, prefix: str = "", label: str = "", arrays: dict[str, Array] | None = None
    ) -> None:
        self.weights, self.prefix, self.label = weights, prefix, label
        self.arrays: dict[str, Array] = {} if arrays is None else arrays

    @classmethod
    def of(cls, weights: Weights, names: Names, label: str = "", arrays: dict[str, Array] | None = None) -> Parameters:
        """Return the parameters of a stack. A file of the bare model has a shorter prefix."""
        return cls(weights, stored_prefix(weights, names.prefix, names.layers), label, arrays)

    def outside(self) -> Parameters:
        """Return the parameters of heads, whose names have no prefix."""
        return Parameters(self.weights, "", self.label, self.arrays)

    def full(self, name: str) -> str:
        """Return the name of the array of a tensor."""
        return f"{self.label}{self.prefix}{name}"

    def has(self, name: str) -> bool:
        return self.prefix + name in self.weights.names

    def get(self, name: str, *shape: int) -> Array:
        """Read a tensor."""
        return self.weights.get(self.prefix + name, shape)

    def array(self, name: str, make: Callable[[], Array]) -> Array:
        """Return an array by its full name, computed on first use."""
        if name not in self.arrays:
            self.arrays[name] = make()
        return self.arrays[name]


def stored_prefix(weights: Weights, prefix: str, layers: str = "") -> str:
    """Return the suffix of `a.b.` that precedes the names of layers in the file: `a.b.`, `b.` or nothing.

    Alternative prefixes are separated by `|`."""
    suffixes = list[str]()
    for parts in (alternative.split(".") for alternative in prefix.split("|")):
        suffixes += [".".join(parts[k:]) for k in range(len(parts))]
    stored = sorted((p for p in suffixes if any(n.startswith(f"{p}{layers}") for n in weights.names)), key=len)
    return stored[-1] if stored else prefix.partition("|")[0]


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer, or some rows of a stored one.

    Attributes:
        name: of the stored layer
        stored: number of its outputs
        part: name of the selected rows
        out: number of selected rows; 0: all
        rows: selects them, in this order; called only after the stored shape has been checked
        bias: name of the bias of the selected rows; empty: the rows of the layer's bias
    """

    name: str
    stored: int
    part: str = ""
    out: int = 0
    rows: Callable[[], Rows] | None = None
    bias: str = ""

    @property
    def label(self) -> str:
        """Name of its arrays."""
        return f"{self.name}.{self.part}" if self.part else self.name

    @property
    def width(self) -> int:
        return self.out or self.stored

    def select(self, stored: Array) -> Array:
        return stored if self.rows is None else stored[self.rows()]


def attention_projection(stack: Stack, names: Names, path: str, part: str, rope: Rope | None) -> Projection:
    """Return the projection to the `query`, `key` or `value` heads of the layer at `path`.

    The graph pairs dim `k` of a head with dim `k + size / 2`. Rows of interleaved and partial rotations are reordered to that, in
    queries and keys alike, which leaves their products unchanged."""
    size, which = stack.size, ("query", "key", "value").index(part)
    heads = (stack.heads, stack.groups, stack.groups)
    turned = rope is not None and part != "value" and rope.reorders(size)

    def rows() -> Rows:
        if stack.gated and part == "query":
            # Each head stores its query and then its gate.
            by_head = np.arange(2 * heads[0] * size).reshape(-1, 2, size)[:, 0]
            return (by_head[:, rope.order(size)] if rope is not None and turned else by_head).ravel()
        plain = np.arange(heads[which] * size) if names.qkv is None else fused_rows(stack)[which]
        # Weights are reordered instead of values: the rotation then takes two contiguous halves, at no cost at run
        # time. Scores do not change, as queries and keys are reordered alike.
        return plain.reshape(-1, size)[:, rope.order(size)].ravel() if rope is not None and turned else plain

    width = heads[which] * size
    if names.qkv is not None:
        own = names.qkv_biases[which] if names.qkv_biases else ""
        return Projection(f"{path}.{names.qkv}", sum(heads) * size, part, width, rows, own and f"{path}.{own}")
    if names.kv is not None and part != "query":
        start = width * (part == "value")
        return Projection(f"{path}.{names.kv}", 2 * width, part, width, lambda: slice(start, start + width))
    if stack.gated and part == "query":
        return Projection(f"{path}.{names.query}", 2 * width, part, width, rows)
    return Projection(f"{path}.{getattr(names, part)}", width, rows=rows if turned else None)


def gate_projection(stack: Stack, path: str) -> Projection:
    """Return the projection to the gates of a layer, which follow the queries of each head."""
    width = stack.heads * stack.size
    rows = lambda: np.arange(2 * width).reshape(-1, 2, stack.size)[:, 1].ravel()
    return Projection(f"{path}.{stack.names.query}", 2 * width, "gate", width, rows)


def fused_rows(stack: Stack) -> tuple[NDArray[np.int64], ...]:
    """Return the rows of a joint projection that give queries, keys and values."""
    heads, groups, size = stack.heads, stack.groups, stack.size
    rows = np.arange((heads + 2 * groups) * size)
    if stack.fused == "groups":
        per_group = rows.reshape(groups, heads // groups + 2, size)
        return per_group[:, :-2].ravel(), per_group[:, -2].ravel(), per_group[:, -1].ravel()
    if stack.fused == "shards":
        shards = rows.reshape(4, 3, -1)
        return shards[:, 0].ravel(), shards[:, 2].ravel(), shards[:, 1].ravel()
    return tuple(np.split(rows, (heads * size, (heads + groups) * size)))
