"""Run by test_artifact_memory.py in a child process: whole artifacts where a stray access cannot go unnoticed.

`c FOLDER NAME...`: through the executor on both watched C devices, all variants at all shapes, planned and unshared memory.
`opencl LOG NAME...`: the same on the OpenCL simulator, whose log is looked at after every artifact.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.ir.codegen.codegen_cases import through_shared_memory
from tests.ir.codegen.codegen_runner import Compiled
from tests.runtime.device.watched import RecordingDevice, SanitizedDevice, SimulatedDevice, forced, unshared
from tests.runtime.mutants import BARRIER, CAUGHT_BARRIER, CAUGHT_C, CAUGHT_OPENCL, MUTATIONS
from tests.runtime.whole_models import MODELS, Built, built, inputs_of

from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import Program


def once(program: Program, device: Device, made: Built, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run on an executor of its own, whose memory is as large as these inputs need."""
    executor = Executor(program, device, made.constants)
    try:
        return executor.run(inputs)
    finally:
        executor.close()


def same_bits(one: list[np.ndarray], other: list[np.ndarray], where: object) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.tobytes() == b.tobytes(), f"{where}: outputs depend on what was in memory before: {a} {b}"


def near(found: list[np.ndarray], made: Built, inputs: list[np.ndarray], where: object) -> None:
    wanted = evaluate_function(made.module, inputs)
    for f, w in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        np.testing.assert_allclose(f, w, rtol=1e-4, atol=1e-4, err_msg=str(where))


def programs(made: Built) -> Iterator[tuple[str, Program]]:
    """The plans as built, then one variant for all calls at a time."""
    yield "planned", made.program
    for number in range(made.variants):
        yield f"variant {number}", forced(made.program, number)


def c(folder: Path, names: list[str]) -> None:
    sanitized, recording = SanitizedDevice(folder), RecordingDevice(folder)
    with ThreadPoolExecutor(2) as pool:
        ready = []
        for name in names:
            made = built(MODELS[name], sanitized.info)
            compiled = [pool.submit(device.compile, made.program.kernels) for device in (sanitized, recording)]
            ready.append((name, made, compiled))
        for name, made, compiled in ready:
            for future in compiled:
                future.result()
            check_c(name, made, sanitized, recording)
    print("c done")


def check_c(name: str, made: Built, sanitized: SanitizedDevice, recording: RecordingDevice) -> None:
    whole, start = MODELS[name], time.perf_counter()
    seen = set()
    cases = [(at, inputs_of(made, at, whole.below, seed)) for seed, at in enumerate(whole.shapes)]
    for label, program in programs(made):
        alone = unshared(program)
        grown = Executor(program, sanitized, made.constants)  # planned memory that grows and is used again
        for at, inputs in cases:
            where = f"{name}, {label}, {dict(at)}"
            print(where, flush=True)
            found = once(alone, sanitized, made, inputs)
            near(found, made, inputs, where)
            same_bits(found, once(alone, recording, made, inputs), where)
            said = recording.complaints()
            assert not said, f"{where}: {said}"
            same_bits(found, grown.run(inputs), where)
            seen |= set(grown.bind(dict(at)).choices)
        for at, inputs in reversed(cases):
            near(grown.run(inputs), made, inputs, f"{name}, {label}, {dict(at)}")
        grown.close()
    assert {"generic", "tuned"} <= {label for _, label in seen}, seen
    print(f"{name}: {len(made.program.kernels)} kernels, {time.perf_counter() - start:.1f} s", flush=True)


