"""Models of one node of another domain, and comparison of their meaning with ONNX Runtime's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.support.meaning import own_results

from relax_tune.ir.core.graph_walk import nested_values, operator_of
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.shapes import TensorToShape
from relax_tune.ir.passes.pipeline import lower

onnx = pytest.importorskip("onnx", reason="needs the onnx package: pip install 'relax-tune[onnx]'")

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
RNG = np.random.default_rng(23)


def f(*shape: int, scale: float = 1.0) -> Array:
    """Random float32 numbers."""
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def whole(low: int, high: int, *shape: int, dtype: Any = np.int64) -> Array:
    """Random integers in low .. high - 1."""
    return RNG.integers(low, high, shape).astype(dtype)


@dataclass(frozen=True)
class Input:
    """An input of the model. dims: names or numbers of its dims, separated by spaces."""

    array: Array
    dims: str


Argument = Input | Array | None
"""An input, a constant, or an omitted argument."""


def model_of(
    op: str,
    arguments: Sequence[Argument],
    results: int = 1,
    domain: str = MICROSOFT,
    version: int = 1,
    **attributes: Any,
) -> tuple[Any, list[Array]]:
    """Return a model of one node, and its inputs."""
    h, given, constants, names, arrays = onnx.helper, [], [], [], []
    for k, a in enumerate(arguments):
        names.append("" if a is None else f"x{k}")
        if isinstance(a, Input):
            dims = [int(d) if d.isdigit() else d for d in a.dims.split()]
            given.append(h.make_tensor_value_info(names[-1], h.np_dtype_to_tensor_dtype(a.array.dtype), dims))
            arrays.append(a.array)
        elif a is not None:
            constants.append(onnx.numpy_helper.from_array(a, names[-1]))
    outputs = [f"y{k}" for k in range(results)]
    node = h.make_node(op, names, outputs, domain=domain, **attributes)
    graph = h.make_graph([node], "g", given, [h.make_empty_tensor_value_info(n) for n in outputs], constants)
    opsets = [h.make_opsetid("", 20), *([h.make_opsetid(domain, version)] if domain else [])]
    return h.make_model(graph, opset_imports=opsets, ir_version=9), arrays


def by_onnxruntime(proto: Any, inputs: Sequence[Array]) -> list[Array]:
    """The results of ONNX Runtime on the processor, without its graph optimizer."""
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install onnxruntime")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    # products of unsigned and signed bytes are exact then; on AVX2 without VNNI, sums of two saturate at 16 bits by default
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = runtime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(zip((i.name for i in proto.graph.input), inputs, strict=True))))


def compare(
    proto: Any,
    inputs: Sequence[Array],
    wanted: Sequence[Any],
    rtol: float = 1e-5,
    atol: float = 1e-6,
    bounds: dict[str, tuple[int, int]] | None = None,
    steps: float = 0.0,
    lowered: bool = True,
) -> None:
    """Compare the graph and its lowered form with results; None is not compared.

    Args:
        steps: Share of the elements of integer results that may differ by 1.
        lowered: Whether to compare the lowered form, which takes longer.
    """
    module = load_onnx(proto, bounds)
    # sizes that data decide, and loops, are known while a program runs, not to the evaluation of its meaning
    by_data = len(module.graphs) > 1 or any(
        operator_of(value, TensorToShape) for value in nested_values(module.graphs["main"])
    )
    run = partial(run_function, module, "main") if by_data else partial(evaluate_function, module)
    for results in [
        run(list(inputs)),
        *([] if by_data or not lowered else [evaluate_function(lower(module).module, list(inputs))]),
    ]:
        results = own_results(results, module)
        for got, want in zip(results, wanted, strict=True):
            if want is None:
                continue
            assert got.shape == want.shape
            assert got.dtype == want.dtype or got.dtype == np.float64
            if want.dtype.kind in "iub":
                difference = np.abs(got.astype(np.int64) - want.astype(np.int64))
                assert difference.max(initial=0) <= (1 if steps else 0)
                assert difference.sum() <= steps * difference.size
            else:
                np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=atol)


def check(
    op: str,
    arguments: Sequence[Argument],
    results: int = 1,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    bounds: dict[str, tuple[int, int]] | None = None,
    steps: float = 0.0,
    reference: Callable[[], Sequence[Any]] | None = None,
    **attributes: Any,
) -> None:
    """Compare a node with ONNX Runtime, or with a reference where ONNX Runtime has no kernel for processors."""
    proto, inputs = model_of(op, arguments, results, **attributes)
    wanted = by_onnxruntime(proto, inputs) if reference is None else reference()
    compare(proto, inputs, wanted, rtol, atol, bounds, steps)
