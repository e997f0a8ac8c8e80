"""Any legal trace keeps the meaning of a function in generated code too, with numbers put in for its tunables."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, kernels_of, opened
from tests.schedules.traces.test_random_traces import SIZES, functions, random_schedule, started
from tests.support.meaning import make_inputs, outputs_of, size_of

from relax_tune.errors import BuildError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.schedule import PRIMITIVES
from relax_tune.schedules.sketch import Sketch, instantiate, replay_with
from relax_tune.schedules.trace import Trace

DEVICES = [
    pytest.param("c", 20, marks=pytest.mark.ccompiler),
    pytest.param("opencl", 4, marks=(pytest.mark.opencl, pytest.mark.heavy)),
]


@dataclass(frozen=True)
class Sample:
    """A function, and what a trace with values makes of it: from its sketch, and replayed with the values put in."""

    start: PrimFunc
    trace: Trace
    instance: PrimFunc
    replayed: PrimFunc


def samples(language: str, count: int) -> list[Sample]:
    """A trace with every primitive, and `count` others, of a fixed sequence of random traces: the first that the language has
    code for. Not every schedule of local buffers, work-items and their like can be lowered; BuildError reports the others."""
    rng = random.Random(f"traces on {language}")
    chosen: list[Sample] = []
    for number, primitive in enumerate([*PRIMITIVES, *[None] * count]):
        for attempt in range(8):
            if primitive is None:
                func = functions()[(number + attempt) % len(functions())]
                s = random_schedule(func, rng, 12)
            else:
                func, s = started(primitive, rng, 7 - attempt)
            values = {t.name: rng.choice(t.domain) for t in s.trace.tunables}
            instance = instantiate(Sketch("random", s.func, s.trace, ()), values)
            with suppress(BuildError):
                kernels_of(instance, language)
                chosen.append(Sample(func, s.trace, instance, replay_with(s.trace, func, values)))
                break
        else:
            raise AssertionError(f"no trace with {primitive or 'any primitives'} has code for {language}")
    return chosen


@pytest.mark.parametrize(("language", "count"), DEVICES)
def test_code_of_random_traces_keeps_meaning(language: str, count: int) -> None:
    device = opened(language)
    chosen = samples(language, count)
    rng = random.Random("shapes")
    for sample, run in zip(chosen, Compiled.together(device, language, [s.instance for s in chosen]), strict=True):
        func = sample.start
        for size in (0, 1, None, None):
            dims = {v.name: rng.choice(SIZES) if size is None else size for v in func.symbols}
            where = f"{func.name} at {dims}\n{sample.trace.as_python()}"
            inputs = make_inputs(func, dims)
            expected = outputs_of(func, dims, inputs)
            outputs = [
                np.full(tuple(size_of(d, dims, func) for d in b.shape), 77, b.dtype.numpy) for b in func.output_buffers
            ]
            actual = run([*inputs, *outputs], [dims[v.name] for v in func.scalar_params])
            replayed = outputs_of(sample.replayed, dims, inputs)
            for f, r, w in zip(actual, replayed, expected, strict=True):
                np.testing.assert_allclose(r, w, rtol=3e-5, atol=3e-5, err_msg=where)
                np.testing.assert_allclose(f, w, rtol=3e-5, atol=3e-5, err_msg=where)
    device.close()
