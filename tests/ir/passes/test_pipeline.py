"""The pass manager and the levels of users' rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_tune.errors import VerifyError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.math.elementwise import AddScalar, MulScalar, Relu
from relax_tune.ir.passes.graph.canonical import Canonicalise
from relax_tune.ir.passes.graph.cleanup import DeadCode
from relax_tune.ir.passes.pipeline import STANDARD, PassManager, lower, pass_names
from relax_tune.ir.rewrite.pattern import op
from relax_tune.ir.rewrite.rules import Rule


def program() -> IRModule:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    g.call(Relu(), x)  # read by nothing
    return g.finish(g.call(AddScalar(3.0), x))


def drop_first_binding(module: IRModule) -> IRModule:
    """A pass that leaves a variable undefined."""
    main = module.functions["main"]
    assert isinstance(main, Function)
    blocks = tuple(replace(b, bindings=b.bindings[:-1]) for b in main.blocks)
    return replace(module, functions={**module.functions, "main": replace(main, blocks=blocks)})


def test_manager_verify_broken_module_names_pass() -> None:
    with pytest.raises(VerifyError, match=r"after <function drop_first_binding"):
        PassManager(verify=True).run(program(), (DeadCode(), drop_first_binding))


def test_manager_verify_refuses_a_broken_module_before_the_passes() -> None:
    with pytest.raises(VerifyError, match="before the passes"):
        PassManager(verify=True).run(drop_first_binding(program()), (DeadCode(),))


def test_manager_times_every_pass_and_keeps_changing_stages() -> None:
    manager = PassManager()
    manager.run(program(), (Canonicalise(), DeadCode(), DeadCode()))
    assert [name for name, _ in manager.seconds] == ["Canonicalise", "DeadCode", "DeadCode.2"]
    assert [name for name, _ in manager.stages] == ["DeadCode()"]


def test_manager_after_stops_behind_the_named_pass() -> None:
    manager = PassManager(after="DeadCode")
    lower(program(), manager=manager)
    names = [name for name, _ in manager.seconds]
    assert names == list(pass_names(STANDARD))[: len(names)] and names[-1] == "DeadCode"


def test_import_rules_run_to_a_fixpoint() -> None:
    def down(number: float) -> bool:
        return number > 1

    def less(site: object) -> Call:
        value = site.operator("added", AddScalar).value  # type: ignore[attr-defined]
        return site.call(AddScalar(value - 1), site.call(MulScalar(1.0), "x"))  # type: ignore[attr-defined, no-any-return]

    rule = Rule(op(AddScalar, "x", value=down).named("added"), less, "less", level="import")
    manager = PassManager()
    lower(program(), (), [rule], manager)
    main = manager.stages[0][1].functions["main"]
    assert isinstance(main, Function)
    added = [b.value.op.value for b in main.bindings if isinstance(b.value, Call) and isinstance(b.value.op, AddScalar)]
    assert added == [1.0]
