"""Unexpected errors of rules, candidates, checks and library forms: each costs its own part, with one warning."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from tests.support.tuner_models import PAPER_DEVICE, QUICK, job_dispatching

from relax_tune.database.store import MemoryStore
from relax_tune.errors import UnexpectedErrorWarning
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.math.elementwise import Gelu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.library import library_lowering
from relax_tune.schedules import sketch
from relax_tune.schedules.rules.cpu import fallback, injective
from relax_tune.schedules.sketch import generate_sketches
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.program.program_builder import ProgramBuilder
from relax_tune.tuner.task import check, legal_values, sketch_set, variants
from relax_tune.tuner.task.alternatives import alternatives_here

pytestmark = [pytest.mark.self_test, pytest.mark.process, pytest.mark.ccompiler, pytest.mark.slow]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    with contextlib.closing(LocalRunner("c")) as found:
        yield found


def gelu() -> IRModule:
    g = GraphBuilder()
    return g.finish(g.call(Gelu(), g.input("x", (g.symbol("n", 1, 64), 16))))


def fails(*arguments: Any, **named: Any) -> Any:
    raise IndexError("a fault")


def broken_rule(*arguments: Any) -> Iterator[Any]:
    yield fails()


def broken_for(label: str, make: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Return `make`, which fails where its argument at `position` is the label."""

    def made(*arguments: Any, **named: Any) -> Any:
        return fails() if arguments[position] == label else make(*arguments, **named)

    return made


def broken_number(make: Callable[..., Any], number: int) -> Callable[..., Any]:
    calls = iter(range(100))
    return lambda *a, **k: fails() if next(calls) == number else make(*a, **k)


def in_a_rule(patch: Patch) -> None:
    patch.setitem(sketch.PROCESSOR_RULES, "injective", broken_rule)
    patch.setitem(sketch.RULES, "injective", broken_rule)


def in_every_schedule(patch: Patch) -> None:
    patch.setattr(injective, "build", fails)


def in_the_generic_schedule(patch: Patch) -> None:
    for table in (sketch.PROCESSOR_RULES, sketch.RULES):
        for name in table:
            patch.setitem(table, name, broken_rule)
    patch.setattr(fallback, "sketches", broken_rule)


def in_legal_values(patch: Patch) -> None:
    for module in (legal_values, sketch_set):
        patch.setattr(module, "ConstraintFunction", fails)


def in_generated_code(patch: Patch) -> None:
    patch.setattr(variants, "candidate_program", broken_for("tuned", variants.candidate_program, 1))


def in_emitted_code(patch: Patch) -> None:
    patch.setattr(ProgramBuilder, "variant", broken_for("predicted", ProgramBuilder.variant, 1))


def in_one_check(patch: Patch) -> None:
    patch.setattr(check, "evaluate", broken_number(check.evaluate, 0))


# where an error occurs, and the labels of the variants that a build without records dispatches then
FAULTS: Mapping[str, tuple[Callable[[Patch], None], set[str]]] = {
    "rule": (in_a_rule, {"generic"}),
    "schedule": (in_every_schedule, {"generic"}),
    "generic schedule": (in_the_generic_schedule, {"generic"}),
    "legal values": (in_legal_values, {"predicted"}),  # the rules' first guess needs none
    "generated code": (in_generated_code, {"generic"}),
    "emitted code": (in_emitted_code, {"generic"}),
    "check": (in_one_check, {"predicted"}),
}


def labels(built: BuildResult) -> set[str]:
    return {v.label for c in built.program.calls for v in c.variants}


@pytest.mark.parametrize("fault", FAULTS)
def test_build_with_unexpected_error_warns_and_goes_on(runner: LocalRunner, fault: str, monkeypatch: Patch) -> None:
    break_it, expected = FAULTS[fault]
    break_it(monkeypatch)
    job = device_job(gelu(), runner.device_info(), MemoryStore(), QUICK)
    with pytest.warns(UnexpectedErrorWarning) as caught:
        built = job.tested_build(runner)
    (name,) = job.task_variants
    assert all(repr(name) in str(w.message) and "a fault" in str(w.message) for w in caught)
    assert labels(built) == expected
    # how many variants the prior dispatches depends on this machine's workers and caches
    dispatched = {key for plan in built.plans.values() for key in plan.plan.variants}
    assert len(dispatched) == 1 or expected == {"predicted"}
    assert built.self_test == {"passed": len(dispatched), "failed": []}


