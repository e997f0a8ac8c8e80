"""Candidates of every rule for the tests that run them: the functions, the shapes, and sampled instances."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.effort import some
from tests.support.meaning import make_inputs, size_of
from tests.support.opencl_drivers import as_driven
from tests.support.processors import PROCESSORS

from relax_tune.ir.core.dtype import bf16, f16, f32, i8, i32
from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.op.reduction.scan import ArgMax
from relax_tune.ir.op.reduction.trees import TreeEnsemble
from relax_tune.schedules.schedule import Schedule, holds
from relax_tune.schedules.sketch import (
    GPU_RULES,
    RULES,
    Sketch,
    generate_sketches,
    instantiate,
    rules_for,
    simplify_func,
)
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.task.reference import evaluate, tolerances

Array = NDArray[Any]
Dims = Mapping[str, int]

MACHINES = {
    # the same on every machine; compilers take many times as long over wider vectors than theirs
    "c": PROCESSORS["avx2"].machine,
    "opencl": as_driven(HardwareInfo("opencl", 2, 8, 32, 48 << 10, 1 << 20, 32 << 20)),
    # a small GPU, whose groups a simulator runs in a moment
    "gpu": as_driven(
        HardwareInfo.from_limits(
            "opencl",
            {
                "workers": 4,
                "warp": 32,
                "max_group_size": 128,
                "max_local_bytes": 32 << 10,
                "registers_per_sm": 64 << 10,
            },
        )
    ),
}
WIDE = PROCESSORS["avx512-vnni-bf16"].machine
# Functions that GPU sketches are tried on, one or two of each kind.
GPU_CASES = (
    "matmul symbolic", "NT, 128 steps", "int4, many columns", "batched NT", "softmax with mask", "gather, add, norm", "turned, bf16",
    "attention over a cache", "attention, f16", "mean pool", "sum of all", "convolution 3x2, apart", "convolution by channel",
    "convolution of 128 steps", "sums along rows", "largest of 100", "gates", "paged attention", "paged write",
)  # fmt: skip


def _zoo(name: str) -> Callable[[], PrimFunc]:
    return lambda: next(c.func for c in zoo.cases() if c.name == name)


# tables of 40 nodes and 30 leaves
TREES = (
    *(TensorInfo((const(40),), t) for t in (i32, i32, f32, i32)),
    TensorInfo((const(30), const(1)), f32),
)
# name: (function, shapes: off every tile, one row, one column)
CASES: dict[str, tuple[Callable[[], PrimFunc], tuple[Dims, ...]]] = {
    "matmul symbolic": (lambda: make.matmul(const_weight=False), ({"m": 13, "n": 37, "k": 5}, {"m": 1, "n": 1, "k": 1})),
    "matmul 96": (lambda: make.matmul(96, 24), ({"m": 1}, {"m": 37}, {"m": 0})),
    "matmul 7": (lambda: make.matmul(7, 33), ({"m": 5}, {"m": 16})),
    "matmul 30, K = 1": (lambda: make.matmul(30, 1), ({"m": 3}, {"m": 17})),
    "matmul 50, bare": (lambda: make.matmul(50, 9, epilogue=False), ({"m": 29}, {"m": 4})),
    "matmul 96, bf16": (lambda: make.matmul(96, 24, stored=bf16), ({"m": 1}, {"m": 37}, {"m": 0})),
    "matmul 33, f16": (lambda: make.matmul(33, 7, const_weight=False, stored=f16), ({"m": 5}, {"m": 17})),
    "NT, 128 steps": (lambda: make.dense(64, 128), ({"m": 5},)),
    "NT": (lambda: make.dense(21, 37), ({"m": 1}, {"m": 9}, {"m": 0})),
    "one row": (lambda: make.dense(48, 40, rows=1), ({},)),
    "a matrix and a vector": (make.rows_by_vector, ({"m": 11, "k": 37}, {"m": 1, "k": 1})),
    "int8": (lambda: make.quantised(33, 21, 8), ({"m": 1}, {"m": 7}, {"m": 9})),
    "int8, KN": (lambda: make.quantised(32, 20, 8, transposed=False), ({"m": 2}, {"m": 8})),
    "bytes by bytes": (lambda: make.quantised(37, 22, 8, activations="int8"), ({"m": 1}, {"m": 7}, {"m": 19}, {"m": 0})),
    "bytes by bytes, KN": (
        lambda: make.quantised(40, 64, 8, transposed=False, activations="int8"), ({"m": 5}, {"m": 33})
    ),
    "groups by shorts": (lambda: make.quantised(24, 64, 8, 32, activations="int8"), ({"m": 1}, {"m": 7}, {"m": 19}, {"m": 0})),
    "groups of int4 by shorts": (
        lambda: make.quantised(40, 64, 4, transposed=False, activations="int8"), ({"m": 1}, {"m": 9}),
    ),
    "bf16 by bf16": (lambda: make.dense(37, 22, stored=bf16), ({"m": 1}, {"m": 7}, {"m": 19}, {"m": 0})),
    "int4": (lambda: make.quantised(40, 64, 4), ({"m": 1}, {"m": 7}, {"m": 9})),
    "int4, KN, odd": (lambda: make.quantised(21, 33, 4, 8, transposed=False), ({"m": 1}, {"m": 8})),
    "int4, many columns": (lambda: make.quantised(128, 64, 4, 32), ({"m": 3},)),
    "int4, one row": (lambda: make.quantised(48, 64, 4, rows=1), ({},)),
    "batched NT": (make.scores, ({"b": 2, "n": 19}, {"b": 1, "n": 1})),
    "batched NN": (make.context, ({"b": 2, "n": 13}, {"b": 1, "n": 1})),
    "product of turned": (make.transposed_product, ({"m": 13, "n": 67, "k": 19}, {"m": 9, "n": 33, "k": 16}, {"m": 1, "n": 1, "k": 1})),
    "zoo batched NT": (_zoo("batched_matmul_nt"), ({"b": 3, "n": 5, "m": 21}, {"b": 1, "n": 1, "m": 1})),
    "gates": (make.gates, ({"m": 1}, {"m": 13}, {"m": 0})),
    "gates of 8, K = 1": (lambda: make.gates(8, 1), ({"m": 2}, {"m": 5})),
    "mean pool": (_zoo("mean_pool"), ({"b": 3, "n": 9}, {"b": 1, "n": 1})),
    "mean over the middle": (make.mean_over_middle, ({"b": 3, "n": 9}, {"b": 1, "n": 1})),
    "layer norm": (_zoo("layer_norm"), ({"n": 5, "m": 37}, {"n": 1, "m": 2}, {"n": 33, "m": 64})),
    "group norm": (make.group_norm, ({"n": 2, "h": 37}, {"n": 1, "h": 1}, {"n": 3, "h": 64})),
    "softmax": (_zoo("softmax"), ({"n": 7, "m": 41}, {"n": 1, "m": 1}, {"n": 2, "m": 128})),
    "softmax with mask": (make.softmax_mask, ({"b": 2, "n": 19}, {"b": 1, "n": 1})),
    "softmax of 17": (make.short_softmax, ({"n": 5}, {"n": 1}, {"n": 0})),
    "sums along rows": (make.prefix_sums, ({"n": 13, "m": 21}, {"n": 1, "m": 1}, {"n": 3, "m": 0})),
    "sums down columns, from the end": (lambda: make.prefix_sums(0, True, True), ({"n": 7, "m": 37}, {"n": 1, "m": 1}, {"n": 9, "m": 16})),
    "largest of rows": (
        make.top_places,
        ({"n": 3, "m": 300, "k": 7}, {"n": 1, "m": 1, "k": 1}, {"n": 2, "m": 17, "k": 17}, {"n": 4, "m": 9, "k": 0}),
    ),
    "largest of 100": (lambda: make.top_places_of(100), ({"n": 3, "k": 7}, {"n": 1, "k": 100}, {"n": 0, "k": 1})),
    "places of the largest of 21": (
        lambda: ArgMax(1).legalize("places", [TensorInfo((Var("n"), const(21)), f32)]), ({"n": 5}, {"n": 1}, {"n": 0})
    ),
    "order of columns": (
        lambda: make.top_places(0, False, i8),
        ({"n": 37, "m": 3, "k": 37}, {"n": 5, "m": 1, "k": 2}, {"n": 8, "m": 0, "k": 8}),
    ),
    "scatter of rows": (
        make.scattered_rows, ({"n": 5, "m": 37, "w": 9}, {"n": 1, "m": 1, "w": 70}, {"n": 0, "m": 3, "w": 2}, {"n": 3, "m": 0, "w": 4})
    ),
    "scatter of rows of 3": (lambda: make.scattered_rows(width=3), ({"n": 50, "m": 37}, {"n": 1, "m": 1}, {"n": 0, "m": 3})),
    "scatter along columns": (
        lambda: make.scattered_columns("replace"), ({"n": 3, "m": 21, "w": 5}, {"n": 1, "m": 1, "w": 1}, {"n": 4, "m": 2, "w": 0})
    ),
    "rows in CSR": (
        make.csr_rows, ({"n": 37, "m": 50, "k": 9, "w": 6}, {"n": 1, "m": 1, "k": 1, "w": 1}, {"n": 3, "m": 4, "k": 2, "w": 0})
    ),
    "descents of trees": (
        lambda: TreeEnsemble(9, 4).legalize("trees", [TensorInfo((Var("n"), const(5)), f32), *TREES]), ({"n": 37}, {"n": 1}, {"n": 0})
    ),
    "moments of cells": (make.moments_of_cells, ({"n": 3, "m": 21}, {"n": 1, "m": 1}, {"n": 2, "m": 32}, {"n": 0, "m": 3})),
    "row sum of six": (make.row_sum_of_six, ({"n": 5}, {"n": 1}, {"n": 0})),
    "sum of all": (make.sum_of_all, ({"n": 9001}, {"n": 1}, {"n": 0})),
    "column extremes": (make.column_extremes, ({"n": 150, "m": 37}, {"n": 1, "m": 1}, {"n": 70, "m": 5})),
    "standardise": (make.standardise, ({"n": 4500}, {"n": 1}, {"n": 70})),
    "sums over both ends": (make.ends, ({"n": 5, "m": 9}, {"n": 1, "m": 1})),
    "gather, add, norm": (lambda: make.embed_norm(264), ({"b": 2, "n": 3}, {"b": 1, "n": 1})),
    "row sum": (_zoo("row_sum"), ({"n": 5, "m": 70}, {"n": 9, "m": 1}, {"n": 0, "m": 4})),
    "row max": (_zoo("row_max"), ({"n": 5, "m": 70}, {"n": 9, "m": 1})),
    "attention": (make.attention, ({"n": 17, "m": 31}, {"n": 1, "m": 1}, {"n": 40, "m": 0}, {"n": 3, "m": 257})),
    "attention of positions": (make.attention_of_positions, ({"b": 2, "n": 19}, {"b": 1, "n": 1})),
    "attention over a cache": (make.attention_over_cache, ({"n": 5, "m": 21}, {"n": 1, "m": 40}, {"n": 33, "m": 33})),
    "attention, f16": (make.attention_of_halves, ({"n": 9, "m": 37}, {"n": 33, "m": 33}, {"n": 1, "m": 1})),
    "paged attention": (make.paged_attention, ({"t": 5, "r": 3, "w": 6, "p": 20}, {"t": 1, "r": 1, "w": 1, "p": 1})),
    "paged attention, f16": (lambda: make.paged_attention(f16), ({"t": 3, "r": 2, "w": 11, "p": 7},)),
    "paged write": (make.paged_write, ({"t": 7, "r": 3, "w": 5, "p": 20}, {"t": 1, "r": 1, "w": 1, "p": 1})),
    "causal attention": (make.causal_attention, ({"n": 0}, {"n": 1}, {"n": 37}, {"n": 131})),
    "transpose": (_zoo("transpose_0213"), ({"b": 3, "n": 7}, {"b": 1, "n": 1})),
    "turned": (make.transposed_scale, ({"b": 2, "n": 17, "m": 35}, {"b": 1, "n": 16, "m": 8}, {"b": 1, "n": 1, "m": 1})),
    "turned, bf16": (lambda: make.transposed_scale(bf16), ({"b": 2, "n": 17, "m": 9}, {"b": 1, "n": 32, "m": 16})),
    "reshape": (_zoo("reshape"), ({"n": 13}, {"n": 1})),
    "gather": (_zoo("gather"), ({"s": 13}, {"s": 1})),
    "concat": (_zoo("concat_select"), ({"n": 5, "m": 8}, {"n": 1, "m": 1})),
    "pointwise 1": (lambda: make.pointwise(1), ({"n": 71}, {"n": 1}, {"n": 0})),
    "pointwise 2": (lambda: make.pointwise(2), ({"n": 5, "m": 33}, {"n": 1, "m": 1})),
    "pointwise 4": (lambda: make.pointwise(4), ({"b": 2, "n": 7}, {"b": 1, "n": 1})),
    "stencil": (make.stencil, ({"n": 37}, {"n": 1})),
    "reverse": (make.reverse, ({"n": 37}, {"n": 1})),
    "two outputs": (make.two_outputs, ({"n": 5, "m": 9}, {"n": 1, "m": 1})),
    "scalar parameter": (make.scaled_rows, ({"n": 9, "limit": 4}, {"n": 3, "limit": 50})),
    "convolution 3x3": (lambda: make.convolution((3, 7), (3, 3), ("h", "w")), ({"n": 1, "h": 5, "w": 19}, {"n": 2, "h": 1, "w": 1})),
    "convolution 3x3, 6x20": (lambda: make.convolution((2, 18), (3, 3), (6, 20)), ({"n": 1}, {"n": 3}, {"n": 0})),
    "convolution 3x2, apart": (
        lambda: make.convolution((2, 4), (3, 2), ("h", "w"), (2, 3), (1, 2)), ({"n": 1, "h": 7, "w": 18}, {"n": 2, "h": 1, "w": 1})
    ),
    "convolution by channel": (
        lambda: make.convolution((6, 6), (3, 3), ("h", "w"), groups=6, padded=True), ({"n": 1, "h": 5, "w": 37}, {"n": 2, "h": 1, "w": 1})
    ),
    "convolution by channel, apart": (
        lambda: make.convolution((4, 4), (3, 3), ("h", "w"), (2, 2), groups=4), ({"n": 1, "h": 5, "w": 37}, {"n": 2, "h": 1, "w": 1})
    ),
    "convolution in groups": (
        lambda: make.convolution((2, 8), (2, 2), (5, "w"), groups=2, last=True), ({"n": 1, "w": 17}, {"n": 2, "w": 1})
    ),
    "convolution 1-D": (
        lambda: make.convolution((4, 16), (5,), ("t",), (1,), (2,), const_weight=False), ({"n": 1, "t": 37}, {"n": 2, "t": 1})
    ),
    "convolution of 128 steps": (
        lambda: make.convolution((32, 24), (2, 2), (4, "w"), (2, 1), (1, 3), last=True), ({"n": 2, "w": 7}, {"n": 1, "w": 1})
    ),
    "pool 3x3": (
        lambda: make.pooled(("h", "w"), 3, 2, 1, True),
        ({"h": 5, "w": 41}, {"h": 1, "w": 1}, {"h": 2, "w": 2}, {"h": 3, "w": 64}, {"h": 6, "w": 3}),
    ),
    "pool of one row": (lambda: make.pooled((3, "w"), 3, 1, 0, True), ({"w": 3}, {"w": 37})),
    "pool of one row, padded": (lambda: make.pooled((1, "w"), 3, 2, 1, False), ({"w": 1}, {"w": 70})),
    "pool of one column": (lambda: make.pooled(("h", 3), 3, 2, 0, True), ({"h": 3}, {"h": 20})),
    "pool of one place": (lambda: make.pooled(("h", "w"), 1, 2, 0, True), ({"h": 1, "w": 1}, {"h": 5, "w": 37})),
    "pool 2x2": (lambda: make.pooled((6, 21), 2, 1, 1, False), ({},)),
    "pool 5, apart": (lambda: make.pooled(("w",), 5, 3, 4, True, 2), ({"w": 1}, {"w": 5}, {"w": 79})),
    "padding": (
        lambda: make.padded(("h", "w"), 1, 2), ({"h": 5, "w": 41}, {"h": 1, "w": 1}, {"h": 0, "w": 3}, {"h": 3, "w": 64}, {"h": 2, "w": 0})
    ),
    "padding of 21": (lambda: make.padded((6, 21), 3, 0), ({},)),
    "one element": (make.dot, ({"n": 37}, {"n": 1})),
}  # fmt: skip


def cases_of(language: str) -> tuple[str, ...]:
    """The functions that a machine's sketches are tried on."""
    return GPU_CASES if MACHINES[language].is_gpu else tuple(CASES)


