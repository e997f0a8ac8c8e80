"""The experiment on whole models: its cases and its table, without a device or a peer."""

from __future__ import annotations

import numpy as np
import pytest
from experiments.end_to_end import e2e
from experiments.harness import e2e_cases as cases


def test_every_contender_gets_the_same_inputs() -> None:
    d = cases.SMALL
    for model in cases.MODELS:
        for size in (1, 7):
            one, two = cases.inputs(model, size, d), cases.inputs(model, size, d)
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
            assert [a.shape for a in one] == {
                "minilm": [(1, size)] * 2,
                "prefill": [(1, size)],
                "decode": [(1, 1)] + [(1, d.groups, size, d.head_size)] * 2 * d.layers,
            }[model]
    assert cases.SIZES[0] == 1 and cases.LARGEST == 512
    big, small = np.arange(1000.0), np.ones((2, 3))
    assert cases.head([big, small]) == [float(x) for x in range(0, 960, 15)] + [1.0] * 6


def test_the_table_compares_with_the_best_peer_alone() -> None:
    def times(**us: float) -> dict[str, dict[str, float]]:
        return {name.replace("_", "-"): {"median_us": t, "least_us": t, "samples": 1} for name, t in us.items()}

    record = {
        "times": {
            "1": times(torch_eager=4e3, onnxruntime=2e3, ours_c_model=1e3, ours_c_library=0.5e3),
            "7": times(torch_eager=2e3, ours_c_model=4e3),
            "16": times(ours_c_model=1e3),
        },
        "failed": {"tvm": "no such operator"},
    }
    lines = e2e.report({"decode": record})
    text = "\n".join(lines)
    assert "| decode | past=1 | past=7 | past=16 |" in lines
    assert "| onnxruntime | 2.00 | - | - |" in lines
    assert "| **times as fast as the best peer** | 2.00 | 0.50 | - |" in lines
    assert "decode, tvm: no such operator" in lines
    assert text.endswith("All: 1.00 times (goal 1.2).")
    assert cases.geomean([2.0, 8.0]) == pytest.approx(4.0)
