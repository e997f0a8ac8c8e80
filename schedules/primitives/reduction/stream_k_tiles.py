"""The tiles that stream_k finds around a reduction, and the checks of their intermediates.

Tests: `tests/schedules/primitives/reduction/test_stream_k.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import extent_of, linear
from relax_tune.ir.arith.prove import Proof, prove, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import (
    Expr,
    Load,
    Var,
    ceildiv,
    conjuncts,
    const,
    floordiv,
    floormod,
    free_vars,
    le,
    lt,
    maximum,
    minimum,
    mul,
    select,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, Seq, blocks
from relax_tune.schedules.independence import updates_in_place, writers
from relax_tune.schedules.loop_tree import (
    enclosing,
    loop_env,
    readers,
)
from relax_tune.schedules.primitives.memory.pipeline import WrittenRange, require_reads_own_iteration, written_ranges
from relax_tune.schedules.symbols import only_tunables


@dataclass(frozen=True, slots=True)
class WorkRanges:
    """The reduction steps of all tiles in one sequence, divided evenly among workers; ranges differ by one step at most.

    Attributes:
        steps: Reduction steps of a tile.
    """

    tiles: Expr
    steps: Expr
    workers: Expr

    @property
    def total(self) -> Expr:
        return mul(self.tiles, self.steps)

    @property
    def max_tiles_per_worker(self) -> Expr:
        """The largest number of tiles that a range touches."""
        # One more than the mean, since a range may begin and end within a tile.
        return ceildiv(self.tiles, self.workers) + 1

    def start(self, worker: Expr) -> Expr:
        """Return the first step of a worker, counted from the first step of all."""
        return floordiv(mul(worker, self.total), self.workers)

    def tile_of(self, worker: Expr, piece: Expr) -> Expr:
        """Return the tile of a piece of a worker's range; for piece 0 it equals `start // steps`."""
        return piece + floordiv(mul(worker, self.tiles), self.workers)

    def first_step(self, worker: Expr, piece: Expr) -> Expr:
        """Return the worker's first step within the tile."""
        # Only the first piece may begin within a tile; the others begin at its first step.
        return select(lt(piece, 1), floormod(self.start(worker), maximum(self.steps, 1)), 0)

    def step_count(self, worker: Expr, piece: Expr) -> Expr:
        """Return the number of the worker's steps in the tile; 0 or less for none."""
        end = self.start(worker + 1) - mul(self.tile_of(worker, piece), self.steps)
        # the outer minimum is redundant: most proofs need only `count <= steps`
        return minimum(minimum(end, self.steps) - self.first_step(worker, piece), self.steps)

    def workers_before(self, steps: Expr) -> Expr:
        """Return the number of workers whose range starts before `steps`; defined for tiles without steps, too."""
        return ceildiv(mul(steps, self.workers), maximum(self.total, 1))


@dataclass(frozen=True, slots=True)
class DimTiling:
    """The tiling of a dimension.

    Attributes:
        loop: The loop that selects the tile; None if each tile has the whole dimension.
        size: Elements of a tile.
    """

    loop: Var | None
    size: Expr


def write_back_block(func: PrimFunc, node: Block, outer: Sequence[For], target: For) -> Block:
    """Return the block that stores the sums, in the nest that `stream_k` requires. Raises ScheduleError."""
    path = enclosing(func, node)
    nest = (*outer, target)
    whole = bool(outer) and path[: len(nest)] == nest and all(a.body is b for a, b in zip(outer, outer[1:]))
    parts = outer[-1].body.stmts if whole and isinstance(outer[-1].body, Seq) else ()
    after = blocks(parts[1]) if len(parts) == 2 and parts[0] is target else ()
    sums = node.body.buffer
    if len(after) == 1 and not after[0].is_reduction and isinstance(after[0].body.value, Load):
        (copy,) = after
        result = copy.body.buffer
        places = copy.body.indices, sums_read(copy).indices
        plain = all(set(where) == {i.var for i in copy.iters} and len(where) == len(copy.iters) for where in places)
        is_private = (
            result in func.allocs
            and writers(func, result) == (copy,)
            and sums_read(copy).buffer is sums
            and sums in func.allocs
        )
        if plain and is_private and writers(func, sums) == (node,) and readers(func, sums) == (copy,):
            return copy
    raise ScheduleError(
        f"{func.name}: stream_k expects {', '.join(p.var.name for p in outer) or 'loops over tiles'} around {target.var.name!r}, which "
        f"holds {node.name!r}, and then one block that copies its sums to an intermediate, and nothing else"
    )


