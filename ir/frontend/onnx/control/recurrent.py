"""ONNX operators: recurrent layers over a symbolic length, as loops.

The products with the input are one product for all positions; an iteration multiplies the state alone. LSTM: Hochreiter and
Schmidhuber 1997, with peepholes of Gers and Schmidhuber 2000; GRU: Cho et al. 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.math import HANDLERS as MATH
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.compositions import cast_to, clip, permute, reversed_along, slice_axis
from relax_tune.ir.frontend.shared.control import LoopBody, Values, loop, row
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Mul, MulScalar, Sub, Tanh
from relax_tune.ir.op.math.logic import Less, Where
from relax_tune.ir.op.reduction.linalg import Matmul

PARAMETERS: Mapping[str, tuple[float, ...]] = {
    "Relu": (), "Tanh": (), "Sigmoid": (), "Softplus": (), "LeakyRelu": (0.01,), "Elu": (1.0,), "HardSigmoid": (0.2, 0.5),
    "Affine": (1.0, 0.0), "ScaledTanh": (1.0, 1.0),
}  # fmt: skip
"""The activations, with the values of `alpha` and `beta` where none are given."""
Activation = Callable[[Writer, Value], Value]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of recurrent layer.

    gates: number of gates, whose weights are stacked
    states: number of values that an iteration passes on
    activations: names of the activations in one direction
    write: writes an iteration
    """

    gates: int
    states: int
    activations: tuple[str, ...]
    write: Callable[[Layer, LoopBody, Value], list[Value]]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One direction of a recurrent layer.

    hidden: size of the state
    recurrent: weights of the state, (hidden, gates * hidden)
    bias: biases of the state's product that are not in the input's, (gates * hidden,)
    peepholes: weights of the cell state, (3 * hidden,)
    """

    node: OnnxNode
    cell: Cell
    hidden: Expr
    recurrent: ImportedValue
    bias: ImportedValue | None
    peepholes: ImportedValue | None
    activations: Sequence[Activation]

    def gate(self, w: Writer, stacked: Value, number: int) -> Value:
        """Return one gate's part of a value with stacked gates."""
        return _columns(w, stacked, number * self.hidden, (number + 1) * self.hidden)

    def product(self, body: LoopBody, state: Value, first: int = 0, last: int | None = None) -> Value:
        """Return the product of a state with the weights of some gates, with the bias."""
        w, begin, end = body.w, first * self.hidden, (last or self.cell.gates) * self.hidden
        value = w.emit(Matmul(), state, _columns(w, w.tensor(body.outside(self.recurrent)), begin, end))
        if self.bias is None:
            return value
        return w.emit(Add(), value, _columns(w, w.tensor(body.outside(self.bias)), begin, end))

    def active(self, w: Writer, number: int, value: Value) -> Value:
        """Return an activation of a value, which is clipped first."""
        most = self.node.attributes.get("clip")
        return self.activations[number](
            w, value if most is None else clip(w, value, w.of(value).dtype, -float(most), float(most))
        )

    def seen(self, body: LoopBody, cell: Value, number: int) -> Value | None:
        """Return what a peephole adds to a gate."""
        if self.peepholes is None:
            return None
        weights = body.w.tensor(body.outside(self.peepholes))
        return body.w.emit(Mul(), cell, self.gate(body.w, weights, number))


def _rnn(layer: Layer, body: LoopBody, given: Value) -> list[Value]:
    w, h = body.w, body.w.tensor(body.state[0])
    return [layer.active(w, 0, w.emit(Add(), given, layer.product(body, h)))]


def _gru(layer: Layer, body: LoopBody, given: Value) -> list[Value]:
    w, h = body.w, body.w.tensor(body.state[0])
    if layer.node.attributes.get("linear_before_reset", 0):
        added = layer.product(body, h)
        reset = layer.active(w, 0, w.emit(Add(), layer.gate(w, given, 1), layer.gate(w, added, 1)))
        proposed = w.emit(Mul(), reset, layer.gate(w, added, 2))
    else:
        added = layer.product(body, h, 0, 2)
        reset = layer.active(w, 0, w.emit(Add(), layer.gate(w, given, 1), layer.gate(w, added, 1)))
        proposed = layer.product(body, w.emit(Mul(), reset, h), 2)
    update = layer.active(w, 0, w.emit(Add(), layer.gate(w, given, 0), layer.gate(w, added, 0)))
    new = layer.active(w, 1, w.emit(Add(), layer.gate(w, given, 2), proposed))
    return [w.emit(Add(), w.emit(Mul(), _rest(w, update), new), w.emit(Mul(), update, h))]


