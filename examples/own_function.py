"""A tensor function of one's own, put by a rule where a model has operators, tuned and run like any other.

python examples/own_function.py [--target opencl] [--trials 4]
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import relax_tune as rt
from relax_tune.ir.op.indexing.movement import Split
from relax_tune.ir.op.math.elementwise import Mul, Sigmoid
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.rewrite.pattern import op

# silu(gate) * up for rows that hold gate and up side by side; n rows, k wide, both read off the buffers
SWIGLU = rt.parse_prim_func("""
@prim_func(outputs=1)
def swiglu(h: Buffer((n, k * 2), f32), y: Buffer((n, k), f32)):
    for i in serial(n):
        for j in serial(k):
            with block("swiglu"):
                vi = spatial(n, i)
                vj = spatial(k, j)
                y[vi, vj] = h[vi, vj] / (1.0 + exp(0.0 - h[vi, vj])) * h[vi, vj + k]
""")

# what the model says with four operators: the halves of h, one of them times its own sigmoid, times the other
HALVES = op(Split, "h", parts=2, axis=1)
GATED = HALVES[0].named("gate") * op(Sigmoid, "gate") * HALVES[1]
USE_SWIGLU = rt.Rule(GATED, lambda site: site.tir(SWIGLU, "h"), "swiglu")


def gated_layer(width: int = 32, inner: int = 96) -> rt.IRModule:
    """silu(x w1) * (x w2), the weights side by side, for n rows; n is a symbol."""
    graph = rt.GraphBuilder()
    x = graph.input("x", (graph.symbol("n", 1, 128), width))
    w = graph.constant("w", np.random.default_rng(0).standard_normal((width, inner * 2), np.float32) / 8)
    halves = graph.call(Split(2, 1), graph.call(Matmul(), x, w))
    gate, up = graph.item(halves, 0), graph.item(halves, 1)
    return graph.finish(graph.call(Mul(), graph.call(Mul(), gate, graph.call(Sigmoid(), gate)), up))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--target", default="opencl", help="c, opencl or opencl:PART")
    arguments.add_argument("--trials", type=int, default=4, help="candidates per task")
    given = arguments.parse_args()

    records = Path(tempfile.mkdtemp(prefix="own-function-"), "records.db")
    model = gated_layer()
    own = rt.rewrite(model, USE_SWIGLU)
    print("functions:", *own.functions)
    result = rt.tune(own, target=given.target, db=records, trials=given.trials)
    for task in result.tasks:
        for where, variant in task.dispatch:
            print(f"  {task.name}: {where}: {variant}")

    plain = rt.build(model, target=given.target, db=records)
    tuned = rt.build(own, target=given.target, db=records)
    with plain.open() as before, tuned.open() as after:
        for rows in (1, 7, 128):
            x = np.random.default_rng(rows).standard_normal((rows, 32), np.float32)
            (wanted,), (found,) = before.run({"x": x}), after.run({"x": x})
            print(
                f"n = {rows}: {found.shape}, differs from the operators by {np.abs(found - wanted).max():.1e} at most"
            )


if __name__ == "__main__":
    main()
