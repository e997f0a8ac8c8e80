"""Descents of trees by several rows or trees at a time, against NumPy, on both kinds of device."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support.candidates import MACHINES
from tests.support.random_trees import forest, forest_module
from tests.support.schedule_functions import csr_rows

from relax_tune.ir.op.reduction.trees import TreeEnsemble
from relax_tune.ir.passes.pipeline import lower
from relax_tune.schedules.rules.cpu import descents
from relax_tune.schedules.sketch import Sketch, generate_sketches, instantiate

TREES, FEATURES = 21, 5
FORMS = [f"descents.{form}.{order}" for form in ("rows", "trees") for order in ("parallel", "serial")]


def sketches(op: TreeEnsemble, targets: int, machine: str = "c") -> tuple[list[np.ndarray], list[Sketch]]:
    """Return the tables of random trees, and the sketches of their descent."""
    tables = forest(TREES, op.depth, FEATURES, targets, 3, op.nan_first)
    (func,) = lower(forest_module(op, tables, FEATURES)).module.prims.values()
    rule = {"descents": descents.sketches}
    return tables, list(generate_sketches(func, MACHINES[machine], rule))


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=getattr(pytest.mark, m)) for k, m in (("c", "ccompiler"), ("opencl", "opencl"))]
)
@pytest.mark.parametrize("targets, aggregate", [(1, "sum"), (3, "max")])
def test_descents_equal_numpy(kind: str, targets: int, aggregate: str) -> None:
    op = TreeEnsemble(TREES, 6, aggregate)
    tables, found = sketches(op, targets, kind)
    chosen = [(s, values) for s in found for values in ({"G": 1, "R": 16, "T": 8}, {"G": 4, "R": 4, "T": 16})]
    funcs = [instantiate(s, {t.name: values[t.name] for t in s.tunables}) for s, values in chosen]
    device = opened(kind)
    for n in (0, 1, 5, 67):
        x = np.random.default_rng(n).integers(-3, 4, (n, FEATURES)).astype(np.float32)
        x[::3, :1] = np.nan
        expected = op.evaluate([x, *tables])
        for kernel, (sketch, values) in zip(Compiled.together(device, kind, funcs), chosen, strict=True):
            (y,) = kernel([x, *tables, np.full((n, targets), np.nan, np.float32)])
            np.testing.assert_allclose(y, expected, rtol=1e-5, err_msg=f"{sketch.name} {values}, {n} rows")
    device.close()


@pytest.mark.parametrize("machine", ["c", "opencl"])
def test_processors_have_both_forms(machine: str) -> None:
    names = {s.name for s in sketches(TreeEnsemble(TREES, 6), 1, machine)[1]}
    assert names and names <= set(FORMS) and {n.split(".")[1] for n in names} == {"rows", "trees"}


def test_gathered_sums_are_no_descents() -> None:
    assert not list(generate_sketches(csr_rows(), MACHINES["c"], {"descents": descents.sketches}))