@cache
def function(case: str) -> PrimFunc:
    """A function of `CASES`."""
    return CASES[case][0]()


@cache
def by_rule(case: str, language: str, rule: str) -> tuple[Sketch, ...]:
    """Return one rule's sketches of a function, cached for all tests of a process."""
    return generate_sketches(function(case), MACHINES[language], {rule: RULES[rule]})


def sketches_of(case: str, language: str) -> tuple[PrimFunc, tuple[Sketch, ...]]:
    """Return a function of `CASES` and all of its sketches, the fallback last."""
    return function(case), tuple(s for rule in rules_for(MACHINES[language]) for s in by_rule(case, language, rule))


def few(case: str, language: str, limit: int) -> tuple[Sketch, ...]:
    """Return at most `limit` of a function's sketches, the fallback among them."""
    func, (*others, last) = sketches_of(case, language)
    rng = random.Random(f"a {case} {func.name} {language}")
    return (*rng.sample(others, min(len(others), limit - 1)), last)


@cache
def covering(language: str, least: int) -> Mapping[str, tuple[Sketch, ...]]:
    """Return sketches of each function: at least `least` where it has them, and together every sketch name."""
    seen: set[str] = set()
    found = {}
    for case in cases_of(language):
        named = {s.name: s for s in few(case, language, least)}
        others = {s.name: s for s in sketches_of(case, language)[1] if s.name not in seen}
        found[case] = tuple({**named, **others}.values())
        seen |= {s.name for s in found[case]}
    return found


