"""A tiny encoder built without measuring, and what a refusal must look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.tuner.cli.cli_model import make_bert

from relax_tune.database.store import MemoryStore
from relax_tune.errors import RelaxTuneError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

BOUNDS = {"b": (1, 4), "n": (1, 24)}


def generic_program(module: IRModule, device: Device) -> tuple[Program, dict[str, NDArray[Any]]]:
    """An untuned build for this device, and its constants."""
    job = device_job(module, device.info, MemoryStore(), Settings(target=device.info.kind))
    program = job.build("generic").program
    names = {b.name for b in program.buffers if b.role == "const"}
    return program, {n: np.asarray(a) for n, a in job.lowered.module.constants.items() if n in names}


def tiny_bert(folder: Path) -> IRModule:
    return load_hf(make_bert(folder), bounds=BOUNDS)


def paragraph(error: BaseException) -> str:
    """The text of a refusal: an error of ours in one paragraph."""
    assert isinstance(error, RelaxTuneError), repr(error)
    text = str(error)
    assert text and "\n" not in text and len(text) < 1500, text
    return text
