"""A function of an opened artifact, as the server calls it: checks of arguments, calls of joined requests, times of shapes.

Tests: `tests/tuner/serve/test_app.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.arguments import check_values
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.model import Model
from relax_tune.runtime.signature import Spec, TensorSpec, function_specs
from relax_tune.tuner.serve.costs import ShapeCosts, log_axis
from relax_tune.tuner.serve.policy import Shape
from relax_tune.tuner.serve.rows import Arrays, Joining, sample
from relax_tune.tuner.serve.tensors import datatype_of

UNBOUNDED = 4096
"""Greatest rows and lengths that are timed where a symbol has no upper bound."""
TOLERANCE = 1e-2
"""Greatest difference between rows that are computed together and one by one, relative to the largest element: plans may
dispatch other kernels, so results differ by rounding."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The checked arguments of a request.

    Attributes:
        arrays: In the order of the parameters.
        rows: Rows along the batch dim; 1 without one.
        length: Extent of the other dims.
        group: Requests of different groups never run together.
        own_length: Extent of the padded dim; None without one.
    """

    arrays: Arrays
    rows: int = 1
    length: int = 1
    group: tuple[int, ...] = ()
    own_length: int | None = None


class ServedFunction:
    """A function of an open model. Its calls belong to one thread at a time.

    Args:
        model: The model, which the caller closes.
        name: Name of the function.
        joining: How requests run together; None: one by one.

    Raises:
        UserError: A parameter or result is no tensor, or of a type that the protocol has no name for.
    """

    def __init__(self, model: Model, name: str, joining: Joining | None = None) -> None:
        self.model, self.name, self.joining = model, name, joining
        self.executor: Executor | None = model.executors.get(name) if name not in _host_programs(model) else None
        every: dict[str, Any] = {p.name: p for p in model.artifact.programs}
        every |= {d.name: d for d in model.artifact.host_programs}
        self.inputs, self.outputs = function_specs(every[name])
        for spec in (*self.inputs, *self.outputs):
            if not isinstance(spec, TensorSpec) or datatype_of(spec.dtype) is None:
                raise UserError(
                    f"{model.artifact.path}: {name}: expected tensors of types of the Open Inference Protocol, got {spec}"
                )
        self.times = self._grid()

    def _grid(self) -> ShapeCosts:
        joining = self.joining
        if joining is None:
            return ShapeCosts((1,), (1,), pad_rows=False)
        lower, upper = joining.lengths()
        rows = log_axis(joining.least_rows, min(joining.most_rows or UNBOUNDED, UNBOUNDED))
        lengths = log_axis(lower, max(lower, min(upper or UNBOUNDED, UNBOUNDED)))
        return ShapeCosts(rows, lengths, pad_length=joining.padded is not None)

    @property
    def most_rows(self) -> int | None:
        """Most rows of a call; None: any number."""
        return None if self.joining is None else self.joining.most_rows

    def check(self, inputs: Mapping[str, NDArray[Any]]) -> CallArguments:
        """Check arguments before they wait, so that a request that does not fit harms no other one.

        Raises:
            UserError: An argument does not fit; the message names it.
        """
        if self.executor is None:
            return CallArguments([inputs[spec.name] for spec in self.inputs])
        program = self.executor.program
        arrays, key, values = self.executor.match(inputs)
        check_values(program, arrays, values)
        for check in program.checks:
            if not values[check.slot]:
                self.executor.bind(key, values)  # raises the error of the check
        given: Arrays = [np.asarray(a) for a in arrays]
        if self.joining is None:
            return CallArguments(given, group=key)
        joining = self.joining
        own = key[joining.padded] if joining.padded is not None else None
        return CallArguments(given, key[joining.batch], joining.length(key), joining.group(key), own)

    def run(self, calls: Sequence[CallArguments], shape: Shape | None = None) -> list[Arrays]:
        """Return the results of requests that run together at a shape, or of one by itself.

        Raises:
            RelaxTuneError: The call failed.
        """
        if self.joining is None or shape is None:
            (call,) = calls
            return [[np.asarray(r) for r in self.model.run(call.arrays, self.name)]]
        padded = shape.length if self.joining.padded is not None else None
        arrays = self.joining.join([call.arrays for call in calls], max(shape.rows, self.joining.least_rows), padded)
        results = self.model.run(arrays, self.name)
        return self.joining.divide(results, [(call.rows, call.own_length) for call in calls])

    def time(self, rows: int, length: int, repeats: int = 2) -> float:
        """Run a shape and return the seconds of its fastest run; infinity for a shape that the function refuses."""
        assert self.joining is not None and self.executor is not None
        key = self.joining.at(rows, length)
        try:
            arrays = sample(self.executor.program, key, self.executor.bind(key).values)
            secs = math.inf
            for _ in range(repeats):
                start = time.perf_counter()
                self.executor.run(arrays, in_place=True)
                secs = min(secs, time.perf_counter() - start)
        except UserError:
            return math.inf
        return secs

    def check_rows(self) -> None:
        """Compare two random rows that are computed together with the same rows one by one.

        This finds declarations that are wrong for most inputs; it proves nothing.

        Raises:
            UserError: They differ.
        """
        joining, executor = self.joining, self.executor
        assert joining is not None and executor is not None
        if (joining.most_rows or 2) < 2 or joining.least_rows > 1:
            return
        low, high = joining.lengths()
        key = joining.at(2, min(max(low, 8), high or UNBOUNDED))
        generator = np.random.default_rng(0)
        both = sample(executor.program, key, executor.bind(key).values, generator)
        together = self.model.run(both, self.name)
        single = [self.model.run([a[row : row + 1] for a in both], self.name) for row in (0, 1)]
        for number, result in enumerate(together):
            rows = np.concatenate([s[number] for s in single]).astype(np.float64)
            wide = np.asarray(result).astype(np.float64)
            largest = np.abs(rows[np.isfinite(rows)]).max(initial=0.0)
            if wide.shape != rows.shape or not np.allclose(wide, rows, TOLERANCE, TOLERANCE * largest, equal_nan=True):
                symbol = executor.program.symbols[joining.batch].name
                raise UserError(
                    f"{self.model.artifact.path}: {self.name}: expected independent rows along {symbol}, but "
                    f"{self.outputs[number].name} of two rows together differs from the rows one by one; leave --rows out"
                )


def _host_programs(model: Model) -> set[str]:
    return {d.name for d in model.artifact.host_programs}


def spec_json(spec: Spec) -> dict[str, Any]:
    """Return the protocol's description of a tensor; -1 stands for a dim that varies."""
    assert isinstance(spec, TensorSpec)
    shape = [n if isinstance(n, int) else -1 for n in spec.shape]
    return {"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": shape}
