"""Weights of a decoder as the arrays of its program: made once, shared by its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.frontend.hf.decoders.rope import Rope
from relax_tune.ir.frontend.hf.decoders.spec import DecoderSpec

Array = NDArray[Any]
Rows = NDArray[np.int64] | slice


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer, or some rows of a stored one.

    name: of the stored layer; stored: its outputs; part: name of the rows; out: their number, 0 for all
    rows: the ones taken, in this order; it is asked once the stored layer is known to be as large as it should
    """

    name: str
    stored: int
    part: str = ""
    out: int = 0
    rows: Callable[[], Rows] | None = None

    @property
    def kept(self) -> str:
        """Name in the program."""
        return f"{self.name}.{self.part}" if self.part else self.name

    @property
    def width(self) -> int:
        return self.out or self.stored

    def taken(self, found: Array) -> Array:
        """Return the rows of the stored array."""
        return found if self.rows is None else found[self.rows()]


class DecoderWeights(Protocol):
    """Tensors of a file or folder, by name."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""

    def get(self, name: str, shape: Sequence[int]) -> Array:
        """Read a tensor as float32. Raises ParseError naming it, the wanted and the found shape."""


class Parameters:
    """Arrays by name. Files of the bare decoder lack the prefix of its names."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self.weights, self.input_major = weights, spec.input_major
        parts = spec.names.prefix.split(".")
        prefixes = [".".join(parts[k:]) for k in range(len(parts))]
        there = (p for p in prefixes if any(n.startswith(f"{p}{spec.names.layers}.") for n in weights.names))
        self.prefix = next(there, spec.names.prefix)
        self._arrays: dict[str, Array] = {}

    def array(self, name: str, make: Callable[[], Array]) -> Array:
        """Return an array by name, made on first use."""
        if name not in self._arrays:
            self._arrays[name] = make()
        return self._arrays[name]

    def stored(self, name: str, *shape: int) -> Array:
        """Return a tensor as it is in the file."""
        return self.array(name, lambda: self.weights.get(name, shape))

    def matrix(self, at: Projection, width: int) -> tuple[str, Array]:
        """Return the name and the weights (width, out) of a linear layer; most files hold them as (out, in)."""
        name = f"{at.kept}.weight"

        def make() -> Array:
            shape = (width, at.stored) if self.input_major else (at.stored, width)
            found = self.weights.get(f"{at.name}.weight", shape)
            found = found.T if self.input_major else found
            return np.ascontiguousarray(at.taken(found).T)

        return name, self.array(name, make)

    def bias(self, at: Projection) -> tuple[str, Array]:
        name = f"{at.kept}.bias"

        def make() -> Array:
            return np.ascontiguousarray(at.taken(self.weights.get(f"{at.name}.bias", (at.stored,))))

        return name, self.array(name, make)


def projections(spec: DecoderSpec, layer: str, rope: Rope | None) -> tuple[Projection, Projection, Projection]:
    """Return the projections to queries, keys and values. layer: name of the layer; rope: its rotation"""
    names, size = spec.names, spec.size
    heads = (spec.heads, spec.groups, spec.groups)
    stored = sum(heads) * size

    def one(which: int) -> Projection:
        turned = rope is not None and which < 2 and rope.reorders(size)

        def rows() -> Rows:
            found = np.arange(heads[which] * size) if names.qkv is None else fused_rows(spec)[which]
            return found.reshape(-1, size)[:, rope.order(size)].ravel() if rope is not None and turned else found

        width = heads[which] * size
        if names.qkv is not None:
            return Projection(f"{layer}.{names.qkv}", stored, ("query", "key", "value")[which], width, rows)
        name = f"{layer}.{(names.query, names.key, names.value)[which]}"
        return Projection(name, width, rows=rows if turned else None)

    return one(0), one(1), one(2)


def fused_rows(spec: DecoderSpec) -> tuple[NDArray[np.int64], ...]:
    """Return the rows of a joint projection that give queries, keys and values."""
    heads, groups, size = spec.heads, spec.groups, spec.size
    rows = np.arange((heads + 2 * groups) * size)
    if spec.fused == "groups":
        of = rows.reshape(groups, heads // groups + 2, size)
        return of[:, :-2].ravel(), of[:, -2].ravel(), of[:, -1].ravel()
    if spec.fused == "shards":
        of = rows.reshape(4, 3, -1)
        return of[:, 0].ravel(), of[:, 2].ravel(), of[:, 1].ravel()
    return tuple(np.split(rows, (heads * size, (heads + groups) * size)))
