"""Random uses of ONNX branches, loops, sequences, recurrent layers and random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import helper
from tests.fuzz.importers.builder import BOOL, F32, FLOATS, I64, NUMBERS, Builder, number_of, within
from tests.fuzz.importers.elementwise import Use
from tests.fuzz.importers.program import Invalid


def _value(name: str, dtype: Any = None, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, number_of(dtype or F32), shape)


def _step(b: Builder, x: str, y: str, out: str) -> Any:
    return helper.make_node(b.choose(("Add", "Mul", "Sub")), [x, y], [out])


def if_(b: Builder, op: str) -> None:
    x = b.existing([F32], low=1) or b.given(b.shape(low=1))
    y = b.given(b.get(x).shape, F32) if b.chance(0.5) else x
    condition = b.given((), BOOL, constant=b.chance(0.2))
    sides = []
    for name in "te":
        nodes = [_step(b, x, y, f"{name}_0")]
        if b.chance(0.5):
            nodes.append(helper.make_node("Neg", [f"{name}_0"], [f"{name}_1"]))
        sides.append(helper.make_graph(nodes, f"branch_{name}", [], [_value(nodes[-1].output[0])]))
    b.node(op, [condition], then_branch=sides[0], else_branch=sides[1])


def loop(b: Builder, op: str) -> None:
    """A loop over a state, which also reads a value from outside and stacks rows."""
    if b.opset < 11:
        raise Invalid("older form")
    state = b.given(b.shape(b.choose((1, 2)), 1), F32)
    shape = b.get(state).shape
    outer = b.given(shape, F32)
    nodes = [
        helper.make_node("Identity", ["go"], ["go_on"]),
        _step(b, "s", outer, "s_0"),
        helper.make_node("Neg", ["s_0"], ["row"]),
    ]
    if b.chance(0.5):
        nodes.append(helper.make_node("Cast", ["i"], ["f"], to=1))
        nodes.append(helper.make_node("Add", ["row", "f"], ["row_0"]))
    row = nodes[-1].output[0]
    inputs = [_value("i", I64, []), _value("go", BOOL, []), _value("s", F32, list(shape))]
    outputs = [_value("go_on", BOOL, []), _value("s_0", F32, list(shape)), _value(row, F32, list(shape))]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    count = b.literal(np.int64(b.choose((0, 1, 3, 4) if b.zeros else (1, 3, 4))), b.chance(0.5))
    if not b.get(count):
        b.p.stated |= {*shape}  # without an iteration the rows have the dims that the body declares
    go = b.literal(np.asarray(True), True) if b.chance(0.5) else ""
    b.node(op, [count, go, state], 2, body=body)


def scan(b: Builder, op: str) -> None:
    if b.opset < 9:
        raise Invalid("older form")
    steps, shape = b.size(1, 5), b.shape(b.choose((1, 2)), 1)
    state, items = b.given(shape, F32), b.given((steps, *shape), F32)
    nodes = [_step(b, "s", "x", "s_0"), helper.make_node("Identity", ["s_0"], ["row"])]
    inputs = [_value("s", F32, list(shape)), _value("x", F32, list(shape))]
    body = helper.make_graph(nodes, "body", inputs, [_value("s_0", F32, list(shape)), _value("row", F32, list(shape))])
    more = {"scan_input_directions": [1]} if b.chance(0.3) else {}
    more |= {"scan_output_directions": [1]} if b.chance(0.3) else {}
    b.node(op, [state, items], 2, body=body, num_scan_inputs=1, **more)


def sequence(b: Builder, op: str) -> None:
    """A sequence that is constructed, changed and read."""
    x = b.existing(NUMBERS, least=1, low=1) or b.given(b.shape(2, 1))
    shape, dtype = b.get(x).shape, b.get(x).dtype
    count = b.choose((1, 2, 3))
    if op == "SplitToSequence":
        axis = b.rng.randrange(len(shape))
        split = b.choose((None, "one"))
        inputs = [x] if split is None else [x, b.literal(np.int64(b.choose((1, 2))))]
        (items,) = b.node(op, inputs, axis=axis, keepdims=b.choose((None, 0, 1)) if split is None else None)
        count = len(b.values[items])
    elif op == "SequenceEmpty":
        count = 0
        (items,) = b.node(op, [], dtype=number_of(dtype))
        (items,) = b.node("SequenceInsert", [items, x])
        count = 1
    else:
        (items,) = b.node("SequenceConstruct", [x, *(b.given(shape, dtype) for _ in range(count - 1))])
    part = b.values[items][0]
    for _ in range(b.choose((0, 1, 2))):
        if b.chance(0.6) and count > 0:
            at = [b.literal(np.int64(b.rng.randint(-count, count)))] if b.chance(0.7) else []
            (items,) = b.node("SequenceInsert", [items, b.given(part.shape, part.dtype), *at])
            count += 1
        elif count > 1:
            at = [b.literal(np.int64(b.rng.randrange(-count, count)))] if b.chance(0.7) else []
            (items,) = b.node("SequenceErase", [items, *at])
            count -= 1
    end = b.choose(("at", "concat", "stack", "length"))
    if end == "at" or op == "SequenceAt":
        b.node("SequenceAt", [items, b.literal(np.int64(b.rng.randrange(-count, count)))])
    elif end == "length" or op == "SequenceLength":
        b.node("SequenceLength", [items])
    else:
        rank = b.values[items][0].ndim
        if end == "concat" and rank:
            b.node("ConcatFromSequence", [items], axis=b.axis(rank))
        elif all(v.shape == part.shape for v in b.values[items]):
            b.node("ConcatFromSequence", [items], axis=b.axis(rank + 1), new_axis=1)


def optional(b: Builder, op: str) -> None:
    if op == "OptionalHasElement":
        x = b.x("Identity") if b.opset >= 18 else b.node("Optional", [b.x("Identity")])[0]
        b.node(op, [x])
        return
    x = b.x("Identity")
    if b.opset < 18 or b.chance(0.5):
        (x,) = b.node("Optional", [x])
    b.node("OptionalGetElement", [x])


def recurrent(b: Builder, op: str) -> None:
    if b.chance(0.7):
        raise Invalid("a program that takes as long as ten others")
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    t, n, i, h = b.size(1, 4), b.size(1, 3), b.choose((1, 2, 3)), b.choose((1, 2, 3))
    direction = b.choose(("forward", "reverse", "bidirectional"))
    d = 2 if direction == "bidirectional" else 1
    dtype = F32
    layout = 1 if b.opset >= 14 and b.chance(0.1) else 0
    x = b.given((n, t, i) if layout else (t, n, i), dtype)
    inputs = [x, b.given((d, gates * h, i), dtype), b.given((d, gates * h, h), dtype)]
    inputs.append(b.given((d, 2 * gates * h), dtype) if b.chance(0.7) else "")
    inputs.append(b.given((n,), np.dtype("i4"), within(1, t + 1, np.dtype("i4"))) if b.chance(0.3) else "")
    if b.chance(0.5):
        state = (n, d, h) if layout else (d, n, h)
        inputs.append(b.given(state, dtype))
        if op == "LSTM":
            inputs.append(b.given(state, dtype))
            if b.chance(0.4):
                inputs.append(b.given((d, 3 * h), dtype))
    while not inputs[-1]:
        inputs.pop()
    more: dict[str, Any] = {"linear_before_reset": b.choose((None, 0, 1))} if op == "GRU" else {}
    if b.chance(0.2):
        names = (
            b.choose((("Relu",), ("Tanh",), ("Sigmoid",)))
            if op == "RNN"
            else ("Sigmoid", "Relu", "Tanh")[: 3 if op == "LSTM" else 2]
        )
        more["activations"] = [*names] * d
    b.node(op, inputs, 3 if op == "LSTM" else 2, hidden_size=h, direction=direction, layout=layout or None, **more)


def random_numbers(b: Builder, op: str) -> None:
    """Random numbers: every generator has others, so that only the shape and the type count."""
    more: dict[str, Any] = {"seed": 2.0}
    if op in ("RandomNormal", "RandomUniform"):
        y = b.node(op, [], shape=list(b.shape(low=1)), dtype=number_of(b.choose((F32, np.dtype("f8")))), **more)
    elif op == "Multinomial":
        y = b.node(op, [b.given((b.size(1, 3), 3), F32)], sample_size=b.choose((1, 4)), **more)
    elif op == "Bernoulli":
        y = b.node(op, [b.given(b.shape(low=1), F32, within(0, 1, F32))], **more)
    else:
        y = b.node(op, [b.x(op, among=FLOATS)], **more)
    b.node("Shape", y)
    del b.values[y[0]]


SEQUENCES = ("SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceAt", "SequenceLength",
             "ConcatFromSequence", "SplitToSequence")  # fmt: skip
USES: Mapping[str, Use] = {
    "If": if_, "Loop": loop, "Scan": scan, **dict.fromkeys(SEQUENCES, sequence),
    **dict.fromkeys(("Optional", "OptionalGetElement", "OptionalHasElement"), optional),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), recurrent),
    **dict.fromkeys(("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"),
                    random_numbers),
}  # fmt: skip
