"""Tint, the WGSL compiler of Chromium, accepts what wgpu-native accepts: uniform barriers, types, constants."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.ir.codegen.codegen_runner import TARGETS
from tests.ir.codegen.grid_cases import TEXTS, function
from tests.ir.codegen.test_math import elementwise
from tests.support.wgsl import texts

from relax_tune.ir.codegen.generate import generate
from relax_tune.ir.codegen.print.wgsl.functions import FUNCTIONS, conversion
from relax_tune.ir.codegen.print.wgsl.prelude import WGSLPrelude
from relax_tune.ir.codegen.print.wgsl.wide import WIDE
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.scalar_ops import MATH, SCALAR_OPS

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.tint]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder in which the npm package webgpu is installed."""
    path = Path(os.environ.get("RELAX_TUNE_TINT", ROOT / "build" / "tint"))
    if shutil.which("node") is None or not (path / "node_modules" / "webgpu").is_dir():
        pytest.skip(f"node and the npm package webgpu in {path} are expected; make test-webgpu installs it")
    return path


def refused(folder: Path, sources: Iterable[tuple[str, str]]) -> list[list[str]]:
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("tint.mjs")), str(folder.resolve())],
        input=json.dumps(list(sources)), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    refusals: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return refusals


def test_tint_takes_sampled_kernels(folder: Path) -> None:
    assert refused(folder, texts()) == []


def test_tint_takes_kernels_with_barriers(folder: Path) -> None:
    assert refused(folder, ((name, generate(function(name), TARGETS["webgpu"]).source) for name in TEXTS)) == []


def test_tint_takes_every_function(folder: Path) -> None:
    of_one = [f for f in MATH if SCALAR_OPS[f].arity == 1]
    sources = [(f, generate(elementwise(f, 4, "vectorized"), TARGETS["webgpu"]).source) for f in of_one]
    prelude = WGSLPrelude()
    for name in WIDE:
        prelude.wide(name)
    for name in FUNCTIONS:
        prelude.function(name)
    for name in (
        "from_f16",
        "to_f16",
        "from_bf16",
        "to_bf16",
        "from_f8e4m3fn",
        "to_f8e4m3fn",
        "from_f8e8m0",
        "to_f8e8m0",
    ):
        prelude.helper(name, f32, 1)
        assert conversion(name)
    main = "@group(0) @binding(0) var<storage, read_write> a: array<f32>;\n@compute @workgroup_size(1) fn main() { a[0] = 1.0f; }\n"
    assert refused(folder, [*sources, ("all", prelude.text() + main)]) == []


def test_tint_refuses_divergent_barrier(folder: Path) -> None:
    text = (
        "@group(0) @binding(0) var<storage, read_write> a: array<f32>;\n"
        "@compute @workgroup_size(4) fn main() { if (a[0] > 0.0f) { workgroupBarrier(); } a[1] = 1.0f; }\n"
    )
    ((name, error),) = refused(folder, [("divergent", text)])
    assert name == "divergent" and "uniform control flow" in error
