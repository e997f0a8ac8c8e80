"""The primitive of the Stream-K decomposition (Osama et al., PPoPP 2023): stream_k."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import extent_of, linear
from relax_tune.ir.arith.prove import Proof, prove, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    ExprLike,
    Load,
    Var,
    and_,
    as_int,
    ceildiv,
    conjuncts,
    const,
    floordiv,
    floormod,
    free_vars,
    le,
    load,
    loads,
    lt,
    maximum,
    minimum,
    mul,
    only_tunables,
    op,
    or_,
    replaced,
    select,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Seq, Stmt, blocks, map_blocks, seq
from relax_tune.schedules.independence import updates_in_place, writers
from relax_tune.schedules.loop_tree import (
    block_loads,
    block_value,
    enclosing,
    find_block,
    find_loop,
    fresh,
    loop_env,
    readers,
    rebind,
    replace_node,
    require_compute_block,
)
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.primitives.loops.loops import require_serial
from relax_tune.schedules.primitives.memory.pipeline import WrittenRange, require_reads_own_iteration, written_ranges
from relax_tune.schedules.primitives.reduction.reductions import combiner, decompose_reduction, starts_neutral


@dataclass(frozen=True, slots=True)
class WorkRanges:
    """The reduction steps of all tiles in one sequence, divided evenly among workers; ranges differ by one step at most.

    steps: reduction steps of a tile
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
        return ceildiv(self.tiles, self.workers) + 1

    def start(self, worker: Expr) -> Expr:
        """Return the first step of a worker, counted from the first step of all."""
        return floordiv(mul(worker, self.total), self.workers)

    def tile_of(self, worker: Expr, piece: Expr) -> Expr:
        """Return the tile of a piece of a worker's range; for piece 0 it equals `start // steps`."""
        return piece + floordiv(mul(worker, self.tiles), self.workers)

    def first_step(self, worker: Expr, piece: Expr) -> Expr:
        """Return the worker's first step within the tile."""
        return select(lt(piece, 1), floormod(self.start(worker), maximum(self.steps, 1)), 0)

    def step_count(self, worker: Expr, piece: Expr) -> Expr:
        """Return the number of the worker's steps in the tile; 0 or less for none."""
        end = self.start(worker + 1) - mul(self.tile_of(worker, piece), self.steps)
        # the outer minimum is redundant: most proofs need only `count <= steps`
        return minimum(minimum(end, self.steps) - self.first_step(worker, piece), self.steps)

    def workers_before(self, steps: Expr) -> Expr:
        """Return the number of workers whose range starts before `steps`; defined for tiles without steps, too."""
        return ceildiv(mul(steps, self.workers), maximum(self.total, 1))


def stream_k(func: PrimFunc, block: str, tiles: Sequence[str], steps: str, workers: ExprLike) -> PrimFunc:
    """Divide the reduction steps of all tiles evenly among workers, and sum up the partial tiles in a fix-up nest.

    Stream-K (Osama et al., PPoPP 2023). block: the reduction, whose sums another block stores after the steps of a tile.

    Before: `for t in range(T): (for k in range(K): for e in range(E): S[t * E + e] += f(t * E + e, k)) (from a neutral value);
    (for e in range(E): C[t * E + e] = S[t * E + e])`
    After, where worker w of W starts at step w * T * K // W, in tile t(w) = w * T // W:
    `for w in range(W): for p in range(ceil(T / W) + 1): (for e: S[e] = 0); (for k in range(count): for e:
    S[e] += f((t(w) + p) * E + e, first + k)); (for e: if count: R[w, p, e] = S[e])` over the worker's steps of each tile, then the
    fix-up `for i: (C[i] = 0); for r in range(count): C[i] += R[w, i // E - t(w), i % E]` over the workers w of tile i // E
    Checks: the number of workers is positive. Tiles are the outermost loops of a perfect nest of serial loops. It holds the
    serial loop over steps, then one block that copies the sums to an intermediate, under no condition but its bounds. The
    reduction has no condition and an initial value that may be combined more than once; nothing else touches its sums. Each
    tile loop selects equal, adjacent parts of one dimension of the copy. Other results of a step are read in the same step.
    """
    node, target = find_block(func, block), find_loop(func, steps)
    wanted = positive(func, f"stream_k({block!r})", workers, node)
    operation, term = combiner(node)
    alone = all(x.buffer is not node.body.buffer for x in loads(term))
    if not starts_neutral(node) or not alone or node.predicate is not TRUE:
        raise ScheduleError(
            f"{func.name}: stream_k wants {block!r} to combine what it reads elsewhere, under no condition and from an initial value "
            f"that may be combined more than once"
        )
    outer = tuple(find_loop(func, t) for t in tiles)
    copy = _write_back_block(func, node, outer, target)
    for p in (*outer, target):
        require_serial(func, p, "stream_k")
    require_compute_block(func, "stream_k", *blocks(outer[0]))
    tilings = _dim_tilings(func, copy, outer)
    _require_private_to_step(func, node, copy, outer[-1], target, tilings)
    made = decompose_reduction(func, block, steps)
    work = WorkRanges(reduce(mul, (p.extent for p in outer)), target.extent, wanted)
    assert node.init is not None
    return _Rewrite(made, copy, tuple(find_loop(made, t) for t in tiles), find_loop(made, steps), tilings, work).run(
        operation, node.init.value
    )


