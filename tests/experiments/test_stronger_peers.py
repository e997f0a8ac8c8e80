"""The experiment beside stronger peers: its cases, its errors and its page, without a device or a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.harness import decoder_folder as decoder
from experiments.stronger import cases, page


def test_every_case_has_inputs_and_every_peer_a_class() -> None:
    for case in cases.CASES["minilm"]:
        ids, mask = cases.given("minilm", case, Path())
        assert ids.shape == mask.shape == tuple(map(int, case.split("x"))) and mask.all()
    for case in cases.CASES["prefill"]:
        (ids,) = cases.given("prefill", case, Path())
        assert ids.shape == (1, int(case)) and ids.max() < cases.DECODER.vocabulary
    assert {cases.class_of(n) for n in cases.SERVED} == set(cases.CLASSES)
    assert set(cases.MEANINGS) <= {n for w in cases.CLASSES.values() for n in (*w.ours, *w.peers)}
    assert all(set(few) <= set(cases.CASES[model]) for model, few in cases.FEW.items())


def test_an_error_is_relative_and_never_passes_other_shapes() -> None:
    wanted = cases.numbers(np.arange(3000.0))
    assert len(wanted) == 1000 and wanted[:2] == [0.0, 3.0]
    assert cases.error(wanted, wanted) == 0
    assert cases.error([1.01 * x for x in wanted], wanted) == pytest.approx(0.01)
    assert cases.error(wanted[1:], wanted) == float("inf")
    assert cases.error([float("nan"), *wanted[1:]], wanted) == float("inf")


def test_the_decoder_is_drawn_once() -> None:
    from dataclasses import replace

    small = replace(cases.DECODER, layers=2, width=8, heads=4, groups=2, inner=12, vocabulary=5)
    one, two = decoder.decoder_weights(small), decoder.decoder_weights(small)
    assert list(one) == list(two) and all(np.array_equal(one[n], two[n]) for n in one)
    assert one["model.layers.1.self_attn.k_proj.weight"].shape == (4, 8)
    assert one["model.layers.0.mlp.down_proj.weight"].shape == (8, 12)


def record() -> dict[str, Any]:
    def row(**ms: float) -> dict[str, dict[str, float]]:
        return {n.replace("_", "."): {"median_us": t * 1e3, "least_us": t * 1e3, "samples": 5} for n, t in ms.items()}

    return {
        "trials": 2, "rounds": 3, "environment": {"cpu": "a processor, 2 cores"}, "tuning": {},
        "asked": {"versions": {"torch": "9.9", "openvino": "not installed"}},
        "times": {"16": row(ours_f32=1, torch_eager=4, onnxruntime_f32=2), "64": row(ours_f32=4, torch_eager=2)},
        "errors": {"ours.f32": {"16": 1e-6, "64": 2e-6}},
        "failed": {"openvino.f32": "did not start: No module named 'openvino'"},
        "notes": {},
    }  # fmt: skip


def test_the_page_compares_within_a_class_and_names_absent_peers() -> None:
    lines = page.page({"prefill": record()}, "flags\t\t: fpu avx2 fma f16c\n")
    assert "| f32 | ours.f32 | 1.00, least 0.50 at 64 |" in lines
    assert "| best peer / ours.f32 | 2.00 | 0.50 |" in lines
    assert "| best peer | onnxruntime.f32 | torch.eager |" in lines
    assert "| openvino.f32 | - | - |" in lines and "| 4 bits | ours.int4 | - |" in lines
    assert "* prefill, openvino.f32: did not start: No module named 'openvino'" in lines
    assert "| ours.f32 | 0.001 | 2.0e-06 |" in lines
    text = "\n".join(lines)
    assert "has avx2, fma, f16c; lacks avx_vnni" in text and "openvino not installed" in text
