"""Import of forecasters of time series.

Tests: `tests/ir/frontend/hf/test_series.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.hf.config import BATCH, Bounds, ConfigFields, SymbolRange, symbol_bounds
from relax_tune.ir.frontend.hf.families.family import read_stack
from relax_tune.ir.frontend.hf.families.series import SERIES
from relax_tune.ir.frontend.hf.transformer.inputs import Series
from relax_tune.ir.frontend.hf.transformer.programs import encoder_module
from relax_tune.ir.frontend.hf.transformer.series import bare_series, forecast
from relax_tune.ir.frontend.hf.weights import HfWeights

FORECAST = "ForPrediction"


def load_series(folder: Path, data: Mapping[str, Any], where: str, bounds: Bounds | None) -> IRModule:
    """Import a forecaster whose `model_type` is one of SERIES, for `s` steps of each series.

    `main(past_values (b, s) f32, past_values_padding (b, s) i64, freq (b, 1) i64)` gives `mean_predictions (b, horizon)` and
    `full_predictions (b, horizon, 1 + quantiles)`. A bare model gives `last_hidden_state (b, patches, hidden)`, and the mean `loc (b,)`
    and standard deviation `scale (b,)` of the patch that a series is scaled by. Padding is 1 where a step has no value.

    Raises:
        ParseError: for an architecture or field that is not imported.
        UserError: for bounds that the model cannot have.
    """
    c, kind = ConfigFields(data, where), str(data["model_type"])
    named = data.get("architectures") or ["Model"]
    name = str(named[0]) if isinstance(named, list) else ""
    if not name.endswith(("Model", FORECAST)):
        raise c.wrong("architectures", f"one whose name ends in Model or {FORECAST}")
    stack = read_stack(SERIES[kind], c)
    assert isinstance(stack.embedding, Series)
    span = symbol_bounds({"b": BATCH, "s": SymbolRange("steps", 1, stack.embedding.steps)}, bounds)
    predicts = name.endswith(FORECAST)
    names = ("mean_predictions", "full_predictions") if predicts else ("last_hidden_state", "loc", "scale")
    stage = forecast if predicts else bare_series
    return encoder_module(stack, HfWeights(folder), span["b"], span["s"], [stage], length="s", names=names)
