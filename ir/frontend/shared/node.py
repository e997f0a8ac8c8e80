"""Nodes of models as handlers of every format read them: arguments, attributes, and errors that name the node.

Tests: `tests/ir/frontend/shared/test_node.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Union

from relax_tune.errors import DeduceError, ParseError
from relax_tune.ir.core.expr import Expr, as_int
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer

Number = Union[int, float, bool]
FIXED_DIMS = (
    "export the model with numbers as these dims, or fix dims of an ONNX file by equal bounds (bounds={'n': (4, 4)}, or "
    "--bound n=4:4)"
)


class WrongValueError(ParseError):
    """Invalid value of an attribute. The function body of the ONNX operator is not tried either."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of a model with imported arguments. Each format derives its own.

    Attributes:
        op: Operator.
        name: Name of the node.
        neighbours: Neighbouring nodes, for messages (`Neighbours.of`).
        near: Similar operator names, for messages.
    """

    op: str
    name: str
    neighbours: str = field(default="", kw_only=True)
    near: tuple[str, ...] = field(default=(), kw_only=True)

    # what a format defines

    def item(self, position: int) -> ImportedValue:
        """Return an argument that must be a tensor. Raises ParseError."""
        raise NotImplementedError

    def optional(self, position: int) -> ImportedValue | None:
        """Return an argument that is a tensor, or None where it is left out."""
        raise NotImplementedError

    def typed(self, w: Writer, position: int) -> ImportedValue:
        """Return an argument in the element type in which the operator computes."""
        raise NotImplementedError

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute by the name that handlers of both formats use, which is ONNX's; the default without one."""
        raise NotImplementedError

    def reduction(self, w: Writer, ndim: int) -> tuple[tuple[int, ...], bool]:
        """Return the axes of a reduction, and whether they remain as dims of 1."""
        raise NotImplementedError

    def shown_arguments(self) -> str:
        raise NotImplementedError

    def definition(self) -> str:
        """Return what defines the operator, in brackets, for messages."""
        return ""

    def place(self) -> str:
        """Return the place of the node in its source, for messages."""
        return ""

    def workaround(self) -> str:
        """Return what to do about a node that is not supported, for messages."""
        return ""

    # what handlers of both formats read

    def refuse(self, why: str, workaround: str = "") -> ParseError:
        """Return the error for an unsupported node, with its arguments, neighbours, place and similar operators.

        Args:
            workaround: What to do, if it is something else than what the format says for every node.
        """
        remedy = f"workaround: {workaround}" if workaround else self.workaround()
        near = f"; near in name and supported: {', '.join(self.near)}" if self.near else ""
        return ParseError(
            # names in a damaged file may contain control characters
            re.sub(
                r"[\x00-\x1f\x7f]",
                "?",
                f"node {self.name!r}, operator {self.op}{self.definition()} of ({self.shown_arguments() or 'nothing'}): "
                f"{why}{self.neighbours}{self.place()}{near}{f'; {remedy}' if remedy else ''}",
            )
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the errors of a handler into errors that name its node."""
        try:
            yield
        except ParseError as error:
            # an error of a node within a graph or function of this node names the inner node, which is closer to the cause
            raise error if str(error).startswith("node ") else self.refuse(str(error)) from None
        except (DeduceError, KeyError, ValueError, IndexError, OverflowError, TypeError) as error:
            # the lines after the first show the imported graph, not the model's
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise self.refuse(f"expected arguments that fit together, got: {first}") from error

    def operand(self, w: Writer, position: int) -> Value:
        """Return an argument as a tensor of the graph, in the element type in which the operator computes."""
        return w.tensor(self.typed(w, position))

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an attribute that must be a constant integer. Raises ParseError."""
        value = number_of(self.attribute(name, default))
        if value is None or not float(value).is_integer():
            raise self.refuse(f"expected {name} as an integer, got {self.attribute(name, default)}")
        return int(value)

    def real(self, name: str, default: float | None = None) -> float:
        """Return an attribute that must be a constant number. Raises ParseError."""
        value = number_of(self.attribute(name, default))
        if value is None:
            raise self.refuse(f"expected {name} as a number, got {self.attribute(name, default)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.attribute(name, default))

    def text(self, name: str, default: str) -> str:
        value = self.attribute(name, default)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def choice(self, name: str, default: str, *others: str) -> str:
        """Return a text attribute that must be one of the given values. Raises WrongValueError."""
        text = self.text(name, default)
        if text not in (default, *others):
            expected = " or ".join(map(repr, (default, *others)))
            raise WrongValueError(str(self.refuse(f"expected {name} {expected}, got {text!r}")))
        return text

    def normalised(self, axis: int, ndim: int, name: str = "an axis") -> int:
        """Normalise a possibly negative axis to 0 .. ndim-1. Raises ParseError."""
        if not -ndim <= axis < max(ndim, 1):
            raise self.refuse(f"expected {name} in {-ndim}..{ndim - 1}, got {axis}")
        return axis % ndim if ndim else 0

    def axis(self, ndim: int, default: int | None = None) -> int:
        """Return the attribute `axis`, normalised to 0 .. ndim-1. Raises ParseError."""
        return self.normalised(self.integer("axis", default), ndim)


SharedHandler = Callable[[Writer, Node], Union[ImportedValue, Sequence[Union[ImportedValue, None]]]]


def number_of(value: Any) -> Number | None:
    """Return a Python number, or the value of a constant expression; None for anything else."""
    if isinstance(value, (bool, int, float)):
        return value
    return as_int(value) if isinstance(value, Expr) else None


def shown(value: Any) -> str:
    """Return an argument as messages show it."""
    if isinstance(value, ImportedValue):
        return f"{value.name}: {value.info!r}"
    return str(value)


def near_names(op: str, supported: Iterable[str]) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(op, list(supported), 4, 0.5))


class Neighbours:
    """Producers and readers of the values of a graph, for messages.

    Args:
        nodes: (title, names of the values it reads, names of its results) of each node.
    """

    def __init__(self, nodes: Iterable[tuple[str, Sequence[str], Sequence[str]]]) -> None:
        self._producers: dict[str, str] = {}
        self._readers: dict[str, list[str]] = {}
        for title, inputs, outputs in nodes:
            self._producers.update((name, title) for name in outputs)
            for name in dict.fromkeys(inputs):
                self._readers.setdefault(name, []).append(title)

    def of(self, inputs: Sequence[str], outputs: Sequence[str]) -> str:
        """Describe the neighbours of a node, as the end of a sentence."""
        producers = dict.fromkeys(self._producers[name] for name in inputs if name in self._producers)
        readers = dict.fromkeys(title for name in outputs if name for title in self._readers.get(name, ()))
        parts = [
            f"{relation} {', '.join(list(titles)[:4])}{' and others' if len(titles) > 4 else ''}"
            for relation, titles in (("fed by", producers), ("read by", readers))
            if titles
        ]
        return f"; {', '.join(parts)}" if parts else ""
