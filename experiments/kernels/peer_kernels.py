"""The same kernels by the peers: torch, ONNX Runtime, NumPy (its OpenBLAS), TVM's MetaSchedule. Runs in a Python that has them.

    python -m experiments.kernels.peer_kernels serve torch|onnxruntime|numpy      answers the lines of `contenders.serve`
    python -m experiments.kernels.peer_kernels tune KERNEL FOLDER SEED TRIALS BATCH     tunes with MetaSchedule, writes FOLDER/KERNEL.so
    python -m experiments.kernels.peer_kernels serve tvm FOLDER

MetaSchedule gets every weight as an argument and cannot pack it outside the call: its interface has no way to do so.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import serve
from experiments.kernels.model import Array, Kernel
from experiments.kernels.zoo import KERNELS

HEAD = 64
# A build may take so long before TVM calls it failed; its own 30 s are too short on a loaded machine.
TVM_PATIENCE_SECS = 120
Served = tuple[Callable[[], Any], Callable[[], Sequence[float]]]


def head(result: Any) -> list[float]:
    """A few numbers of a result, the same for all contenders."""
    flat = np.ravel(np.asarray(result))
    return [float(x) for x in flat[:: max(1, flat.size // HEAD)][:HEAD]]


def case_of(case: str) -> tuple[Kernel, dict[str, Array]]:
    """The kernel, its inputs and its weights in 32 bits."""
    name, *given = case.split()
    kernel = KERNELS[name]
    sizes = dict(kernel.dims) | {n: int(v) for n, v in (s.split("=") for s in given)}
    return kernel, kernel.arrays(sizes) | kernel.weights()


def torch_answer(case: str) -> Served:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    kernel, arrays = case_of(case)
    tensors = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}

    def run() -> Any:
        with torch.no_grad():
            return kernel.torch(torch, tensors)

    return run, lambda: head(run())


def onnxruntime_answer(case: str) -> Served:
    """A kernel as torch.onnx.export writes it, weights held by the session. Raises whatever the exporter does where it cannot."""
    import onnxruntime
    import torch

    kernel, arrays = case_of(case)
    held = kernel.weights()
    inputs = {n: np.ascontiguousarray(a) for n, a in arrays.items() if n not in held}

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for n, a in held.items():
                self.register_buffer(n, torch.from_numpy(np.ascontiguousarray(a)))

        def forward(self, *given: Any) -> Any:
            return kernel.torch(torch, dict(self.named_buffers()) | dict(zip(inputs, given, strict=True)))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        path = Path(folder) / "kernel.onnx"
        example = tuple(map(torch.from_numpy, inputs.values()))
        torch.onnx.export(Whole().eval(), example, str(path), input_names=list(inputs), dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs), lambda: head(session.run(None, inputs)[0])


def numpy_answer(case: str) -> Served:
    kernel, arrays = case_of(case)
    left, right = kernel.factors(arrays)
    out = np.empty((*left.shape[:-1], right.shape[-1]), np.float32)
    return lambda: np.matmul(left, right, out=out), lambda: head(out)


# -- TVM -----------------------------------------------------------------------------------------------------------------

RELAX: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "matmul": lambda op, v: op.matmul(v["x"], v["w"]),
    "dense": lambda op, v: op.matmul(v["x"], v["w"]),
    "dense_gelu": lambda op, v: op.nn.gelu(op.add(op.matmul(v["x"], v["w"]), v["bias"])),
    "softmax": lambda op, v: op.nn.softmax(v["x"], -1),
    "layer_norm": lambda op, v: op.nn.layer_norm(v["x"], v["gamma"], v["beta"], [-1], 1e-5),
    "rms_norm": lambda op, v: op.nn.rms_norm(v["x"], v["gamma"], [-1], 1e-6),
    "conv": lambda op, v: op.nn.conv2d(v["x"], v["w"], padding=(1, 1, 1, 1)),
    "batch_matmul_nn": lambda op, v: op.matmul(v["x"], v["y"]),
    "dietcode_nn": lambda op, v: op.matmul(v["x"], v["y"]),
    "mikpoly": lambda op, v: op.matmul(v["x"], v["w"]),
}
# In Relax the transposition would be a function of its own; these are said in tensor expressions.
TRANSPOSED: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "batch_matmul_nt": lambda nn, x, y: nn.batch_matmul(x, y),
    "dietcode_nt": lambda nn, x, y: nn.batch_matmul(x, y),
    "dietcode_dense": lambda nn, x, w: nn.dense(x, w),
}


def relax_of(name: str) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Return TVM's program of a kernel, by the longest known prefix of its name. Raises KeyError for an unknown kernel."""
    return RELAX[max((n for n in RELAX if name.startswith(n)), key=len)]


