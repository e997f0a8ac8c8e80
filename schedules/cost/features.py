"""Closed-form features of a sketch over (shapes, tunables), the input of the cost model.

Each feature is a ratio of two integer expressions, read off the scheduled loop nest with its tunables still free. All are
compiled once per sketch and evaluated for every candidate and shape at once. No program is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.arith.linear import extents_within, linear
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, as_int, ceildiv, const, free_vars, maximum, minimum, mul, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, blocks
from relax_tune.schedules.cost.gpu_features import gpu_features
from relax_tune.schedules.cost.vectorized import Array, compile_numpy
from relax_tune.schedules.loop_tree import block_loads, block_value, enclosing, loop_env
from relax_tune.schedules.mean_extents import uneven_blocks, with_mean_extents
from relax_tune.schedules.sketch import Sketch
from relax_tune.schedules.target import HardwareInfo

OPERANDS = 3
# Rows evaluated at a time: their features at a few shapes stay in the second-level cache.
CHUNK_ROWS = 1024
ONE = const(1)


@dataclass(frozen=True, slots=True)
class Feature:
    """`numerator / denominator`, as log2(1 + x) when `log`."""

    name: str
    numerator: Expr
    denominator: Expr = ONE
    log: bool = True


class FeatureFunction:
    """The features of one sketch as a vectorised function."""

    def __init__(self, sketch: Sketch, hardware: HardwareInfo) -> None:
        self.tunables = sketch.tunables
        self.features = sketch_features(sketch.func, hardware)
        exprs = [e for f in self.features for e in (f.numerator, f.denominator)]
        self._run, self.variables = compile_numpy(exprs)
        # a GPU's workers are its multiprocessors, not threads of this process
        self._threads = 2 if hardware.is_gpu else hardware.workers

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.features)

    def __call__(
        self, tunables: Mapping[str, NDArray[np.int64]], shapes: Mapping[str, NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        """Evaluate the features for tunables (R,) and shapes (S,): (R, S, F) float32."""
        rows = len(next(iter(tunables.values()))) if tunables else 1
        points = len(next(iter(shapes.values()))) if shapes else 1
        out = np.empty((rows, points, len(self.features)), np.float32)
        fixed = {n: np.asarray(a, np.float64).reshape(1, -1) for n, a in shapes.items()}
        starts = range(0, rows, CHUNK_ROWS)

        def chunk(start: int) -> None:
            part = slice(start, start + CHUNK_ROWS)
            columns = {n: np.asarray(a[part], np.float64).reshape(-1, 1) for n, a in tunables.items()}
            self._chunk(columns | fixed, out[part])

        if len(starts) == 1:
            chunk(0)
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(chunk, starts))
        return out

    def _chunk(self, columns: Mapping[str, Array], out: NDArray[np.float32]) -> None:
        """Fill `out` (r, S, F): logarithms are taken before broadcasting, and in float32."""
        values = self._run(columns)
        plane = np.empty((len(self.features), *out.shape[:2]), np.float32)
        for a, f in enumerate(self.features):
            # A count of 0 in the denominator gives a large number, not NaN, which trees take for a missing feature.
            x = np.asarray(values[2 * a] / np.maximum(values[2 * a + 1], 1e-9), np.float32)
            plane[a] = np.log2(1 + np.maximum(x, 0)) if f.log else x
        out[...] = plane.transpose(1, 2, 0)


def _product(parts: Sequence[Expr]) -> Expr:
    total: Expr = ONE
    for p in parts:
        total = mul(total, p)
    return total


def _operations(block: Block) -> int:
    """Count the scalar operations of a point; transcendentals weigh 10."""
    return max(1, sum(10 if n.op in ("exp", "erf", "tanh", "log") else 1 for n in _float_ops(block)))


def _float_ops(block: Block) -> list[Expr]:
    return [n for n in postorder((block.body.value,)) if n.op and n.dtype.is_float]


def _main(func: PrimFunc) -> Block:
    """Return the block with the most loops around it; among equals a reduction, then the later block."""
    compute = [b for b in blocks(func.body) if b.role == "compute"]
    return max(compute, key=lambda b: (len(enclosing(func, b)), b.is_reduction, compute.index(b)))


@dataclass(frozen=True)
class _Access:
    buffer: Buffer
    indices: tuple[Expr, ...]


def _accesses(func: PrimFunc, block: Block) -> list[_Access]:
    env = loop_env(enclosing(func, block))
    spots = [(block.body.buffer, block.body.indices), *((x.buffer, x.indices) for x in block_loads(block))]
    accesses: dict[tuple[int, tuple[Expr, ...]], _Access] = {}
    for buffer, indices in spots:
        where = tuple(simplify(block_value(block, i), env) for i in indices)
        accesses.setdefault((id(buffer), where), _Access(buffer, where))
    return list(accesses.values())


# The loops of a tile (the innermost serial one and below), of a worker, and all around the main block.
_Levels = tuple[Sequence[For], Sequence[For], Sequence[For]]
_Footprints = Mapping[_Access, tuple[Expr, ...]]


def _footprints(access: _Access, levels: _Levels) -> tuple[Expr, ...]:
    """Return the bytes that an access touches while the loops of each level run."""
    totals: list[Expr] = [const(access.buffer.dtype.bytes)] * len(levels)
    for e, dim in zip(access.indices, access.buffer.shape):
        free = free_vars(e)
        varying = [{p.var: p.extent for p in inner if p.var in free} for inner in levels]
        covered = extents_within(e, varying, dim) if any(varying) else []
        totals = [mul(t, c) if ranges else t for t, c, ranges in zip(totals, covered or totals, varying)]
    return tuple(totals)


def _stride(access: _Access, var: Var | None) -> Expr:
    """Return the elements between neighbours along `var`; 0 when `var` does not move the access."""
    if var is None:
        return const(0)
    total: Expr = const(0)
    scale: Expr = ONE
    for e, dim in zip(reversed(access.indices), reversed(access.buffer.shape)):
        if var in free_vars(e):
            parts = linear(e, (var,))
            # an index that is not linear counts as a long stride: 64 is the largest stride that the feature shows
            total = total + mul(scale, const(64) if parts is None else parts[0].get(var, const(0)))
        scale = mul(scale, dim)
    return simplify(total)


def sketch_features(func: PrimFunc, hardware: HardwareInfo) -> tuple[Feature, ...]:
    """Return the features: the same names in the same order for every sketch on one kind of hardware."""
    uneven = uneven_blocks(func)
    func = with_mean_extents(func)
    main = _main(func)
    path = enclosing(func, main)

    def points_of(b: Block) -> Expr:
        """Count the points of a block: of its iterators, or of its loops if these have differing lengths."""
        return _product([p.extent for p in enclosing(func, b)] if b.name in uneven else [i.extent for i in b.iters])

    compute = [b for b in blocks(func.body) if b.role == "compute"]
    spread = [p for p in path if p.kind in ("parallel", "group", "item")]
    within = [p for p in path if p not in spread]
    serial = [p for p in within if p.kind == "serial"]
    points = _product([p.extent for p in path])
    useful = points_of(main)
    parallel = _product([p.extent for p in spread])
    workers = const(hardware.workers)
    reach = _accesses(func, main)
    reads = [a for a in reach if a.buffer is not main.body.buffer][:OPERANDS]
    tile = (serial and path[path.index(serial[-1]) :]) or path
    touched = {a: _footprints(a, (tile, within, path)) for a in reach}
    flops = _sum([mul(const(_operations(b)), points_of(b)) for b in compute])
    bytes_moved = _sum([_param_bytes(b) for b in func.buffers])
    others = [b for b in compute if b is not main]
    other_points = _sum([mul(const(_operations(b)), _product([p.extent for p in enclosing(func, b)])) for b in others])
    scalar_others = _sum(
        [_product([p.extent for p in enclosing(func, b)]) for b in others if not _vector_of(enclosing(func, b))]
    )
    out = [
        Feature("flops", flops),
        Feature("bytes", bytes_moved),
        Feature("intensity", flops, bytes_moved),
        Feature("points", points),
        Feature("padding", points, useful),
        Feature("parallel", parallel),
        Feature("waves", ceildiv(parallel, workers)),
        Feature("wave_use", parallel, mul(ceildiv(parallel, workers), workers), log=False),
        Feature("work_each", points, parallel),
        Feature("flops_each", flops, parallel),
        *_register_tile_features(path, hardware),
        Feature("inner_trip", serial[-1].extent if serial else ONE),
        Feature("outer_trip", _product([p.extent for p in serial[:-1]])),
        Feature("trip_each", _product([p.extent for p in serial])),
        *_footprint_features(touched, (tile, within, path), hardware, parallel),
        Feature("other_work", other_points),
        Feature("scalar_work", scalar_others),
        Feature("tail_pow2", const(sum(p.tail == "pow2" for p in path)), log=False),
        Feature("tail_peel", const(sum(p.tail == "peel" for p in path)), log=False),
        Feature("guarded", const(sum(_is_guarded(b) for b in compute)), log=False),
        Feature("prepared", const(sum(b.role == "prepack" for b in blocks(func.body))), log=False),
        Feature("blocks", const(len(compute)), log=False),
        Feature("scratch", _sum([_param_bytes(a) for a in func.allocs if a.scope == "global"])),
    ]
    out += _operand_features(reads, touched, path)
    if hardware.is_gpu:
        out += [Feature(*f) for f in gpu_features(func, main, hardware)]
    return tuple(out)


def _register_tile_features(path: Sequence[For], hardware: HardwareInfo) -> list[Feature]:
    """Return the features of the register tile: the vectorized loop by the unrolled ones."""
    vector = _vector_of(path)
    width = vector.extent if vector else ONE
    vectors = ceildiv(width, hardware.lanes)
    tile_rows = _product([p.extent for p in path if p.kind == "unrolled"])
    return [
        Feature("vector", width),
        Feature("vectors", vectors),
        Feature("lane_use", width, mul(vectors, hardware.lanes), log=False),
        Feature("tile_rows", tile_rows),
        Feature("registers", mul(vectors, tile_rows)),
        Feature("register_use", mul(vectors, tile_rows) + vectors + 1, const(hardware.registers)),
        Feature("loads_per_point", tile_rows + vectors, mul(tile_rows, vectors)),
    ]


def _footprint_features(touched: _Footprints, levels: _Levels, hardware: HardwareInfo, parallel: Expr) -> list[Feature]:
    """Return the features that relate footprints of tile, worker and nest to the caches."""
    _, within, path = levels
    per_tile, per_worker, everything = (_sum(of_level) for of_level in zip(*touched.values(), strict=True))
    return [
        Feature("tile_bytes", per_tile),
        Feature("tile_l1", per_tile, const(hardware.l1_bytes)),
        Feature("worker_bytes", per_worker),
        Feature("worker_l2", per_worker, const(hardware.l2_bytes)),
        Feature("all_bytes", everything),
        Feature("all_l3", everything, const(hardware.l3_bytes)),
        Feature("reuse", _product([p.extent for p in path]), everything),
        Feature("worker_reuse", _product([p.extent for p in within]), per_worker),
        Feature("traffic", mul(parallel, per_worker)),
    ]


def _operand_features(reads: Sequence[_Access], touched: _Footprints, path: Sequence[For]) -> list[Feature]:
    """Return stride and footprints of each of the first operands; zeros for missing ones."""
    vector, out = _vector_of(path), list[Feature]()
    for number in range(OPERANDS):
        access = reads[number] if number < len(reads) else None
        stride = _stride(access, vector.var if vector else None) if access else const(0)
        out.append(Feature(f"stride{number}", minimum(maximum(stride, 0), 64)))
        footprints = touched[access] if access else (const(0), const(0), const(0))
        out += [
            Feature(f"{level}{number}", f) for level, f in zip(("tile", "worker", "whole"), footprints, strict=True)
        ]
    return out


def _sum(parts: Sequence[Expr]) -> Expr:
    total: Expr = const(0)
    for p in parts:
        total = total + p
    return total


def _param_bytes(buffer: Buffer) -> Expr:
    return mul(const(buffer.dtype.bytes), _product(buffer.shape))


def _vector_of(path: Sequence[For]) -> For | None:
    return next((p for p in path if p.kind == "vectorized"), None)


def _is_guarded(block: Block) -> bool:
    return as_int(block.predicate) is None and bool(free_vars(block.predicate))
