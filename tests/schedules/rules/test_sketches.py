"""Sketches of every rule: instances equal the replayed trace, keep the meaning, and satisfy the constraints."""

from __future__ import annotations

import gc
import random
import re
import weakref
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.candidates import CASES, MACHINES, by_rule, drawn
from tests.support.effort import some, thinned
from tests.support.meaning import assert_same_meaning

from relax_tune.errors import ScheduleError
from relax_tune.ir.check.structural import first_difference
from relax_tune.ir.check.verify import verify
from relax_tune.ir.codegen.generate import CodeTarget, generate, split_kernels
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Tunable, Var, const, free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import For, blocks, loops, walk
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.op.neural.grid_sample import GridSample
from relax_tune.ir.text.printer import print_text
from relax_tune.schedules.cost.vectorized import ConstraintFunction
from relax_tune.schedules.schedule import Schedule, holds
from relax_tune.schedules.sketch import RULES, Sketch, generate_sketches, instantiate, replay_with, simplify_func


@cache
def functions() -> dict[str, PrimFunc]:
    own = {
        "matmul": make.matmul(),
        "matmul 1536": make.matmul(96, 8),
        "matmul 7": make.matmul(7, 3),
        "matmul 30": make.matmul(30, 1),
        "matmul 50": make.matmul(50, 5, epilogue=False),
        "scores": make.scores(),
        "context": make.context(),
        "softmax_mask": make.softmax_mask(),
        "embed_norm": make.embed_norm(),
        "mean_over_middle": make.mean_over_middle(),
        "moments": make.moments_of_cells(),
        "pointwise1": make.pointwise(1),
        "pointwise2": make.pointwise(2),
        "pointwise4": make.pointwise(4),
        "two_outputs": make.two_outputs(),
        "scaled_rows": make.scaled_rows(),
        "stencil": make.stencil(),
        "dot": make.dot(),
        "prefix_sums": make.prefix_sums(),
        "prefix_sums_down": make.prefix_sums(0, True, True),
    }
    return own | {c.name: c.func for c in zoo.cases()}


@cache
def sketches(name: str, machine: str) -> tuple[Sketch, ...]:
    return generate_sketches(functions()[name], MACHINES[machine])


def legal_values(sketch: Sketch, rng: random.Random, count: int) -> list[dict[str, int]]:
    """Values of the tunables that satisfy the constraints."""
    if not sketch.tunables:
        return [{}]
    legal: list[dict[str, int]] = []
    for _ in range(300):
        values = {t.name: rng.choice(t.domain) for t in sketch.tunables}
        if all(holds(c, {t: values[t.name] for t in sketch.tunables}) for c in sketch.constraints):
            legal.append(values)
        if len(legal) == count:
            break
    return legal


# Of the sketches for GPUs, whose rules are also tried on devices, one or two of each.
ON_GPU = frozenset(
    {"matmul 1536", "scores", "softmax_mask", "mean_over_middle", "pointwise4", "stencil", "prefix_sums"}
)
every = pytest.mark.parametrize(
    ("name", "machine"), [(n, m) for n in functions() for m in MACHINES if m != "gpu" or n in ON_GPU]
)


@pytest.mark.slow
@every
def test_instantiate_any_sketch_equals_replayed_trace(name: str, machine: str) -> None:
    func = functions()[name]
    rng = random.Random(f"{name} {machine}")
    for sketch in some(sketches(name, machine)):
        for values in legal_values(sketch, rng, 1):
            instance, replayed = instantiate(sketch, values), replay_with(sketch.trace, func, values)
            difference = first_difference(instance, replayed)
            assert difference is None, f"{sketch.name} {values}: {difference}"


@every
def test_generate_sketches_any_function_gives_well_formed_sketches(name: str, machine: str) -> None:
    generated = sketches(name, machine)
    assert generated[-1].name == "fallback" and [s.name for s in generated].count("fallback") == 1
    assert len({s.name for s in generated}) == len(generated)
    assert len({s.trace.to_json() for s in generated}) == len(generated), "two sketches are the same schedule"
    for sketch in generated:
        verify(sketch.func)
        declared = set(sketch.tunables)
        used = {v for s in walk(sketch.func.body) if isinstance(s, For) for v in free_vars(s.extent)}
        assert declared >= {v for v in used if isinstance(v, Tunable)}
        assert set(free_vars(*sketch.constraints)) <= declared, "a constraint speaks of more than tunables"
        assert sketch.func.params == functions()[name].params
        assert legal_values(sketch, random.Random(1), 1), f"no values satisfy the constraints of {sketch.name}"


