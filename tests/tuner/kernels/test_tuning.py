"""Tuning a single function: the same records as a model's, and a kernel that agrees with NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relax_tune as rt
from relax_tune.errors import UserError
from relax_tune.ir.check.structural import workload_key

SCALE = rt.parse_prim_func("""
@prim_func(outputs=1)
def scale(values: Buffer((rows, 24), f32), by: Buffer((24,), f32), result: Buffer((rows, 24), f32)):
    for i in serial(rows):
        for j in serial(24):
            with block("scale"):
                vi = spatial(rows, i)
                vj = spatial(24, j)
                result[vi, vj] = values[vi, vj] * by[vj]
""")


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_tuned_kernel_agrees_with_numpy_and_records_the_workload(tmp_path: Path) -> None:
    options: dict[str, Any] = {"db": tmp_path / "records.db", "trials": 1, "bounds": {"rows": (40, 40)}}
    kernel = rt.kernel(SCALE, "c")
    best = kernel.tune(**options)
    x, by = np.random.default_rng(0).standard_normal((40, 24), np.float32), np.arange(24, dtype=np.float32)
    np.testing.assert_array_equal(best(values=x, by=by), x * by)
    assert repr(best) == "<kernel scale(values, by; rows) -> result on c>"
    with rt.open_database(str(options["db"])) as store:
        (target,) = store.targets()
        assert [w.key for w in store.workloads(target.key)] == [workload_key(SCALE)]
        count = store.count(target.key, workload_key(SCALE))
    again = best.tune(**options)
    assert again.schedule.trace == best.schedule.trace
    with rt.open_database(str(options["db"])) as store:
        assert store.count(target.key, workload_key(SCALE)) == count > 0


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        ({}, "bounds for rows, got none"),
        ({"bounds": {"rows": (1, 4), "n": (1, 2)}}, "bounds for rows, got rows, n"),
        ({"bounds": {"rows": 4}}, "bounds of rows"),
        ({"bounds": {"rows": (4, 1)}}, "'rows'.*lower <= upper"),
        ({"bounds": {"rows": (1, 4)}, "trails": 2}, "trails; did you mean trials"),
        ({"bounds": {"rows": (1, 4)}, "strategy": "luck"}, "luck"),
    ],
)
def test_wrong_argument_of_tune_is_refused(arguments: dict[str, Any], subject: str) -> None:
    with pytest.raises(UserError, match=subject):
        rt.kernel(SCALE, "c").tune(db="memory://", **arguments)
