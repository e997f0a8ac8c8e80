"""Resize of integers, which onnx's evaluator rounds and ONNX Runtime cuts off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Input, by_onnxruntime, compare, model_of, whole

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.onnx.importer import load_onnx

SCALES = np.float32([1, 1, 1.5, 0.75])


@pytest.mark.parametrize(("dtype", "low"), [(np.uint8, 0), (np.int8, -100), (np.int32, -5000)])
def test_linear_resize_of_integers_is_onnxruntime_s(dtype: Any, low: int) -> None:
    x = whole(low, 100, 2, 3, 5, 7, dtype=dtype)
    proto, inputs = model_of("Resize", [Input(x, "b 3 h w"), None, SCALES], domain="", mode="linear")
    # where the mean is a whole number, ONNX Runtime's sum of rounded products may be below it
    compare(proto, inputs, by_onnxruntime(proto, inputs), steps=0.06)


@pytest.mark.parametrize("options", [{"mode": "cubic"}, {"mode": "linear", "antialias": 1}])
def test_other_resizes_of_integers_are_refused_and_follow_a_cast(options: dict[str, Any]) -> None:
    x = whole(0, 100, 2, 3, 5, 7, dtype=np.uint8)
    proto, _ = model_of("Resize", [Input(x, "b 3 h w"), None, SCALES], domain="", **options)
    with pytest.raises(ParseError, match=r"operator Resize .*workaround: cast the input to float32"):
        load_onnx(proto)
    floats, inputs = model_of("Resize", [Input(x.astype(np.float32), "b 3 h w"), None, SCALES], domain="", **options)
    compare(floats, inputs, by_onnxruntime(floats, inputs), rtol=1e-4, atol=1e-4)