def tvm_function(name: str, symbolic: bool = False) -> tuple[Any, list[str]]:
    """The kernel as one fused tensor function, and the names of its arguments in order. symbolic: so are the dims that can be."""
    import tvm
    from tvm import relax, te, topi
    from tvm import tirx as tir

    from experiments.kernels.tvm_memory import FUSING

    kernel = KERNELS[name]
    _, arrays = case_of(name)
    # dims that follow the symbol are those that another size of it changes
    (dim, size), *_ = kernel.dims.items()
    others = {k: a.shape for k, a in kernel.arrays({dim: size + 1}).items()} if symbolic else {}
    n = tir.Var("n", "int64")
    shapes = {
        k: [n if d != e else d for d, e in zip(a.shape, others.get(k, a.shape), strict=True)] for k, a in arrays.items()
    }
    if name in TRANSPOSED:
        order = ["x", "w" if "w" in shapes else "y"]
        left, right = (te.placeholder(shapes[k], name=k) for k in order)
        product = te.create_prim_func([left, right, TRANSPOSED[name](topi.nn, left, right)])
        # a layout of the weights' own would have to be made outside the call
        return product.without_attr("layout_free_buffers").with_attr("global_symbol", "main"), order
    builder = relax.BlockBuilder()
    values = {k: relax.Var(k, relax.TensorType(shape, str(arrays[k].dtype))) for k, shape in shapes.items()}
    with builder.function("main", list(values.values())):
        with builder.dataflow():
            out = builder.emit_output(relax_of(name)(relax.op, values))
        builder.emit_func_output(out)
    made = builder.get()
    with tvm.target.Target("llvm"):
        for step in FUSING:
            made = step(made)
    calls = [b.value for block in made["main"].body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    if len(calls) != 1:
        raise SystemExit(f"{name}: expected one fused function of TVM, got {len(calls)}")
    order = [a.name for a in calls[0].args[1].fields]
    return made[calls[0].args[0]].with_attr("global_symbol", "main"), order


def tvm_target() -> Any:
    import tvm

    model = "znver4" if "AMD" in Path("/proc/cpuinfo").read_text() else "sapphirerapids"
    return tvm.target.Target({"kind": "llvm", "mcpu": model, "num-cores": os.cpu_count() or 1})


def tvm_tune(name: str, folder: Path, seed: int, trials: int, batch: int) -> None:
    import tvm
    from tvm.s_tir import meta_schedule as ms

    function, order = tvm_function(name)
    target = tvm_target()
    start = time.perf_counter()
    database = ms.tune_tir(
        function, target, str(folder / f"{name}-work"), trials, num_trials_per_iter=batch, seed=seed,
        num_tuning_cores=os.cpu_count() or 1, builder=ms.builder.LocalBuilder(timeout_sec=TVM_PATIENCE_SECS),
    )  # fmt: skip
    wall = time.perf_counter() - start
    schedule = ms.tir_integration.compile_tir(database, function, target)
    if schedule is None:
        raise SystemExit(f"{name}: TVM found no schedule")
    tvm.compile(schedule.mod, target=target).export_library(str(folder / f"{name}.so"))
    (folder / f"{name}.json").write_text(json.dumps({"wall_secs": wall, "order": order, "trials": trials}))


def tvm_untuned(name: str, folder: Path) -> None:
    """Return TVM's default build of the kernel with a symbolic leading dim."""
    import tvm

    function, order = tvm_function(name, symbolic=True)
    tvm.compile(tvm.IRModule({"main": function}), target=tvm_target()).export_library(str(folder / f"{name}.so"))
    (folder / f"{name}.json").write_text(json.dumps({"wall_secs": 0.0, "order": order, "trials": 0}))


def tvm_answer(folder: Path) -> Callable[[str], Served]:
    import tvm

    def answer(case: str) -> Served:
        kernel, arrays = case_of(case)
        name = case.split()[0]
        order = json.loads((folder / f"{name}.json").read_text())["order"]
        library = tvm.runtime.load_module(str(folder / f"{name}.so"))
        function = library["main"]
        shape = expected_shape(kernel, arrays)
        args = [tvm.runtime.tensor(np.ascontiguousarray(arrays[n])) for n in order]
        out = tvm.runtime.tensor(np.zeros(shape, np.float32))
        return lambda: function(*args, out), lambda: head(out.numpy())

    return answer


def expected_shape(kernel: Kernel, arrays: Mapping[str, Array]) -> tuple[int, ...]:
    import torch

    with torch.no_grad():
        return tuple(
            kernel.torch(torch, {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}).shape
        )


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "tune":
        name, folder, seed, trials, batch = rest
        tvm_tune(name, Path(folder), int(seed), int(trials), int(batch))
    elif command == "untuned":
        tvm_untuned(rest[0], Path(rest[1]))
    else:
        kinds = {"torch": torch_answer, "onnxruntime": onnxruntime_answer, "numpy": numpy_answer}
        serve(tvm_answer(Path(rest[1])) if rest[0] == "tvm" else kinds[rest[0]])


if __name__ == "__main__":
    main()
