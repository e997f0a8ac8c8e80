"""Long f32 sums: every schedule adds them up in parts; sums known to be short keep their loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.support import schedule_functions as make
from tests.support.candidates import CASES, MACHINES, arguments, cases_of, function, problems, sampled, sketches_of
from tests.support.effort import some
from tests.support.tuner_models import DEVICES, opened

from relax_tune.ir.codegen.lower import long_sums
from relax_tune.ir.codegen.lower.long_sums import LONG_SUM, SUM_PART
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, as_int, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.schedules.sketch import Sketch, generate_sketches

# Rules whose running sums are scaled at every tile of keys, or stay in a tile of registers of a work-item.
SEQUENTIAL = {
    "c": {"flash_attention"},
    "gpu": {"flash_attention.queries", "flash_attention.keys", "matmul.data_parallel", "matmul.stream_k"},
}

# Functions whose kernels compile quickly.
SMALL = (
    "row sum",
    "sum of all",
    "mean pool",
    "softmax with mask",
    "sums over both ends",
    "one element",
    "a matrix and a vector",
)
# How many functions are compiled in one call: large files take the compiler minutes.
TOGETHER = 4


def adds_up_unknown(func: PrimFunc) -> bool:
    """Whether a function has a sum whose number of terms is only known at a call."""
    reductions = [(b, i) for b in blocks(func.body) for i in b.iters if i.kind == "reduce"]
    return any(
        b.body.value.op == "add" and b.body.buffer.dtype is f32 and as_int(i.extent) is None for b, i in reductions
    )


def symbolic_sums(language: str) -> list[tuple[str, Sketch, PrimFunc]]:
    cases = some([c for c in cases_of(language) if adds_up_unknown(function(c))], 2)
    return [(c, s, m) for c in cases for s, _, m in sampled(sketches_of(c, language)[1], f"sums {c}")]


def text(func: PrimFunc, language: str) -> str:
    return "".join(k.source for k in kernels_of(func, language))


@pytest.mark.parametrize("machine", ["c", "gpu"])
def test_long_sums_of_every_rule_run_in_parts(machine: str) -> None:
    language = "c" if machine == "c" else "cuda"
    whole = {s.name for _, s, m in symbolic_sums(machine) if "_total" not in text(m, language)}
    assert whole <= SEQUENTIAL[machine]


def test_sums_known_to_be_short_keep_the_loops() -> None:
    funcs = [make.matmul(96, 4096), make.matmul(96, LONG_SUM, const_weight=False), make.dense(64, 4096)]
    funcs.append(Sum((1,)).legalize("rows", [TensorInfo((const(7), const(LONG_SUM)), f32)]))
    for func in some(funcs, 2):
        for machine in ("c", "gpu"):
            for sketch, _, func_of_sketch in sampled(generate_sketches(func, MACHINES[machine]), "short"):
                assert "_total" not in text(func_of_sketch, "c" if machine == "c" else "cuda"), sketch.name


def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_sums, "SUM_PART", 4)
    monkeypatch.setattr(long_sums, "WIDE_ON_ITEM", 512)


def check_all(device: Any, language: str, candidates: Sequence[tuple[str, Sketch, PrimFunc]]) -> None:
    parts = [candidates[at : at + TOGETHER] for at in range(0, len(candidates), TOGETHER)]
    runs = [run for part in parts for run in Compiled.together(device, language, [m for _, _, m in part])]
    for (case, sketch, _), run in zip(candidates, runs, strict=True):
        longer = {name: 23 for name in CASES[case][1][0]}
        for seed, dims in enumerate((*CASES[case][1], longer)):
            arrays, scalars = arguments(run.func, dims, seed)
            wrong = problems(function(case), arrays, run(arrays, scalars), dims)
            assert not wrong, (case, sketch.name, wrong)


@pytest.mark.parametrize("language", DEVICES)
@pytest.mark.slow
def test_long_sums_in_small_parts_are_right_in_every_schedule(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short_parts(monkeypatch)
    candidates = {s.name: (c, s, m) for c, s, m in symbolic_sums(language) if c in SMALL or s.name == "fallback"}
    with opened(language) as device:
        check_all(device, language, some(candidates.values()))


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_long_sums_in_small_parts_are_right_in_cuda(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    short_parts(monkeypatch)
    candidates = {s.name: (c, s, m) for c, s, m in symbolic_sums("gpu")}
    device = emulated(tmp_path)
    try:
        check_all(device, "cuda", some(candidates.values()))
    finally:
        device.close()


def relative_error(values: np.ndarray[Any, Any], total: float) -> float:
    exact = float(values.astype(np.float64).sum())
    return abs(total - exact) / exact


@pytest.mark.slow
@pytest.mark.parametrize("language", DEVICES)
def test_long_sums_stay_within_the_bound(language: str) -> None:
    """2**25 ones, and many tenths, whose sequential sum is off by parts per thousand."""
    func = Sum((1,)).legalize("rows", [TensorInfo((Var("n"), Var("m")), f32)])
    sketches = generate_sketches(func, MACHINES[language])
    with opened(language) as device:
        runs = Compiled.together(device, language, [m for _, _, m in sampled(sketches, "long")])
        for values in (np.full((1, 1 << 20), 0.1, np.float32), np.ones((1, 1 << 25), np.float32)):
            n = values.shape[1]
            for sketch, run in zip(sketches, runs, strict=True):
                (total,) = run([values, np.zeros(1, np.float32)])
                assert relative_error(values, float(total[0])) <= (LONG_SUM + n / SUM_PART) / 2**24, sketch.name
                assert n < 1 << 25 or total[0] == n, sketch.name
