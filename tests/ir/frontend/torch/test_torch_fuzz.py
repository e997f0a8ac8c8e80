"""A slice of the fuzzer of the torch importer, and its parts."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install torch")
pytest.importorskip("onnx", reason="needs the onnx package")
from tests.fuzz.importers import minimise, run
from tests.fuzz.importers import torch_programs as programs
from tests.fuzz.importers.torch_operators import EXACT, INEXACT

pytestmark = pytest.mark.torch


def test_program_is_determined_by_seed_and_number() -> None:
    first, second = programs.make(5, 3), programs.make(5, 3)
    assert first is not None and second is not None
    assert first.function() == second.function()
    for a, b in zip(first.calls, second.calls, strict=True):
        assert all(np.array_equal(a[k], b[k], equal_nan=a[k].dtype.kind == "f") for k in a)


@pytest.mark.slow
def test_every_template_makes_a_line_of_torch() -> None:
    import random

    def accepted(template: str) -> bool:
        for seed in range(12):
            try:
                programs.Builder(random.Random(f"{seed} {template}")).line(template, 0)
                return True
            except programs.Invalid:
                continue
        return False

    assert [t for t in (*EXACT, *INEXACT) if not accepted(t)] == []


@pytest.mark.slow
def test_wrong_result_is_reported_and_minimised() -> None:
    def doubled(module: object, args: list[np.ndarray]) -> object:
        results = programs.interpreted(module, args)
        every = results if isinstance(results, tuple) else (results,)
        return tuple(2 * r if r.dtype == np.float32 else r for r in every)

    x = np.array([[1.0, -2.0, 3.0]], np.float32)
    lines = [
        programs.Line(("v0",), ("x0",), "torch.abs(x0)"), programs.Line(("v1",), ("v0",), "torch.neg(v0)"),
        programs.Line(("v2",), ("v1",), "torch.sign(v1)"),
    ]  # fmt: skip
    code = programs.TorchCode(
        0, lines, {"x0": programs.Input(x.dtype, (1, 3))}, outputs=["v1", "v2"], calls=[{"x0": x}], dims="fixed"
    )
    assert not programs.attempt(code).kind
    outcome = programs.attempt(code, doubled)
    assert (outcome.kind, outcome.output) == ("wrong", "v1")
    small = minimise.minimise(code, "v1", 0, lambda p: programs.attempt(p, doubled).kind == "wrong", 20)
    assert isinstance(small, programs.TorchCode) and len(small.nodes) == 1
    assert "compare(f, [" in programs.regression_test(small, "why")


@pytest.mark.heavy
@pytest.mark.slow
def test_fuzzer_finds_no_difference_in_a_few_programs() -> None:
    trials = run.trials_of("torch")
    outcomes = [run.one(trials, 20261130, number, None) for number in range(25)]
    assert [(k, o.why) for k, o in enumerate(outcomes) if o is not None and o.is_finding] == []
    assert sum(o is not None and not o.kind for o in outcomes) > 10