def test_build_with_long_source_dispatches_the_generic_form(runner: LocalRunner, monkeypatch: Patch) -> None:
    monkeypatch.setattr(variants, "LONGEST_SOURCE", 100)
    built = device_job(gelu(), runner.device_info(), MemoryStore(), QUICK).tested_build(runner)
    assert labels(built) == {"generic"}


def test_build_without_any_check_says_so(runner: LocalRunner, monkeypatch: Patch) -> None:
    monkeypatch.setattr(check, "evaluate", fails)
    job = device_job(gelu(), runner.device_info(), MemoryStore(), QUICK)
    with pytest.warns(UnexpectedErrorWarning):
        built = job.tested_build(runner)
    (name,) = job.task_variants
    assert [n for n in built.notes if n.startswith(f"{name}: no check")]


def test_build_with_broken_winner_dispatches_another_variant(runner: LocalRunner, monkeypatch: Patch) -> None:
    job = job_dispatching(runner.device_info(), gelu(), lambda c, _: [c.sketch_set.record_of(c.sketch_set.seeds(1)[0])])
    monkeypatch.setattr(ProgramBuilder, "variant", broken_for("tuned", ProgramBuilder.variant, 1))
    with pytest.warns(UnexpectedErrorWarning):
        assert labels(job.tested_build(runner)) == {"generic"}


def test_library_forms_with_broken_routine_keep_the_others(monkeypatch: Patch) -> None:
    g = GraphBuilder()
    n = g.symbol("n", 1, 64)
    module = g.finish(g.call(Matmul(), g.input("x", (n, 16)), g.input("y", (16, 8))))
    func = next(iter(device_job(module, PAPER_DEVICE, MemoryStore(), QUICK).task_variants.values())).task.func
    routines = alternatives_here("c", ("onednn", "openblas"))
    whole = [f.routine for f in library_lowering.library_forms(func, routines)]
    assert len(whole) > 1
    make = library_lowering._product_form
    monkeypatch.setattr(
        library_lowering, "_product_form", lambda f, a, t: fails() if a.routine == whole[0] else make(f, a, t)
    )
    with pytest.warns(UnexpectedErrorWarning, match=whole[0]):
        assert [f.routine for f in library_lowering.library_forms(func, routines)] == whole[1:]


@pytest.mark.parametrize("fault", ["rule", "schedule", "features", "generated code", "check", "baseline"])
def test_tune_with_unexpected_error_measures_the_rest(runner: LocalRunner, fault: str, monkeypatch: Patch) -> None:
    if fault == "features":
        monkeypatch.setattr(sketch_set, "FeatureFunction", broken_number(sketch_set.FeatureFunction, 0))
    elif fault == "baseline":
        monkeypatch.setattr(variants.UnfusedVariants, "variants", property(fails))
    else:
        FAULTS[fault][0](monkeypatch)
    job = device_job(gelu(), runner.device_info(), MemoryStore(), QUICK)
    with pytest.warns(UnexpectedErrorWarning):
        summary = job.tune(runner)
    assert summary.measurements > summary.failures
    assert not summary.problems


def test_unexpected_error_is_shown_once(monkeypatch: Patch) -> None:
    (func,) = (c.task.func for c in device_job(gelu(), PAPER_DEVICE, MemoryStore(), QUICK).task_variants.values())
    monkeypatch.setattr(injective, "build", fails)
    machine = next(iter(device_job(gelu(), PAPER_DEVICE, MemoryStore(), QUICK).task_variants.values())).hardware
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            generate_sketches(func, machine)
    texts = [str(w.message) for w in caught]
    assert texts and len(texts) == len(set(texts))


def test_command_shows_an_unexpected_error_in_one_line() -> None:
    code = (
        "from relax_tune.errors import warn_unexpected; from relax_tune.tuner.cli import app\n"
        "app.app = lambda **_: warn_unexpected('the rule x', 'f', ValueError('a fault'))\n"
        "app.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("warning: the rule x failed for function 'f'")
    assert done.stderr.count("\n") == 1
