"""Every definition of every supported operator, from opset 13 to the newest: handled, or refused by name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model, onnx
from tests.ir.frontend.onnx.test_operators import CASES, NEWER, RANDOM, UNKNOWN_TO_ONNX, f, positive

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.onnx import recurrent, sizes
from relax_tune.ir.frontend.onnx import versions as onnx_versions
from relax_tune.ir.frontend.onnx.importer import SUPPORTED, load_onnx
from relax_tune.ir.frontend.onnx.old_forms import FIRST
from relax_tune.ir.frontend.onnx.versions import VERSIONS

NEWEST = onnx.defs.onnx_opset_version()
REDUCTIONS = (
    "ReduceMean",
    "ReduceProd",
    "ReduceMax",
    "ReduceMin",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceLogSum",
    "ReduceLogSumExp",
)
# Forms that only older definitions have.
OLD: list[tuple[str, list[np.ndarray[Any, Any]]]] = [
    *[(f"(float[a, b, c] x) => (float[q] y) {{ y = {op}<axes = [-1, 0], keepdims = 0>(x) }}", [positive(2, 3, 4)]) for op in REDUCTIONS],
    ("(float[a, 6] x) => (float[q] y, float[r] z) { y, z = Split<axis = 1>(x) }", [f(3, 6)]),
    ("(float[b, c, h, w] x, float[r, k] i, int64[r] j) => (float[r, c, 2, 3] y) { y = RoiAlign<output_height = 2, output_width = 3, "
     "sampling_ratio = 2>(x, i, j) }", [f(2, 3, 6, 5), np.array([[1, 2, 4, 4], [-8, 0, 3, 9]], "f4"), np.array([0, 1])]),
]  # fmt: skip
ENDED = {"Scatter": (9, 11)}  # operators that no longer exist in opset 13
# Definitions that the evaluator does not have, or whose statistics it updates where nobody asks for them: the opset of one
# that says the same, with the attribute that says it.
ELSEWHERE = {
    ("BatchNormalization", 9): (15, ""), ("DequantizeLinear", 13): (19, ""), ("DequantizeLinear", 10): (19, ""),
    ("RoiAlign", 10): (16, 'coordinate_transformation_mode = "output_half_pixel", '),
}  # fmt: skip


def versions(op: str) -> list[int]:
    """The definitions of an operator that are in force at some opset from 13 on."""
    every = sorted(s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == op and not s.domain)
    return [v for v, after in zip(every, [*every[1:], NEWEST + 1]) if after > FIRST and v not in ENDED.get(op, ())]


def opset_of(op: str, version: int) -> int:
    """The newest opset with this definition: what is older is tried at its own end."""
    spread = range(max(FIRST, version), NEWEST + 1)
    return max(o for o in spread if onnx.defs.get_schema(op, o).since_version == version)


def valid(proto: Any) -> bool:
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError:
        return False
    return True


def cases_of(op: str) -> list[tuple[str, list[np.ndarray[Any, Any]]]]:
    return [c for c in (*OLD, *CASES, *(n[1:] for n in NEWER)) if re.search(rf"= {op}(<[^(]*>)?\(", c[0])]


def test_versions_table_lists_exactly_supported_operators() -> None:
    assert set(VERSIONS) == set(SUPPORTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", sorted(set(SUPPORTED) - {*recurrent.HANDLERS, *sizes.HANDLERS, *RANDOM})
)  # loops: test_control; sizes from data: test_sizes
def test_every_definition_is_handled_or_refused_by_name(op: str) -> None:
    for version in versions(op):
        opset = opset_of(op, version)
        handled = 0
        for text, inputs in cases_of(op):
            proto = model(text, opset)
            if valid(proto):
                if version in VERSIONS[op] and not handled:
                    newer, attribute = ELSEWHERE.get((op, version), (0, ""))
                    same = model(text.replace("<", f"<{attribute}", 1), newer) if newer else None
                    check(proto, inputs, same_as=same)
                    handled += 1
            else:
                # another definition's form of it or of another operator in the case: never taken for something else
                with pytest.raises(ParseError, match=rf"operator \w+ \(domain ai.onnx, opset {opset}"):
                    load_onnx(proto)
        if version in VERSIONS[op] and op not in UNKNOWN_TO_ONNX:
            assert handled, (op, version, opset)


def test_load_onnx_unknown_operator_version_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_versions, "VERSIONS", {**VERSIONS, "Relu": (13,)})
    text = "(float[n] x) => (float[n] y) { y = Relu(x) }"
    with pytest.raises(ParseError, match=r"operator Relu .*opset 13, got .* opset 14"):
        load_onnx(model(text, 20))
    load_onnx(model(text, 13))


def test_load_onnx_opset_out_of_range_message_advises() -> None:
    proto = model("(float[n] x) => (float[n] y) { y = Relu(x) }")
    for wrong in (NEWEST + 1, 10**6, 2**40):
        proto.opset_import[0].version = wrong
        with pytest.raises(ParseError, match=rf"opset 1 to {NEWEST}, .* got {wrong}; .*newer onnx"):
            load_onnx(proto)
    for wrong in (-1, -3):
        proto.opset_import[0].version = wrong
        with pytest.raises(ParseError, match=rf"opset 1 to {NEWEST}, got {wrong}; convert"):
            load_onnx(proto)


def test_load_onnx_operator_of_later_opset_names_opset() -> None:
    with pytest.raises(ParseError, match=r"operator Gelu .*opset 17, got .* opset 20"):
        load_onnx(model("(float[n] x) => (float[n] y) { y = Gelu(x) }", 17))