def sampled(sketches: Sequence[Sketch], seed: str) -> list[tuple[Sketch, dict[str, int], PrimFunc]]:
    """Return (sketch, values, instance) of each sketch, for random values that satisfy its constraints."""
    rng = random.Random(f"values {seed}")
    values = [drawn(sketch, rng) for sketch in sketches]
    return [(sketch, v, instantiate(sketch, v)) for sketch, v in zip(sketches, values, strict=True)]


def drawn(sketch: Sketch, rng: random.Random) -> dict[str, int]:
    """Draw values of the tunables that satisfy the constraints."""
    for _ in range(400):
        values = {t.name: rng.choice(t.domain) for t in sketch.tunables}
        if all(holds(c, {t: values[t.name] for t in sketch.tunables}) for c in sketch.constraints):
            return values
    raise AssertionError(f"{sketch.name}: no values found that satisfy its constraints")


@dataclass(frozen=True)
class Sample:
    """A candidate of a rule, and shapes around its tiles."""

    case: str
    rule: str
    sketch: str
    values: Mapping[str, int]
    instance: PrimFunc
    shapes: tuple[Dims, ...]


def samples(language: str, seed: str, largest: int) -> list[Sample]:
    """Return a random candidate of every sketch name of every rule, and for processors of every function too.

    Shapes: one of the function's own, and two random ones of 0, 1, primes, tile sizes and their neighbours. No
        dimension is above
    `largest`.
    """
    rng = random.Random(f"{seed} {language}")
    options: dict[tuple[str, str], list[tuple[str, Sketch]]] = {}
    cases = some(cases_of(language))
    for case in cases:
        for rule in rules_for(MACHINES[language]):
            for sketch in by_rule(case, language, rule):
                options.setdefault((rule, sketch.name), []).append((case, sketch))
    picked = [(rule, *rng.choice(found)) for (rule, _), found in options.items()]
    seen = {case for _, case, _ in picked}
    for case in sorted(set(cases) - seen) if not MACHINES[language].is_gpu else ():
        of_case = [(rule, case, s) for (rule, _), found in options.items() for c, s in found if c == case]
        picked.append(rng.choice(of_case))
    made = []
    for rule, case, sketch in picked:
        values = drawn(sketch, rng)
        near = [x for v in values.values() for x in (v - 1, v, v + 1) if 1 < x <= largest]
        sizes = [0, 1, 2, *(p for p in (3, 7, 13, 31) if p <= largest), *near]
        known = [d for d in CASES[case][1] if max(d.values(), default=0) <= max(largest, 41)]
        names = [v.name for v in function(case).symbols]
        random_shapes = [{n: rng.choice(sizes) for n in names} for _ in range(2)]
        shapes = tuple(known[:1] + random_shapes)
        made.append(Sample(case, rule, sketch.name, values, instantiate(sketch, values), shapes))
    return made


