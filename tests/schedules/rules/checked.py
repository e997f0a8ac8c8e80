"""Run by test_rules_memory.py in a child process: candidates of each rule where a stray access cannot go unnoticed.

`c FOLDER`: C kernels on both watched devices; `opencl LOG`: OpenCL kernels in the simulator; `cuda FOLDER`: CUDA kernels on a GPU, for
compute-sanitizer around this process to watch. A third argument seeds the sample:

    for s in 1 2 3; do LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python checked.py c /tmp $s; done
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.ir.codegen.codegen_runner import Compiled
from tests.runtime.device.watched import RecordingDevice, SanitizedDevice, SimulatedDevice
from tests.support.candidates import CASES, Sample, arguments, by_hand, problems, samples
from tests.support.effort import some

from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device

SEED = sys.argv[3] if len(sys.argv) > 3 else "memory"
LARGEST = {"c": 70, "opencl": 17, "cuda": 70}


def check(sample: Sample, runs: Sequence[Compiled], say: Callable[[], str]) -> None:
    """The same right bits on every device, which have nothing to say."""
    func = CASES[sample.case][0]()
    for seed, dims in enumerate(sample.shapes):
        where = f"{sample.case}, {sample.rule}, {sample.sketch} {sample.values} at {dict(dims)}"
        print(where, flush=True)
        arrays, scalars = arguments(sample.instance, dims, seed)
        first, second = (run(arrays, scalars) for run in runs)
        assert not (text := say()), f"{where}: {text[:3000]}"
        wrong = problems(func, arrays, first, dims)
        assert not wrong, f"{where}: {wrong}"
        for a, b in zip(first, second, strict=True):
            assert a.tobytes() == b.tobytes(), f"{where}: depends on what was in memory before"


def together(devices: Sequence[Device], language: str, say: Callable[[], str], machines: Sequence[str]) -> None:
    """Every sample on both devices. `say`: findings since the last call."""
    samples_and_hand = [x for m in machines for x in samples(m, SEED, LARGEST[language])] + by_hand(language)
    samples_and_hand = some(samples_and_hand)
    Compiled.guard = 0
    funcs = [replace(s.instance, name=f"f{at}") for at, s in enumerate(samples_and_hand)]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda d: Compiled.together(d, language, funcs), devices))
    for at, sample in enumerate(samples_and_hand):
        check(sample, [runs[at] for runs in both], say)


def c(folder: Path) -> None:
    recording = RecordingDevice(folder)
    together([SanitizedDevice(folder), recording], "c", recording.complaints, ["c"])
    print("c done")


def opencl(log: Path) -> None:
    devices = [SimulatedDevice(0), SimulatedDevice(1)]
    together(devices, "opencl", lambda: log.read_text().strip() if log.exists() else "", ["opencl", "gpu"])
    print("opencl done")


def cuda(folder: Path) -> None:
    device = open_device("cuda")
    together([device, device], "cuda", str, ["gpu"])
    print("cuda done")


if __name__ == "__main__":
    {"c": c, "opencl": opencl, "cuda": cuda}[sys.argv[1]](Path(sys.argv[2]))
