"""ONNX recurrent layers over a symbolic length, as loops.

The products with the input are one product for all positions; an iteration multiplies only the state. LSTM: Hochreiter and
Schmidhuber 1997, with peepholes of Gers and Schmidhuber 2000; GRU: Cho et al. 2014.

Tests: `tests/ir/frontend/onnx/test_control.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.math import HANDLERS as MATH
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers.control import LoopBody, Values, loop, row
from relax_tune.ir.frontend.shared.handlers.math import clip
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer

PARAMETERS: Mapping[str, tuple[float, ...]] = {
    "Relu": (), "Tanh": (), "Sigmoid": (), "Softplus": (), "LeakyRelu": (0.01,), "Elu": (1.0,), "HardSigmoid": (0.2, 0.5),
    "Affine": (1.0, 0.0), "ScaledTanh": (1.0, 1.0), "Softsign": (), "ThresholdedRelu": (1.0,),
}  # fmt: skip
"""The activations, with the values of `alpha` and `beta` where none are given."""


Activation = Callable[[Writer, Value], Value]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of recurrent layer.

    Attributes:
        gates: Number of gates, whose weights are stacked.
        states: Number of values that an iteration passes on.
        activations: Names of the activations in one direction.
        write: Writes an iteration.
    """

    gates: int
    states: int
    activations: tuple[str, ...]
    write: Callable[[Layer, LoopBody, Value], list[Value]]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One direction of a recurrent layer.

    Attributes:
        hidden: Size of the state.
        recurrent: Weights of the state, (hidden, gates * hidden).
        bias: Biases of the state's product that are not in the input's, (gates * hidden,).
        peepholes: Weights of the cell state, (3 * hidden,).
        operand: Gives the state as its product reads it.
    """

    node: OnnxNode
    cell: Cell
    hidden: Expr
    recurrent: ImportedValue
    bias: ImportedValue | None
    peepholes: ImportedValue | None
    activations: Sequence[Activation]
    operand: Activation

    def gate(self, w: Writer, stacked: Value, number: int) -> Value:
        """Return one gate's part of a value with stacked gates."""
        return _columns(w, stacked, number * self.hidden, (number + 1) * self.hidden)

    def product(self, body: LoopBody, state: Value, first: int = 0, last: int | None = None) -> Value:
        """Return the product of a state with the weights of some gates, with the bias."""
        w, begin, end = body.w, first * self.hidden, (last or self.cell.gates) * self.hidden
        value = w.matmul(self.operand(w, state), _columns(w, w.tensor(body.outside(self.recurrent)), begin, end))
        if self.bias is None:
            return value
        return w.add(value, _columns(w, w.tensor(body.outside(self.bias)), begin, end))

    def active(self, w: Writer, number: int, value: Value) -> Value:
        """Return an activation of a value, which is clipped first."""
        most = self.node.attributes.get("clip")
        return self.activations[number](w, value if most is None else clip(w, value, -float(most), float(most)))

    def peephole(self, body: LoopBody, cell: Value, number: int) -> Value | None:
        """Return what a peephole adds to a gate."""
        if self.peepholes is None:
            return None
        weights = body.w.tensor(body.outside(self.peepholes))
        return body.w.mul(cell, self.gate(body.w, weights, number))


def _rnn(layer: Layer, body: LoopBody, projected: Value) -> list[Value]:
    w, h = body.w, body.w.tensor(body.state[0])
    return [layer.active(w, 0, w.add(projected, layer.product(body, h)))]


def _gru(layer: Layer, body: LoopBody, projected: Value) -> list[Value]:
    w, h = body.w, body.w.tensor(body.state[0])
    # The two forms of a GRU: the reset gate scales the product with the state (cuDNN and PyTorch), or the state
    # before the product (the paper).
    linear = bool(layer.node.flag("linear_before_reset"))
    added = layer.product(body, h, 0, 3 if linear else 2)
    # One sum for all gates, so that the product stays one.
    of_input = projected if linear else _columns(w, projected, const(0), 2 * layer.hidden)
    stacked = w.add(of_input, added)
    update, reset = (layer.active(w, 0, layer.gate(w, stacked, number)) for number in (0, 1))
    # The third gate of the paper needs the reset state, so its product is a separate one.
    proposed = w.mul(reset, layer.gate(w, added, 2)) if linear else layer.product(body, w.mul(reset, h), 2)
    new = layer.active(w, 1, w.add(layer.gate(w, projected, 2), proposed))
    return [w.add(w.mul(_rest(w, update), new), w.mul(update, h))]