def by_hand(language: str) -> list[Sample]:
    """Return matmuls scheduled by primitives that no rule uses, and for CUDA a rule's sketch with asynchronous copies.

    tensorized: padded whole tiles. ahead: tiles copied ahead into aligned rows. cut: main loops and tails over a
        rearranged intermediate.
    """
    case = "matmul symbolic"
    s = Schedule(CASES[case][0]())
    s.apply("pad", block="mm", factors=[4, 16, None])
    i_0, i_1 = s.split("mm_i", [None, 4])
    j_0, j_1 = s.split("mm_j", [None, 16])
    s.reorder([i_0, j_0, "mm_k", i_1, j_1])
    s.apply("decompose_reduction", block="mm", loop="mm_k")
    s.apply("tensorize", loop=i_1, intrinsic="outer_f32_4x16")
    ahead = Schedule(CASES[case][0]())
    ahead.apply("cache_read", block="mm", buffer="W", scope="local")
    j_0, j_1 = ahead.split("mm_j", [None, 8])
    k_0, k_1 = ahead.split("mm_k", [None, 4])
    ahead.reorder([j_0, k_0, "mm_i", k_1, j_1])
    copied = ahead.compute_at("W_cache_copy", k_0)
    ahead.apply("software_pipeline", block="W_cache_copy", loop=k_0, stages=3)
    ahead.apply("storage_align", buffer="W_cache", factor=8, offset=1)
    ahead.vectorize(copied[-1])
    ahead.vectorize(j_1)
    ahead.set_kind(j_0, "parallel" if language == "c" else "group")
    cut = Schedule(CASES[case][0]())
    cut.apply("transform_layout", buffer="C", index_map="i, j -> j // f0, i, j % f0", factors=[8])
    cut.apply("partition", loop="mm_k", factor=4)
    cut.apply("partition", loop="relu_j", factor=8)
    _, lanes = cut.split("relu_j", [None, 8])
    cut.vectorize(lanes)
    shapes = ({"m": 5, "n": 17, "k": 9}, {"m": 4, "n": 16, "k": 4}, {"m": 1, "n": 1, "k": 0}, {"m": 3, "n": 7, "k": 13})
    made = {"tensorized": s, "ahead": ahead, "cut": cut}
    samples = [Sample(case, "by hand", name, {}, simplify_func(x.func), shapes) for name, x in made.items()]
    if language == "c":
        return samples
    late = replace(MACHINES["gpu"], language="cuda", capability=80)
    (sketch, *_) = generate_sketches(CASES[case][0](), late, {"gpu_matmul": GPU_RULES["gpu_matmul"]})
    values = {"TX": 8, "TY": 4, "MR": 1, "NV": 1, "KE": 1, "STAGES": 3}
    return [*samples, Sample(case, "gpu_matmul", sketch.name, values, instantiate(sketch, values), shapes)]


def arguments(func: PrimFunc, dims: Dims, seed: int = 0) -> tuple[list[Array], list[int]]:
    """Return all arrays, with poisoned outputs last, and the scalar arguments."""
    outputs = [np.full(tuple(size_of(d, dims, func) for d in b.shape), 77, b.dtype.numpy) for b in func.output_buffers]
    return [*make_inputs(func, dims, seed), *outputs], [dims[v.name] for v in func.scalar_params]


def problems(func: PrimFunc, arrays: list[Array], found: list[Array], dims: Dims) -> list[str]:
    """Describe the errors of the outputs against the f64 reference of the unscheduled function."""
    symbols: dict[Var, int] = {v: dims[v.name] for v in func.symbols}
    wanted = evaluate(func, arrays[: len(func.input_buffers)], symbols)
    out = []
    for o, w, (rtol, atol) in zip(found, wanted, tolerances(func, symbols, wanted), strict=True):
        if not np.allclose(o.astype(w.dtype), w, rtol, atol, equal_nan=True):
            out.append(f"{dict(dims)}: off by {np.nanmax(np.abs(o - w))}, {np.count_nonzero(np.isnan(o))} NaN")
    return out
