"""Validation of untrusted program text before it is compiled.

Tests: `tests/ir/frontend/test_text.py`.
"""

from __future__ import annotations

from relax_tune.errors import ParseError
from relax_tune.ir.check.examine import examine
from relax_tune.ir.check.in_bounds import keep_in_bounds
from relax_tune.ir.check.no_overflow import require_no_overflow
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Constant
from relax_tune.ir.core.graph_walk import nested_values


def accept(module: IRModule, weights: str) -> IRModule:
    """Check a parsed module, and return it with its tensor functions confined to their buffers.

    Integers that may leave 64 bits get checks of the call.

    Args:
        weights: where the weights are stored, for messages.

    Raises:
        ParseError: a graph function or a weight is missing.
        VerifyError, DeduceError: the module is not well-formed.
    """
    _require_whole(module, weights)
    verify(module)
    examine(module)
    return require_no_overflow(keep_in_bounds(module))


def _require_whole(module: IRModule, weights: str) -> None:
    graphs = list(module.graphs.values())
    if not graphs:
        raise ParseError(
            "expected a graph function, or a single tensor function; "
            f"got {', '.join(module.functions) or 'no function'}; add a function that calls them"
        )
    named = dict.fromkeys(v.name for f in graphs for v in nested_values(f) if isinstance(v, Constant))
    missing = [name for name in named if name not in module.constants]
    if missing:
        names = ", ".join(list(module.constants)[:8]) or "no weights"
        raise ParseError(
            f"expected a weight called {missing[0]!r} in {weights}, got {names}; store the weights in the folder of the text"
        )