def opencl(log: Path, names: list[str]) -> None:
    devices = [SimulatedDevice(poison) for poison in (0, 1)]
    for name in names:
        whole, start = MODELS[name], time.perf_counter()
        made = built(whole, devices[0].info, seed=1)
        for label, program in programs(made):
            alone = unshared(program)
            for seed, at in enumerate(whole.tiny):
                where = f"{name}, {label}, {dict(at)}"
                print(where, flush=True)
                inputs = inputs_of(made, at, whole.below, seed)
                found = once(alone, devices[0], made, inputs)
                said = log.read_text() if log.exists() else ""
                assert not said.strip(), f"{where}: {said[:3000]}"
                near(found, made, inputs, where)
                same_bits(found, once(program, devices[1], made, inputs), where)
        print(f"{name}: {len(made.program.kernels)} kernels, {time.perf_counter() - start:.1f} s", flush=True)
    print("opencl done")


def mutants_c(folder: Path, names: list[str]) -> None:
    """What catches each wrong version of a small artifact's kernels. Every run is a process of its own: it may crash."""
    whole = replace(MODELS["row softmax"], tuned=1)
    made = built(whole, CDevice().info)
    for name, mutate in MUTATIONS.items():
        caught = set()
        for number in range(made.variants):
            program = unshared(forced(made.program, number))
            for seed, at in enumerate(whole.tiny):
                inputs = inputs_of(made, at, whole.below, seed)

                def recorded(program: Program = program, inputs: list[np.ndarray] = inputs) -> None:
                    device = RecordingDevice(folder, mutate)  # noqa: B023
                    np.save(folder / "recorded.npy", once(program, device, made, inputs)[0])
                    assert not (said := device.complaints()), said

                def sanitized(program: Program = program, inputs: list[np.ndarray] = inputs) -> None:
                    device = SanitizedDevice(folder, mutate)  # noqa: B023
                    np.save(folder / "sanitized.npy", once(program, device, made, inputs)[0])

                for file in folder.glob("*.npy"):
                    file.unlink()
                if "findings" in apart(recorded):
                    caught.add("recorder")
                said = apart(sanitized)
                if "AddressSanitizer" in said or "runtime error" in said:
                    caught.add("sanitizer")
                elif (folder / "sanitized.npy").read_bytes() != (folder / "recorded.npy").read_bytes():
                    caught.add("bits")
        assert caught >= CAUGHT_C[name], (name, caught)
    print("mutants-c done")


def apart(action: Callable[[], None]) -> str:
    """What a forked process that runs `action` prints to stderr."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            try:
                action()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        said.seek(0)
        return said.read().decode(errors="replace")


def mutants_opencl(log: Path, names: list[str]) -> None:
    """The same in the simulator; and a kernel whose barrier is gone, or not reached by all."""
    whole = replace(MODELS["row softmax"], tuned=1)
    made = built(whole, SimulatedDevice().info)
    for name, mutate in MUTATIONS.items():
        devices = [SimulatedDevice(poison, mutate) for poison in (0, 1)]
        caught = ""
        for number in range(made.variants):
            program = unshared(forced(made.program, number))
            for seed, at in enumerate(whole.tiny):
                inputs = inputs_of(made, at, whole.below, seed)
                (one,), (other,) = (once(program, d, made, inputs) for d in devices)
                caught += log.read_text() + ("bits" if one.tobytes() != other.tobytes() else "")
                log.write_text("")
        assert all(c in caught for c in CAUGHT_OPENCL[name]), (name, caught[:2000])
    func = through_shared_memory()
    data = np.arange(80, dtype=np.float32).reshape(5, 16)
    for name, (old, new) in {"none": ("", ""), **BARRIER}.items():
        run = Compiled(SimulatedDevice(0, lambda text: text.replace(old, new) if old else text), "opencl", func)  # noqa: B023
        run.guard = 0
        run([data, np.empty_like(data)])
        found = log.read_text()
        assert CAUGHT_BARRIER.get(name, "") in found and bool(found) == (name != "none"), (name, found)
        log.write_text("")
    print("mutants-opencl done")


if __name__ == "__main__":
    run = {"c": c, "opencl": opencl, "mutants-c": mutants_c, "mutants-opencl": mutants_opencl}[sys.argv[1]]
    run(Path(sys.argv[2]), sys.argv[3:])
