"""Bind the parallel loops of a kernel with a grid to work-groups: a launch has no other threads to share iterations.

Tests: `tests/ir/codegen/test_loop_kinds.py`.
"""

from __future__ import annotations

from dataclasses import replace

from relax_tune.errors import BuildError
from relax_tune.ir.core.expr import free_vars
from relax_tune.ir.core.stmt import AXES, For, Stmt, loops


def bind_parallel_loops(n: Stmt, name: str) -> tuple[Stmt, tuple[str, ...]]:
    """Return a kernel whose parallel loops are loops over groups, each on the first free axis, and the names of these loops.

    Args:
        name: The function, for messages.

    Raises:
        BuildError: No axis is free, or the number of groups would change during the launch.
    """
    names = tuple(f.var.name for f in loops(n, "parallel"))
    return (_bound(n, (), name), names) if names else (n, ())


def _bound(n: Stmt, around: tuple[For, ...], name: str) -> Stmt:
    if not isinstance(n, For):
        return n.with_children(tuple(_bound(c, around, name) for c in n.children))
    if n.kind == "parallel":
        outer = [f.var.name for f in around if f.var in free_vars(n.extent)]
        if outer:
            raise BuildError(
                f"{name}: expected a parallel loop of one extent, since it becomes groups of a grid, got {n.extent!r} for "
                f"{n.var.name!r}, which depends on {', '.join(outer)}; make {outer[0]!r} the parallel loop"
            )
        used = {f.axis for f in (*around, *loops(n.body)) if f.kind == "group"}
        axis = next((a for a in range(AXES["group"]) if a not in used), None)
        if axis is None:
            raise BuildError(
                f"{name}: expected at most {AXES['group']} axes of groups, which leave none for the parallel loop {n.var.name!r}; `fuse` "
                "it with another loop before they are bound"
            )
        n = replace(n, kind="group", axis=axis)
    return replace(n, body=_bound(n.body, (*around, n), name))
