"""Tune the kernels of `shapes.py` over their whole range or at one size, with libraries among the measured variants.

One job gives three builds from the same records: `ours` as the tool dispatches, `kernels` with generated kernels only, and `library`
with the library only. Only what the database lacks is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Visits
from experiments.kernels.model import Array, Kernel
from experiments.kernels.zoo import KERNELS
from relax_tune.database.store import open_store
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.scalars import compile_scalars
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.variants import TaskVariants


@dataclass(frozen=True)
class Tuned:
    """The cost of tuning a kernel.

    timings: recorded pairs of a variant and a shape; wall_secs and trials: of the run that recorded them; sizes: timed values of the
    symbol; sketches: those that the build `ours` dispatches; libraries: those that were installed.
    """

    wall_secs: float
    trials: int
    timings: int
    sizes: tuple[int, ...]
    sketches: tuple[str, ...]
    libraries: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """The folder of tuned results and the settings of tuning. top: upper limit of all ranges."""

    folder: Path
    target: str
    trials: int
    top: int | None = None

    def kernel(self, name: str) -> Kernel:
        found = KERNELS[name]
        return replace(found, dims={d: min(size, self.top or size) for d, size in found.dims.items()})

    def builds(self, of: str) -> Path:
        """Return the folder of `ours`, `kernels`, `library`, `oracle` or of notes; results of other settings are in another folder."""
        whole = [] if self.top is None else [f"to-{self.top}"]
        return self.folder / "-".join([self.target, str(self.trials), *whole]) / of

    def keep(self, part: str, samples: Visits) -> None:
        """Every sample of a part, for who wants to look closer."""
        (self.folder / f"{self.target}-{part}-samples.json").write_text(json.dumps(samples))

    def tune(self, name: str, size: int | None = None) -> Tuned:
        """Tune what the database lacks and write the artifacts.

        size: tune for this size only, in a separate database without the records of ranges.
        """
        case = name if size is None else f"{name} n={size}"
        note = self.builds("notes") / f"{case}.json"
        if note.exists():
            return Tuned(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(note.read_text()).items()})
        kernel = self.kernel(name)
        module = kernel.module(True) if size is None else replace(kernel, dims={"n": size}).module()
        settings = Settings(target=self.target, trials=self.trials, caches="warm")
        runner = open_runner(settings)
        try:
            with open_store(f"sqlite:///{self.folder / ('ranges.db' if size is None else 'oracle.db')}") as store:
                job = device_job(module, runner.device_info(), store, settings)
                start = time.perf_counter()
                work = job.tune(runner)
                wall = time.perf_counter() - start
                found = self._written(case, job, size is not None, wall, work.trials)
        finally:
            runner.close()
        for task, problem in work.problems:
            print(f"{case}, {task}: {problem}", file=sys.stderr)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(asdict(found)))
        print(
            f"{self.target} {case}: {wall:.0f} s, {found.timings} timings, {found.sketches}",
            file=sys.stderr,
            flush=True,
        )
        return found

    def _written(self, case: str, job: DeviceJob, alone: bool, wall: float, trials: int) -> Tuned:
        built = job.build()
        records = [r for c in job.task_variants.values() for r in job.records(c.task.key, c.task.regime)]
        self._save(case, "oracle" if alone else "ours", job.artifact(built))
        if not alone:
            self._save(case, "library", job.artifact(job.build("library")))
            job.__dict__["task_variants"] = {t.name: TaskVariants(t, job.hardware, job.code_target) for t in job.tasks}
            self._save(case, "kernels", job.artifact(job.build()))
        timed = [r for r in records if r.status == "ok"]
        pairs = {(r.workload, r.variant.key, tuple(sorted(r.symbols.items()))) for r in timed}
        sizes = tuple(sorted({dict(shape)["s0"] for _, _, shape in pairs if shape}))
        entries = [p.variants[e.variant].sketch for p in built.plans.values() for e in p.plan.entries]
        return Tuned(wall, trials, len(pairs), sizes, tuple(dict.fromkeys(entries)), tuple(sorted(job.libraries)))

    def _save(self, case: str, of: str, artifact: Artifact) -> None:
        self.builds(of).mkdir(parents=True, exist_ok=True)
        artifact.save(self.builds(of) / f"{case}.rta")


def by_size(rows: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Rows of `KERNEL n=SIZE`, by kernel and size."""
    return sorted(rows.items(), key=lambda row: (row[0].partition(" n=")[0], int(row[0].partition(" n=")[2])))


def wrong_sizes(kernel: Kernel, path: Path, target: str, sizes: Sequence[int], tolerance: float = 1e-4) -> list[int]:
    """The sizes at which an artifact of a product strays from NumPy's in double precision, by the largest number there."""
    weights, top = kernel.weights(), max(sizes)
    expected: dict[int, tuple[dict[str, Array], Array]] = {}
    if weights:  # each row of the result is its own row's
        given = kernel.arrays({"n": top})
        whole = _product(kernel, given | weights)
        expected = {m: ({"x": given["x"][:m]}, whole[:m]) for m in sizes}
    else:
        for m in sizes:
            given = kernel.arrays({"n": m})
            expected[m] = given, _product(kernel, given)
    device = open_device(target)
    wrong = []
    try:
        with load_artifact(path).open(device) as model:
            for m, (inputs, wanted) in expected.items():
                (found,) = model.run(inputs)
                if found.shape != wanted.shape or not _near(found, wanted, tolerance):
                    wrong.append(m)
    finally:
        device.close()
    return wrong


def _product(kernel: Kernel, arrays: dict[str, Array]) -> Array:
    left, right = kernel.factors(arrays)
    return np.matmul(left.astype(np.float64), right.astype(np.float64)).astype(np.float32)


def _near(found: Array, wanted: Array, tolerance: float) -> bool:
    """NaN is near to nothing."""
    return bool(np.max(np.abs(found - wanted)) <= tolerance * np.max(np.abs(wanted)))


def intervals(path: Path, top: int) -> list[tuple[int, int, str]]:
    """Of an artifact of one call and one symbol: each maximal range of sizes from 1 that dispatches one variant, with its label."""
    program = load_artifact(path).program
    (call,) = program.calls
    evaluate = compile_scalars(program.scalars, len(program.symbols))
    found: list[tuple[int, int, int]] = []
    for size in range(1, top + 1):
        choice = evaluate((size,))[call.choice]
        if found and found[-1][2] == choice:
            found[-1] = (found[-1][0], size, choice)
        else:
            found.append((size, size, choice))
    return [(low, high, call.variants[choice].label) for low, high, choice in found]
