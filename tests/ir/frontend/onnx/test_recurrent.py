"""Recurrent layers of ONNX, compiled with the kernels that a build chooses, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import Array, onnx
from tests.support.effort import thinned
from tests.support.programs import compiled, opened
from tests.support.tuner_models import QUICK

from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.device.base import Device
from relax_tune.tuner.job.device_job import device_job

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}
INPUTS = 5
SHAPES = ((1, 1), (2, 3), (9, 4), (7, 32))
"""Length and batch of each call."""
MAYBE_EMPTY = ("lstm, coupled", "gru, linear")
"""Cases whose length may be 0."""
# operator, hidden size, attributes, further inputs
CASES: Mapping[str, tuple[str, int, Mapping[str, Any], str]] = {
    "lstm of everything": (
        "LSTM", 24, {"direction": "bidirectional", "clip": 0.7}, "B lengths initial P"
    ),
    "lstm": ("LSTM", 16, {}, "B"),
    "lstm, coupled": ("LSTM", 8, {"direction": "reverse", "input_forget": 1}, "P"),
    "lstm of one unit": ("LSTM", 1, {}, "B initial"),
    "gru of everything": (
        "GRU", 32, {"direction": "bidirectional", "linear_before_reset": 1, "clip": 0.6}, "B lengths initial"
    ),
    "gru": ("GRU", 16, {}, "B lengths"),
    "gru, linear": ("GRU", 40, {"linear_before_reset": 1}, ""),
    "lstm, others' activations": ("LSTM", 40, {"activations": ["HardSigmoid", "Relu", "Softsign"]}, "B"),
    "rnn": ("RNN", 16, {"direction": "bidirectional"}, "B lengths initial"),
    "lstm of a prime size": ("LSTM", 13, {}, "B lengths"),
    "rnn of relu": ("RNN", 48, {"activations": ["Relu"], "clip": 0.9}, "B"),
}  # fmt: skip
ACTIVE: Mapping[str, Callable[[Array], Array]] = {
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Relu": lambda x: np.maximum(x, 0),
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "Softsign": lambda x: x / (1 + np.abs(x)),
}
USUAL = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def _values(*shape: int, seed: int) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.5).astype(np.float32)


def weights_of(case: str, seed: int = 0) -> dict[str, Array]:
    op, hidden, attributes, given = CASES[case]
    sides, gates = 2 if attributes.get("direction") == "bidirectional" else 1, GATES[op]
    shapes = {"W": (sides, gates * hidden, INPUTS), "R": (sides, gates * hidden, hidden)}
    if "B" in given.split():
        shapes["B"] = (sides, 2 * gates * hidden)
    if "P" in given.split():
        shapes["P"] = (sides, 3 * hidden)
    return {name: _values(*shape, seed=100 * seed + n) for n, (name, shape) in enumerate(shapes.items())}


def network(case: str, seed: int = 0, dims: Sequence[Any] = ("n", "b")) -> Any:
    """The layer of a case as a ModelProto, over x (n, b, 5)."""
    op, hidden, attributes, given = CASES[case]
    sides = 2 if attributes.get("direction") == "bidirectional" else 1
    state = [sides, dims[1], hidden]
    info, types = onnx.helper.make_tensor_value_info, onnx.TensorProto
    inputs = [info("x", types.FLOAT, [*dims, INPUTS])]
    names = ["x", "W", "R", "B" if "B" in given.split() else "", "", *[""] * STATES[op]]
    if "lengths" in given:
        names[4] = "lengths"
        inputs.append(info("lengths", types.INT32, [dims[1]]))
    for n in range(STATES[op]) if "initial" in given else ():
        names[5 + n] = f"state{n}"
        inputs.append(info(f"state{n}", types.FLOAT, state))
    if op == "LSTM":
        names.append("P" if "P" in given.split() else "")
    results = ["every", "h", "c"][: 1 + STATES[op]]
    node = onnx.helper.make_node(op, names, results, hidden_size=hidden, **attributes)
    outputs = [info("every", types.FLOAT, [dims[0], sides, dims[1], hidden])]
    outputs += [info(name, types.FLOAT, state) for name in results[1:]]
    constants = [onnx.numpy_helper.from_array(a, name) for name, a in weights_of(case, seed).items()]
    graph = onnx.helper.make_graph([node], "layer", inputs, outputs, constants)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)


def arguments(case: str, n: int, batch: int) -> list[Array]:
    op, hidden, attributes, given = CASES[case]
    sides = 2 if attributes.get("direction") == "bidirectional" else 1
    args = [_values(n, batch, INPUTS, seed=9)]
    if "lengths" in given:
        args.append(np.random.default_rng(n).integers(0, n + 1, batch).astype(np.int32))
    return args + [_values(sides, batch, hidden, seed=10 + k) for k in range(STATES[op]) if "initial" in given]


def expected(case: str, args: Sequence[Array], seed: int = 0) -> list[Array]:
    """Every state and the last ones, in float64."""
    op, hidden, attributes, given = CASES[case]
    weights = {name: a.astype(np.float64) for name, a in weights_of(case, seed).items()}
    x, *rest = (a.astype(np.float64) if a.dtype == np.float32 else a for a in args)
    lengths = rest.pop(0) if "lengths" in given else np.full(x.shape[1], len(x))
    names = attributes.get("activations") or USUAL[op]
    limit = attributes.get("clip", np.inf)
    sides, every, last = len(weights["W"]), [], []
    for d in range(sides):
        back = d == 1 or attributes.get("direction") == "reverse"
        cell = _Cell(op, hidden, attributes, {k: a[d] for k, a in weights.items()}, names, limit)
        states = [s[d] for s in rest] if rest else [np.zeros((x.shape[1], hidden)) for _ in range(STATES[op])]
        rows = np.zeros((len(x), x.shape[1], hidden))
        for t in reversed(range(len(x))) if back else range(len(x)):
            inside = (t < lengths)[:, None]
            new = cell.step(x[t], states)
            rows[t] = np.where(inside, new[0], 0)
            states = [np.where(inside, a, b) for a, b in zip(new, states, strict=True)]
        every.append(rows)
        last.append(states)
    return [np.stack(every, 1), *(np.stack(s) for s in zip(*last, strict=True))]


class _Cell:
    """One step of a direction, as the standard writes it (ONNX operators, versions 14 to 22)."""

    def __init__(
        self,
        op: str,
        hidden: int,
        attributes: Mapping[str, Any],
        w: Mapping[str, Array],
        names: Sequence[str],
        limit: float,
    ) -> None:
        self.op, self.size, self.attributes, self.w, self.limit = op, hidden, attributes, w, limit
        self.active = [ACTIVE[n] for n in names]
        zeros = np.zeros(2 * GATES[op] * hidden)
        self.input_bias, self.state_bias = np.split(w.get("B", zeros), 2)
        self.peepholes = np.split(w.get("P", np.zeros(3 * hidden)), 3)

    def gate(self, values: Array, k: int) -> Array:
        return values[..., k * self.size : (k + 1) * self.size]

    def f(self, k: int, x: Array) -> Array:
        return self.active[k](np.clip(x, -self.limit, self.limit))

    def step(self, x: Array, states: Sequence[Array]) -> list[Array]:
        h = states[0]
        a, b = x @ self.w["W"].T + self.input_bias, h @ self.w["R"].T + self.state_bias
        if self.op == "RNN":
            return [self.f(0, a + b)]
        if self.op == "GRU":
            z, r = (self.f(0, self.gate(a, k) + self.gate(b, k)) for k in (0, 1))
            if self.attributes.get("linear_before_reset"):
                n = r * self.gate(b, 2)
            else:
                n = (r * h) @ self.gate(self.w["R"].T, 2) + self.gate(self.state_bias, 2)
            return [(1 - z) * self.f(1, self.gate(a, 2) + n) + z * h]
        c, (pi, po, pf) = states[1], self.peepholes
        i = self.f(0, self.gate(a + b, 0) + pi * c)
        forget = 1 - i if self.attributes.get("input_forget") else self.f(0, self.gate(a + b, 2) + pf * c)
        new = forget * c + i * self.f(1, self.gate(a + b, 3))
        return [self.f(0, self.gate(a + b, 1) + po * new) * self.active[2](new), new]


@pytest.fixture(scope="module")
def c() -> Iterator[Device]:
    with opened("c") as device:
        yield device


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.parametrize("case", thinned(CASES, 4))
def test_layer_compiled_for_c_is_numpy_s_in_float64(case: str, c: Device) -> None:
    least = 0 if case in MAYBE_EMPTY else 1
    module = load_onnx(network(case), bounds={"n": (least, 64), "b": (1, 64)})
    with compiled(module, c, policy="predicted") as built:
        # The third call of a shape runs without the machine's instructions.
        for n, batch in (*SHAPES * 3, *((0, 2),) * (1 - least)):
            args = arguments(case, n, batch)
            for got, want in zip(built(*args), expected(case, args), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"{case} at {n}, {batch}")


@pytest.mark.process
@pytest.mark.ccompiler
def test_replaced_weights_apply_to_later_calls(c: Device) -> None:
    case, args, artifacts = "lstm", arguments("lstm", 5, 3), []
    for seed in (0, 1):
        job = device_job(load_onnx(network(case, seed)), c.info, MemoryStore(), QUICK)
        artifacts.append(job.artifact(job.build("predicted")))
    with artifacts[0].open(c) as model:
        for seed in (0, 1, 0):
            model.replace_weights(artifacts[seed])
            for _ in range(4):
                for got, want in zip(model.run(args), expected(case, args, seed), strict=True):
                    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def _kernels_of_a_step(module: IRModule) -> list[str]:
    lowered = lower(module)
    return [call.callee for loop in lowered.loops.values() for call in lowered.calls(loop.part)]


@pytest.mark.parametrize(
    ("case", "calls"),
    [("lstm", 1), ("gru, linear", 1), ("gru", 2), ("rnn", 2), ("lstm of everything", 2), ("rnn of relu", 1)],
)
def test_step_of_a_layer_is_one_call_for_each_product(case: str, calls: int) -> None:
    """Bidirectional layers have two loops, and the third gate of a GRU that is not linear has another product."""
    kernels = _kernels_of_a_step(load_onnx(network(case)))
    assert len(kernels) == calls and all(name.startswith("fused_gates") for name in kernels)


def test_step_with_gates_of_a_prime_size_is_not_merged() -> None:
    kernels = _kernels_of_a_step(load_onnx(network("lstm of a prime size")))
    assert kernels and not any(name.startswith("fused_gates") for name in kernels)
