"""Refuse kernels in which one work-group may depend on another, since groups of a launch cannot wait for each other.

Tests: `tests/ir/codegen/test_grid.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import as_int
from relax_tune.ir.core.stmt import For, Stmt, loops, own_accesses


@dataclass(frozen=True, slots=True)
class _GlobalAccess:
    """An access to a buffer in global memory.

    Attributes:
        groups: id() of the enclosing loop over groups of each axis; None without one.
        written: Whether it is a store.
    """

    groups: tuple[int | None, ...]
    written: bool


def verify_grid_independence(n: Stmt, algebra: Algebra, parallel: Sequence[str] = ()) -> None:
    """Check that only one group accesses each element that a kernel writes.

    The iterations of a loop were proved independent when it was bound to groups. Therefore accesses below one such loop are confined to
    a group, unless the loop is inside a serial one and runs several times.

    Args:
        parallel: Names of loops that were parallel and are loops over groups now.

    Raises:
        BuildError: The accesses of a buffer are not all below one loop over groups, or that loop is inside a serial one.
    """
    axes = sorted({f.axis for f in loops(n) if _spans_groups(f, algebra)})
    uses: dict[Buffer, list[_GlobalAccess]] = {}
    repeated: set[int] = set()
    if not axes:
        return
    for m, around in _with_loops(n, ()):
        bound = {a.axis: id(a) for a in around if _spans_groups(a, algebra)}
        # A group loop inside of a serial one runs once per iteration, so different groups may touch one element in
        # different iterations.
        after = next((i for i, a in enumerate(around) if a.kind not in ("group", "item")), len(around))
        repeated |= {id(a) for a in around[after:]}
        for b, _indices, written in own_accesses(m):
            if b.scope == "global":
                uses.setdefault(b, []).append(_GlobalAccess(tuple(bound.get(a) for a in axes), written))
    for b, buffer_uses in uses.items():
        if not any(u.written for u in buffer_uses) or len(buffer_uses) == 1:
            continue
        first = buffer_uses[0].groups
        same_loops = all(u.groups == first for u in buffer_uses)
        if not same_loops or any(g is None or g in repeated for g in first):
            names = ", ".join(map(repr, parallel))
            where = f"parallel loop {names} becomes groups of a grid, but " if parallel else ""
            raise BuildError(
                f"{where}groups of one kernel depend on each other: {b.name} is written by some and read by others, which cannot wait; "
                "bind the outermost loop around all accesses (`reorder` puts it there), or make the accesses separate top-level statements"
            )


def _spans_groups(m: For, algebra: Algebra) -> bool:
    """Return whether a statement is a loop over several groups."""
    return m.kind == "group" and as_int(algebra.expr(algebra.static(m.extent))) != 1


def _with_loops(n: Stmt, around: tuple[For, ...]) -> Iterator[tuple[Stmt, tuple[For, ...]]]:
    """Yield every statement with its enclosing loops, outermost first."""
    yield n, around
    inside = (*around, n) if isinstance(n, For) else around
    for c in n.children:
        yield from _with_loops(c, inside)
