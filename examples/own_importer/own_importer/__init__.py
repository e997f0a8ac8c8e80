"""Import of a multi-layer perceptron from a folder of .csv files: one matrix of weights for each layer, in order of their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import relax_tune as rt
from relax_tune.errors import ParseError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.reduction.linalg import Matmul


def import_layers(source: Any, bounds: Mapping[str, tuple[int, int]]) -> IRModule | None:
    """Return the program of a folder of .csv files, with a symbolic batch; None for any other source."""
    if not isinstance(source, Path) or not source.is_dir():
        return None
    files = sorted(source.glob("*.csv"))
    if not files:
        return None
    weights = [np.loadtxt(file, np.float32, delimiter=",", ndmin=2) for file in files]
    for file, first, second in zip(files[1:], weights, weights[1:], strict=False):
        if first.shape[1] != second.shape[0]:
            raise ParseError(f"{file}: expected {first.shape[1]} rows, got {second.shape[0]}; is a layer missing?")
    graph = rt.GraphBuilder()
    batch = graph.symbol("batch", *bounds.get("batch", (1, None)))
    value = graph.input("x", (batch, weights[0].shape[0]))
    for number, matrix in enumerate(weights):
        value = graph.call(Matmul(), value, graph.constant(f"layer_{number}", matrix))
        if number < len(weights) - 1:
            value = graph.call(Relu(), value)
    return graph.finish(value)