def _lstm(layer: Layer, body: LoopBody, given: Value) -> list[Value]:
    w = body.w
    h, c = (w.tensor(s) for s in body.state)
    stacked = w.emit(Add(), given, layer.product(body, h))

    def gate(number: int, cell: Value, place: int) -> Value:
        value, more = layer.gate(w, stacked, number), layer.seen(body, cell, place)
        return layer.active(w, 0, value if more is None else w.emit(Add(), value, more))

    entered = gate(0, c, 0)
    kept = _rest(w, entered) if layer.node.attributes.get("input_forget", 0) else gate(2, c, 2)
    new = layer.active(w, 1, layer.gate(w, stacked, 3))
    cell = w.emit(Add(), w.emit(Mul(), kept, c), w.emit(Mul(), entered, new))
    return [w.emit(Mul(), gate(1, cell, 1), layer.activations[2](w, cell)), cell]


CELLS: Mapping[str, Cell] = {
    "RNN": Cell(1, 1, ("Tanh",), _rnn),
    "GRU": Cell(3, 1, ("Sigmoid", "Tanh"), _gru),
    "LSTM": Cell(4, 2, ("Sigmoid", "Tanh", "Tanh"), _lstm),
}


def recurrent(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import RNN, GRU or LSTM: all positions, the last state and, of LSTM, the last cell state."""
    cell = CELLS[node.op]
    by_batch = bool(node.attributes.get("layout", 0))
    directions = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    backward = directions[node.choice("direction", "forward", "reverse", "bidirectional")]
    names = [n.decode() if isinstance(n, bytes) else str(n) for n in node.attributes.get("activations", ())]
    names = names or list(cell.activations * len(backward))
    if len(names) != len(cell.activations) * len(backward):
        raise node.refuse(f"wanted {len(cell.activations) * len(backward)} activations, found {len(names)}")
    active = _activations(node, names)
    x = w.tensor(node.item(0))
    x = permute(w, x, (1, 0, 2)) if by_batch else x
    all_rows: list[Value] = []
    all_last: list[list[Value]] = [[] for _ in range(cell.states)]
    for d, back in enumerate(backward):
        own = active[d * len(cell.activations) : (d + 1) * len(cell.activations)]
        rows, last = _direction(w, node, cell, x, d, back, own)
        all_rows.append(w.emit(ExpandDims((1,)), rows))
        for found, value in zip(all_last, last, strict=True):
            found.append(w.emit(ExpandDims((0,)), value))
    every = all_rows[0] if len(all_rows) == 1 else w.emit(Concat(1), *all_rows)
    states = [s[0] if len(s) == 1 else w.emit(Concat(0), *s) for s in all_last]
    if by_batch:
        every, states = permute(w, every, (2, 0, 1, 3)), [permute(w, s, (1, 0, 2)) for s in states]
    return [w.of(every), *map(w.of, states)]


def _direction(
    w: Writer, node: OnnxNode, cell: Cell, x: Value, d: int, back: bool, activations: Sequence[Activation]
) -> tuple[Value, list[Value]]:
    """Write one direction. Returns its state at every position (length, batch, hidden), and the last states."""
    item, weights = w.of(x), _of_direction(w, node.item(2), d)
    hidden, (length, batch, _) = weights.shape[1], item.shape
    stacked = cell.gates * hidden
    given = w.emit(Matmul(), x, w.tensor(_turned(w, _of_direction(w, node.item(1), d))))
    of_state = None
    if node.has(3):
        biases = w.tensor(_of_direction(w, node.item(3), d))
        given = w.emit(Add(), given, _columns(w, biases, 0, stacked))
        of_state = w.of(_columns(w, biases, stacked, 2 * stacked))
    peepholes = _of_direction(w, node.item(7), d) if node.op == "LSTM" and node.has(7) else None
    layer = Layer(node, cell, hidden, _turned(w, weights), of_state, peepholes, activations)
    initial = [
        _of_direction(w, _by_direction(w, node, 5 + k), d)
        if node.has(5 + k)
        else w.of(w.full((batch, hidden), 0.0, item.dtype))
        for k in range(cell.states)
    ]
    lengths = node.inputs[4] if node.has(4) else None
    inputs = w.of(given)

    def step(body: LoopBody) -> tuple[ImportedValue | None, Values, Values]:
        v, at = body.w, length - 1 - body.index if back else body.index
        made = cell.write(layer, body, row(body, inputs, 0, at))
        shown = made[0]
        if lengths is not None:
            place = v.reshape(v.size(at), (const(1), const(1)))
            ends = v.reshape(cast_to(v, v.tensor(body.outside(lengths)), lengths.dtype, i64), (batch, const(1)))
            inside = v.emit(Less(), place, ends)
            shown = v.emit(Where(), inside, shown, v.literal(0.0, item.dtype))
            made = [v.emit(Where(), inside, m, v.tensor(s)) for m, s in zip(made, body.state, strict=True)]
        return None, [v.of(m) for m in made], [v.of(shown)]

    last, (rows,) = loop(w, initial, step, w.number(length))
    every = w.tensor(rows)
    return reversed_along(w, every, 0) if back else every, [w.tensor(s) for s in last]


def _by_direction(w: Writer, node: OnnxNode, position: int) -> ImportedValue:
    """Return an initial state with directions first."""
    item = node.item(position)
    return w.of(permute(w, w.tensor(item), (1, 0, 2))) if node.attributes.get("layout", 0) else item


def _of_direction(w: Writer, item: ImportedValue, d: int) -> ImportedValue:
    """Return the part of a value for one direction, of a constant as a constant."""
    if item.array is not None:
        return w.constant(item.array[d], f"{item.name}_{d}" if len(item.array) > 1 else item.name)
    return w.of(w.reshape(slice_axis(w, w.tensor(item), 0, const(d), const(d + 1)), item.shape[1:]))


def _turned(w: Writer, item: ImportedValue) -> ImportedValue:
    """Return the transpose of a matrix, of a constant as a constant."""
    if item.array is not None:
        return w.constant(np.ascontiguousarray(item.array.T), item.name)
    return w.of(permute(w, w.tensor(item), (1, 0)))


def _columns(w: Writer, value: Value, begin: Expr | int, end: Expr | int) -> Value:
    axis = w.of(value).ndim - 1
    return slice_axis(w, value, axis, w.simplify(const(0) + begin), w.simplify(const(0) + end))


def _rest(w: Writer, value: Value) -> Value:
    """Return 1 - value."""
    return w.emit(Sub(), w.literal(1.0, w.of(value).dtype), value)


def _activations(node: OnnxNode, names: Sequence[str]) -> list[Activation]:
    """Return the activations by name. `activation_alpha` and `activation_beta` have a number for each that takes one."""
    given = [[float(v) for v in node.attributes.get(key, ())] for key in ("activation_alpha", "activation_beta")]
    found = []
    for name in names:
        if name not in PARAMETERS:
            raise node.refuse(f"wanted activations among {', '.join(PARAMETERS)}, found {name!r:.40}")
        numbers = [g.pop(0) if g else default for g, default in zip(given, PARAMETERS[name], strict=False)]
        found.append(_activation(node, name, numbers))
    return found


def _activation(node: OnnxNode, name: str, numbers: Sequence[float]) -> Activation:
    def write(w: Writer, value: Value) -> Value:
        if name == "Affine":
            return w.emit(AddScalar(numbers[1]), w.emit(MulScalar(numbers[0]), value))
        if name == "ScaledTanh":
            return w.emit(MulScalar(numbers[0]), w.emit(Tanh(), w.emit(MulScalar(numbers[1]), value)))
        attributes = dict(zip(("alpha", "beta"), numbers, strict=False))
        made = MATH[name](w, OnnxNode(name, node.name, node.opset, (w.of(value),), attributes, ("",)))
        assert isinstance(made, ImportedValue)
        return w.tensor(made)

    return write


HANDLERS: Mapping[str, Handler] = dict.fromkeys(CELLS, recurrent)