@every
def test_guesses_any_sketch_satisfy_constraints(name: str, machine: str) -> None:
    for sketch in sketches(name, machine):
        for guess in sketch.guesses:
            assert set(guess) == {t.name for t in sketch.tunables}
            assert all(guess[t.name] in t.domain for t in sketch.tunables)
            assert all(holds(c, {t: guess[t.name] for t in sketch.tunables}) for c in sketch.constraints)


@pytest.mark.parametrize("machine", ("c", "opencl"))
def test_matmul_symbolic_sizes_packs_in_the_call(machine: str) -> None:
    by_name = {s.name: s for s in sketches("matmul", machine)}
    for name in ("matmul.panels.packed", "matmul.blocks.packed"):
        sketch = by_name[name]
        assert sketch.guesses and any(a.scope == "global" for a in sketch.func.allocs)


@pytest.mark.slow
@every
def test_instantiate_any_sketch_leaves_no_tunables(name: str, machine: str) -> None:
    rng = random.Random(f"verify {name} {machine}")
    for sketch in some(sketches(name, machine)):
        (values,) = legal_values(sketch, rng, 1)
        instance = instantiate(sketch, values)
        verify(instance)
        assert "tunable(" not in print_text(instance)
        assert all(not isinstance(x.extent, Tunable) for x in loops(instance.body))


@pytest.mark.parametrize("machine", ["c", "opencl"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("matmul", {"matmul"}),
        ("matmul 7", {"matmul"}),
        ("matmul 30", {"matmul"}),
        ("scores", {"matmul"}),
        ("context", {"matmul"}),
        ("softmax", {"rowwise", "reductions.two_pass"}),
        ("softmax_mask", {"rowwise"}),
        ("embed_norm", {"rowwise"}),
        ("layer_norm", {"rowwise"}),
        ("row_sum", {"rowwise", "reductions.two_pass"}),
        ("row_max", {"rowwise"}),
        ("mean_over_middle", {"reductions.columns", "reductions.two_pass"}),
        ("moments", {"reductions.unrolled"}),
        ("pointwise1", {"injective"}),
        ("pointwise4", {"injective"}),
        ("transpose_0213", {"injective"}),
        ("gather", {"injective"}),
        ("scaled_rows", {"injective"}),
        ("reshape", {"injective"}),
        ("two_outputs", {"rowwise"}),
        ("concat_blocks", {"injective"}),
        ("dot", {"reductions.two_pass"}),
    ],
)
def test_generate_sketches_each_kind_of_function_uses_expected_rules(
    name: str, expected: set[str], machine: str
) -> None:
    names = [s.name for s in sketches(name, machine)]
    rules = {".".join(n.split(".")[: 2 if n.startswith("reductions.") else 1]) for n in names}
    assert rules >= expected | {"fallback"}
    if not expected:
        assert rules == {"fallback"}


SMALL = (
    "matmul 7", "matmul 30", "scores", "context", "softmax_mask", "embed_norm", "layer_norm", "row_sum", "pointwise4",
    "two_outputs",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine"),
    # devices run candidates for GPUs much faster than the interpreter does, which has no barriers to get wrong
    thinned(
        [
            (n, m)
            for n in SMALL
            for m in MACHINES
            if m != "gpu" or n in ("layer_norm", "row_sum", "pointwise4", "two_outputs")
        ]
    ),
)
def test_instantiate_any_sketch_keeps_the_meaning(name: str, machine: str) -> None:
    func = functions()[name]
    rng = random.Random(f"meaning {name} {machine}")
    for sketch in some(sketches(name, machine), 3):
        (values,) = legal_values(sketch, rng, 1)
        instance = instantiate(sketch, values)
        for size in (1, 5):
            dims = {v.name: size if at else 3 for at, v in enumerate(func.symbols)}
            assert_same_meaning(func, instance, dims, seed=size)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ("c", "opencl"))
@pytest.mark.parametrize("name", ["matmul", "softmax", "pointwise2", "scores"])
def test_sketch_with_tunables_keeps_the_meaning(name: str, machine: str) -> None:
    # the interpreter runs the sketch itself with values for its tunables: nothing is instantiated
    func = functions()[name]
    rng = random.Random(f"free {name} {machine}")
    for sketch in some(sketches(name, machine), 3):
        (values,) = legal_values(sketch, rng, 1)
        dims = {v.name: 2 + at for at, v in enumerate(func.symbols)}
        assert_same_meaning(func, sketch.func, dims, tunables={t: values[t.name] for t in sketch.tunables})


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_generate_sketches_twice_gives_equal_traces(machine: str) -> None:
    for name in ("matmul", "softmax_mask", "pointwise4"):
        again = generate_sketches(functions()[name], MACHINES[machine])
        assert [s.trace.to_json() for s in again] == [s.trace.to_json() for s in sketches(name, machine)]


