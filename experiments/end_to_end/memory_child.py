"""One start of a runtime for `loaded_memory`: prints the memory of its process after each step as JSON. NumPy and the runtime.

    python memory_child.py RUNTIME MODEL FILE CALLS

RUNTIME: relax-tune, onnxruntime or openvino. It runs in checkouts of other commits, so it uses only what all of them have.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

LENGTH = 128


def memory() -> dict[str, float]:
    """Return the peak and the resident memory of this process in MB: in all, anonymous, of files, and its share of them (PSS)."""
    with open("/proc/self/status") as status, open("/proc/self/smaps_rollup") as rollup:
        peak = int(re.search(r"VmHWM:\s+(\d+)", status.read())[1])  # type: ignore[index]
        kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", rollup.read(), re.M)}
    now = {
        "resident": kib["Rss"],
        "anonymous": kib["Anonymous"],
        "files": kib["Rss"] - kib["Anonymous"],
        "pss": kib["Pss"],
    }
    return {name: size * 1024 / 1e6 for name, size in {"peak": peak, **now}.items()}


def given(model: str) -> Any:
    random = np.random.default_rng(0)
    if model in ("bert", "gpt2"):
        return random.integers(0, 30000, (1, LENGTH))
    return random.standard_normal((1, 3, 224, 224)).astype(np.float32)


def relax_tune(model: str, path: str) -> tuple[Callable[[], Any], dict[str, float]]:
    """Return a call of the model, and the planned bytes of its weights and activations."""
    import relax_tune as rt

    loaded = rt.load(path)
    decoder = "prefill" in loaded.functions
    # the planned memory of executors is known when they have run
    sizes: dict[str, float] = {"weights": sum(a.nbytes for a in loaded.artifact.constants.values()) / 1e6}

    def call() -> Any:
        x = given(model)
        if not decoder:
            results = loaded.run([x, *[np.ones_like(x)] * (len(loaded.inputs) - 1)])
        else:
            results = loaded.run([x], "prefill")
            if model_steps:
                results = loaded.run([x[:, :1], *results[1:]], "decode")
        used = [s for e in loaded.executors.values() for s in e.memory._storages if s is not None]
        sizes["activations"] = sum(s.nbytes for s in used) / 1e6
        return results[0]

    return call, sizes


def onnxruntime(model: str, path: str) -> tuple[Callable[[], Any], dict[str, float]]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: given(model)})[0], {}


def openvino(model: str, path: str) -> tuple[Callable[[], Any], dict[str, float]]:
    import openvino as ov

    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 2})
    return lambda: compiled([given(model)])[0], {}


def main() -> None:
    global model_steps
    kind, case, path, calls = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    warnings.simplefilter("ignore")
    model, _, rest = case.partition(".")
    model_steps = "decode" in rest
    __import__(kind.replace("-", "_"))
    steps = {"imported": memory()}
    begin = time.process_time()
    call, sizes = {"relax-tune": relax_tune, "onnxruntime": onnxruntime, "openvino": openvino}[kind](model, path)
    steps["loaded"], processor = memory(), time.process_time() - begin
    result = call()
    steps["called"] = memory()
    for _ in range(calls):
        result = call()
    steps["again"] = memory()
    digest = hashlib.blake2b(np.ascontiguousarray(result).tobytes(), digest_size=8).hexdigest()
    print(json.dumps({"steps": steps, "sizes": sizes, "result": digest, "processor_secs_of_load": processor}))


model_steps = False
if __name__ == "__main__":
    main()
