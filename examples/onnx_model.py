"""An ONNX model with dynamic dims, and what the runtime says to wrong input. Wants the extra `onnx`.

    python examples/onnx_model.py [MODEL.onnx] [--target c] [--trials 4]

Without a path a small classifier is written and used.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import relax_tune as rt


def write_classifier(path: Path) -> Path:
    """softmax(relu(x w1 + b1) w2) with x: (batch, 20)."""
    rng = np.random.default_rng(0)
    weights = {"w1": rng.standard_normal((20, 32)), "b1": rng.standard_normal(32), "w2": rng.standard_normal((32, 5))}
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "w2"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 20])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path, nargs="?", help="an .onnx file of one float32 input")
    arguments.add_argument("--target", default="c", help="c, opencl or opencl:PART")
    arguments.add_argument("--trials", type=int, default=4, help="candidates per task")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.model or write_classifier(Path(folder, "classifier.onnx"))
        model = rt.load_model(path)
        print("symbols:", *(f"{b.var.name} in [{b.lower}, {b.upper or 'any'}]" for b in model.bounds))
        model = rt.load_model(path, bounds={b.var.name: (1, 64) for b in model.bounds})
        with rt.open_database("memory://") as records:
            rt.tune(model, target=given.target, db=records, trials=given.trials)
            artifact = rt.build(model, target=given.target, db=records)
        with artifact.open() as loaded:
            (spec,) = loaded.inputs
            print("takes", spec)
            for size in (1, 13, 64):
                shape = tuple(dim if isinstance(dim, int) else size for dim in spec.shape)
                outputs = loaded.run([np.zeros(shape, spec.dtype)])
                print(f"{shape} ->", *(o.shape for o in outputs))
            try:
                loaded.run([np.zeros(tuple(dim if isinstance(dim, int) else 65 for dim in spec.shape), spec.dtype)])
            except rt.RelaxTuneError as error:
                print("refused:", error)


if __name__ == "__main__":
    main()