def test_generate_sketches_given_rules_uses_no_others() -> None:
    only = generate_sketches(make.matmul(), MACHINES["c"], {"fallback": RULES["fallback"]})
    assert [s.name for s in only] == ["fallback"]


@pytest.mark.parametrize("machine", MACHINES)
def test_constraint_function_arrays_agrees_with_substitution(machine: str) -> None:
    rng = random.Random(7)
    for name in ("matmul", "matmul 1536", "scores", "softmax_mask", "pointwise2", "two_outputs"):
        for sketch in sketches(name, machine):
            rows = [{t.name: rng.choice(t.domain) for t in sketch.tunables} for _ in range(20)]
            columns = {t.name: np.array([r[t.name] for r in rows]) for t in sketch.tunables}
            satisfied = ConstraintFunction(sketch)(columns)
            expected = [
                all(holds(c, {t: r[t.name] for t in sketch.tunables}) for c in sketch.constraints) for r in rows
            ]
            assert satisfied.dtype == np.bool_
            assert satisfied.tolist() == (expected if sketch.tunables else [True])


def test_constraint_function_violating_values_returns_false() -> None:
    for sketch in sketches("matmul", "c"):
        if sketch.constraints:
            columns = {t.name: np.array([t.domain[0], t.domain[-1]]) for t in sketch.tunables}
            assert ConstraintFunction(sketch)(columns).tolist() == [True, False]
            return
    raise AssertionError("no sketch of a matmul has a constraint")


def test_instantiate_wrong_values_raises() -> None:
    sketch = sketches("pointwise2", "c")[0]
    with pytest.raises(ScheduleError, match="tunable 'VL' expects one of"):
        instantiate(sketch, {"RB": 1})
    with pytest.raises(ScheduleError, match="got 17"):
        instantiate(sketch, {"RB": 1, "VL": 17})


def test_simplify_func_single_trip_loops_are_removed() -> None:
    func = make.matmul(7, 3)
    sketch = next(s for s in sketches("matmul 7", "c") if s.name.startswith("matmul.panels.direct"))
    instance = instantiate(sketch, {t.name: t.domain[0] for t in sketch.tunables})
    assert all(str(x.extent) != "1" for x in loops(instance.body))
    assert len(blocks(instance.body)) == len(blocks(sketch.func.body))
    again = simplify_func(instance)
    assert first_difference(again, instance) is None
    assert_same_meaning(func, again, {"m": 5})


def forms(func: PrimFunc, machine: str) -> list[str]:
    return [s.name for s in generate_sketches(func, MACHINES[machine], {"injective": RULES["injective"]})]


def copied(size: int) -> PrimFunc:
    b = TensorBuilder("copied")
    x, y = b.input("A", (size,)), b.output("C", (size,))
    b.compute(y, lambda i: x[i], name="copy")
    return b.finish()


def test_injective_outputs_beyond_cache_tries_nontemporal_stores() -> None:
    elements = MACHINES["c"].workers * MACHINES["c"].l2_bytes // 4
    assert "injective.nontemporal" not in forms(copied(elements), "c")
    assert "injective.nontemporal" in forms(copied(elements + 1), "c")
    assert "injective.nontemporal" in forms(make.pointwise(1), "c")


def times_matrix(steps: int, columns: int) -> PrimFunc:
    b = TensorBuilder("times_matrix")
    x, w = b.input("X", (1, steps)), b.input("W", (steps, columns), const=True)
    y = b.output("Y", (1, columns))
    b.reduce(y, (steps,), const(0.0), lambda acc, i, j, k: acc + x[i, k] * w[k, j], name="mm")
    return b.finish()


def test_gemv_panels_beyond_cache_are_prefetched() -> None:
    machine, name = MACHINES["c"], "gemv.columns.{}parallel"
    columns = machine.l2_bytes // 4 // (4 * 64)
    assert name.format("prefetch.") not in {s.name for s in generate_sketches(times_matrix(64, columns), machine)}
    sketches = {s.name: s for s in generate_sketches(times_matrix(64, 2 * columns), machine)}

    def asked(sketch: Sketch) -> list[str]:
        instance = instantiate(sketch, {"MR": 1, "V": 4})
        text = "".join(generate(f, CodeTarget("c", machine.lanes)).source for f in split_kernels(instance))
        return re.findall(r"__builtin_prefetch\((\w+)", text)

    assert not asked(sketches[name.format("")])
    (panels,) = set(asked(sketches[name.format("prefetch.")]))
    assert panels.startswith("W"), "what is read with them stays near"
    assert len(asked(sketches[name.format("prefetch.")])) == 4, "each panel once an iteration"


