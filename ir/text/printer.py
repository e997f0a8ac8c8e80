"""Print programs as text: Python syntax, deterministic, parsed by `relax_tune.ir.text.parser`.

Names are hints: the printer makes them identifiers that are unique in their scope (`i`, `i_1`, ...). `normalise` renames every
identity by order of appearance and drops the names of blocks and of the function; the key of a workload hashes this text. A change
of the form must raise `FORMAT_VERSION`.

Tests: `tests/ir/text/test_text.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import AnyFunction, ExternFunc, IRModule, PrimFunc
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.stmt import Stmt
from relax_tune.ir.core.struct_info import StructInfo
from relax_tune.ir.text.print_graph import GraphPrinter
from relax_tune.ir.text.print_tensor import FORMAT_VERSION, flattened, quote

__all__ = ["FORMAT_VERSION", "Excerpts", "Printer", "excerpt", "flattened", "print_text", "show_lines"]

Printable = Union[IRModule, PrimFunc, Function, ExternFunc, Stmt, Expr, StructInfo]


def print_text(x: Printable, *, normalise: bool = False) -> str:
    """Print `x`, without a final newline.

    Args:
        normalise: rename every identity by order of appearance.
    """
    return Printer(normalise).run(x)


def excerpt(x: Printable, node: object, context: int = 1) -> str:
    """Return the printed lines around `node`, with a caret under its line.

    Args:
        node: statement, binding, buffer or parameter of `x`; for any other, the first line is shown.
    """
    return Excerpts(x).around(node, context)


class Excerpts:
    """Excerpts of `x`, which is printed once."""

    def __init__(self, x: Printable) -> None:
        self._printer = Printer(False)
        self._lines = self._printer.run(x).splitlines()

    def around(self, node: object, context: int = 1) -> str:
        """Return the lines around `node`; see `excerpt`."""
        header = len(self._printer.header)
        return show_lines(self._lines, self._printer.line_of.get(id(node), -header) + header, context=context)


def show_lines(lines: Sequence[str], at: int, column: int | None = None, context: int = 1) -> str:
    """Return lines `at - context ..= at` (from 0), numbered from 1, with a caret.

    Args:
        column: column of the caret in line `at`; None: under its whole text.
    """
    shown = [f"{i + 1:5} | {lines[i]}" for i in range(max(0, at - context), min(at + 1, len(lines)))]
    text = lines[at] if at < len(lines) else ""
    start = len(text) - len(text.lstrip()) if column is None else column
    carets = "^" * max(1, len(text.rstrip()) - start) if column is None else "^"
    return "\n".join([*shown, f"      | {' ' * start}{carets}"])


class Printer(GraphPrinter):
    """Printer of modules and functions."""

    def run(self, x: Printable) -> str:
        match x:
            case IRModule():
                self.module(x)
            case PrimFunc() | Function() | ExternFunc():
                self.named(x, x.name)
            case Expr():
                self.emit(self.expr(x))
            case Stmt():
                self.stmt(x)
            case _:
                self.emit(self.info(x))
        if self.header and self.lines[:1] != [""]:
            self.header.append("")
        return "\n".join(self.header + self.lines)

    # modules

    def module(self, m: IRModule) -> None:
        self.in_module = True
        self.header.append(f"module(version={FORMAT_VERSION})")
        for bound in m.bounds:
            known = bound.var in self.names
            name = self.names[bound.var] if known else self.declare(bound.var, "s")
            self.header.append(self.symbol(name, bound.var.dtype, bound))
        for key, f in m.functions.items():
            self.emit("")
            with self.scope():
                self.named(f, key)

    def named(self, f: AnyFunction, key: str) -> None:
        match f:
            case PrimFunc():
                self.prim(f, key)
            case Function():
                self.function(f, key)
            case ExternFunc():
                self.extern(f, key)

    def extern(self, f: ExternFunc, key: str) -> None:
        signature = "" if f.signature is None else f", {self.annotation(f.signature)}"
        alias = "" if key == f.name else f", key={quote(key)}"
        self.emit(f"extern({quote(f.name)}{signature}{alias})", f)
