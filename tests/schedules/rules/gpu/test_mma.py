"""Candidates of the rules for warps that multiply tiles: their meaning, their machine code, and on the emulation the reference's outputs.

Only CUDA has such products, so these are not among the functions that other devices of a GPU's kind run (`candidates.GPU_CASES`).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from itertools import product as every_choice
from pathlib import Path

import pytest
from tests.cuda_emulation.gpus import PLACES, gpu
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.schedules.cost.test_gpu_features import number
from tests.schedules.test_occupancy import shared_bytes, value
from tests.support import schedule_functions as make
from tests.support.candidates import MACHINES, arguments, drawn, problems
from tests.support.effort import some, thinned
from tests.support.meaning import make_inputs, outputs_of

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import split_kernels
from relax_tune.ir.core.buffer import Scope
from relax_tune.ir.core.dtype import bf16, f16
from relax_tune.ir.core.expr import Expr, Var, const, lt
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, IfThenElse, Stmt, blocks, loops, rewrite
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.cost.gpu_features import WarpAccess, bank_conflicts, warp_accesses
from relax_tune.schedules.mean_extents import with_mean_extents
from relax_tune.schedules.occupancy import kernels, stored_bytes, stored_shape
from relax_tune.schedules.schedule import holds
from relax_tune.schedules.sketch import GPU_RULES, Sketch, generate_sketches, instantiate, replay_with

MACHINE = replace(MACHINES["gpu"], language="cuda", capability=80)
# name: (function, shapes at and next to multiples of tiles)
PRODUCTS: Mapping[str, tuple[Callable[[], PrimFunc], tuple[Mapping[str, int], ...]]] = {
    "NN, bias": (lambda: make.matmul(96, 64, stored=f16), ({"m": 1}, {"m": 37}, {"m": 0})),
    "NN, symbolic": (lambda: make.matmul(const_weight=False, stored=bf16), ({"m": 13, "n": 37, "k": 5}, {"m": 1, "n": 1, "k": 1})),
    "NT": (lambda: make.dense(64, 256, stored=f16), ({"m": 5}, {"m": 33})),
    "batched NN": (lambda: make.context(2, 24, bf16), ({"b": 2, "n": 19}, {"b": 1, "n": 1})),
    "batched NT": (lambda: make.scores(2, 16, f16), ({"b": 2, "n": 17}, {"b": 1, "n": 0})),
    "TN": (lambda: make.transposed_product(f16), ({"m": 13, "n": 67, "k": 19}, {"m": 1, "n": 1, "k": 1})),
}  # fmt: skip
ATTENTION: Mapping[str, tuple[Callable[[], PrimFunc], tuple[Mapping[str, int], ...]]] = {
    "of a cache": (make.attention_of_halves, ({"n": 9, "m": 37}, {"n": 33, "m": 33}, {"n": 1, "m": 1}, {"n": 3, "m": 0})),
    "of positions": (lambda: make.attention_of_positions(bf16), ({"b": 2, "n": 19}, {"b": 1, "n": 65})),
}  # fmt: skip
DECODED: Mapping[str, tuple[Callable[[], PrimFunc], tuple[Mapping[str, int], ...]]] = {
    "int8": (lambda: make.scaled_bytes(40, 256), ({"m": 3}, {"m": 17})),
}
AHEAD = ("NN, bias", "NT", "int8")
CASES = {**PRODUCTS, **ATTENTION, **DECODED}
RULES = {name: GPU_RULES[name] for name in ("gpu_mma", "gpu_flash_attention_mma")}


# Seeds of the samples, by sketch. They decide which candidates the tests look at.
SEEDS = {
    "mma.data_parallel": "tensor.tiles",
    "mma.split_k": "tensor.split",
    "mma.stream_k": "tensor.stream",
    "flash_attention.mma": "attention.tensor",
}


@cache
def sketches(case: str) -> tuple[Sketch, ...]:
    return generate_sketches(CASES[case][0](), MACHINE, RULES)


@cache
def instances() -> list[tuple[str, str, PrimFunc]]:
    """(case, what it is, instance) of a candidate of each sketch."""
    chosen = []
    for case in CASES:
        for sketch in sketches(case):
            if sketch.name == "mma.stream_k" and case not in ("NT", "TN"):
                continue  # what the others fetch is fetched for whole tiles as well
            values = drawn(sketch, random.Random(f"{case} {SEEDS.get(sketch.name, sketch.name)}"))
            func = replace(instantiate(sketch, values), name=f"f{len(chosen)}")
            chosen.append((case, f"{sketch.name} {values}", func))
    return chosen


@cache
def text(func: PrimFunc) -> list[str]:
    return [k.source.split("/*end prelude*/")[1] for k in kernels_of(func, "cuda")]


@pytest.mark.slow
def test_mma_split_k_with_slices_one_more_than_stages_multiplies_by_mma() -> None:
    values = {"KS": 1, "SS": 4, "WM": 2, "WN": 1, "MT": 1, "NT": 2, "STAGES": 3}
    (sketch,) = (s for s in sketches("NT") if s.name == "mma.split_k")
    assert "".join(text(instantiate(sketch, values))).count("rt_mma_") == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", thinned(CASES))
def test_tensor_core_sketch_at_any_tunables_multiplies_by_the_instruction(case: str) -> None:
    """A marked nest that no longer matches its instruction would run as loops: right, but slow."""
    tensor_cores = replace(MACHINE, capability=90, has_wgmma=True, group_size=256, local_bytes=227 << 10)
    wgmma = generate_sketches(CASES[case][0](), tensor_cores, {"gpu_wgmma": GPU_RULES["gpu_wgmma"]})
    assert len(wgmma) == (case not in ATTENTION)
    for sketch in (*sketches(case), *wgmma):
        for values in some(covering(sketch), 3):
            source = "".join(text(instantiate(sketch, values)))
            assert len(re.findall("rt_w?g?mma_", source)) == (2 if case in ATTENTION else 1), (sketch.name, values)


def covering(sketch: Sketch) -> Iterator[dict[str, int]]:
    """Yield values with every combination of slices and stages, which shape the indices of operands, and random tiles."""
    rng = random.Random(sketch.name)
    slices = [t for t in sketch.tunables if t.name in ("KS", "SS", "KT", "STAGES")]
    for chosen in every_choice(*(t.domain for t in slices)):
        for _ in range(100):
            values = {t: rng.choice(t.domain) for t in sketch.tunables} | dict(zip(slices, chosen, strict=True))
            if all(holds(fact, values) for fact in sketch.constraints):
                yield {t.name: x for t, x in values.items()}
                break


@pytest.mark.heavy
@pytest.mark.slow
def test_products_of_16_bit_floats_have_sketches_where_warps_multiply() -> None:
    named = {case: [s.name for s in sketches(case)] for case in some(CASES, 4)}
    forms = {"mma.data_parallel": (*PRODUCTS, *DECODED), "mma.split_k": ("NT", "int8")}
    forms["mma.stream_k"] = tuple(c for c in forms["mma.data_parallel"] if not c.startswith("batched"))
    products = {c: [name for name, own in forms.items() if c in own] for c in forms["mma.data_parallel"]}
    expected = {**products, **{c: ["flash_attention.mma"] for c in ATTENTION}}
    assert expected.keys() == set(CASES) and named == {c: expected[c] for c in named}
    older = replace(MACHINE, capability=75)
    others = [
        (make.dense(64, 256), MACHINE),
        (make.attention(), MACHINE),
        *((CASES[c][0](), older) for c in ("NT", "of a cache")),
    ]
    assert not any(generate_sketches(func, machine, RULES) for func, machine in others)
    assert all(s.guesses for case in named for s in sketches(case))
    for case, what, func in some(instances(), 12):
        source = "".join(text(func))
        assert source.count("rt_mma_") == (2 if case in ATTENTION else 1), what
        # operands whose rows begin at multiples of what one copy has are copied ahead of their use
        assert ("rt_copy<8>" in source and "rt_sent" in source) == (case in AHEAD or case in ATTENTION), what


@pytest.mark.slow
def test_mma_guesses_for_few_rows_use_lowest_tiles() -> None:
    func = make.dense(256, 512, rows=8, stored=f16)
    for sketch in generate_sketches(func, MACHINE, {"gpu_mma": GPU_RULES["gpu_mma"]}):
        assert sketch.guesses and all(g["WM"] * g["MT"] == 1 for g in sketch.guesses)
        assert any(g["STAGES"] == 3 for g in sketch.guesses)


@pytest.mark.slow
@pytest.mark.parametrize("case", thinned(["NT", "batched NN", "of a cache"]))
def test_traces_replay_and_keep_the_meaning(case: str) -> None:
    func, (dims, *_) = CASES[case][0](), CASES[case][1]
    for sketch in sketches(case):
        values = drawn(sketch, random.Random(case))
        # sums may have their terms in another order
        replayed, instantiated = (
            [sorted(t.split()) for t in text(f)]
            for f in (replay_with(sketch.trace, func, values), instantiate(sketch, values))
        )
        assert replayed == instantiated
        if sketch.name not in ("mma.split_k", "mma.stream_k"):
            inputs = make_inputs(func, dims)
            assert not problems(func, inputs, outputs_of(instantiate(sketch, values), dims, inputs), dims)


@pytest.mark.slow
def test_attention_weights_under_divergent_warps_go_to_shared_memory() -> None:
    """Where not all items come by, weights are in shared memory, or nobody takes them."""
    (sketch,) = sketches("of a cache")
    func = instantiate(sketch, {"WM": 2, "MT": 1, "KT": 1, "STAGES": 2})
    (product,) = (b for b in blocks(func.body) if b.name == "context_1_rf")
    nests = [f for f in loops(func.body) if f.kind == "item" and product in blocks(f)]
    (warps, rows) = (next(f for f in nests if f.axis == a) for a in (2, 1))

    def declaration(n: Stmt, condition: Expr) -> str:
        body = rewrite(func.body, lambda m: replace(m, predicate=condition) if m is n and isinstance(m, Block) else m)
        body = rewrite(body, lambda m: IfThenElse(condition, m, None) if m is n and isinstance(m, For) else m)
        return next(line for line in "".join(text(replace(func, body=body))).splitlines() if " power_[" in line)

    assert "__shared__" not in declaration(product, lt(0, 1)) and "__shared__" in declaration(product, lt(rows.var, 4))
    with pytest.raises(BuildError, match="in shared memory, not in registers"):
        declaration(rows, lt(warps.var, 1))


@pytest.mark.slow
@pytest.mark.parametrize("case", thinned(CASES))
def test_mma_counted_shared_memory_equals_kernels(case: str) -> None:
    for sketch in sketches(case):
        values = drawn(sketch, random.Random(f"shared {case}"))
        instance = split_kernels(instantiate(sketch, values))
        # limits and features count with loops of even lengths
        for counted in (sketch.func, with_mean_extents(sketch.func)):
            for part, func in zip(kernels(counted), instance, strict=True):
                # which are counted as of a machine that exchanges no registers
                scopes: tuple[Scope, ...] = ("shared", "warp")
                counted_bytes = sum(value(stored_bytes(counted, part, scope), sketch, values) for scope in scopes)
                assert counted_bytes == shared_bytes(func), values


@pytest.mark.slow
def test_mma_shared_accesses_have_no_bank_conflicts() -> None:
    """By the closed form, and counted: the vectors that each quarter of a warp stores, and the rows of matrices that it fetches."""
    rng = random.Random(0)
    for sketch in sketches("NN, bias"):
        for values in [drawn(sketch, rng) for _ in range(2)]:
            env = {t: const(values[t.name]) for t in sketch.tunables}
            accesses = [(k, x) for k in kernels(sketch.func) for x in warp_accesses(sketch.func, k, True)]
            assert accesses
            for kernel, x in accesses:
                shape = [number(d, env) for d in stored_shape(sketch.func, kernel, x.buffer)]
                counted = max(meeting(at, shape[-1] // 8) for at in at_once(x, shape, env))
                assert number(bank_conflicts(x), env) == counted == 1, f"{sketch.name}: {x.buffer.name} {values}"


def at_once(x: WarpAccess, shape: Sequence[int], env: Mapping[Var, Expr]) -> Iterator[list[tuple[int, int]]]:
    """(row, vector) of what is served together."""
    if any(p.marks.intrinsic for p in x.path):
        yield from ([(8 * r + k, c) for k in range(8)] for r in range(2) for c in range(shape[-1] // 8))
        return
    items = {p.axis: p for p in x.path if p.kind == "item"}
    sizes = [number(items[a].extent, env) for a in sorted(items)]
    zero: dict[Var, Expr] = {p.var: const(0) for p in x.path}
    lanes = list(islice(every_choice(*map(range, reversed(sizes))), 32))
    for first in range(0, len(lanes), 8):
        words = []
        for lane in lanes[first : first + 8]:
            place = {**env, **zero, **{items[a].var: const(n) for a, n in zip(sorted(items), reversed(lane))}}
            *rows, column = (number(e, place) for e in x.where)
            flat = 0
            for e, d in zip(rows, shape):
                flat = flat * d + e
            words.append((flat, column // 8))
        yield words


def meeting(places: Sequence[tuple[int, int]], vectors: int) -> int:
    """The most of different vectors that are in the same banks, eight of which are apart."""
    turn = [r % 8 if vectors >= 8 else r // (8 // vectors) for r, _ in places]
    spots = {r * vectors + (c + t) % vectors for (r, c), t in zip(places, turn)}
    return max(Counter(at % 8 for at in spots).values())


@pytest.mark.parametrize("where", PLACES)
def test_mma_kernels_match_function(where: str, tmp_path: Path) -> None:
    device = gpu(where, tmp_path)
    mine = {"forwards": instances()[2:], "backwards": instances()[:2]}.get(where, instances())
    for (case, what, func), run in zip(mine, Compiled.together(device, "cuda", [f for _, _, f in mine]), strict=True):
        for seed, dims in enumerate(CASES[case][1]):
            arrays, scalars = arguments(func, dims, seed)
            wrong = problems(CASES[case][0](), arrays, run(arrays, scalars), dims)
            assert not wrong, f"{case}, {what}: {wrong}"
    device.close()


@pytest.mark.nvrtc
def test_mma_kernels_compile_with_sums_in_registers() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    for at, architecture in enumerate(("sm_80", "sm_90")):
        sources = [k for _, _, func in instances()[at::3] for k in kernels_of(func, "cuda")]
        compiled = CUDACompiler(architecture).compile([KernelSource(k.name, "cuda", k.source) for k in sources])
        assert all(report.stack_bytes <= 8 for report in compiled.kernels.values()), "the sums are in registers"
