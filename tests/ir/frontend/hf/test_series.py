"""Forecasters of time series against the original framework, at weights drawn by name."""

from __future__ import annotations

import json
import runpy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.effort import GENERIC
from tests.support.encoder_folders import write_encoder

from relax_tune import build
from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.graph import GVar, TupleValue
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

DATA = Path(__file__).parents[3] / "data"
MAKER = runpy.run_path(str(DATA / "make_tiny_series.py"))
Array = np.ndarray[Any, Any]
NAMES = {"timesfm": ("mean_predictions", "full_predictions"), "timesfm-bare": ("last_hidden_state", "loc", "scale")}

write = partial(write_encoder, DATA / "tiny_series.npz", MAKER)


def close(actual: tuple[Array, ...], results: dict[str, Array], number: int) -> None:
    expected = [results[key] for k in range(9) if (key := f"{number}/{k}") in results]
    assert [part.shape for part in actual] == [want.shape for want in expected]
    for part, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(part, want, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("name", MAKER["MODELS"])
def test_forecaster_gives_the_results_of_torch(name: str, tmp_path: Path) -> None:
    results = write(tmp_path, name)
    module = load_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for form in (module, lower(module).module):
        for number, case in enumerate(MAKER["MODELS"][name][2]):
            actual = evaluate_function(form, list(MAKER["inputs"](case, config).values()))
            close(actual, results, number)


@pytest.mark.parametrize("name", ["timesfm-placed", "timesfm-missing"])
def test_padding_in_front_changes_no_forecast(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    module, config = load_hf(tmp_path), json.loads((tmp_path / "config.json").read_text())
    given = MAKER["inputs"]((3, 21), config)
    short = evaluate_function(module, list(given.values()))
    # a step of padding may hold anything
    given["past_values"] = np.pad(given["past_values"], ((0, 0), (30, 0)), constant_values=np.nan)
    given["past_values_padding"] = np.pad(given["past_values_padding"], ((0, 0), (30, 0)), constant_values=1)
    for part, want in zip(evaluate_function(module, list(given.values())), short, strict=True):
        np.testing.assert_allclose(part, want, rtol=1e-4, atol=1e-4)


@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("name", ["timesfm-placed", "timesfm-bare-placed"])
def test_compiled_forecaster_gives_the_results_of_torch(name: str, tmp_path: Path) -> None:
    results = write(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    with build(load_hf(tmp_path), target="c", db="memory://", **GENERIC).open() as model:
        for number, case in enumerate(MAKER["MODELS"][name][2]):
            close(tuple(model.run(MAKER["inputs"](case, config), "main")), results, number)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_results_and_bounds_have_the_names_of_the_framework(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    module = load_hf(tmp_path)
    main = module.graphs["main"]
    assert [p.name for p in main.params] == ["past_values", "past_values_padding", "freq"]
    assert isinstance(main.ret, TupleValue)
    assert tuple(value.name for value in main.ret.fields if isinstance(value, GVar)) == NAMES[name]
    assert [(b.var.name, b.lower, b.upper) for b in module.bounds] == [("b", 1, None), ("s", 1, 64)]
    fixed = load_hf(tmp_path, bounds={"s": (8, 16)})
    assert [(b.lower, b.upper) for b in fixed.bounds] == [(1, None), (8, 16)]
    with pytest.raises(UserError, match="bound of s: expected at most 64"):
        load_hf(tmp_path, bounds={"s": (1, 65)})
    with pytest.raises(UserError, match="expected an encoder, got timesfm"):
        load_hf(tmp_path, "cls")
    with pytest.raises(UserError, match="every_position: expected a decoder, got timesfm"):
        load_hf(tmp_path, every_position=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["TimesFmForClassification"]},
            "architectures: expected one whose name",
        ),
        ({"context_length": 60}, "context_length to be a multiple of patch_length, got 60 and 8"),
        ({"quantiles": 0.5}, "quantiles: expected a list of numbers, got 0.5"),
        ({"quantiles": ["0.5"]}, "quantiles: expected a list of numbers"),
        ({"quantiles": [0.5]}, "output_layer.weight': expected shape .10, 24."),
        ({"tolerance": 0}, "tolerance: expected a number above 0 and below 1, got 0"),
        ({"pad_val": 1e39}, "pad_val: expected a number that float32 holds"),
        ({"use_positional_embedding": True, "hidden_size": 15}, "hidden_size: expected an even number"),
        ({"freq_size": 4}, "freq_emb.weight': expected shape .4, 16."),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: expected None"),
    ],
)
def test_forecaster_with_other_fields_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "timesfm", **changes)
    with pytest.raises(ParseError, match=message):
        load_hf(tmp_path)
