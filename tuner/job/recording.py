"""Records of what a job measures, under its name, target and libraries.

Tests: `tests/tuner/job/test_loop.py`.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass

from relax_tune.database.records import Measurement, VariantRecord, single
from relax_tune.tuner.measure.messages import MeasureResult, UnitState
from relax_tune.tuner.task.task import Task


@dataclass(frozen=True, slots=True)
class Recording:
    """The identity of a job's records.

    Attributes:
        environment: Key of the recorded state of the libraries.
    """

    target: str
    job: str
    environment: str

    def id(self, task: Task, variant: VariantRecord, part: str) -> str:
        """Return the id of a measurement, the same whenever the job measures the variant for the same reason.

        Args:
            part: The reason to measure, such as `trial`.
        """
        timed = "" if task.regime == "warm" else f":{task.regime}"
        text = f"{task.key}:{self.target}:{variant.key}:{self.job}:{part}{timed}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def of(self, task: Task, variant: VariantRecord, result: MeasureResult) -> list[Measurement]:
        """Return the records of a result: one a shape, or one failure."""
        if not result.ok:
            stage = result.stage or "runtime"
            return [
                self.failed(task, variant, result.id, stage, result.message, result.build_secs, result.unit),
            ]
        return [
            Measurement(
                id=f"{result.id}.{number}",
                workload=task.key,
                target=self.target,
                variant=variant,
                symbols=timing.symbols,
                samples_secs=tuple(map(single, timing.samples_secs)),  # stored in half the room
                regime=timing.regime,
                checked=result.checked,
                build_secs=result.build_secs,
                job=self.job,
                environment=self.environment,
                measured_at=time.time(),
                contention=timing.contention,
                **asdict(result.unit),
            )
            for number, timing in enumerate(result.timings)
            if timing.samples_secs
        ]

    def failed(
        self,
        task: Task,
        variant: VariantRecord,
        identity: str,
        stage: str,
        message: str,
        build_secs: float = 0.0,
        unit: UnitState = UnitState(),  # noqa: B008 - a frozen value
    ) -> Measurement:
        """Return the record of a failure."""
        return Measurement(
            id=f"{identity}.f",
            workload=task.key,
            target=self.target,
            variant=variant,
            status="failed",
            regime=task.regime,
            stage=stage,  # type: ignore[arg-type]
            message=message or f"failed at stage {stage} without a message",
            build_secs=build_secs,
            job=self.job,
            environment=self.environment,
            measured_at=time.time(),
            **asdict(unit),
        )
