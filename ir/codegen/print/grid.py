"""Kernels with a grid, in OpenCL, CUDA and WGSL: group and item loops become the indices of the launch.

Tests: `tests/ir/codegen/test_grid.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Poly
from relax_tune.ir.codegen.lower.index_width import fits
from relax_tune.ir.codegen.print.cfamily import CFamilyPrinter, Grid
from relax_tune.ir.codegen.print.prelude import INDEX
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, as_int, const, maximum
from relax_tune.ir.core.stmt import AXES, For, Stmt, loops

# Last axis of a launch.
LAST = AXES["group"] - 1


def product(extents: Sequence[Expr]) -> Expr:
    """Return the product of the extents of a grid."""
    total: Expr = const(1)
    for e in extents:
        total = total * e
    return total


def launched_items(grid: Grid) -> tuple[int, ...]:
    """Return the items along the axes of a launch; loops over further axes are folded into the last one."""
    return (*grid.items[:LAST], prod(grid.items[LAST:])) if len(grid.items) > LAST else grid.items


class GridPrinter(CFamilyPrinter):
    """Printer of one kernel. A language defines indices, barriers, shared arrays, parameters and the kernel's head."""

    def index(self, kind: str, axis: int) -> str:
        """Return the index of this group, or of this item in its group, along an axis.

        Args:
            kind: `group` or `item`.
        """
        raise NotImplementedError

    def groups_text(self, e: Expr) -> str:
        """Return the number of groups along an axis as an operand."""
        return f"({self.poly_text(self.algebra.poly(e))})"

    def delinearized(self, linear: str, axis: int) -> str:
        """Return the index of a group along an axis, given its number `linear` over all axes, the first one fastest."""
        text = linear
        for e in self.groups[:axis]:
            text += f" / {self.groups_text(e)}"
        return text if axis == len(self.groups) - 1 else f"{text} % {self.groups_text(self.groups[axis])}"

    def exceeds(self, limit: int, extents: Sequence[Expr]) -> bool:
        """Return whether one of the extents may exceed a limit."""
        upper = [self.algebra.interval(self.algebra.static(e))[1] for e in extents]
        return any(bound is None or bound > limit for bound in upper)

    def shared_arrays(self, arrays: Sequence[tuple[Buffer, str, int]]) -> list[str]:
        """Return the declarations of all arrays that a group shares.

        Args:
            arrays: (buffer, name, number of elements) of each.
        """
        raise NotImplementedError

    def parameter(self, b: Buffer, written: bool) -> str:
        """Return the declaration of a pointer parameter, without its name."""
        raise NotImplementedError

    def head(self, name: str, parameters: Sequence[str], items: Sequence[int]) -> str:
        """Return the kernel's signature."""
        raise NotImplementedError

    def array(self, b: Buffer, name: str, size: int) -> str:
        """Return the declaration of an array that is private to a work-item."""
        raise NotImplementedError

    def launched(self, groups: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Return the extents of the launch's grid for these groups."""
        return groups

    def declare_array(self, b: Buffer, name: str, size: int) -> None:
        if b.scope == "shared":
            self.shared.append((b, name, max(size, 1)))
        else:
            self.line(self.array(b, name, max(size, 1)))

    def thread_loop(self, f: For, extent: Poly) -> None:
        self.effects |= {(f.var, f.kind), (f.var, "parallel")}  # a parallel loop is one over groups
        kind, name = self.counted(f.var, extent)
        with self.indented("{"):
            self.line(self.constant(kind, name, self._place(f.kind, f.axis)))
            if (f.kind, f.axis) in self.uneven:
                with self.indented(f"if ({name} < {self.poly_text(extent)}) {{"):
                    self.statement(f.body)
            else:
                self.statement(f.body)

    def _place(self, kind: str, axis: int) -> str:
        """Return the index along an axis. Loops over items may have one axis more than a launch; two share its last one."""
        if kind == "group" or axis < LAST or len(self.items) == LAST + 1:
            return self.index(kind, axis)
        return f"{self.index(kind, LAST)} {'%' if axis == LAST else '/'} {self.items[LAST]}"

    def kernel(
        self, name: str, buffers: tuple[Buffer, ...], written: frozenset[Buffer], body: Stmt
    ) -> tuple[str, Grid]:
        grid = self.begin(name, buffers, written, body)
        parameters = [f"{self.parameter(b, b in written)}{self.buffers[b]}" for b in buffers]
        self.statement(body)
        groups = self.launched(grid.groups)
        symbols, wide = [self.names[v] for v in self.symbols], self.prelude.storage(i64)
        if self.spans is not None:
            # sizes are passed as int64 in any case, so that both widths of a text have one signature
            index = self.prelude.storage(INDEX)
            self.lines = [f"{self.indent}const {index} {x} = ({index})rt_{x};" for x in symbols] + self.lines
            self.most = self.spans.most(self.symbols)
            symbols = [f"rt_{x}" for x in symbols] + (["rt_most"] if fits(self.most) is None else [])
        parameters += [f"{wide} {x}" for x in symbols]
        self.lines = [self.indent + x for x in self.shared_arrays(self.shared)] + self.lines
        items = launched_items(grid)
        return self.finish(self.head(name, parameters, items)), Grid(groups, items)

    def begin(self, name: str, buffers: tuple[Buffer, ...], written: frozenset[Buffer], body: Stmt) -> Grid:
        """Name the buffers, and return the groups and items along each axis."""
        self.shared: list[tuple[Buffer, str, int]] = []
        grid = self._grid(name, body)
        self.groups, self.items, self.written = grid.groups, grid.items, written
        for b in buffers:
            self.buffers[b] = self.fresh(b.name)
        return grid

    def _grid(self, name: str, body: Stmt) -> Grid:
        """Return the groups and items along each axis; axes whose loops differ in extent get a bound check."""
        groups: dict[int, list[Expr]] = {}
        items: dict[int, list[int]] = {}
        for f in loops(body, "group"):
            groups.setdefault(f.axis, []).append(f.extent)
        for f in loops(body, "item"):
            size = as_int(self.algebra.expr(self.algebra.static(f.extent)))
            if size is None:
                raise BuildError(
                    f"expected a constant extent of work-item loop {f.var.name} in {name}, got {f.extent!r}; "
                    "split it by a constant"
                )
            items.setdefault(f.axis, []).append(size)
        axes = max([*groups, *items], default=0) + 1
        static = self.algebra.static
        self.uneven = {("group", a) for a, e in groups.items() if any(static(x) != static(e[0]) for x in e)}
        self.uneven |= {("item", a) for a, e in items.items() if len(set(e)) > 1}
        extents: list[Expr] = []
        for a in range(min(axes, AXES["group"])):
            total: Expr | None = None
            for e in groups.get(a, []):
                total = e if total is None or static(e) == static(total) else maximum(total, e)
            extents.append(const(1) if total is None else total)
        return Grid(tuple(extents), tuple(max(items.get(a, [1])) for a in range(axes)))
