"""The fuzzer: its table, its judge, its shrinking, its stored findings, and a fixed run of it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fuzz import run as fuzz
from tests.fuzz.coverage import Place, Tally, code_under_test
from tests.fuzz.draft import Draft, Grower, Step, arguments
from tests.fuzz.execute import Outcome, Trial, Way, execute
from tests.fuzz.operators import ENTRIES
from tests.fuzz.oracle import Expected
from tests.fuzz.outside import differences
from tests.fuzz.shrink import REGRESSIONS, read, shrink, store
from tests.support.effort import EFFORT

from relax_tune.errors import RelaxTuneError, UserError
from relax_tune.ir.core.dtype import bf16, f16, f32, f64, i64, u8
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.struct_info import TupleInfo
from relax_tune.ir.frontend.text import load_text
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import Cast, Erf, Exp, Maximum, Mul, MulScalar, Relu, Tanh
from relax_tune.ir.op.math.numeric import Acosh, Asin, Atan2, Atanh, Fmod, Log
from relax_tune.ir.op.reduction.reduce import LayerNorm, Sum
from relax_tune.ir.op.reduction.scan import ArgMax, CumProd
from relax_tune.ir.op.registry import OPERATORS

SEED = 20230325
CASES = sorted(REGRESSIONS.glob("*.relax"))


def chain(*ops: Any, dtype: Any = f32) -> tuple[Draft, list[Any]]:
    """Unary operators on an (n, 5) tensor, and an argument."""
    w = Grower(random.Random(0))
    x = w.fresh((w.symbols[0], 5), dtype)
    for op in ops:
        x = w.step(Step(op, (x,)))
    draft = w.finish()
    return draft, arguments(draft, {"n": 7, "m": 1}, np.random.default_rng(0), "plain")


def test_operator_table_covers_registry() -> None:
    assert set(ENTRIES) == set(OPERATORS), "each operator of the registry expects an entry in tests/fuzz/operators.py"


@pytest.mark.slow
def test_entries_drawn_at_random_fit() -> None:
    for name, entry in ENTRIES.items():
        fitting = 0
        for seed in range(60):
            w = Grower(random.Random(seed))
            try:
                w.step(entry.make(w))
                w.finish().module()
                fitting += 1
            except RelaxTuneError:
                continue
        assert fitting >= 10, name


@pytest.mark.parametrize("dtype", [f16, f32])
def test_judge_accepts_interpreter_and_finds_a_wrong_element(dtype: Any) -> None:
    draft, args = chain(Exp(), MulScalar(0.1), Sum((1,)), dtype=dtype)
    module = draft.module()
    actual = run_function(module, "main", args)
    expected = Expected(module, args, "c")
    assert not expected.judge((actual,)).problems and expected.judge((actual,)).judged == 7
    actual[3] *= 1 + (0.15 if dtype is f16 else 1e-4)
    assert "1 of 7 wrong, at [3]" in expected.judge((actual,)).problems[0]


def test_judge_comparison_of_inexact_values_is_skipped() -> None:
    w = Grower(random.Random(0))
    x = w.fresh((w.symbols[0],), f32)
    w.step(Step(OPERATORS["less"](), (w.step(Step(Tanh(), (x,))), w.step(Step(Tanh(), (x,))))))
    draft = w.finish()
    args = [np.float32([1.0, 2.0])]
    assert Expected(draft.module(), args, "c").judge((np.array([True, False]),)).skipped >= 1


def test_judge_comparison_below_the_normal_numbers_is_skipped() -> None:
    w = Grower(random.Random(0))
    x = w.fresh((w.symbols[0],), f64)
    w.step(Step(OPERATORS["equal"](), (w.step(Step(Erf(), (x,))), x)))
    expected = Expected(w.finish().module(), [np.array([2e-323, 1.0])], "c")
    assert not any(expected.judge((np.array([actual, False]),)).problems for actual in (False, True))
    assert expected.judge((np.array([False, True]),)).problems


@pytest.mark.parametrize("function", [Asin(), Acosh(), Atanh(), Log(), Tanh()], ids=lambda op: op.name)
def test_judge_function_of_an_overflowing_sum_is_skipped(function: Any) -> None:
    draft, _ = chain(Sum((1,)), function)
    expected = Expected(draft.module(), [np.full((7, 5), np.float32([3e38, -3e38, 3e38, -3e38, 3e38]))], "c")
    for actual in (math.nan, 0.0, 1.0, math.inf):
        assert not expected.judge((np.full(7, actual, np.float32),)).problems


@pytest.mark.parametrize("inside", [True, False])
def test_judge_refusal_of_indices_inside_is_wrong(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    w = Grower(random.Random(0))
    w.step(Step(Take(), (w.fresh((5, 3), f32), w.fresh((w.symbols[0],), i64))))
    draft = w.finish()
    args = [np.ones((5, 3), np.float32), np.array([4 if inside else 5])]
    text = "main: take: expected indices of at least 0"

    def refusing(*_: Any) -> None:
        raise UserError(text)

    monkeypatch.setattr(fuzz, "run_function", refusing)
    problem = fuzz.wrong(draft, draft.module(), args, text, "c", Tally())
    assert problem == (f"refused, though every index is inside: {text}" if inside else "")


def test_judge_remainder_of_a_product_near_overflow_is_skipped() -> None:
    w = Grower(random.Random(0))
    product = w.step(Step(CumProd(0), (w.fresh((w.symbols[0],), f32),)))
    w.step(Step(Cast(u8), (w.step(Step(Fmod(), (product, w.fresh((1,), f32)))),)))
    expected = Expected(w.finish().module(), [np.float32([2, 5e37]), np.float32([1.5])], "c")
    first = int(expected.nominal[0][0])
    assert not any(expected.judge((np.uint8([first, actual]),)).problems for actual in (0, 1))
    assert expected.judge((np.uint8([first + 1, 0]),)).problems


def test_judge_normalised_axes_with_an_overflowing_square_are_skipped() -> None:
    w = Grower(random.Random(0))
    x = w.fresh((2, w.symbols[0], 1), f32)
    w.step(Step(LayerNorm(axes=2), (x, w.fresh((1,), f32), w.fresh((1,), f32))))
    args = [np.float32([[[1], [-3.4e38]], [[1], [3]]]), np.ones(1, np.float32), np.ones(1, np.float32)]
    expected = Expected(w.finish().module(), args, "c")
    judged = expected.judge((np.float32([[[9], [9]], [[0], [2]]]),))
    assert not judged.problems and judged.judged == 2
    assert expected.judge((np.float32([[[9], [9]], [[0], [9]]]),)).problems


@pytest.mark.parametrize("op", [Mul(), Maximum()])
def test_judge_operands_of_other_shapes_are_no_excuse(op: Any) -> None:
    w = Grower(random.Random(0))
    w.step(Step(op, (w.fresh((4, 3), f32), w.fresh((3,), f32))))
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.full(3, -0.0, np.float32)
    expected = Expected(w.finish().module(), [x, y], "c")
    assert all(r is not None for r in expected.runs)
    assert expected.judge((np.full((4, 3), 99, np.float32),)).problems


@pytest.mark.slow
def test_judge_runs_end_without_errors() -> None:
    """A run that ends in an error has the judge skip the program."""
    with np.errstate(all="ignore"):
        for draft, trial in fuzz.programs(random.Random(5), 60, Tally()):
            for args in trial.calls:
                try:
                    expected = Expected(trial.module, args, "c")
                except (UserError, IndexError, ValueError):  # a call that is refused
                    continue
                assert all(r is not None for r in expected.runs), [s.op.name for s in draft.steps]


def test_judge_either_zero_of_relu_is_accepted() -> None:
    w = Grower(random.Random(0))
    x = w.fresh((3,), f32)
    w.step(Step(Atan2(), (w.step(Step(Relu(), (x,))), w.fresh((3,), f32))))
    draft = w.finish()
    args = [np.float32([-0.0, 0.0, -1.0]), np.float32([-1.0, -1.0, -1.0])]
    expected = Expected(draft.module(), args, "c")
    pi = np.float32(np.pi)
    assert not expected.judge((np.float32([-pi, pi, pi]),)).problems
    assert "at [1]" in expected.judge((np.float32([pi, -pi, pi]),)).problems[0]


def test_judge_either_zero_of_a_sum_of_zeros_is_accepted() -> None:
    w = Grower(random.Random(0))
    w.step(Step(Atan2(), (w.step(Step(Sum((1,)), (w.fresh((2, 2), f32),))), w.fresh((2,), f32))))
    args = [np.float32([[-0.0, -0.0], [1.0, -1.0]]), np.float32([-1.0, -1.0])]
    expected = Expected(w.finish().module(), args, "c")
    pi = np.float32(np.pi)
    assert not expected.judge((np.float32([-pi, pi]),)).problems
    assert "at [1]" in expected.judge((np.float32([pi, -pi]),)).problems[0]


@pytest.mark.parametrize("dtype", [bf16, f32])
def test_judge_comparison_of_a_cancelling_sum_is_skipped(dtype: Any) -> None:
    w = Grower(random.Random(0))
    w.step(Step(OPERATORS["equal"](), (w.step(Step(Sum((1,)), (w.fresh((2, 3), dtype),))), w.fresh((2,), dtype))))
    draft = w.finish()
    args = [np.array(a).astype(dtype.numpy) for a in ([[1, 2**-26, -1], [0.1, 0.2, 0.3]], [0, 0])]
    expected = Expected(draft.module(), args, "c")
    assert not expected.judge((np.array([True, False]),)).problems
    assert expected.judge((np.array([True, True]),)).problems


def test_judge_places_of_nearly_equal_elements_are_skipped() -> None:
    draft, _ = chain(Tanh(), ArgMax(1))
    args = [np.full((7, 5), np.float32([2.0, np.nextafter(np.float32(2), 1), 1.9, 1.9, 1.9]))]
    for seed in range(4):
        assert not Expected(draft.module(), args, "c", seed).judge((np.full(7, 1),)).problems


def test_tally_written_and_read_goes_on(tmp_path: Path) -> None:
    draft, _ = chain(Exp(), MulScalar(0.1), Sum((1,)))
    tally = Tally(next=7)
    tally.count(draft.module(), "c", ["fused_exp_mul_scalar", "sum"])
    tally.programs["c generic"] += 1
    tally.findings.append(Place(3, 1, 0, "wrong"))
    tally.write(tmp_path / "totals.json")
    result = Tally.read(tmp_path / "totals.json")
    assert result.findings == tally.findings
    result.add(tally)
    assert (result.next, result.total) == (7, 2)
    assert result.pairs[("exp", "f32", "mul_scalar", "c")] == result.fused[("exp", "f32", "mul_scalar", "c")] == 2
    assert ("mul_scalar", "f32", "sum", "c") not in result.fused


def test_tally_of_other_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "totals.json"
    Tally(next=7).write(path)
    path.write_text(path.read_text().replace(code_under_test(), "0" * 64))
    with pytest.raises(UserError, match="expected totals of this code"):
        Tally.read(path)


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
def test_finding_accepted_by_judge_is_dropped() -> None:
    assert not fuzz.is_reproduced(1, Place(0, 0, 0, "a judge of old"), ["c generic 0"])


@pytest.mark.slow
def test_operators_on_random_arguments_agree_with_onnx() -> None:
    pytest.importorskip("onnx")
    compared, result = differences(20230325, 1500)
    assert compared == 1500 and not result, "\n".join(result[:5])


def test_judge_infinite_result_requires_the_same_infinity() -> None:
    draft, _ = chain(Exp())
    expected = Expected(draft.module(), [np.array([[1000, 0, 1, -1000, 2]], np.float32)], "c")
    right = np.exp(np.array([[np.inf, 0, 1, -np.inf, 2]], np.float32))
    assert not expected.judge([right]).problems
    for other in (-math.inf, 5.0, math.nan):
        assert expected.judge([np.where(np.isinf(right), np.float32(other), right)]).problems


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
def test_shrink_failing_chain_becomes_one_operator(tmp_path: Path) -> None:
    draft, args = chain(Exp(), MulScalar(0.1), Tanh(), MulScalar(3.0), Sum((1,)))

    def why(d: Draft, module: Any, given: Sequence[Any], outcome: Outcome) -> str:
        return "result 0: wrong" if any(s.op == Tanh() for s in d.steps) and outcome.results else ""

    (small, left), _ = shrink((draft, args), Way(), why, "wrong", 60)
    assert [s.op for s in small.steps] == [Tanh()] and left[0].shape == (1, 5)
    path = store((small, left), Way(), "result 0: wrong", tmp_path)
    way, back, stored = read(path)
    assert way == Way() and back[0].shape == left[0].shape and stored["found"] == "result 0: wrong"
    assert load_text(path).functions.keys() == {"main"}


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
def test_execute_program_dying_in_a_batch_is_identified(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from tests.fuzz import execute as module

    real = module._ran
    monkeypatch.setattr(
        module, "_ran", lambda a, n, t, d: os.abort() if t.calls[0][0].shape[0] == 3 else real(a, n, t, d)
    )
    draft, args = chain(Exp())
    trials = [Trial(draft.module(), ([args[0][:k]],)) for k in (2, 3)]
    result = execute(Way(), trials)
    assert result[0].results and result[1].crash == "the process died"


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_stored_case_matches_judge(path: Path, request: pytest.FixtureRequest) -> None:
    """A case with a reason under `open` fails as yet; remove the reason with its mending."""
    way, args, stored = read(path)
    if way.target == "opencl":
        pytest.importorskip("pyopencl", reason="pyopencl is not installed (extra opencl)")
    if "open" in stored:
        request.node.add_marker(pytest.mark.xfail(reason=stored["open"], strict=False))
    module = load_text(path)
    main = module.functions["main"]
    assert isinstance(main, Function)
    (outcome,) = execute(way, [Trial(module, (args,))])
    assert not outcome.crash and not outcome.unbuilt, outcome.crash + outcome.unbuilt
    assert not outcome.outside
    try:
        results = run_function(module, "main", args)
    except UserError as error:
        assert isinstance(outcome.results[0], str), f"the interpreter refuses, the program does not: {error}"
        return
    assert not isinstance(outcome.results[0], str), outcome.results[0]
    expected = Expected(module, args, way.target, exempt=False)
    assert not expected.judge(results if isinstance(main.ret.info, TupleInfo) else (results,)).problems
    assert not expected.judge(outcome.results[0]).problems


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
def test_random_programs_match_judge() -> None:
    """A little of `make fuzz`, with a fixed seed and number of programs."""
    ways = ("c generic 0", "c generic 1", "c traces 0", "c tuned 0")
    most, used = (192, 0.9) if EFFORT == "heavy" else (96, 0.75)
    tally = fuzz.campaign(600, SEED, ways, most=most)
    small = [fuzz.shortened(fuzz.finding_at(SEED, f, ways), 20) for f in tally.findings[:3]]
    assert not tally.findings, "\n\n".join(f"{f.way}: {f.why}\n{fuzz.shown(f)}" for f in small)
    assert tally.total >= most and len(tally.uses) >= used * len(ENTRIES)
    assert tally.counts["judged"] > 8 * tally.counts["skipped"]
