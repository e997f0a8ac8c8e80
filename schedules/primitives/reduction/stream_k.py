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
    conjuncts,
    const,
    floordiv,
    floormod,
    free_vars,
    le,
    load,
    loads,
    lt,
    minimum,
    mul,
    op,
    or_,
    replaced,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Seq, Stmt, blocks, map_blocks, seq
from relax_tune.ir.deduce.pattern_kinds import starts_neutral
from relax_tune.schedules.loop_tree import (
    block_loads,
    block_value,
    enclosing,
    find_block,
    find_loop,
    fresh,
    readers,
    rebind,
    replace_node,
    require_compute_block,
)
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.primitives.loops.loops import require_serial
from relax_tune.schedules.primitives.reduction.reductions import combiner, decompose_reduction
from relax_tune.schedules.primitives.reduction.stream_k_tiles import (
    DimTiling,
    WorkRanges,
    dim_tilings,
    require_private_to_step,
    sums_read,
    write_back_block,
)
from relax_tune.schedules.symbols import variables_of


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
    count = positive(func, f"stream_k({block!r})", workers, node)
    operation, term = combiner(node)
    reads_no_sums = all(x.buffer is not node.body.buffer for x in loads(term))
    # A worker starts its piece of a tile from the initial value, so a value that counts would be added once for each
    # piece.
    if not starts_neutral(node) or not reads_no_sums or node.predicate is not TRUE:
        raise ScheduleError(
            f"{func.name}: stream_k expects {block!r} to combine elements of other buffers, under no condition and from an initial value "
            f"that may be combined more than once"
        )
    outer = tuple(find_loop(func, t) for t in tiles)
    copy = write_back_block(func, node, outer, target)
    for p in (*outer, target):
        require_serial(func, p, "stream_k")
    require_compute_block(func, "stream_k", *blocks(outer[0]))
    tilings = dim_tilings(func, copy, outer)
    require_private_to_step(func, node, copy, outer[-1], target, tilings)
    decomposed = decompose_reduction(func, block, steps)
    work = WorkRanges(reduce(mul, (p.extent for p in outer)), target.extent, count)
    assert node.init is not None
    return _Rewrite(
        decomposed, copy, tuple(find_loop(decomposed, t) for t in tiles), find_loop(decomposed, steps), tilings, work
    ).run(operation, node.init.value)


