"""What the rules for GPUs share: loops over the items of a group, and sums over them.

Items along the first axis are neighbours: where they are a warp, or one of equal parts of it, they exchange their sums in registers
(scope `warp`). What several warps have meets in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.buffer import Scope
from relax_tune.ir.core.expr import Expr, Var, as_int, const, le
from relax_tune.ir.core.stmt import LoopKind, blocks
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.vectorize import set_kind_of_copies
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

# Items that exchange registers: a warp, or with fewer of them several parts of one.
NEIGHBOURS = (4, 8, 16, 32)
# Warps that share one sum.
WARPS = (2, 4, 8, 16, 32)


def item_counts(machine: HardwareInfo, least: int = 64) -> list[int]:
    """Items of a group along one axis: as many as a group may have at most."""
    return [n for n in (4, 8, 16, 32, 64, 128, 256, 512, 1024) if least <= n <= machine.group_size] or [
        machine.group_size
    ]


def vector_widths(columns: Sequence[Expr], machine: HardwareInfo, size: int = 4) -> list[int]:
    """Widths of vectors, of elements of so many bytes, that divide all constant numbers of columns. Vectors of a column whose length
    nobody knows start anywhere in memory, and are no better than their elements."""
    sizes = [as_int(c) for c in columns]
    most = machine.lanes * 4 // min(size, 4)
    return [w for w in (1, 2, 4, 8, 16) if w <= most and all(w == 1 or (e is not None and e % w == 0) for e in sizes)]


def in_warps(s: Schedule, machine: HardwareInfo) -> tuple[Expr, int]:
    """Counts of warps, and of the items of one, that share a row."""
    most = max(machine.group_size // NEIGHBOURS[-1], WARPS[0])
    return s.tunable("TW", [n for n in WARPS if n <= most]), NEIGHBOURS[-1]


def over_items(s: Schedule, column: str, items: Sequence[Expr | int], width: Expr | int) -> tuple[str, list[str], str]:
    """A loop over elements cut so that neighbouring items have neighbouring vectors: its loops over rounds, items and lanes."""
    vectors, lanes = s.split(column, [None, width], divides=as_int(s.extent(column)) is not None)
    rounds, *item = s.split(vectors, [None, *items])
    return rounds, item, lanes


def bind_items(s: Schedule, items: Sequence[str], axis: int = 0) -> None:
    """Loops over items on axes from this one on, the innermost on it."""
    for at, item in enumerate(reversed(items)):
        s.bind(item, "item", axis + at)


def each_point(s: Schedule, loops: Sequence[str], items: Expr | int) -> tuple[str, str]:
    """An item for each point of some loops; the loops over groups and items, which are bound."""
    group, item = s.split(s.fuse(loops), [None, items])
    s.bind(group, "group")
    s.bind(item, "item")
    return group, item


def sum_over_items(
    s: Schedule, block: str, items: Sequence[str], lanes: str, axis: int = 0, rows: Sequence[str] = ()
) -> str:
    """The block that makes what single items leave of a reduction whose outermost loops are those over `items` and whose innermost is
    `lanes`, after those over `rows` of results: each item adds up its own share in registers, then those of the first axis theirs,
    and then all what these have left."""
    partial = block
    for item in items:
        made = factored(s, partial, item, "warp" if item == items[-1] and axis == 0 else "shared")
        left, *each = s.loops_of(partial)[-1 - len(rows) :]
        if each:
            s.reorder([*each, left])
        partial = made
    factored(s, partial, lanes, "local")
    bind_items(s, items, axis)
    set_kind_of_copies(s, {n: "unrolled" for n in rows})
    if find_block(s.func, block).init is not None:
        s.apply("decompose_reduction", block=block, loop=s.loops_of(block)[-1])
    return partial


def factored(s: Schedule, block: str, loop: str, scope: Scope, kind: LoopKind = "vectorized") -> str:
    """Results of its own for every iteration of a loop, which becomes of a kind where they are local: the block that makes them."""
    before = {b.name for b in blocks(s.func.body)}
    s.apply("rfactor", block=block, loop=loop, scope="local" if scope == "local" else "global")
    made = [b for b in blocks(s.func.body) if b.name not in before]
    for b in made:
        if scope == "local":
            s.set_kind(s.loops_of(b.name)[-1], kind)
    partial = next(b for b in made if not b.name.endswith("_init"))
    if scope != "local":
        s.apply("set_scope", buffer=partial.body.buffer.name, scope=scope)
        return partial.name
    node = find_block(s.func, block)
    (over,) = (b for i, b in zip(node.iters, node.bindings) if i.kind == "reduce")
    assert isinstance(over, Var)
    s.unroll(over.name)
    return partial.name


def limit_items(s: Schedule, machine: HardwareInfo, items: Expr) -> None:
    """A group has at least a warp of items, and no more than the machine lets it have."""
    s.require(le(const(machine.warp), items))
    s.require(le(items, const(machine.group_size)))


# What a tile's rows or columns are cut into, from the outside: how many of each part (of one, what is left), and who has them.
Parts = Sequence[tuple[Expr | int | None, Literal["group", "warp", "item", "each", "lane"]]]


def own_parts(s: Schedule, block: str, loops: Sequence[str], rows: Parts, columns: Parts, whole: bool) -> None:
    """A block on what each item has of a tile: its items lie along the first axes, columns before rows, its warps along the third, groups
    of these along the fourth; an item goes through each of its rows and columns. whole: lanes are vectors, of which none is cut off."""
    *leading, last = loops
    if len(leading) != 1:
        raise ScheduleError(f"{s.func.name}: the epilogue has other rows than the product")
    found: dict[str, list[str]] = {"group": [], "warp": [], "item": [], "each": [], "lane": []}
    for loop, parts in ((leading[0], rows), (last, columns)):
        for name, (_, kind) in zip(s.split(loop, [count for count, _ in parts]), parts, strict=True):
            found[kind].append(name)
    s.reorder([name for names in found.values() for name in names])
    for name in found["lane"]:
        s.set_kind(name, "vectorized" if whole else "unrolled")
    for name in found["each"]:
        s.unroll(name)
    for axis, name in zip((1, 0), found["item"], strict=True):
        s.bind(name, "item", axis)
    for axis, kind in ((2, "warp"), (3, "group")):
        if found[kind]:
            s.bind(s.fuse(found[kind]), "item", axis)
