"""A node of an ONNX graph with its inputs looked up, and what is near it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer


class WrongValueError(ParseError):
    """An attribute has a value that its operator does not have: there is no other way to take the node either."""


@dataclass(frozen=True, slots=True, eq=False)
class OnnxNode:
    """One ONNX node with its inputs looked up. inputs: None for an optional one that is left out."""

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
        """The error that names the node, what it takes, its neighbours, and what is near in name."""
        takes = ", ".join("nothing" if i is None else f"{i.name}: {i.info!r}" for i in self.inputs) or "nothing"
        near = f"; near in name and supported: {', '.join(self.near)}" if self.near else ""
        version = "" if self.version is None else f", version {self.version}"
        defined = f"domain {self.domain or 'ai.onnx'}, opset {self.opset}{version}"
        text = f"node {self.name!r}, operator {self.op} ({defined}) of ({takes}): {why}{self.beside}{near}"
        return ParseError(re.sub(r"[\x00-\x1f\x7f]", "?", text))  # names of a damaged file may hold anything

    def has(self, position: int) -> bool:
        return position < len(self.inputs) and self.inputs[position] is not None

    def item(self, position: int) -> ImportedValue:
        """An input that must be there. Raises ParseError."""
        found = self.inputs[position] if position < len(self.inputs) else None
        if found is None:
            raise self.refuse(f"wanted input {position}, found none")
        return found

    def wants(self, position: int) -> bool:
        """Whether anybody reads output `position`."""
        return position < len(self.outputs) and self.outputs[position] != ""

    def text(self, name: str, default: str) -> str:
        value = self.attributes.get(name, default)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def choice(self, name: str, default: str, *others: str) -> str:
        """A text attribute that must be one of these. Raises ParseError."""
        found = self.text(name, default)
        if found not in (default, *others):
            wanted = " or ".join(map(repr, (default, *others)))
            raise WrongValueError(str(self.refuse(f"wanted {name} {wanted}, found {found!r}")))
        return found


class Neighbours:
    """Who makes and who reads the values of a list of nodes."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        self._makers: dict[str, str] = {}
        self._readers: dict[str, list[str]] = {}
        for n in nodes:
            title = f"{n.op_type} {n.name or (n.output[0] if n.output else '')!r}"
            self._makers.update((name, title) for name in n.output)
            for name in dict.fromkeys(n.input):
                self._readers.setdefault(name, []).append(title)

    def reads(self, name: str) -> bool:
        """Whether any node reads it."""
        return name in self._readers

    def of(self, node: Any) -> str:
        """The neighbours of a node, as the end of a sentence."""
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