def _lstm(layer: Layer, body: LoopBody, projected: Value) -> list[Value]:
    w = body.w
    h, c = (w.tensor(s) for s in body.state)
    stacked = w.add(projected, layer.product(body, h))

    def gate(number: int, cell: Value, place: int) -> Value:
        value, more = layer.gate(w, stacked, number), layer.peephole(body, cell, place)
        return layer.active(w, 0, value if more is None else w.add(value, more))

    entered = gate(0, c, 0)
    # Gates of ONNX are in the order input, output, forget, cell; peepholes in the order input, output, forget.
    forget = _rest(w, entered) if layer.node.flag("input_forget") else gate(2, c, 2)
    new = layer.active(w, 1, layer.gate(w, stacked, 3))
    cell = w.add(w.mul(forget, c), w.mul(entered, new))
    # The peephole of the output gate sees the new cell state, the other two the old one.
    return [w.mul(gate(1, cell, 1), layer.activations[2](w, cell)), cell]


CELLS: Mapping[str, Cell] = {
    "RNN": Cell(1, 1, ("Tanh",), _rnn),
    "GRU": Cell(3, 1, ("Sigmoid", "Tanh"), _gru),
    "LSTM": Cell(4, 2, ("Sigmoid", "Tanh", "Tanh"), _lstm),
}


def recurrent(w: Writer, node: OnnxNode, operand: Activation = lambda _, value: value) -> list[ImportedValue]:
    """Import RNN, GRU or LSTM: all positions, the last state and, of LSTM, the last cell state.

    Args:
        operand: Gives the input and the states as their products read them, such as quantised.
    """
    cell = CELLS[node.op]
    by_batch = node.flag("layout")
    directions = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    backward = directions[node.choice("direction", "forward", "reverse", "bidirectional")]
    names = [n.decode() if isinstance(n, bytes) else str(n) for n in node.attributes.get("activations", ())]
    names = names or list(cell.activations * len(backward))
    if len(names) != len(cell.activations) * len(backward):
        raise node.refuse(f"expected {len(cell.activations) * len(backward)} activations, got {len(names)}")
    active = _activations(node, names)
    x = w.tensor(node.item(0))
    x = w.permute(x, (1, 0, 2)) if by_batch else x
    all_rows: list[Value] = []
    all_last: list[list[Value]] = [[] for _ in range(cell.states)]
    for d, back in enumerate(backward):
        of_direction = active[d * len(cell.activations) : (d + 1) * len(cell.activations)]
        rows, last = _direction(w, node, cell, x, d, back, of_direction, operand)
        all_rows.append(w.expand_dims(rows, (1,)))
        for collected, value in zip(all_last, last, strict=True):
            collected.append(w.expand_dims(value, (0,)))
    every = all_rows[0] if len(all_rows) == 1 else w.concat(1, *all_rows)
    states = [s[0] if len(s) == 1 else w.concat(0, *s) for s in all_last]
    if by_batch:
        every, states = w.permute(every, (2, 0, 1, 3)), [w.permute(s, (1, 0, 2)) for s in states]
    return [w.of(every), *map(w.of, states)]


def _direction(
    w: Writer,
    node: OnnxNode,
    cell: Cell,
    x: Value,
    d: int,
    back: bool,
    activations: Sequence[Activation],
    operand: Activation,
) -> tuple[Value, list[Value]]:
    """Write one direction. Returns its state at every position (length, batch, hidden), and the last states."""
    item, weights = w.of(x), _of_direction(w, node.item(2), d)
    hidden, (length, batch, _) = weights.shape[1], item.shape
    stacked = cell.gates * hidden
    projected = w.matmul(operand(w, x), w.tensor(_transposed(w, _of_direction(w, node.item(1), d))))
    of_state = None
    if node.has(3):
        biases = _of_direction(w, node.item(3), d)
        bias, of_state = _bias(w, biases, const(0), stacked), _bias(w, biases, stacked, 2 * stacked)
        # Biases are added once for all positions, except the state's of a GRU, which may scale it by the reset gate.
        if node.op != "GRU":
            bias, of_state = w.of(w.add(w.tensor(bias), w.tensor(of_state))), None
        projected = w.add(projected, w.tensor(bias))
    peepholes = _of_direction(w, node.item(7), d) if node.op == "LSTM" and node.has(7) else None
    layer = Layer(node, cell, hidden, _transposed(w, weights), of_state, peepholes, activations, operand)
    initial = [
        _of_direction(w, _by_direction(w, node, 5 + k), d)
        if node.has(5 + k)
        else w.of(w.full((batch, hidden), 0.0, item.dtype))
        for k in range(cell.states)
    ]
    ends = w.of(w.reshape(w.cast(w.tensor(node.item(4)), i64), (batch, const(1)))) if node.has(4) else None
    inputs = w.of(projected)

    def step(body: LoopBody) -> tuple[ImportedValue | None, Values, Values]:
        v, at = body.w, length - 1 - body.index if back else body.index
        states = cell.write(layer, body, row(body, inputs, 0, at))
        shown = states[0]
        if ends is not None:
            inside = v.less(v.reshape(v.size(at), (const(1), const(1))), v.tensor(body.outside(ends)))
            # After the end of a shorter sequence the result is 0, and the state stays as it was at the end.
            shown = v.where(inside, shown, 0.0)
            states = [v.where(inside, m, v.tensor(s)) for m, s in zip(states, body.state, strict=True)]
        return None, [v.of(m) for m in states], [v.of(shown)]

    last, (rows,) = loop(w, initial, step, w.number(length))
    every = w.tensor(rows)
    # The loop collects rows in the order of its iterations, which is the reverse of the positions.
    return w.reversed(every, 0) if back else every, [w.tensor(s) for s in last]


