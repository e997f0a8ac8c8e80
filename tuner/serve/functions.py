"""A function of an opened artifact, as the server calls it: checks of arguments, calls of joined requests, times of shapes.

Tests: `tests/tuner/serve/test_app.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.arguments import check_values, in_order
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.scalars import compile_scalars
from relax_tune.runtime.signature import Spec, TensorSpec, function_specs
from relax_tune.tuner.serve.costs import ShapeCosts, log_axis
from relax_tune.tuner.serve.policy import Shape
from relax_tune.tuner.serve.rows import Arrays, Joining, sample
from relax_tune.tuner.serve.tensors import datatype_of

UNBOUNDED = 4096
"""Greatest rows and lengths that are timed where a symbol has no upper bound."""
MOST_CHANGES = 12
"""Changes of kernels along the lengths beyond which none is timed on both sides: plans that test remainders change at every length."""
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
        every: dict[str, Any] = {p.name: p for p in model.artifact.programs}
        every |= {d.name: d for d in model.artifact.host_programs}
        self.inputs, self.outputs = function_specs(every[name])
        for spec in (*self.inputs, *self.outputs):
            if not isinstance(spec, TensorSpec) or datatype_of(spec.dtype) is None:
                raise UserError(
                    f"{model.artifact.path}: {name}: expected tensors of types of the Open Inference Protocol, got {spec}"
                )
        self.times = self._grid()

    @property
    def executor(self) -> Executor | None:
        """The executor of the programs that calls run now; None of a host program."""
        return None if self.name in _host_programs(self.model) else self.model.executors.get(self.name)

    def _grid(self) -> ShapeCosts:
        joining = self.joining
        if joining is None:
            return ShapeCosts((1,), (1,), pad_rows=False)
        lower, upper = joining.lengths()
        rows = log_axis(joining.least_rows, min(joining.most_rows or UNBOUNDED, UNBOUNDED))
        lengths = log_axis(lower, max(lower, min(upper or UNBOUNDED, UNBOUNDED)))
        if joining.padded is not None:  # then a length is one symbol, along which kernels change
            evaluate, calls = compile_scalars(joining.program.scalars, 2), joining.program.calls

            def choices(key: Sequence[int]) -> list[int]:
                values = evaluate(key)
                return [values[call.choice] for call in calls]

            keys = [joining.at(rows[-1], n) for n in range(lengths[0], lengths[-1] + 1)]
            changes = [lengths[0] + number for number in plan_changes(choices, keys)]
            lengths = tuple(sorted({*lengths, *changes, *(n - 1 for n in changes)}))
        return ShapeCosts(rows, lengths, pad_length=joining.padded is not None)

    @property
    def most_rows(self) -> int | None:
        """Most rows of a call; None: any number."""
        return None if self.joining is None else self.joining.most_rows

    def check(self, inputs: Mapping[str, NDArray[Any]] | Arrays) -> CallArguments:
        """Check arguments before they wait, so that a request that does not fit harms no other one.

        Raises:
            UserError: An argument does not fit; the message names it.
        """
        executor = self.executor
        if executor is None:
            return CallArguments(in_order(self.name, [spec.name for spec in self.inputs], inputs))
        program = executor.program
        arrays, key, values = executor.match(inputs)
        check_values(program, arrays, values)
        for check in program.checks:
            if not values[check.slot]:
                executor.bind(key, values)  # raises the error of the check
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

    def sample(self, rows: int, length: int, generator: np.random.Generator | None = None) -> Arrays:
        """Return valid arguments of a shape, random ones by a generator. Raises UserError for a shape that the function refuses."""
        executor = self.executor
        assert self.joining is not None and executor is not None
        key = self.joining.at(rows, length)
        return sample(executor.program, key, executor.bind(key).values, generator)

    def time(self, rows: int, length: int, repeats: int = 2) -> float:
        """Run a shape and return the seconds of its fastest run; infinity for a shape that the function refuses, and after a swap.

        These runs are not counted among the served sizes.
        """
        executor = self.executor
        assert self.joining is not None and executor is not None
        record, executor.record = executor.record, None
        try:
            arrays = self.sample(rows, length)
            secs = math.inf
            for _ in range(repeats):
                start = time.perf_counter()
                executor.run(arrays, in_place=True)
                secs = min(secs, time.perf_counter() - start)
        except UserError:
            return math.inf
        finally:
            executor.record = record
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
        both = self.sample(2, min(max(low, 8), high or UNBOUNDED), np.random.default_rng(0))
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


def plan_changes(choices: Callable[[Sequence[int]], Sequence[int]], keys: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the positions of shapes at which a plan dispatches another kernel than at the shape before; none if there are too many.

    Args:
        choices: Returns the variant of every call at values of the symbols.
        keys: Values of the symbols, shape by shape.
    """
    changes, before = list[int](), None
    for number, key in enumerate(keys):
        try:
            chosen = choices(key)
        except UserError:  # a shape that the program refuses
            continue
        if before is not None and chosen != before:
            changes.append(number)
        before = chosen
    return changes if len(changes) <= MOST_CHANGES else []


def swapped(function: ServedFunction, joining: Joining | None) -> ServedFunction:
    """Return a function after its model was swapped, with the times of shapes as they were: batches correct them."""
    result = ServedFunction(function.model, function.name, joining)
    result.times.take_over(function.times)
    return result


def _host_programs(model: Model) -> set[str]:
    return {d.name for d in model.artifact.host_programs}


def spec_json(spec: Spec) -> dict[str, Any]:
    """Return the protocol's description of a tensor; -1 stands for a dim that varies."""
    assert isinstance(spec, TensorSpec)
    shape = [n if isinstance(n, int) else -1 for n in spec.shape]
    return {"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": shape}
