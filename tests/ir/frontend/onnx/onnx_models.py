"""Small ONNX models from their text form, and what onnx's own evaluator says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tests.support.meaning import own_results

from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

onnx = pytest.importorskip("onnx", reason="needs the onnx package: pip install 'relax-tune[onnx]'")

Array = np.ndarray[Any, Any]


def model(text: str, opset: int = 20) -> Any:
    """`graph (float[n] x) => (float[m] y) <initializers> { nodes }` as a ModelProto."""
    import onnx.parser

    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> graph {text}')


def reference(proto: Any, inputs: Sequence[Array]) -> list[Array]:
    """The outputs by onnx's own evaluator."""
    from onnx.reference import ReferenceEvaluator

    names = [i.name for i in proto.graph.input]
    return list(ReferenceEvaluator(proto).run(None, dict(zip(names, inputs, strict=True))))


def check(
    proto: Any,
    inputs: Sequence[Array],
    bounds: Mapping[str, tuple[int, int]] | None = None,
    rtol: float = 1e-5,
    same_as: Any = None,
) -> IRModule:
    """Import, and compare the graph and its lowered form with onnx's evaluator; gives the imported module. same_as: a model
    that says the same, for what the evaluator itself gets wrong."""
    wanted = reference(same_as or proto, inputs)
    module = load_onnx(proto, bounds)
    for form in (module, lower(module).module):
        found = evaluate_function(form, list(inputs))
        for f, w in zip(own_results(found, module), wanted, strict=True):
            assert f.shape == np.shape(w)
            assert f.dtype == np.asarray(w).dtype or f.dtype == np.float64
            np.testing.assert_allclose(f, w, rtol=rtol, atol=1e-6)
    return module
