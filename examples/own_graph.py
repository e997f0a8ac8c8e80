"""A model of one's own: built operator by operator, tuned for 1 to 256 rows, saved, loaded and run.

python examples/own_graph.py [--target opencl] [--trials 8] [--folder FOLDER]
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import relax_tune as rt
from relax_tune.ir.op.math.elementwise import Add, Gelu
from relax_tune.ir.op.reduction.linalg import Matmul


def feed_forward(width: int = 64, inner: int = 256) -> rt.IRModule:
    """x + gelu(x w1) w2 for n rows of `width` numbers; n is a symbol."""
    rng = np.random.default_rng(0)
    graph = rt.GraphBuilder()
    n = graph.symbol("n", 1, 256)
    x = graph.input("x", (n, width))
    w1 = graph.constant("w1", rng.standard_normal((width, inner), np.float32) / 8)
    w2 = graph.constant("w2", rng.standard_normal((inner, width), np.float32) / 16)
    hidden = graph.call(Gelu(), graph.call(Matmul(), x, w1))
    return graph.finish(graph.call(Add(), x, graph.call(Matmul(), hidden, w2)))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--target", default="c", help="c, opencl or opencl:PART")
    arguments.add_argument("--trials", type=int, default=8, help="candidates per task")
    arguments.add_argument("--folder", type=Path, default=None, help="where records and artifact are kept")
    given = arguments.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="own-graph-"))
    folder.mkdir(parents=True, exist_ok=True)
    records = folder / "records.db"

    model = feed_forward()
    result = rt.tune(model, target=given.target, db=records, trials=given.trials)
    print(f"{result.work.measurements} measurements of {len(result.tasks)} tasks on {result.target.name}")
    for task in result.tasks:
        for where, variant in task.dispatch:
            print(f"  {task.name}: {where}: {variant}")

    path = rt.build(model, target=given.target, db=records).save(folder / "feed-forward.rta")
    with rt.load(path) as loaded:
        print("takes", *loaded.inputs)
        print("gives", *loaded.outputs)
        for rows in (1, 7, 97, 256):  # one artifact for all of them
            (y,) = loaded.run({"x": np.ones((rows, 64), np.float32)})
            print(f"n = {rows}: {y.shape}, mean {y.mean():.4f}")


if __name__ == "__main__":
    main()
