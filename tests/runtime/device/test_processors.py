"""What the C device tells of processors, for each that tests describe."""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.processors import Processor, described, executed

from relax_tune.runtime.device import host
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.program import KernelSource
from relax_tune.tuner.measure.local import LocalRunner

CAPS = ("vector_bits", "max_vector_lanes", "registers", "byte_dots", "bf16_dots", "tile_products")
# the macro that gcc defines where a limit is set
MACROS = {"byte_dots": "VNNI__", "bf16_dots": "__AVX512BF16__", "tile_products": "__AMX_TILE__"}
every_processor = pytest.mark.parametrize("processor", described())


def of_isa(limits: dict[str, int]) -> dict[str, int]:
    return {k: v for k, v in limits.items() if k in CAPS}


@every_processor
def test_host_facts_of_a_described_processor(processor: Processor) -> None:
    found = {"vector_bits": host.vector_bits(processor.flags), "registers": host.vector_registers(processor.flags)}
    found |= {"max_vector_lanes": found["vector_bits"] // 32, **host.dot_products(processor.flags)}
    assert found == of_isa(dict(processor.limits))


@every_processor
def test_host_reads_a_described_processor(
    processor: Processor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processor.stand_in(monkeypatch, tmp_path)
    assert host.cpu_flags() == processor.flags and processor.name in host.cpu_model()
    assert host.vector_bits() == processor.limits["vector_bits"]


def macros(options: tuple[str, ...]) -> str:
    command = [os.environ.get("CC", "gcc"), *options, "-dM", "-E", "-x", "c", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assert_macros_fit(limits: dict[str, int], defined: str) -> None:
    """What rules choose by, the compiler must know: else they choose an instruction and get a loop in its place."""
    assert {name for name, macro in MACROS.items() if macro in defined} == set(limits) & set(MACROS)
    widths = [bits for bits, macro in ((512, "__AVX512F__"), (256, "__AVX__")) if macro in defined]
    assert limits["vector_bits"] == max(widths, default=128)


@pytest.mark.process
@pytest.mark.ccompiler
@every_processor
def test_compiler_defines_macros_of_the_limits_of_a_processor(processor: Processor) -> None:
    if not processor.compiles_here:
        pytest.skip(f"this gcc does not compile for {processor.name}")
    assert_macros_fit(dict(processor.limits), macros(processor.options))


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.skipif("sse2" not in host.cpu_flags(), reason="the macros are those of x86-64")
def test_compiler_defines_macros_of_the_limits_of_the_host() -> None:
    device = open_device("c")
    assert_macros_fit(dict(device.info.limits), macros(("-march=native",)))
    device.close()


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.parametrize("processor", executed())
def test_device_process_has_the_limits_of_the_device(
    processor: Processor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processor.stand_in(monkeypatch, tmp_path)
    device = CDevice()
    assert of_isa(dict(device.info.limits)) == of_isa(dict(processor.limits))
    wide = "int wide(void) {\n#ifdef __AVX512F__\n return 512;\n#elif defined(__AVX__)\n return 256;\n#else\n return 128;\n#endif\n}"
    function = device.compile([KernelSource("wide", "c", wide)])["wide"]
    function.restype = ctypes.c_int
    assert function() == processor.limits["vector_bits"]
    device.close()
    with LocalRunner("c") as runner:
        info = runner.device_info()
    assert replace(info, libraries=None) == replace(device.info, libraries=None)
