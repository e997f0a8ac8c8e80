"""The loop nest of a tensor function as text, with carets under the nodes that a step names."""

from __future__ import annotations

from collections.abc import Collection

from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, walk
from relax_tune.ir.text.printer import Printer


def names_in(func: PrimFunc) -> set[str]:
    """Return the names that a step can mention: loops, blocks and buffers."""
    return {name for name, _ in _named_nodes(func)}


def loop_nest(func: PrimFunc, names: Collection[str]) -> str:
    """Print the loops and blocks of `func`, and the buffers among `names`, with a caret line below each named one."""
    printer = Printer(False)
    text = printer.run(func).splitlines()
    header = len(printer.header)
    shown = {printer.line_of[id(s)] + header for s in walk(func.body) if id(s) in printer.line_of}
    marked = {printer.line_of[id(node)] + header for name, node in _named_nodes(func) if name in names}
    lines = []
    for at in sorted(shown | marked):
        lines.append(f"{at + 1:5} | {text[at]}")
        if at in marked:
            start = len(text[at]) - len(text[at].lstrip())
            lines.append(f"      | {' ' * start}{'^' * (len(text[at]) - start)}")
    return "\n".join(lines)


def _named_nodes(func: PrimFunc) -> list[tuple[str, object]]:
    """Pair each name with the node that the printer prints for it."""
    found: list[tuple[str, object]] = [(b.name, b) for b in (*func.buffers, *func.allocs)]
    for s in walk(func.body):
        if isinstance(s, For):
            found.append((s.var.name, s))
        elif isinstance(s, Block):
            found.append((s.name, s))
    return found