def require_private_to_step(
    func: PrimFunc, node: Block, copy: Block, outer: For, target: For, tilings: Mapping[Var, DimTiling]
) -> None:
    """Check that the intermediates of a tile's steps are private to the tile, or to a step.

    One iteration of the innermost tile loop makes and stores the sums of a tile. Results of other blocks among its steps are read in the
    same step, and nowhere else.
    """
    env = loop_env((*enclosing(func, outer), outer))
    for e, span in zip(sums_read(copy).indices, _require_same_region(func, node, copy, outer), strict=True):
        cut = tilings[e] if isinstance(e, Var) else None
        inside = cut is not None and (
            cut.loop is None or prove_equal(span.start, mul(cut.loop, cut.size), env) is Proof.YES
        )
        if (
            cut is None
            or not inside
            or (cut.loop is not None and prove(le(span.extent, cut.size), env) is not Proof.YES)
        ):
            raise ScheduleError(
                f"{func.name}: stream_k expects {node.name!r} to sum up what {copy.name!r} stores of a tile, got {span.start!r}"
            )
    order = blocks(target)
    for b in order:
        if b is node:
            continue
        buffer = b.body.buffer
        if buffer not in func.allocs or writers(func, buffer) != (b,) or updates_in_place(b):
            raise ScheduleError(f"{func.name}: stream_k expects {b.name!r} to make an intermediate by itself")
        for reader in readers(func, buffer):
            if reader not in order or order.index(reader) <= order.index(b):
                raise ScheduleError(
                    f"{func.name}: stream_k expects readers of {buffer.name!r} after {b.name!r} in {target.var.name!r}, got "
                    f"{reader.name!r}"
                )
            _require_same_region(func, b, reader, target)


def _require_same_region(func: PrimFunc, node: Block, reader: Block, loop: For) -> list[WrittenRange]:
    """Return the ranges that the block writes in an iteration, and check that the reader reads only these. Raises ScheduleError."""
    path = enclosing(func, node)
    at = path.index(loop) + 1
    env = loop_env(path[:at])
    spans = written_ranges(func, node, path, at, env)
    require_reads_own_iteration(func, node, reader, loop, spans, env)
    return spans


def sums_read(copy: Block) -> Load:
    """Return the load of the sums that the write-back block stores."""
    value = copy.body.value
    assert isinstance(value, Load)
    return value


def dim_tilings(func: PrimFunc, copy: Block, outer: Sequence[For]) -> dict[Var, DimTiling]:
    """Return the tiling of each dimension of the stored elements, by iterator. Raises ScheduleError."""
    inner = {p.var: p.extent for p in enclosing(func, copy)[len(outer) :]}
    chosen = {p.var: p for p in outer}
    tilings: dict[Var, DimTiling] = {}
    bounds: list[Expr] = []
    for it, bound in zip(copy.iters, copy.bindings):
        bounds += [le(0, bound), lt(bound, it.extent)]
        parts = linear(bound, (*chosen, *inner))
        tile_loops = [] if parts is None else [chosen[v] for v in parts[0] if v in chosen]
        if parts is None or len(tile_loops) > 1 or any(p.var is c.loop for p in tile_loops for c in tilings.values()):
            raise ScheduleError(
                f"{func.name}: stream_k expects tiles along single dimensions of {copy.name!r}, got {it.var.name} = {bound!r}"
            )
        rest = simplify(substitute(bound, {p.var: const(0) for p in tile_loops}))
        size = extent_of(rest, {v: x for v, x in inner.items() if v in free_vars(rest)}) if tile_loops else it.extent
        even = not tile_loops or prove_equal(parts[0][tile_loops[0].var], size) is Proof.YES
        if (
            not even
            or prove_equal(parts[1], 0) is not Proof.YES
            or (tile_loops and not _covers(mul(tile_loops[0].extent, size), it.extent))
        ):
            raise ScheduleError(
                f"{func.name}: stream_k expects tiles of {it.var.name!r} side by side over {it.extent!r}, got {bound!r}"
            )
        tilings[it.var] = DimTiling(tile_loops[0].var if tile_loops else None, size)
    used = {c.loop for c in tilings.values()}
    idle = [p.var.name for p in outer if p.var not in used and prove(le(p.extent, 1)) is not Proof.YES]
    unexpected = [c for c in conjuncts(copy.predicate) if c not in bounds]
    if idle or unexpected:
        raise ScheduleError(
            f"{func.name}: stream_k expects tiles of {copy.name!r} under no condition but its bounds, got "
            f"{unexpected[0] if unexpected else f'{idle[0]!r}, which chooses none'!r}"
        )
    return tilings


def _covers(tiles: Expr, extent: Expr) -> bool:
    """Return whether the tiles cover an extent.

    If only tunables decide, the split without a condition has added a constraint.
    """
    proof = prove(le(extent, tiles))
    return proof is Proof.YES or (proof is Proof.UNKNOWN and only_tunables(tiles, extent))