@dataclass(frozen=True, slots=True)
class _DimTiling:
    """The tiling of a dimension.

    loop: the loop that selects the tile; None if each tile has the whole dimension
    size: elements of a tile
    """

    loop: Var | None
    size: Expr


def _write_back_block(func: PrimFunc, node: Block, outer: Sequence[For], target: For) -> Block:
    """Return the block that stores the sums, in the nest that the primitive wants. Raises ScheduleError."""
    path = enclosing(func, node)
    nest = (*outer, target)
    whole = bool(outer) and path[: len(nest)] == nest and all(a.body is b for a, b in zip(outer, outer[1:]))
    parts = outer[-1].body.stmts if whole and isinstance(outer[-1].body, Seq) else ()
    after = blocks(parts[1]) if len(parts) == 2 and parts[0] is target else ()
    sums = node.body.buffer
    if len(after) == 1 and not after[0].is_reduction and isinstance(after[0].body.value, Load):
        (copy,) = after
        made = copy.body.buffer
        places = copy.body.indices, _sums_read(copy).indices
        plain = all(set(where) == {i.var for i in copy.iters} and len(where) == len(copy.iters) for where in places)
        lone = (
            made in func.allocs
            and writers(func, made) == (copy,)
            and _sums_read(copy).buffer is sums
            and sums in func.allocs
        )
        if plain and lone and writers(func, sums) == (node,) and readers(func, sums) == (copy,):
            return copy
    raise ScheduleError(
        f"{func.name}: stream_k wants {', '.join(p.var.name for p in outer) or 'loops over tiles'} around {target.var.name!r}, which "
        f"holds {node.name!r}, and then one block that copies its sums to an intermediate, and nothing else"
    )


