"""Run by test_tuning.py where the packages of a GPU are stand-ins: a small model tuned, built, saved, loaded and run on `cuda`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import relax_tune as rt
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.runtime.device.registry import list_devices


def main(folder: Path) -> None:
    graph = rt.GraphBuilder()
    module = graph.finish(graph.call(Relu(), graph.input("x", (graph.symbol("n", 1, 40), 24))))
    url = f"sqlite:///{folder / 'records.db'}"
    rt.tune(module, target="cuda", db=url, trials=1, effort="quick")
    built = rt.build(module, target="cuda", db=url)
    assert {k.language for k in built.program.kernels} == {"cuda"}
    data = np.random.default_rng(1).standard_normal((37, 24)).astype(np.float32)
    with rt.load(built.save(folder / "m.rta")) as model:
        np.testing.assert_allclose(model.run([data])[0], np.maximum(data, 0))
    print("listed", [getattr(d, "name", d) for d in list_devices() if getattr(d, "kind", "") == "cuda"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
