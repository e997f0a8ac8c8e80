"""Functions of an artifact as the server calls them: the shapes to time."""

from __future__ import annotations

import pytest
from tests.tuner.serve.served import Files

from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.serve.functions import ServedFunction, plan_changes
from relax_tune.tuner.serve.rows import Joining, symbol_number


def test_changes_of_plans_are_the_shapes_behind_guards() -> None:
    keys = [(2, n) for n in range(1, 65)]
    assert plan_changes(lambda key: [int(key[1] <= 17), int(key[0] * key[1] > 100)], keys) == [17, 50]
    assert plan_changes(lambda key: [key[1] % 2], keys) == [], "a remainder changes everywhere"


@pytest.mark.ccompiler
def test_shapes_of_an_encoder_are_timed_within_the_bounds(files: Files) -> None:
    with load_artifact(files.artifact("encoder")).open() as model:
        program = model.executors["main"].program
        batch, length = (symbol_number(program, name) for name in "bn")
        function = ServedFunction(model, "main", Joining(program, batch, length))
        assert function.times.rows == (1, 2, 4, 8)
        assert (function.times.lengths[0], function.times.lengths[-1]) == (1, 32)
        assert 0 < function.time(8, 32) < 60
        plain = ServedFunction(model, "main", Joining(program, batch))
        assert plain.check(plain.sample(3, 5)).group == (5,) and function.check(function.sample(3, 5)).group == ()
