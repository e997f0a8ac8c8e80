"""Recurrent layers of ONNX models: ours against ONNX Runtime, timed in turns, by microseconds for each step.

    python -m experiments.kernels.recurrences --work FOLDER [--rounds 4] [--threads 2] [--page]

It needs onnx and onnxruntime. Artifacts are built without records, once for a folder; `--rounds 0` only builds them. A step is one
position of the sequence. A GRU scales the product with the state by its reset gate, as PyTorch's does. Prints a table, and with `--page`
writes `experiments/results/recurrences.md`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Answer, Contender, serve, summary, visits
from experiments.harness.pages import environment, write_page

GATES = {"LSTM": 4, "GRU": 3}
HIDDEN = (256, 1024)
LENGTHS, BATCHES = (16, 100), (1, 4, 32)
MODELS = [f"{operator}-{hidden}" for operator in GATES for hidden in HIDDEN]
CASES = [f"{model} {length} {batch}" for model in MODELS for length in LENGTHS for batch in BATCHES]
REPEATS, VISIT_SECS = 20, 0.25


def network(operator: str, hidden: int) -> Any:
    """Return one layer as an ONNX model, (length, batch, hidden) to (length, 1, batch, hidden)."""
    from onnx import TensorProto, helper, numpy_helper

    gates, rng = GATES[operator], np.random.default_rng(0)
    shapes = {"W": (1, gates * hidden, hidden), "R": (1, gates * hidden, hidden), "B": (1, 2 * gates * hidden)}
    weights = [
        numpy_helper.from_array((rng.standard_normal(shape) / np.sqrt(hidden)).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    linear = {"linear_before_reset": 1} if operator == "GRU" else {}
    node = helper.make_node(operator, ["x", *shapes], ["y"], hidden_size=hidden, **linear)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["length", "batch", hidden])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["length", 1, "batch", hidden])
    graph = helper.make_graph([node], operator, [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def sequence(case: str) -> tuple[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the model and the input of a case."""
    name, length, batch = case.split()
    shape = int(length), int(batch), int(name.split("-")[1])
    return name, np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def ours(work: Path, threads: int) -> Answer:
    import relax_tune as rt

    models = {name: rt.load(work / f"{name}.rta") for name in MODELS}

    def answer(case: str) -> tuple[Any, ...]:
        name, x = sequence(case)
        return lambda: models[name].run([x]), lambda: np.ravel(models[name].run([x])[0])[-8:]

    return answer


def theirs(work: Path, threads: int) -> Answer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    sessions = {
        name: onnxruntime.InferenceSession(work / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
        for name in MODELS
    }

    def answer(case: str) -> tuple[Any, ...]:
        name, x = sequence(case)
        return lambda: sessions[name].run(None, {"x": x}), lambda: np.ravel(sessions[name].run(None, {"x": x})[0])[-8:]

    return answer


def build(work: Path) -> None:
    """Write the models and their artifacts, unless they are there."""
    import relax_tune as rt

    for name in MODELS:
        path, built = work / f"{name}.onnx", work / f"{name}.rta"
        if not built.exists():
            operator, hidden = name.split("-")
            path.write_bytes(network(operator, int(hidden)).SerializeToString())
            module = rt.load_model(path, bounds={"length": (1, 512), "batch": (1, 32)})
            rt.build(module, target="c", db="memory://").save(built)


def table(times: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    lines = ["| layer | hidden | length | batch | ONNX Runtime, us | ours, us | ONNX Runtime / ours |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for case, by in times.items():
        name, length, batch = case.split()
        us = {contender: t["median_us"] / int(length) for contender, t in by.items()}
        known = " | ".join(f"{us[n]:.1f}" if n in us else "-" for n in ("onnxruntime", "ours"))
        ratio = f"{us['onnxruntime'] / us['ours']:.2f}" if len(us) == 2 else "-"
        operator, hidden = name.split("-")
        lines.append(f"| {operator} | {hidden} | {length} | {batch} | {known} | {ratio} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both contenders")
    parser.add_argument("--page", action="store_true", help="write the page")
    parser.add_argument("--serve", choices=("ours", "onnxruntime"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve((ours if args.serve == "ours" else theirs)(args.work, args.threads))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    build(args.work)
    if not args.rounds:
        return
    before = environment()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    command = [sys.executable, "-m", "experiments.kernels.recurrences", "--work", str(args.work)]
    command += ["--threads", str(args.threads), "--serve"]
    contenders = [Contender(name, [*command, name]) for name in ("onnxruntime", "ours")]
    by_visit = visits(contenders, CASES, args.rounds, REPEATS, visit_secs=VISIT_SECS)
    times = summary({case: {n: [s for v in own for s in v] for n, own in by.items()} for case, by in by_visit.items()})
    for c in contenders:
        c.close()
    if not args.page:
        print("\n".join(table(times)))
        return
    lines = [
        "# Recurrent layers",
        "",
        f"One layer of an ONNX model, built without records, against ONNX Runtime, with {args.threads} threads each, in turns. Medians of "
        "the time of a call, divided by the length.",
        "",
        *table(times),
    ]
    write_page("recurrences", lines, {"environment": before, "times": times}, before)


if __name__ == "__main__":
    main()
