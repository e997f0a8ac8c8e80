"""Recurrent layers with weights of ONNX models: ours against ONNX Runtime, timed in turns, by microseconds for each step.

    python -m experiments.kernels.recurrences --work FOLDER [--rounds 8]

It needs onnx and onnxruntime. Artifacts are built without records. A step is one position of the sequence, in all layers. Prints a table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Answer, Contender, in_rounds, serve, summary

HIDDEN = 256
MODELS = {"lstm": ("LSTM", 4, 2), "gru": ("GRU", 3, 1)}
"""Operator, gates and layers of each model."""
SIZES = ((16, 1), (16, 4), (100, 1), (100, 4))
"""Lengths and batches."""
CASES = [f"{name} {length} {batch}" for name in MODELS for length, batch in SIZES]


def network(name: str) -> Any:
    """Return layers of one kind as an ONNX model, (length, batch, HIDDEN) to the same."""
    from onnx import TensorProto, helper, numpy_helper

    operator, gates, layers = MODELS[name]
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [numpy_helper.from_array(np.array([1], np.int64), "axis")], "x"
    for layer in range(layers):
        shapes = {"W": (1, gates * HIDDEN, HIDDEN), "R": (1, gates * HIDDEN, HIDDEN), "B": (1, 2 * gates * HIDDEN)}
        for kind, shape in shapes.items():
            array = (rng.standard_normal(shape) / np.sqrt(HIDDEN)).astype(np.float32)
            weights.append(numpy_helper.from_array(array, f"{kind}{layer}"))
        inputs = [x, *(f"{kind}{layer}" for kind in shapes)]
        nodes.append(helper.make_node(operator, inputs, [f"all{layer}"], hidden_size=HIDDEN))
        nodes.append(helper.make_node("Squeeze", [f"all{layer}", "axis"], [x := f"y{layer}"]))
    dims = ["length", "batch", HIDDEN]
    ends = [helper.make_tensor_value_info(value, TensorProto.FLOAT, dims) for value in ("x", x)]
    graph = helper.make_graph(nodes, name, ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def sequence(case: str) -> tuple[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the model and the input of a case."""
    name, length, batch = case.split()
    shape = int(length), int(batch), HIDDEN
    return name, np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def ours(work: Path) -> Answer:
    import relax_tune as rt

    models = {name: rt.load(work / f"{name}.rta") for name in MODELS}

    def answer(case: str) -> tuple[Any, ...]:
        name, x = sequence(case)
        return lambda: models[name].run([x]), lambda: np.ravel(models[name].run([x])[0])[-8:]

    return answer


def theirs(work: Path) -> Answer:
    import onnxruntime

    sessions = {
        name: onnxruntime.InferenceSession(work / f"{name}.onnx", providers=["CPUExecutionProvider"]) for name in MODELS
    }

    def answer(case: str) -> tuple[Any, ...]:
        name, x = sequence(case)
        return lambda: sessions[name].run(None, {"x": x}), lambda: np.ravel(sessions[name].run(None, {"x": x})[0])[-8:]

    return answer


def build(work: Path) -> None:
    """Write the models and their artifacts."""
    import relax_tune as rt

    for name in MODELS:
        path = work / f"{name}.onnx"
        path.write_bytes(network(name).SerializeToString())
        module = rt.load_model(path, bounds={"length": (1, 512), "batch": (1, 32)})
        rt.build(module, target="c", db="memory://").save(work / f"{name}.rta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--serve", choices=("ours", "onnxruntime"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve((ours if args.serve == "ours" else theirs)(args.work))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    build(args.work)
    command = [sys.executable, "-m", "experiments.kernels.recurrences", "--work", str(args.work), "--serve"]
    contenders = [Contender(name, [*command, name]) for name in ("onnxruntime", "ours")]
    times = summary(in_rounds(contenders, CASES, args.rounds, 10))
    for c in contenders:
        c.close()
    print("| model | length | batch | ONNX Runtime | ours | ONNX Runtime / ours |\n|---|---:|---:|---:|---:|---:|")
    for case, by in times.items():
        name, length, batch = case.split()
        us = {contender: t["median_us"] / int(length) for contender, t in by.items()}
        known = [f"{us[n]:.1f}" if n in us else "-" for n in ("onnxruntime", "ours")]
        ratio = f"{us['onnxruntime'] / us['ours']:.2f}" if len(us) == 2 else "-"
        print(f"| {name} | {length} | {batch} | {known[0]} | {known[1]} | {ratio} |")


if __name__ == "__main__":
    main()