def _require_private_to_step(
    func: PrimFunc, node: Block, copy: Block, outer: For, target: For, tilings: Mapping[Var, _DimTiling]
) -> None:
    """Check that the intermediates of a tile's steps are private to the tile, or to a step. Raises ScheduleError.

    One iteration of the innermost tile loop makes and stores the sums of a tile. Results of other blocks among its steps are
    read in the same step, and nowhere else.
    """
    env = loop_env((*enclosing(func, outer), outer))
    for e, span in zip(_sums_read(copy).indices, _require_same_region(func, node, copy, outer), strict=True):
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
                f"{func.name}: stream_k wants {node.name!r} to sum up what {copy.name!r} stores of a tile, found {span.start!r}"
            )
    order = blocks(target)
    for b in order:
        if b is node:
            continue
        made = b.body.buffer
        if made not in func.allocs or writers(func, made) != (b,) or updates_in_place(b):
            raise ScheduleError(f"{func.name}: stream_k wants {b.name!r} to make an intermediate by itself")
        for reader in readers(func, made):
            if reader not in order or order.index(reader) <= order.index(b):
                raise ScheduleError(
                    f"{func.name}: stream_k wants readers of {made.name!r} after {b.name!r} in {target.var.name!r}, found "
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


def _sums_read(copy: Block) -> Load:
    """Return the load of the sums that the write-back block stores."""
    value = copy.body.value
    assert isinstance(value, Load)
    return value


def _dim_tilings(func: PrimFunc, copy: Block, outer: Sequence[For]) -> dict[Var, _DimTiling]:
    """Return the tiling of each dimension of the stored elements, by iterator. Raises ScheduleError."""
    inner = {p.var: p.extent for p in enclosing(func, copy)[len(outer) :]}
    chosen = {p.var: p for p in outer}
    found: dict[Var, _DimTiling] = {}
    bounds: list[Expr] = []
    for it, bound in zip(copy.iters, copy.bindings):
        bounds += [le(0, bound), lt(bound, it.extent)]
        parts = linear(bound, (*chosen, *inner))
        own = [] if parts is None else [chosen[v] for v in parts[0] if v in chosen]
        if parts is None or len(own) > 1 or any(p.var is c.loop for p in own for c in found.values()):
            raise ScheduleError(
                f"{func.name}: stream_k wants tiles along single dimensions of {copy.name!r}, found {it.var.name} = {bound!r}"
            )
        rest = simplify(substitute(bound, {p.var: const(0) for p in own}))
        size = extent_of(rest, {v: x for v, x in inner.items() if v in free_vars(rest)}) if own else it.extent
        even = not own or prove_equal(parts[0][own[0].var], size) is Proof.YES
        if (
            not even
            or prove_equal(parts[1], 0) is not Proof.YES
            or (own and not _covers(mul(own[0].extent, size), it.extent))
        ):
            raise ScheduleError(
                f"{func.name}: stream_k wants tiles of {it.var.name!r} side by side over {it.extent!r}, found {bound!r}"
            )
        found[it.var] = _DimTiling(own[0].var if own else None, size)
    used = {c.loop for c in found.values()}
    idle = [p.var.name for p in outer if p.var not in used and prove(le(p.extent, 1)) is not Proof.YES]
    strange = [c for c in conjuncts(copy.predicate) if c not in bounds]
    if idle or strange:
        raise ScheduleError(
            f"{func.name}: stream_k wants tiles of {copy.name!r} under no condition but its bounds, found "
            f"{strange[0] if strange else f'{idle[0]!r}, which chooses none'!r}"
        )
    return found


def _covers(tiles: Expr, extent: Expr) -> bool:
    """Return whether the tiles cover an extent.

    If only tunables decide, whoever split the loop without a condition has added a constraint.
    """
    found = prove(le(extent, tiles))
    return found is Proof.YES or (found is Proof.UNKNOWN and only_tunables(tiles, extent))


@dataclass(frozen=True, slots=True)
class _TileBuffer:
    """A buffer for one tile, or for consecutive pieces along a dimension.

    dim, size: the dimension in which pieces follow each other (None: one tile), and the elements of a piece
    """

    buffer: Buffer
    dim: int | None
    size: Expr

    def at(self, where: Sequence[Expr], piece: Expr) -> tuple[Expr, ...]:
        """Return the indices of an element of the tile."""
        return tuple(e if d != self.dim else mul(piece, self.size) + e for d, e in enumerate(where))


def _same_strides(a: Mapping[Var, Expr], b: Mapping[Var, Expr] | None) -> bool:
    """Return whether two expressions have provably equal strides."""
    return b is not None and a.keys() == b.keys() and all(prove_equal(a[v], b[v]) is Proof.YES for v in a)


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """The rewrite of a function whose initial values are already separate.

    copy: the write-back block; outer, target: the loops over tiles and steps; tilings: by iterator of `copy`
    """

    func: PrimFunc
    copy: Block
    outer: Sequence[For]
    target: For
    tilings: Mapping[Var, _DimTiling]
    work: WorkRanges

    def run(self, operation: str, first: Expr) -> PrimFunc:
        """Return the function with the workers' nest and the fix-up nest."""
        func, work, names = self.func, self.work, list[str]()

        def name(wanted: str) -> str:
            names.append(fresh(func, wanted, names))
            return names[-1]

        worker, piece, step = (Var(name(f"{self.target.var.name}_{x}")) for x in ("worker", "piece", "step"))
        count = work.step_count(worker, piece)
        places = self._tile_indices(work.tile_of(worker, piece))
        begin = {**places, self.target.var: work.first_step(worker, piece)}
        old, source = self.copy.body.buffer, _sums_read(self.copy)
        small = replace(source.buffer, name=name(f"{source.buffer.name}_tile"), shape=self._tile_shape(source))
        sizes = dict(zip(source.indices, small.shape, strict=True))
        shape = (work.workers, work.max_tiles_per_worker, *(sizes[e] for e in self.copy.body.indices))
        parts = Buffer(name(f"{old.name}_parts"), shape, old.dtype)

        made_here = {b.body.buffer: b for b in blocks(self.target) if b.body.buffer is not source.buffer}
        kept = {source.buffer: _TileBuffer(small, None, const(0))}
        kept |= {buffer: found for buffer, b in made_here.items() if (found := self._tile_buffer(b)) is not None}

        def moved(b: Block) -> Block:
            if b is self.copy:
                return self._partial_sums(b, small, parts, (worker, piece), count)
            return self._block_of_tile(b, kept, begin, piece, step)

        whole = self.outer[-1].body
        assert isinstance(whole, Seq)
        own = {**places, self.target.var: begin[self.target.var] + step}
        stmts: list[Stmt] = []
        for s in whole.stmts:
            made = rebind(map_blocks(s, moved), own)
            stmts.append(replace(made, var=step, extent=count) if s is self.target and isinstance(made, For) else made)
        nest = For(worker, work.workers, For(piece, work.max_tiles_per_worker, seq(*stmts)))
        body = replace_node(func.body, self.outer[0], seq(nest, self._fixup_nest(name, parts, operation, first)))
        allocs = tuple(kept[a].buffer if a in kept else a for a in func.allocs)
        return replace(func, body=body, allocs=(*allocs, parts))

    def _tile_shape(self, access: Load) -> tuple[Expr, ...]:
        """Return the extents of a tile of a buffer."""
        tilings = [self._tiling(e) for e in access.indices]
        return tuple(d if c.loop is None else c.size for c, d in zip(tilings, access.buffer.shape, strict=True))

    def _tiling(self, e: Expr) -> _DimTiling:
        assert isinstance(e, Var)
        return self.tilings[e]

    def _tile_indices(self, tile: Expr) -> dict[Var, Expr]:
        """Return the values of the tile loops' variables for a tile's number."""
        found: dict[Var, Expr] = {}
        for p in reversed(self.outer):
            found[p.var] = floormod(tile, p.extent)
            tile = floordiv(tile, p.extent)
        return found

    def _outer_strides(self, e: Expr) -> Mapping[Var, Expr] | None:
        """Return the strides of an expression along the loops over tiles and steps; None if it is not linear in them.

        Loops of one iteration are left out, whether or not the expression mentions them.
        """
        parts = linear(e, [p.var for p in (*self.outer, self.target) if p.var in free_vars(e)])
        single = {p.var for p in (*self.outer, self.target) if as_int(p.extent) == 1}
        return None if parts is None else {v: times for v, times in parts[0].items() if v not in single}

    def _tile_buffer(self, b: Block) -> _TileBuffer | None:
        """Return a buffer for the block's results of single tiles, piece after piece along an undivided dimension.

        None unless all readers move like the block.
        """
        made = b.body.buffer
        spots = [(r, x.indices) for r in readers(self.func, made) for x in block_loads(r) if x.buffer is made]
        cut: tuple[int, Expr] | None = None
        for d, e in enumerate(b.body.indices):
            bound = block_value(b, e) if isinstance(e, Var) else None
            own = None if bound is None else self._outer_strides(bound)
            found = [self._outer_strides(block_value(r, where[d])) for r, where in spots]
            if bound is None or own is None or not all(_same_strides(own, other) for other in found):
                return None
            size = self._step_extent(b, bound)
            disjoint = size is not None and all(prove(le(size, times)) is Proof.YES for times in own.values())
            if cut is None and size is not None and disjoint and self.target.var not in free_vars(bound):
                cut = d, size
        if cut is None or any(linear(e, [i.var for i in r.iters]) is None for r, where in spots for e in where):
            return None
        d, each = cut
        shape = (*made.shape[:d], mul(self.work.max_tiles_per_worker, each), *made.shape[d + 1 :])
        return _TileBuffer(replace(made, shape=shape), d, each)

    def _step_extent(self, b: Block, bound: Expr) -> Expr | None:
        """Return the extent that one step of a tile covers in a dimension; None unless it starts where the outer loops say."""
        rest = simplify(substitute(bound, {p.var: const(0) for p in (*self.outer, self.target)}))
        inner = {p.var: p.extent for p in enclosing(self.func, b) if p.var in free_vars(rest)}
        parts = linear(rest, tuple(inner))
        return extent_of(rest, inner) if parts is not None and prove_equal(parts[1], 0) is Proof.YES else None

    def _block_of_tile(
        self, b: Block, kept: Mapping[Buffer, _TileBuffer], begin: Mapping[Var, Expr], piece: Var, step: Var
    ) -> Block:
        """Rewrite a block of a tile: its iterators count from the start of the tile and its steps, which new iterators hold.

        kept: buffers that are shrunk to a tile
        """
        lead: dict[Var, IterVar] = {}
        values: dict[Var, Expr] = {}
        iters, bindings = list[IterVar](), list[Expr]()
        extents = {p.var: p.extent for p in (*self.outer, self.target)}
        here: dict[Var, Expr] = {**{v: const(0) for v in begin}, self.target.var: step}
        to = kept.get(b.body.buffer)
        sizes = {} if to is None or to.dim is not None else dict(zip(b.body.indices, to.buffer.shape, strict=True))
        for i, bound in zip(b.iters, b.bindings, strict=True):
            chosen = self._outer_strides(bound)
            if chosen is None:
                raise ScheduleError(
                    f"{self.func.name}: stream_k wants sums of multiples of loops in {b.name!r}, found {bound!r}"
                )
            iters.append(replace(i, extent=sizes.get(i.var, i.extent)))
            bindings.append(simplify(substitute(bound, here)))
            for v, times in chosen.items():
                lead.setdefault(v, IterVar(Var(f"v{v.name}"), extents[v]))
                values[i.var] = mul(lead[v].var, times) + values.get(i.var, i.var)

        turn = IterVar(Var(f"v{piece.name}"), self.work.max_tiles_per_worker)

        def placed(e: Expr) -> Expr | None:
            if isinstance(e, Load) and e.buffer in kept:
                return load(kept[e.buffer].buffer, kept[e.buffer].at(e.indices, turn.var))
            return values.get(e) if isinstance(e, Var) else None

        value = replaced(b.body.value, placed)
        where = tuple(replaced(e, placed) for e in b.body.indices) if to is None else to.at(b.body.indices, turn.var)
        used = set(free_vars(value, *where))
        places = [(i, e) for i, e in [*((i, begin[v]) for v, i in lead.items()), (turn, piece)] if i.var in used]
        return replace(
            b,
            iters=(*iters, *(i for i, _ in places)),
            bindings=(*bindings, *(e for _, e in places)),
            body=BufferStore(b.body.buffer if to is None else to.buffer, where, value),
            predicate=and_(*(c for c in conjuncts(b.predicate) if not self._follows_from_reduction(b, c))),
        )

    def _follows_from_reduction(self, b: Block, condition: Expr) -> bool:
        """Return whether a bound of a block is also a bound of the reduction, which has no condition."""
        node = next(x for x in blocks(self.target) if x.body.buffer is _sums_read(self.copy).buffer)
        for i, bound in zip(b.iters, b.bindings):
            if condition is lt(bound, i.extent):
                mine = self._dense_tiling(b, bound)
                others = [(j.extent, self._dense_tiling(node, e)) for j, e in zip(node.iters, node.bindings)]
                return mine is not None and any(
                    theirs is not None
                    and theirs[0] is mine[0]
                    and prove_equal(theirs[1], mine[1]) is Proof.YES
                    and prove_equal(extent, i.extent) is Proof.YES
                    for extent, theirs in others
                )
        return False

    def _dense_tiling(self, b: Block, bound: Expr) -> tuple[Var, Expr] | None:
        """Return the loop that selects a part of a binding, and the parts' size; None unless the parts are adjacent."""
        chosen = self._outer_strides(bound)
        if chosen is None or len(chosen) != 1:
            return None
        ((v, times),) = chosen.items()
        size = self._step_extent(b, bound)
        return (v, times) if size is not None and prove_equal(size, times) is Proof.YES else None

    def _partial_sums(self, copy: Block, small: Buffer, parts: Buffer, loops: tuple[Var, Var], count: Expr) -> Block:
        """Return the block that stores a piece's partial sums.

        It runs where the piece has steps, and for the first piece of a worker without any.
        """
        lead = tuple(IterVar(Var(f"v{v.name}"), x) for v, x in zip(loops, parts.shape))
        first: dict[Var, Expr] = {p.var: const(0) for p in self.outer}
        sizes = dict(zip(_sums_read(copy).indices, small.shape, strict=True))
        return replace(
            copy,
            iters=(*lead, *(replace(i, extent=sizes[i.var]) for i in copy.iters)),
            bindings=(*loops, *(simplify(substitute(b, first)) for b in copy.bindings)),
            body=BufferStore(
                parts, (*(i.var for i in lead), *copy.body.indices), load(small, _sums_read(copy).indices)
            ),
            predicate=or_(lt(loops[1], 1), lt(0, count)),
        )

    def _fixup_nest(self, name: Callable[[str], str], parts: Buffer, operation: str, first: Expr) -> Stmt:
        """Return the nest that adds up the partial sums of the workers of each tile ("fix-up" in the paper)."""
        copy, work = self.copy, self.work
        old, block = copy.body.buffer, name(f"{copy.name}_sum")
        extents = {i.var: i.extent for i in copy.iters}
        at = [e for e in copy.body.indices if isinstance(e, Var)]
        loops = [Var(name(f"{block}_{letter}")) for letter in "ijlpqst"[: len(at)]]
        own = [Var(v.name) for v in at]
        vr, r = Var("vr"), Var(name(f"{block}_r"))

        def tile(elements: Sequence[Var]) -> Expr:
            digits = {
                self.tilings[v].loop: floordiv(e, self.tilings[v].size) for v, e in zip(at, elements, strict=True)
            }
            number: Expr = const(0)
            for p in self.outer:
                number = mul(number, p.extent) + digits.get(p.var, const(0))
            return number

        worker = work.workers_before(mul(tile(own), work.steps) + 1) - 1 + vr
        piece = tile(own) - work.tile_of(worker, const(0))
        inside = [v if self.tilings[u].loop is None else floormod(v, self.tilings[u].size) for u, v in zip(at, own)]
        value = op(operation, (load(old, own), load(parts, (worker, piece, *inside))), old.dtype)
        # no workers without steps: the initial value is stored then
        most = minimum(work.workers, mul(work.total, work.workers))
        made: Stmt = Block(
            block,
            (*(IterVar(v, extents[u]) for u, v in zip(at, own)), IterVar(vr, most, "reduce")),
            (*loops, r),
            BufferStore(old, tuple(own), value),
            BufferStore(old, tuple(own), first),
        )
        before, end = mul(tile(loops), work.steps) + 1, mul(tile(loops) + 1, work.steps)
        made = For(r, work.workers_before(end) - work.workers_before(before) + 1, made)
        for u, v in reversed(list(zip(at, loops))):
            made = For(v, extents[u], made)
        return made
