"""Kernels of a grid: group and item loops are the indices of the launch. What OpenCL and CUDA share."""

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


def launched_items(grid: Grid) -> tuple[int, ...]:
    """Return the items along the axes of a launch, whose last one holds all further axes."""
    return (*grid.items[:LAST], prod(grid.items[LAST:])) if len(grid.items) > LAST else grid.items


class GridPrinter(CFamilyPrinter):
    """Printer of one kernel. A language defines indices, barriers, shared arrays, parameters and the kernel's head."""

    def index(self, kind: str, axis: int) -> str:
        """Return the number of this group, or of this item in it, along an axis."""
        raise NotImplementedError

    def shared_arrays(self, found: Sequence[tuple[Buffer, str, int]]) -> list[str]:
        """Return the declarations of all arrays that a group shares, as (buffer, name, elements)."""
        raise NotImplementedError

    def parameter(self, b: Buffer, written: bool) -> str:
        """Return a pointer as the kernel takes it, without its name."""
        raise NotImplementedError

    def head(self, name: str, parameters: Sequence[str], items: Sequence[int]) -> str:
        """Return the kernel's signature."""
        raise NotImplementedError

    def array(self, b: Buffer, name: str, size: int) -> str:
        """Return the declaration of an array of one item."""
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
        if f.kind == "parallel":
            self.serial_loop(f, extent)
            return
        kind, name = self.counted(f.var, extent)
        with self.indented("{"):
            self.line(self.constant(kind, name, self._place(f.kind, f.axis)))
            if (f.kind, f.axis) in self.uneven:
                with self.indented(f"if ({name} < {self.poly_text(extent)}) {{"):
                    self.statement(f.body)
            else:
                self.statement(f.body)

    def _place(self, kind: str, axis: int) -> str:
        """Return the index along an axis. Work-items may have one axis more than a launch."""
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
                    f"wanted a constant extent for work-item loop {f.var.name} of {name}, found {f.extent!r}; "
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