@pytest.mark.parametrize("kind", ["c", "opencl"])
def test_serial_forms_need_serial_launches(kind: str) -> None:
    machine = replace(MACHINES[kind], has_serial_launches=True)
    woken = replace(machine, has_serial_launches=False)
    for func in (make.pointwise(2), make.transposed_scale()):
        assert any(".serial" in s.name for s in generate_sketches(func, machine))
        assert not any(".serial" in s.name for s in generate_sketches(func, woken))


def test_injective_small_or_large_outputs_leaves_forms_out() -> None:
    machine = MACHINES["c"]
    assert forms(copied(machine.launch_ns), "c") == ["injective.serial"]
    assert forms(copied(machine.launch_ns + 1), "c") == ["injective.parallel", "injective.serial"]
    assert "injective.serial" not in forms(copied(1 << 22), "c")
    on_one_worker = generate_sketches(copied(1 << 22), replace(machine, workers=1), {"injective": RULES["injective"]})
    assert {s.name for s in on_one_worker} == {"injective.serial", "injective.nontemporal"}


@pytest.mark.parametrize("machine", MACHINES)
def test_injective_transposed_reads_uses_tiles(machine: str) -> None:
    assert [n for n in forms(make.transposed_scale(), machine) if "transposed" in n]
    for func in (make.pointwise(4), zoo.transpose_0213().func, zoo.gather().func):
        assert not [n for n in forms(func, machine) if "transposed" in n]


def test_rowwise_positions_of_extremes_are_vectorised() -> None:
    (sketch,) = [
        s for s in by_rule("places of the largest of 21", "c", "rowwise") if s.name == "rowwise.parallel.registers"
    ]
    source = generate(instantiate(sketch, {t.name: t.domain[0] for t in sketch.tunables}), CodeTarget("c", 8)).source
    assert "place_rf_0 = rt_min_i32x8(" in source


@pytest.mark.parametrize("kernel", ["linear", "cubic"])
def test_loop_of_many_gathers_is_no_vector(kernel: str) -> None:
    # of three dims: 8 or 64 elements a place, whose indices each lane would compute by itself
    n, h, w = Var("n"), Var("h"), Var("w")
    infos = [TensorInfo((n, const(3), h, w, w), f32), TensorInfo((n, h, w, w, const(3)), f32)]
    func = GridSample(kernel).legalize("samples", infos)
    sketch = next(s for s in generate_sketches(func, MACHINES["c"]) if s.name == "injective.parallel")
    source = generate(instantiate(sketch, {t.name: t.domain[0] for t in sketch.tunables}), CodeTarget("c", 8)).source
    assert "f32x" not in source.split("/*end prelude*/")[-1] and len(source) < 120_000


def test_widened_rows_fit_the_stack_of_a_thread() -> None:
    """WebAssembly's has 256 KiB; a feed-forward part may have 14,336 steps, and more."""
    for steps, most in ((14336, 4), (40000, 1)):
        func = make.quantised(16, steps, 8, activations="int8")
        sketches = generate_sketches(func, MACHINES["c"], {"matmul": RULES["matmul"]})
        sketch = next(s for s in sketches if s.name == "matmul.panels.dots")
        rng = random.Random(steps)
        assert {drawn(sketch, rng)["MR"] for _ in range(20)} <= set(range(1, most + 1))


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES))
def test_first_guesses_generate_code(case: str) -> None:
    """A form without code costs a search its candidates, and nothing else says so."""
    for sketch in generate_sketches(CASES[case][0](), MACHINES["c"]):
        values = sketch.guesses[0] if sketch.guesses else {t.name: t.domain[0] for t in sketch.tunables}
        for part in split_kernels(instantiate(sketch, values)):
            generate(part, CodeTarget("c", MACHINES["c"].lanes))


def test_results_of_primitives_are_shared_and_released_with_the_function() -> None:
    func = make.matmul()
    first, second = Schedule(func), Schedule(func)
    loop = first.loops_of(blocks(func.body)[-1].name)[0]
    for s in (first, second):
        s.split(loop, [None, s.tunable("T", (2, 4))])
        with pytest.raises(ScheduleError, match="no_such_loop"):
            s.split("no_such_loop", [None, 4])
        with pytest.raises(ScheduleError):
            s.compute_inline("no_such_block")
    assert first.func is second.func is not func
    released = weakref.ref(func), weakref.ref(first.func)
    del func, first, second, s
    gc.collect()
    assert [r() for r in released] == [None, None]
