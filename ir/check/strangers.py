"""Programs of strangers: everything that is required of a text before it is compiled."""

from __future__ import annotations

from relax_tune.errors import ParseError
from relax_tune.ir.check.examine import examine
from relax_tune.ir.check.in_bounds import keep_in_bounds
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Constant
from relax_tune.ir.core.graph_walk import nested_values


def accept(module: IRModule, weights: str) -> IRModule:
    """Check a parsed module, and return it with its tensor functions kept within their buffers.

    weights: the place of the weights, for messages

    Raises: ParseError without a graph function or a weight, VerifyError and DeduceError for a module that is not well-formed.
    """
    _require_whole(module, weights)
    verify(module)
    examine(module)
    return keep_in_bounds(module)


def _require_whole(module: IRModule, weights: str) -> None:
    graphs = list(module.graphs.values())
    if not graphs:
        raise ParseError(
            "wanted a graph function, or one tensor function alone; "
            f"found {', '.join(module.functions) or 'no function'}; add a function that calls them"
        )
    named = dict.fromkeys(v.name for f in graphs for v in nested_values(f) if isinstance(v, Constant))
    missing = [name for name in named if name not in module.constants]
    if missing:
        found = ", ".join(list(module.constants)[:8]) or "no weights"
        raise ParseError(
            f"wanted a weight called {missing[0]!r} in {weights}, found {found}; put the weights beside the text"
        )
