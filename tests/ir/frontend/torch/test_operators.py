"""Small recorded programs, one per group of aten operators, against what torch said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.meaning import own_results

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.frontend.torch import control
from relax_tune.ir.frontend.torch.importer import SUPPORTED, import_program
from relax_tune.ir.frontend.torch.program import Ref, TorchCall, TorchProgram, TorchSymbol, TorchTensor, from_json
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

DATA = Path(__file__).parents[3] / "data"
Array = np.ndarray[Any, Any]
CONTROL = ("branches_and_loops", "sizes_masks", "sizes_distinct", "sizes_read")
"""Programs with parts that the runtime calls."""
RECORDED: dict[str, Any] = dict(json.loads((DATA / "torch_operators.json").read_text()))


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    with np.load(DATA / "torch_operators.npz") as found:
        return dict(found)


def program(name: str, arrays: dict[str, Array]) -> TorchProgram:
    start = f"{name}/w_"
    weights = {key.removeprefix(start): a for key, a in arrays.items() if key.startswith(start)}
    return from_json(json.dumps(RECORDED[name]), weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_operators_give_torch_s_results(name: str, arrays: dict[str, Array]) -> None:
    module = import_program(program(name, arrays))
    for form in (module, lower(module).module):
        for k in range(2):
            inputs, wanted = (
                [arrays[f"{name}/{kind}_{k}_{p}"] for p in range(40) if f"{name}/{kind}_{k}_{p}" in arrays]
                for kind in ("in", "out")
            )
            found = run_function(form, "main", inputs) if name in CONTROL else evaluate_function(form, inputs)
            for f, w in zip(own_results(found, module), wanted, strict=True):
                assert f.shape == w.shape
                assert f.dtype == w.dtype or (f.dtype, w.dtype) == (np.float64, np.float32)
                np.testing.assert_allclose(f, w, rtol=1e-4, atol=2e-3 if name == "half_numbers" else 1e-5)


def test_numbers_beside_half_floats_round_as_in_torch(arrays: dict[str, Array]) -> None:
    """Products and quotients keep a number in float32, other functions round it to the type of the tensor."""
    module = import_program(program("half_numbers", arrays))
    found = run_function(module, "main", [arrays["half_numbers/in_0_0"]])
    for k, f in enumerate(found):
        np.testing.assert_array_equal(f, arrays[f"half_numbers/out_0_{k}"])


def test_data_dependent_offset_in_condition_is_imported() -> None:
    x = TorchTensor(("n", 3), f32, "torch.float32")
    calls = (
        TorchCall("offset", "aten.sym_storage_offset.default", (Ref("x"),), {}, None, ""),
        TorchCall("holds", "sym.ge", (Ref("offset"), 0), {}, None, ""),
        TorchCall("said", "aten._assert_scalar.default", (Ref("holds"), "an offset of at least 0"), {}, None, ""),
        TorchCall("y", "aten.neg.default", (Ref("x"),), {}, x, ""),
    )
    made = TorchProgram((TorchSymbol("n", 1, None),), (("x", x),), {}, {}, calls, (("y", Ref("y")),))
    given = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(evaluate_function(import_program(made), [given]), -given)


def test_elu_of_small_values_keeps_digits() -> None:
    """torch takes expm1, since `exp(x) - 1` has no digits of 1e-8 in float32."""
    x = TorchTensor(("n",), f32, "torch.float32")
    calls = (TorchCall("y", "aten.elu.default", (Ref("x"), 0.5), {}, x, ""),)
    made = TorchProgram((TorchSymbol("n", 1, None),), (("x", x),), {}, {}, calls, (("y", Ref("y")),))
    given = np.array([-1e-8, -1e-4, -0.3, -20, -np.inf, 2, np.nan], np.float32)
    wanted = np.where(given > 0, given, 0.5 * np.expm1(given.astype(np.float64)))
    np.testing.assert_allclose(run_function(import_program(made), "main", [given]), wanted, rtol=1e-6)


def test_most_operators_are_recorded() -> None:
    """Every operator that can be written is in some recorded program, but for other spellings of the same."""
    read = {node[1] for p in RECORDED.values() for node in p["nodes"]}
    for path in DATA.glob("torch_*.json"):
        if path.name != "torch_operators.json":
            found = json.loads(path.read_text())
            programs = [p for _, p in found] if isinstance(found, list) else [found]
            read |= {node[1] for p in programs for node in p["nodes"]}
    assert read <= {*SUPPORTED, *control.HANDLERS}
    missing = sorted(set(SUPPORTED) - read)
    assert len(missing) <= len(SUPPORTED) * 0.4, missing
