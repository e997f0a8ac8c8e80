"""GPUs that tests run kernels on: the emulated one, in both orders of its threads, and a real one where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_runner import opened
from tests.support.effort import thinned

from relax_tune.runtime.device.base import Device


def on(where: str, *others: object) -> Any:
    """Parameters of a test: the given ones, then a GPU's name, with the mark that this GPU needs."""
    return pytest.param(*others, where, marks=pytest.mark.cuda if where == "cuda" else pytest.mark.ccompiler)


PLACES = [*thinned([on("backwards"), on("forwards")]), on("cuda")]


def gpu(where: str, folder: Path) -> Device:
    """The device with this name, or a skip that says why there is none. folder: for what the emulation compiles."""
    return opened("cuda") if where == "cuda" else emulated(folder, where == "backwards")
