"""Random schedule steps: any primitive with arguments that at least name things of the function."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from relax_tune.ir.core.expr import Expr, Tunable, const, free_vars, maximum, minimum
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, Seq, blocks, loops
from relax_tune.ir.hardware.intrinsics import INTRINSICS
from relax_tune.schedules.loop_tree import enclosing, find_block, find_loop, readers
from relax_tune.schedules.schedule import PRIMITIVES

Step = tuple[str, dict[str, Any]]
TUNABLES = (Tunable("T0", (1, 2, 3, 5)), Tunable("T1", (2, 4)))
KINDS = ("serial", "parallel", "vectorized", "unrolled", "group", "item")
TAILS = ("predicate", "peel", "pow2", "exact", "narrow")
# a step that changes the nest gets more turns than one that only marks it
WEIGHTS = {"split": 4, "fuse": 3, "reorder": 3, "compute_at": 4, "reverse_compute_at": 4, "set_tail": 0.5, "rfactor": 3}


def random_step(func: PrimFunc, rng: random.Random) -> Step:
    """One step whose arguments exist in `func`; whether it is legal is for the primitive to say."""
    names = list(PRIMITIVES)
    primitive = rng.choices(names, [WEIGHTS.get(n, 1) for n in names])[0]
    return primitive, _ARGUMENTS[primitive](_View(func, rng))


class _View:
    """The names of a function, with a source of randomness."""

    def __init__(self, func: PrimFunc, rng: random.Random) -> None:
        self.func, self.rng = func, rng
        self.loops = [x.var.name for x in loops(func.body)] or ["none"]
        self.blocks = [b.name for b in blocks(func.body)]
        self.allocs = [b.name for b in func.allocs] or ["none"]
        self.buffers = [b.name for b in (*func.buffers, *func.allocs)]

    def loop(self) -> str:
        return self.rng.choice(self.loops)

    def block(self) -> str:
        return self.rng.choice(self.blocks)

    def alloc(self) -> str:
        return self.rng.choice(self.allocs)

    def nest(self) -> list[str]:
        """The loops of one block, outermost first."""
        name = self.block()
        node = next(b for b in blocks(self.func.body) if b.name == name)
        return [x.var.name for x in enclosing(self.func, node)]

    def around(self, name: str) -> str:
        """A loop, mostly one of the block's own."""
        node: Block = next(b for b in blocks(self.func.body) if b.name == name)
        own = [x.var.name for x in enclosing(self.func, node)]
        return self.rng.choice(own) if own and self.rng.random() < 0.8 else self.loop()

    def own(self, name: str, count: int = 0) -> list[str]:
        """Neighbouring loops around a block."""
        node: Block = next(b for b in blocks(self.func.body) if b.name == name)
        names = [x.var.name for x in enclosing(self.func, node)]
        start = self.rng.randrange(len(names) + 1)
        return names[start : start + (count or self.rng.choice([2, 2, 3]))]

    def factor(self) -> Any:
        """Mostly a number or a tunable; else an expression with shape symbols and tunables, which may be zero."""
        if self.rng.random() < 0.75:
            return self.rng.choice([1, 2, 3, 4, 7, *TUNABLES])
        size: Expr = self.rng.choice([*self.func.symbols, TUNABLES[0]])
        by = self.rng.choice([2, 3, 4, *TUNABLES])
        return self.rng.choice(
            [size // by + 1, maximum(size, 1), size % by + 1, minimum(size, by) + 1, size * by, size + by]
        )

    def cut(self, loop: str) -> Any:
        """A place to cut a loop, mostly one inside."""
        extent = find_loop(self.func, loop).extent if loop in self.loops else const(7)
        by = self.rng.choice([2, 3, 4, *TUNABLES])
        known = {*self.func.symbols, *TUNABLES}
        size = extent if known.issuperset(free_vars(extent)) else self.rng.choice([*self.func.symbols, TUNABLES[0]])
        return self.rng.choice(
            [size - size % by, size // 2, minimum(size, by), size - minimum(size, by), size, size // by + 1]
        )


def _split(v: _View) -> dict[str, Any]:
    factors = [v.factor() for _ in range(v.rng.choice([1, 1, 2]))]
    factors.insert(v.rng.randrange(len(factors) + 1), None)
    return {"loop": v.loop(), "factors": factors, "divides": False}


def _partition(v: _View) -> dict[str, Any]:
    loop = v.loop()
    return {"loop": loop, "factor": v.factor()} if v.rng.random() < 0.5 else {"loop": loop, "at": v.cut(loop)}


def _fuse(v: _View) -> dict[str, Any]:
    nest = v.nest()
    start = v.rng.randrange(len(nest) + 1)
    return {"names": nest[start : start + v.rng.choice([2, 2, 3])]}


def _reorder(v: _View) -> dict[str, Any]:
    nest = v.nest()
    return {"names": v.rng.sample(nest, min(len(nest), v.rng.choice([2, 3, 9])))}


def _at(v: _View) -> dict[str, Any]:
    """A block and a loop, mostly one around a reader of what the block makes."""
    block = v.block()
    buffer = find_block(v.func, block).body.buffer
    near = [x.var.name for b in readers(v.func, buffer) if b.name != block for x in enclosing(v.func, b)]
    return {"block": block, "loop": v.rng.choice(near) if near and v.rng.random() < 0.6 else v.loop()}


def _siblings(v: _View) -> dict[str, Any]:
    """A block and a loop that holds its nest and more, where there is one."""
    siblings = [
        (b.name, x.var.name)
        for x in loops(v.func.body)
        if isinstance(x.body, Seq)
        for part in x.body.stmts
        for b in blocks(part)
    ]
    block, loop = v.rng.choice(siblings or [(v.block(), v.loop())])
    return {"block": block, "loop": loop}


def _reduction(v: _View) -> dict[str, Any]:
    block = v.block()
    return {"block": block, "loop": v.around(block)}


def _tile_layout(v: _View) -> dict[str, Any]:
    order = list(range(v.rng.choice([2, 3, 3, 4])))
    v.rng.shuffle(order)
    return {"buffer": v.alloc(), "dim": v.rng.randrange(3), "factor": v.factor(), "order": order}


def _permute_layout(v: _View) -> dict[str, Any]:
    order = list(range(v.rng.choice([1, 2, 2, 3])))
    v.rng.shuffle(order)
    return {"buffer": v.alloc(), "order": order}


MAPS = ("i -> i // f0, i % f0", "i -> i", "i, j -> i * n1 + j", "i, j -> j // f0, i, j % f0", "i, j -> j * n0 + i",
        "i, j, k -> i, k // f0, j * f0 + k % f0", "i, j, k -> i * n1 + j, k", "i, j -> i // f0 * n1 + j, i % f0")  # fmt: skip


def _pad(v: _View) -> dict[str, Any]:
    name = v.block()
    node = next(b for b in blocks(v.func.body) if b.name == name)
    return {"block": name, "factors": [v.rng.choice([None, None, v.factor()]) for _ in node.iters]}


def _pad_spatial(v: _View) -> dict[str, Any]:
    return {"block": v.block(), "dim": v.rng.randrange(3), "factor": v.factor()}


def _stream_k(v: _View) -> dict[str, Any]:
    block = v.block()
    own = [x.var.name for x in enclosing(v.func, find_block(v.func, block))] or ["none"]
    at = v.rng.randrange(len(own))
    return {"block": block, "tiles": own[:at], "steps": own[at], "workers": v.factor()}


_ARGUMENTS: dict[str, Callable[[_View], dict[str, Any]]] = {
    "split": _split,
    "fuse": _fuse,
    "reorder": _reorder,
    "set_kind": lambda v: {"loop": v.loop(), "kind": v.rng.choice(KINDS), "axis": v.rng.randrange(3)},
    "set_tail": lambda v: {"loop": v.loop(), "tail": v.rng.choice(TAILS)},
    "nontemporal_stores": lambda v: {"loop": v.loop()},
    "prefetch": lambda v: {"loop": v.loop(), "iterations": v.rng.randrange(3)},
    "hold_vectors": lambda v: {"loop": v.loop()},
    "copy_async": lambda v: {"loop": v.loop()},
    "partition": _partition,
    "fission": _siblings,
    "fuse_sibling_loops": lambda v: {"first": v.loop(), "second": v.loop()},
    "compute_at": _at,
    "reverse_compute_at": _at,
    "compute_inline": lambda v: {"block": v.block()},
    "reverse_compute_inline": lambda v: {"block": v.block()},
    "multiply_by_reciprocal": lambda v: {"block": v.block()},
    "decompose_reduction": _reduction,
    "rfactor": lambda v: {**_reduction(v), "scope": v.rng.choice(["local", "global"])},
    "hoist_factors": lambda v: {"block": v.block()},
    "tree_reduce": lambda v: {"block": v.block()},
    "separable_reduce": lambda v: {"block": (block := v.block()), "loop": v.around(block), "step": v.around(block)},
    "chunk_scan": lambda v: {
        "block": (block := v.block()),
        "loop": v.around(block),
        "factor": v.rng.choice([1, 2, 3, 8]),
    },
    "serial_scan": lambda v: {"block": (block := v.block()), "loop": v.around(block)},
    "serial_scatter": lambda v: {"block": v.block()},
    "quadratic_select": lambda v: {"block": v.block(), "factor": v.rng.choice([1, 2, 5, 8])},
    "radix_sort": lambda v: {"block": v.block(), "digit_bits": v.rng.choice([0, 4, 6, 8])},
    "bitonic_sort": lambda v: {"block": v.block(), "size": v.rng.choice([3, 4, 8, 16])},
    "stream_k": _stream_k,
    "cache_read": lambda v: {
        "block": v.block(),
        "buffer": v.rng.choice(v.buffers),
        "scope": v.rng.choice(["local", "global"]),
    },
    "fuse_block_iters": lambda v: {"block": (block := v.block()), "names": v.own(block)},
    "flatten_rows": lambda v: {
        "block": (block := v.block()),
        "names": v.own(block, 2),
        "buffer": v.rng.choice(v.buffers),
    },
    "reindex": lambda v: {
        "block": v.block(),
        "buffer": v.rng.choice(v.buffers),
        "dims": v.rng.sample(range(3), v.rng.choice([1, 1, 2])),
        "scope": v.rng.choice(["local", "global"]),
    },
    "cache_write": lambda v: {"block": v.block(), "scope": v.rng.choice(["local", "global"])},
    "set_scope": lambda v: {"buffer": v.alloc(), "scope": v.rng.choice(["local", "shared", "global"])},
    "store_as": lambda v: {"buffer": v.alloc(), "dtype": v.rng.choice(["f16", "bf16", "i16", "f32"])},
    "sum_as": lambda v: {"block": v.block(), "dtype": "i32"},
    "tile_layout": _tile_layout,
    "permute_layout": _permute_layout,
    "transform_layout": lambda v: {"buffer": v.alloc(), "index_map": v.rng.choice(MAPS), "factors": [v.factor()]},
    "storage_align": lambda v: {"buffer": v.alloc(), "factor": v.factor(), "offset": v.rng.choice([0, 0, 1])},
    "swizzle": lambda v: {"buffer": v.alloc(), "vector": v.rng.choice([1, 2, 4, 4])},
    "pad": _pad,
    "pad_spatial": _pad_spatial,
    "pad_softmax_axis": lambda v: {"block": v.block(), "factor": v.factor()},
    "split_k_update": lambda v: {"block": v.block(), "factor": v.factor()},
    "rolling_update": lambda v: {"block": v.block()},
    "tensorize": lambda v: {"loop": v.loop(), "intrinsic": v.rng.choice(sorted(INTRINSICS))},
    "software_pipeline": lambda v: {**_siblings(v), "stages": v.rng.choice([2, 2, 3])},
    "reuse_output": lambda v: {"buffer": v.alloc(), "output": v.rng.choice(v.buffers)},
    "mark_prepack": lambda v: {"block": v.block()},
}
