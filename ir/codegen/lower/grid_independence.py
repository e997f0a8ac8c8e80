"""Refuse kernels in which one work-group may depend on another: groups of a launch never wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import as_int
from relax_tune.ir.core.stmt import For, Stmt, loops, own_accesses


@dataclass(frozen=True, slots=True)
class _GlobalAccess:
    """An access to a buffer in global memory.

    groups: id of the enclosing loop over groups of each axis, None without one.
    written: whether it is a store.
    """

    groups: tuple[int | None, ...]
    written: bool


def verify_grid_independence(n: Stmt, algebra: Algebra) -> None:
    """Check that each element that a kernel writes and touches elsewhere belongs to one group.

    Binding a loop to groups proved its iterations independent. So all accesses below one such loop are a group's own, unless a serial
    loop around it runs the groups again.

    Raises:
        BuildError: a buffer's accesses are not below one loop over groups, or that loop is in a serial one.
    """
    axes = sorted({f.axis for f in loops(n) if _spans_groups(f, algebra)})
    uses: dict[Buffer, list[_GlobalAccess]] = {}
    repeated: set[int] = set()
    if not axes:
        return
    for m, around in _with_loops(n, ()):
        bound = {a.axis: id(a) for a in around if _spans_groups(a, algebra)}
        after = next((i for i, a in enumerate(around) if a.kind not in ("group", "item")), len(around))
        repeated |= {id(a) for a in around[after:]}
        for b, _indices, written in own_accesses(m):
            if b.scope == "global":
                uses.setdefault(b, []).append(_GlobalAccess(tuple(bound.get(a) for a in axes), written))
    for b, found in uses.items():
        if not any(u.written for u in found) or len(found) == 1:
            continue
        first = found[0].groups
        apart = all(u.groups == first for u in found) and all(g is not None and g not in repeated for g in first)
        if not apart:
            raise BuildError(
                f"wanted groups that do not depend on each other, found {b.name} written by some and used by others of one kernel, between "
                "which they would have to wait; bind the outermost loop around all of its uses, or make them statements of their own"
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
