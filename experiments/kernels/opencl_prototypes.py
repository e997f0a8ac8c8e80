"""The prototypes of prototypes.cl as a contender of `bar.py`: built for one case, each launch waited for, as in our builds.

Two, four, eight and sixteen work-groups per core are tried beforehand; the fastest number is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.kernels.model import Array
from experiments.kernels.zoo import KERNELS
from relax_tune.runtime.device.registry import open_device

SOURCE = Path(__file__).parent / "prototypes.cl"
TRIED = (2, 4, 8, 16)
HEAD = 64


def cases() -> list[str]:
    """The kernels there is a prototype for."""
    known = {"gelu_4M", "silu_4M", "sum_16M", "transpose", "gemv_f32", "layer_norm", "rms_norm"}
    return [k for k in KERNELS if k in known or k.startswith("softmax_")]


def _arguments(name: str, v: Mapping[str, Array]) -> tuple[str, list[Array], tuple[int, ...], int, dict[str, Any]]:
    """Return the kernel, its input arrays, the shape of the result, the rows or elements that groups divide, and the macros."""
    x = next(iter(v.values()))
    if name.startswith("softmax"):
        return "softmax", [x], x.shape, x.shape[0], {"WIDTH": x.shape[1]}
    if name == "layer_norm":
        defined = {"WIDTH": x.shape[1], "NORM": 0, "EPSILON": "1e-5f"}
        return "norm", [x, v["gamma"], v["beta"]], x.shape, x.shape[0], defined
    if name == "rms_norm":
        defined = {"WIDTH": x.shape[1], "NORM": 1, "EPSILON": "1e-6f"}
        return "norm", [x, v["gamma"], v["gamma"]], x.shape, x.shape[0], defined
    if name == "gemv_f32":
        return "gemv", [x, v["w"]], (1, len(v["w"])), len(v["w"]), {"WIDTH": x.shape[-1]}
    if name == "sum_16M":
        return "partial_sums", [x], (), x.size, {}
    if name == "transpose":
        b, n, h, d = x.shape
        return "permute", [x], (b, h, n, d), b * h, {}
    return name[:4], [x], x.shape, x.size, {}


class Prototypes:
    """Answers for cases on PoCL, as `contenders.serve` wants them."""

    def __init__(self) -> None:
        import pyopencl

        self._cl: Any = pyopencl
        device = open_device("opencl")
        native = device.native(())
        assert native is not None, "an OpenCL device has a queue"
        self._device = device  # owns the queue
        limits = dict(device.info.limits)
        self._lanes, self._cores = limits["max_vector_lanes"], limits["workers"]
        self._queue: Any = pyopencl.CommandQueue.from_int_ptr(native[0])
        self._context = self._queue.context

    def __call__(self, case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        cl, kernel = self._cl, KERNELS[case]
        name, arrays, shape, count, defined = _arguments(case, kernel.arrays() | kernel.weights())
        flags = cl.mem_flags.READ_WRITE
        inputs = [
            cl.Buffer(self._context, flags | cl.mem_flags.COPY_HOST_PTR, hostbuf=np.ascontiguousarray(a))
            for a in arrays
        ]
        out = cl.Buffer(self._context, flags, max(4, 4 * int(np.prod(shape))))
        runs = list(self._runs(name, inputs, out, arrays[0], count, defined))
        run = min(runs, key=_fastest)

        def head() -> list[float]:
            run()
            found = np.empty(shape, np.float32)
            cl.enqueue_copy(self._queue, found, out)
            return [float(a) for a in np.ravel(found)[:: max(1, found.size // HEAD)][:HEAD]]

        return run, head

    def _runs(
        self, name: str, inputs: list[Any], out: Any, x: Array, count: int, defined: Mapping[str, Any]
    ) -> Iterator[Callable[[], None]]:
        cl = self._cl
        for per_core in TRIED:
            groups = count if name == "permute" else per_core * self._cores
            step = 8 if name == "gemv" else 1 if name in ("softmax", "norm", "permute") else 4 * self._lanes
            if count % (groups * step):
                continue
            options = {"LANES": self._lanes, "ROWS": count // groups, "CHUNK": count // groups, **defined}
            text = [f"-D{key}={value}" for key, value in options.items()]
            program = cl.Program(self._context, SOURCE.read_text()).build(["-cl-mad-enable", *text])
            kernels = {k.function_name: k for k in program.all_kernels()}
            held = [*inputs, out]  # a kernel does not keep its arguments alive
            if name == "partial_sums":
                parts = cl.Buffer(self._context, cl.mem_flags.READ_WRITE, 4 * groups)
                kernels[name].set_args(*inputs, parts)
                kernels["total"].set_args(parts, out, np.int32(groups))
                held.append(parts)
                launches = [(kernels[name], groups), (kernels["total"], 1)]
            else:
                sizes = [np.int32(x.shape[1]), np.int32(x.shape[2])] if name == "permute" else []
                kernels[name].set_args(*inputs, out, *sizes)
                launches = [(kernels[name], groups)]

            def run(launches: Sequence[tuple[Any, int]] = tuple(launches), keep: Sequence[Any] = held) -> None:
                for launched, grid in launches:
                    cl.enqueue_nd_range_kernel(self._queue, launched, (grid,), (1,))
                self._queue.finish()

            yield run
            if name == "permute":
                return


def _fastest(run: Callable[[], None]) -> float:
    """Seconds of the fastest of some calls."""
    run()
    found = []
    for _ in range(30):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
