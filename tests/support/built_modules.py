"""Modules built and run on the processor, for tests that compare levels and memory plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import QUICK, opened

from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.passes.fusion.fuse import FuseOps
from relax_tune.ir.passes.pipeline import STANDARD, Pass, lower
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.job.device_job import DeviceJob, device_job

RNG = np.random.default_rng(11)
UNFUSED: tuple[Pass, ...] = tuple(p for p in STANDARD if not isinstance(p, FuseOps))


def rand(*dims: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(dims).astype(np.float32)


def kernels(module: IRModule) -> list[str]:
    return [c.callee for c in lower(module).calls()]


def job_of(module: IRModule, device: Device, passes: tuple[Pass, ...] = UNFUSED) -> DeviceJob:
    """Return a job that lowers by `passes`."""
    job = device_job(module, device.info, MemoryStore(), QUICK)
    vars(job.model)["lowered"] = lower(module, passes)
    return job


def program_of(module: IRModule, device: Device) -> Program:
    return device_job(module, device.info, MemoryStore(), QUICK).build("generic").program


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """Open the processor, through generated C; skip without a compiler."""
    with opened("c") as processor:
        yield processor


@contextmanager
def executed(program: Program, job: DeviceJob, device: Device) -> Iterator[Executor]:
    executor = Executor(program, device, job.lowered.module.constants)
    try:
        yield executor
    finally:
        executor.close()
