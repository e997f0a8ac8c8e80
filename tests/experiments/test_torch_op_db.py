"""The statuses and reasons of torch's operator samples, from the importer's messages."""

from __future__ import annotations

import pytest
from experiments.families.torch_op_db import UNKNOWN, reason, status_of
from tests.ir.frontend.torch.test_importer import changed, recorded

from relax_tune.errors import BuildError, ParseError, ScheduleError
from relax_tune.ir.frontend.torch.importer import import_program


def test_unknown_operator_is_refused_with_the_name_as_reason() -> None:
    program, _ = recorded("qwen2")
    node = next(c for c in program.nodes if c.op == "aten.silu.default")
    with pytest.raises(ParseError) as error:
        import_program(changed(program, node.name, op="aten.silu_backward.default"))
    assert status_of(error.value) == "refused"
    assert UNKNOWN in str(error.value)
    assert reason(f"ParseError: {error.value}") == "aten.silu_backward.default"


@pytest.mark.parametrize("status, error", [
    ("refused", ParseError("expected dims of add, mul, got TruncToInt(1.7*ToFloat(s68))")),
    ("refused", ParseError("output y: expected a program that only computes results, got one that writes to x")),
    ("failed", BuildError("gcc refused the source")),
    ("failed", ScheduleError("node 'y', operator Add: no schedule")),
])  # fmt: skip
def test_only_errors_of_importers_are_refusals(status: str, error: Exception) -> None:
    assert status_of(error) == status


def test_reason_holds_the_expectation_without_names_of_nodes() -> None:
    why = (
        "ParseError: node 'a', operator aten.f of (x: Tensor((n, 2), f32)): expected a tensor with dims, got 3; cast it"
    )
    assert reason(why) == "aten.f: expected a tensor with dims, got 3"
    assert reason("ParseError: output 'y': expected a tensor") == "ParseError: output _: expected a tensor"
