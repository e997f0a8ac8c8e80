"""Loss of `--activations int8` and of `--weights`: results of a build compared with the unquantised model.

Tests: `tests/tuner/quality/test_activation_loss.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import RelaxTuneError
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.generation.decoder import PREFILL
from relax_tune.runtime.model import choose_function
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.device_job import DeviceJob
from relax_tune.tuner.measure.device_process.inputs import random_inputs
from relax_tune.tuner.quality.bound import METRICS
from relax_tune.tuner.quality.samples import SplitSamples
from relax_tune.tuner.task.extract import sizes_near

Array = NDArray[Any]
DRAWN = 4
"""Calls with random inputs, if no samples are given."""
SIZE = 64
"""Largest value of a symbol in these calls, if its bounds allow it."""
SHOWN = ("cosine", "max_abs")


def with_activation_loss(job: DeviceJob, built: BuildResult) -> BuildResult:
    """Return a build with a note on its loss, if the job's settings quantise activations or weights.

    The build and the unquantised model run on the job's device, on the settings' samples or on random inputs as for
    measurements.

    Raises:
        UserError: The samples do not fit the model.
    """
    settings = job.settings
    if settings.activations == "f32" and settings.weights == "stored":
        return built
    # The exact build is only run a few times, so it is built without records and without a self-test.
    plain = replace(settings, activations="f32", weights="stored", precision="f32", self_test=False)
    exact = job.with_settings(plain)
    chosen = {name: getattr(settings, name) for name in ("activations", "weights", "precision")}
    which = ", ".join(f"{name} {value}" for name, value in chosen.items() if value != getattr(plain, name))
    samples = None
    if settings.samples is not None:
        samples = SplitSamples.read(Path(settings.samples), job.module, settings.seed)
    try:
        losses = _compared(job, exact.artifact(exact.build("generic")), job.artifact(built), samples)
    except RelaxTuneError as error:
        note = f"{which}: their loss was not measured: {str(error).splitlines()[0]}"
    else:
        values = ", ".join(f"{name} {losses[name]:.6g}" for name in SHOWN)
        where = "random inputs" if samples is None else f"the samples of {settings.samples}"
        note = f"{which}: {values} against the unquantised model, on {where}"
    return replace(built, notes=(*built.notes, note))


def _compared(job: DeviceJob, exact: Artifact, lower: Artifact, samples: SplitSamples | None) -> dict[str, float]:
    """Return the values of the metrics of one artifact against another."""
    offered = {p.name: p for p in exact.programs}
    chosen = PREFILL if "main" not in offered and PREFILL in offered else None
    name = choose_function(offered, chosen).name if samples is None else samples.function
    calls: list[Any] = [] if samples is None else [*samples.choosing, *samples.validation]
    if samples is None:
        program = offered[name]
        tops = [s.lower + SIZE if s.upper is None else s.upper for s in program.symbols]
        sizes = {s.name: max(s.lower, min(SIZE, top)) for s, top in zip(program.symbols, tops)}
        near = next(iter(sizes_near(job.lowered, name, [sizes])), sizes)
        calls = [list(random_inputs(program, near, seed)) for seed in range(DRAWN)]
    results = []
    for artifact in (exact, lower):
        with artifact.open(job.settings.target) as model:
            results.append([[_wide(r) for r in model.run(call, name)] for call in calls])
    return {metric: METRICS[metric].of(*results) for metric in SHOWN}


def _wide(array: Any) -> Array:
    return np.asarray(array, np.float64)
