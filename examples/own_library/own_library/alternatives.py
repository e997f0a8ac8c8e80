"""What the routine takes: any tensor function that computes row softmax, whatever its sizes."""

import relax_tune as rt
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.ir.passes.library.library_forms import Alternative, whole

graph = rt.GraphBuilder()
reference = graph.finish(graph.call(Softmax(), graph.input("x", (graph.symbol("n"), graph.symbol("k")))))

ALTERNATIVES = (
    Alternative(
        "own.softmax",
        whole(reference),
        scalars=("n", "k"),
        targets=("c", "opencl"),
        workspace=lambda size: size["n"] * size["k"] * 4,
    ),
)
