"""A node of an ONNX graph with resolved inputs, and its neighbours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer


class WrongValueError(ParseError):
    """Invalid value of an attribute; the function body of the operator is not tried either."""


@dataclass(frozen=True, slots=True, eq=False)
class OnnxNode:
    """An ONNX node with resolved inputs.

    op: operator
    name: name of the node
    opset: opset of its domain
    inputs: imported values; None for an omitted optional input
    attributes: values by name
    outputs: names of the results
    near: similar operator names, for messages
    domain: domain of the operator
    version: version of the operator's definition
    beside: neighbouring nodes, for messages
    """

    op: str
    name: str
    opset: int
    inputs: tuple[ImportedValue | None, ...]
    attributes: Mapping[str, Any]
    outputs: tuple[str, ...]
    near: tuple[str, ...] = ()
    domain: str = ""
    version: int | None = None
    beside: str = ""

    def refuse(self, why: str) -> ParseError:
        """Make the error for an unsupported node, with its arguments, its neighbours and similar operators."""
        takes = ", ".join("nothing" if i is None else f"{i.name}: {i.info!r}" for i in self.inputs) or "nothing"
        near = f"; near in name and supported: {', '.join(self.near)}" if self.near else ""
        version = "" if self.version is None else f", version {self.version}"
        defined = f"domain {self.domain or 'ai.onnx'}, opset {self.opset}{version}"
        text = f"node {self.name!r}, operator {self.op} ({defined}) of ({takes}): {why}{self.beside}{near}"
        return ParseError(
            re.sub(r"[\x00-\x1f\x7f]", "?", text)
        )  # names of a damaged file may contain control characters

    def has(self, position: int) -> bool:
        return position < len(self.inputs) and self.inputs[position] is not None

    def item(self, position: int) -> ImportedValue:
        """Return a required input. Raises ParseError."""
        found = self.inputs[position] if position < len(self.inputs) else None
        if found is None:
            raise self.refuse(f"wanted input {position}, found none")
        return found

    def wants(self, position: int) -> bool:
        """Return True if any node or result reads output `position`."""
        return position < len(self.outputs) and self.outputs[position] != ""

    def text(self, name: str, default: str) -> str:
        value = self.attributes.get(name, default)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def choice(self, name: str, default: str, *others: str) -> str:
        """Return a text attribute that must be one of the given values. Raises ParseError."""
        found = self.text(name, default)
        if found not in (default, *others):
            wanted = " or ".join(map(repr, (default, *others)))
            raise WrongValueError(str(self.refuse(f"wanted {name} {wanted}, found {found!r}")))
        return found


class Neighbours:
    """Producers and readers of the values of a list of nodes."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        self._makers: dict[str, str] = {}
        self._readers: dict[str, list[str]] = {}
        for n in nodes:
            title = f"{n.op_type} {n.name or (n.output[0] if n.output else '')!r}"
            self._makers.update((name, title) for name in n.output)
            for name in dict.fromkeys(n.input):
                self._readers.setdefault(name, []).append(title)

    def reads(self, name: str) -> bool:
        """Return True if any node reads the value `name`."""
        return name in self._readers

    def of(self, node: Any) -> str:
        """Describe the neighbours of a node, as the end of a sentence."""
        makers = dict.fromkeys(self._makers[i] for i in node.input if i in self._makers)
        readers = dict.fromkeys(r for o in node.output if o for r in self._readers.get(o, ()))
        parts = [
            f"{what} {', '.join(list(who)[:4])}{' and others' if len(who) > 4 else ''}"
            for what, who in (("fed by", makers), ("read by", readers))
            if who
        ]
        return f"; {', '.join(parts)}" if parts else ""


def near_names(op: str, supported: Sequence[str]) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(op, supported, 4, 0.5))


Handler = Callable[[Writer, OnnxNode], "ImportedValue | Sequence[ImportedValue | None]"]