@dataclass(frozen=True, slots=True)
class _TileBuffer:
    """A buffer for one tile, or for consecutive pieces along a dimension.

    Attributes:
        dim, size: The dimension in which pieces follow each other (None: one tile), and the elements of a piece.
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

    Attributes:
        copy: The write-back block.
        outer, target: The loops over tiles and steps.
        tilings: The tiling of each iterator of `copy`.
    """

    func: PrimFunc
    copy: Block
    outer: Sequence[For]
    target: For
    tilings: Mapping[Var, DimTiling]
    work: WorkRanges

    def run(self, operation: str, first: Expr) -> PrimFunc:
        """Return the function with the workers' nest and the fix-up nest."""
        func, work, names = self.func, self.work, list[str]()

        def name(hint: str) -> str:
            names.append(fresh(func, hint, names))
            return names[-1]

        worker, piece, step = (Var(name(f"{self.target.var.name}_{x}")) for x in ("worker", "piece", "step"))
        count = work.step_count(worker, piece)
        places = self._tile_indices(work.tile_of(worker, piece))
        begin = {**places, self.target.var: work.first_step(worker, piece)}
        old, source = self.copy.body.buffer, sums_read(self.copy)
        small = replace(source.buffer, name=name(f"{source.buffer.name}_tile"), shape=self._tile_shape(source))
        sizes = dict(zip(source.indices, small.shape, strict=True))
        shape = (work.workers, work.max_tiles_per_worker, *(sizes[e] for e in self.copy.body.indices))
        parts = Buffer(name(f"{old.name}_parts"), shape, old.dtype)

        # Results of a step that move with the tiles need room for one tile only; all others keep their buffers.
        producers = {b.body.buffer: b for b in blocks(self.target) if b.body.buffer is not source.buffer}
        tile_buffers = {source.buffer: _TileBuffer(small, None, const(0))}
        tile_buffers |= {
            buffer: tile_buffer for buffer, b in producers.items() if (tile_buffer := self._tile_buffer(b)) is not None
        }

        def moved(b: Block) -> Block:
            if b is self.copy:
                return self._partial_sums(b, small, parts, (worker, piece), count)
            return self._block_of_tile(b, tile_buffers, begin, piece, step)

        whole = self.outer[-1].body
        assert isinstance(whole, Seq)
        values = {**places, self.target.var: begin[self.target.var] + step}
        stmts: list[Stmt] = []
        for s in whole.stmts:
            rebound = rebind(map_blocks(s, moved), values)
            stmts.append(
                replace(rebound, var=step, extent=count) if s is self.target and isinstance(rebound, For) else rebound
            )
        nest = For(worker, work.workers, For(piece, work.max_tiles_per_worker, seq(*stmts)))
        body = replace_node(func.body, self.outer[0], seq(nest, self._fixup_nest(name, parts, operation, first)))
        allocs = tuple(tile_buffers[a].buffer if a in tile_buffers else a for a in func.allocs)
        return replace(func, body=body, allocs=(*allocs, parts))

    def _tile_shape(self, access: Load) -> tuple[Expr, ...]:
        """Return the extents of a tile of a buffer."""
        tilings = [self._tiling(e) for e in access.indices]
        return tuple(d if c.loop is None else c.size for c, d in zip(tilings, access.buffer.shape, strict=True))

    def _tiling(self, e: Expr) -> DimTiling:
        assert isinstance(e, Var)
        return self.tilings[e]

    def _tile_indices(self, tile: Expr) -> dict[Var, Expr]:
        """Return the values of the tile loops' variables for a tile's number."""
        indices: dict[Var, Expr] = {}
        for p in reversed(self.outer):
            indices[p.var] = floormod(tile, p.extent)
            tile = floordiv(tile, p.extent)
        return indices

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
        buffer = b.body.buffer
        spots = [(r, x.indices) for r in readers(self.func, buffer) for x in block_loads(r) if x.buffer is buffer]
        cut: tuple[int, Expr] | None = None
        for d, e in enumerate(b.body.indices):
            bound = block_value(b, e) if isinstance(e, Var) else None
            stored_strides = None if bound is None else self._outer_strides(bound)
            strides = [self._outer_strides(block_value(r, where[d])) for r, where in spots]
            if (
                bound is None
                or stored_strides is None
                or not all(_same_strides(stored_strides, other) for other in strides)
            ):
                return None
            # parts of consecutive tiles may share the buffer only if they do not overlap in it
            size = self._step_extent(b, bound)
            disjoint = size is not None and all(
                prove(le(size, times)) is Proof.YES for times in stored_strides.values()
            )
            # A dimension that moves with the steps is no piece of a tile: its elements follow each other in time.
            if cut is None and size is not None and disjoint and self.target.var not in free_vars(bound):
                cut = d, size
        if cut is None or any(linear(e, [i.var for i in r.iters]) is None for r, where in spots for e in where):
            return None
        d, each = cut
        shape = (*buffer.shape[:d], mul(self.work.max_tiles_per_worker, each), *buffer.shape[d + 1 :])
        return _TileBuffer(replace(buffer, shape=shape), d, each)

    def _step_extent(self, b: Block, bound: Expr) -> Expr | None:
        """Return the extent of one step of a tile in a dimension; None unless its start follows from the outer loops."""
        rest = simplify(substitute(bound, {p.var: const(0) for p in (*self.outer, self.target)}))
        inner = {p.var: p.extent for p in enclosing(self.func, b) if p.var in free_vars(rest)}
        parts = linear(rest, tuple(inner))
        return extent_of(rest, inner) if parts is not None and prove_equal(parts[1], 0) is Proof.YES else None

    def _block_of_tile(
        self, b: Block, tile_buffers: Mapping[Buffer, _TileBuffer], begin: Mapping[Var, Expr], piece: Var, step: Var
    ) -> Block:
        """Rewrite a block of a tile: its iterators count from the start of the tile and its steps, which new iterators hold.

        Args:
            tile_buffers: Buffers that are shrunk to a tile.
        """
        lead: dict[Var, IterVar] = {}
        values: dict[Var, Expr] = {}
        iters, bindings = list[IterVar](), list[Expr]()
        extents = {p.var: p.extent for p in (*self.outer, self.target)}
        in_tile: dict[Var, Expr] = {**{v: const(0) for v in begin}, self.target.var: step}
        to = tile_buffers.get(b.body.buffer)
        sizes = {} if to is None or to.dim is not None else dict(zip(b.body.indices, to.buffer.shape, strict=True))
        for i, bound in zip(b.iters, b.bindings, strict=True):
            chosen = self._outer_strides(bound)
            if chosen is None:
                raise ScheduleError(
                    f"{self.func.name}: stream_k expects sums of multiples of loops in {b.name!r}, got {bound!r}"
                )
            iters.append(replace(i, extent=sizes.get(i.var, i.extent)))
            bindings.append(simplify(substitute(bound, in_tile)))
            for v, times in chosen.items():
                lead.setdefault(v, IterVar(Var(f"v{v.name}"), extents[v]))
                values[i.var] = mul(lead[v].var, times) + values.get(i.var, i.var)

        turn = IterVar(Var(f"v{piece.name}"), self.work.max_tiles_per_worker)

        def placed(e: Expr) -> Expr | None:
            if isinstance(e, Load) and e.buffer in tile_buffers:
                return load(tile_buffers[e.buffer].buffer, tile_buffers[e.buffer].at(e.indices, turn.var))
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
        node = next(x for x in blocks(self.target) if x.body.buffer is sums_read(self.copy).buffer)
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
        sizes = dict(zip(sums_read(copy).indices, small.shape, strict=True))
        return replace(
            copy,
            iters=(*lead, *(replace(i, extent=sizes[i.var]) for i in copy.iters)),
            bindings=(*loops, *(simplify(substitute(b, first)) for b in copy.bindings)),
            body=BufferStore(parts, (*(i.var for i in lead), *copy.body.indices), load(small, sums_read(copy).indices)),
            # Piece 0 is stored even without steps, since the fix-up reads the first piece of each worker that it
            # visits.
            predicate=or_(lt(loops[1], 1), lt(0, count)),
        )

    def _fixup_nest(self, name: Callable[[str], str], parts: Buffer, operation: str, first: Expr) -> Stmt:
        """Return the nest that adds up the partial sums of the workers of each tile ("fix-up" in the paper)."""
        copy, work = self.copy, self.work
        old, block = copy.body.buffer, name(f"{copy.name}_sum")
        extents = {i.var: i.extent for i in copy.iters}
        at = list(variables_of(copy.body.indices))
        loops = [Var(name(f"{block}_{letter}")) for letter in "ijlpqst"[: len(at)]]
        dims = [Var(v.name) for v in at]
        vr, r = Var("vr"), Var(name(f"{block}_r"))

        def tile(elements: Sequence[Var]) -> Expr:
            digits = {
                self.tilings[v].loop: floordiv(e, self.tilings[v].size) for v, e in zip(at, elements, strict=True)
            }
            number: Expr = const(0)
            for p in self.outer:
                number = mul(number, p.extent) + digits.get(p.var, const(0))
            return number

        # The first worker of a tile is the last one whose range starts before or at the first step of the tile.
        worker = work.workers_before(mul(tile(dims), work.steps) + 1) - 1 + vr
        piece = tile(dims) - work.tile_of(worker, const(0))
        inside = [v if self.tilings[u].loop is None else floormod(v, self.tilings[u].size) for u, v in zip(at, dims)]
        value = op(operation, (load(old, dims), load(parts, (worker, piece, *inside))), old.dtype)
        # no workers without steps: the initial value is stored then
        most = minimum(work.workers, mul(work.total, work.workers))
        sums: Stmt = Block(
            block,
            (*(IterVar(v, extents[u]) for u, v in zip(at, dims)), IterVar(vr, most, "reduce")),
            (*loops, r),
            BufferStore(old, tuple(dims), value),
            BufferStore(old, tuple(dims), first),
        )
        before, end = mul(tile(loops), work.steps) + 1, mul(tile(loops) + 1, work.steps)
        sums = For(r, work.workers_before(end) - work.workers_before(before) + 1, sums)
        for u, v in reversed(list(zip(at, loops))):
            sums = For(v, extents[u], sums)
        return sums