def _by_direction(w: Writer, node: OnnxNode, position: int) -> ImportedValue:
    """Return an initial state with directions first."""
    item = node.item(position)
    return w.of(w.permute(w.tensor(item), (1, 0, 2))) if node.flag("layout") else item


def _of_direction(w: Writer, item: ImportedValue, d: int) -> ImportedValue:
    """Return the part of a value for one direction, of a constant as a constant."""
    if item.array is not None:
        return w.constant(item.array[d], f"{item.name}_{d}" if len(item.array) > 1 else item.name)
    return w.of(w.reshape(w.slice(w.tensor(item), 0, const(d), const(d + 1)), item.shape[1:]))


def _transposed(w: Writer, item: ImportedValue) -> ImportedValue:
    """Return the transpose of a matrix, of a constant as a constant."""
    if item.array is not None:
        return w.constant(np.ascontiguousarray(item.array.T), item.name)
    return w.of(w.permute(w.tensor(item), (1, 0)))


def _columns(w: Writer, value: Value, begin: Expr | int, end: Expr | int) -> Value:
    axis = w.of(value).ndim - 1
    return w.slice(value, axis, w.simplify(const(0) + begin), w.simplify(const(0) + end))


def _bias(w: Writer, item: ImportedValue, begin: Expr, end: Expr) -> ImportedValue:
    """Return a part of the biases, of a constant as a constant."""
    first, last = as_int(begin), as_int(end)
    if item.array is not None and first is not None and last is not None:
        return w.constant(item.array[first:last], item.name)
    return w.of(_columns(w, w.tensor(item), begin, end))


def _rest(w: Writer, value: Value) -> Value:
    """Return 1 - value."""
    return w.sub(1.0, value)


def _activations(node: OnnxNode, names: Sequence[str]) -> list[Activation]:
    """Return the activations by name. `activation_alpha` and `activation_beta` have a number for each that takes one."""
    parameters = [[float(v) for v in node.attributes.get(key, ())] for key in ("activation_alpha", "activation_beta")]
    activations = []
    for name in names:
        if name not in PARAMETERS:
            raise node.refuse(f"expected activations among {', '.join(PARAMETERS)}, got {name!r:.40}")
        numbers = [g.pop(0) if g else default for g, default in zip(parameters, PARAMETERS[name], strict=False)]
        activations.append(activation(node, name, numbers))
    return activations


def activation(node: OnnxNode, name: str, numbers: Sequence[float]) -> Activation:
    """Return an activation of `PARAMETERS` with its numbers, `alpha` and `beta`."""

    def write(w: Writer, value: Value) -> Value:
        if name == "Affine":
            return w.add(w.mul(value, numbers[0]), numbers[1])
        if name == "ScaledTanh":
            return w.mul(w.tanh(w.mul(value, numbers[1])), numbers[0])
        if name == "Softsign":
            return w.div(value, w.add(w.abs(value), 1.0))
        if name == "ThresholdedRelu":
            zero, limit = (w.literal(number, w.of(value).dtype) for number in (0.0, numbers[0]))
            return w.where(w.less(limit, value), value, zero)
        attributes = dict(zip(("alpha", "beta"), numbers, strict=False))
        y = MATH[name](
            w, replace(node, op=name, inputs=(w.of(value),), attributes=attributes, outputs=("",), domain="")
        )
        assert isinstance(y, ImportedValue)
        return w.tensor(y)

    return write


HANDLERS: Mapping[str, Handler] = dict.fromkeys(CELLS, recurrent)
