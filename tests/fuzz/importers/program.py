"""A random ONNX program: nodes, inputs with declared dims, constants, and the values that an evaluator gives to every name.

The chain evaluates a program node by node with `onnx.reference`, or with ONNX Runtime where the reference lacks an operator
or a type. It can move inexact results within their rounding, which shows how far a result may be off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import numpy as np
import onnx
import onnx.shape_inference
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.fuzz.importers.doubtful import is_open, reference_is_wrong, runtime_is_wrong
from tests.fuzz.importers.formulas import by_formula, has_formula
from tests.fuzz.importers.rounding import Jitter, is_exact

from relax_tune.ir.frontend.onnx.file import names_read_by

Array = np.ndarray[Any, Any]
Dim = Union[int, str, None]
"""A size, the name of a symbol, or None for an unnamed dim."""
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


class Invalid(Exception):
    """A node that no oracle accepts."""


@dataclass(frozen=True)
class Input:
    """An input of a program.

    Attributes:
        dims: Declared dims.
        draw: Makes other values of a shape; None where the values are fixed.
    """

    dtype: np.dtype[Any]
    dims: tuple[Dim, ...]
    draw: Draw | None = None


@dataclass
class Values:
    """An evaluation of a program.

    Attributes:
        by_name: Values.
        pure: Names whose value is by the reference alone, where it is right.
        native: Names that ONNX Runtime computes as the standard says.
        exact: Names that no inexact result reaches.
        open: Names whose value the standard leaves open.
    """

    by_name: dict[str, Any]
    pure: set[str]
    native: set[str]
    exact: set[str]
    open: set[str]


@dataclass
class Program:
    """A program and the arguments of each of its calls.

    Attributes:
        wrongly_tied: Whether two dims of one name have different sizes.
        stated: Sizes that attributes state, which are the same at every call.
    """

    opset: int
    nodes: list[Any] = field(default_factory=list)
    inputs: dict[str, Input] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    calls: list[dict[str, Array]] = field(default_factory=list)
    domains: Mapping[str, int] = field(default_factory=dict)
    wrongly_tied: bool = False
    stated: frozenset[int] = frozenset()

    def copy(self, **changes: Any) -> Program:
        lists = {"nodes": [*self.nodes], "inputs": {**self.inputs}, "constants": {**self.constants}}
        lists |= {"outputs": [*self.outputs], "calls": [{**c} for c in self.calls]}
        return replace(self, **{**lists, **changes})

    def proto(self, types: Mapping[str, Array]) -> Any:
        """Return the model. types: values of the outputs, for their element types."""
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(i.dtype), i.dims)
            for name, i in self.inputs.items()
        ]
        outputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(types[name]).dtype), None)
            for name in self.outputs
        ]
        constants = [numpy_helper.from_array(np.asarray(a), name) for name, a in self.constants.items()]
        return _model(self.nodes, inputs, outputs, constants, self.opset, self.domains)

    def needed(self) -> Program:
        """Return the program without nodes, inputs and constants that no output needs."""
        read, nodes = {*self.outputs}, []
        for n in reversed(self.nodes):
            if read & {*n.output}:
                nodes.append(n)
                read |= names_read_by(n)
        return self.copy(
            nodes=nodes[::-1],
            inputs={k: v for k, v in self.inputs.items() if k in read},
            constants={k: v for k, v in self.constants.items() if k in read},
            calls=[{k: v for k, v in c.items() if k in read} for c in self.calls],
        )

    def runs(self, call: Mapping[str, Array], jitter: Jitter | None = None) -> Values:
        """Evaluate node by node.

        Args:
            jitter: Moves inexact results; None for no moves.

        Raises:
            Invalid: No oracle evaluates a node.
        """
        values: dict[str, Any] = {**self.constants, **call}
        v = Values(values, set(values), set(values), set(values), set())
        halves: set[str] = set()
        for n in self.nodes:
            read = sorted(names_read_by(n))
            given = {name: values[name] for name in read}
            exact, opened = v.exact.issuperset(read), not v.open.isdisjoint(read)
            if jitter is not None and not is_exact(n, given, ()):
                given = jitter.given(n, given)
            results, by_reference = evaluate(n, given, self.opset, self.domains)
            rounded_once = is_exact(n, given, results)
            opened = opened or is_open(n, given, self.opset, results)
            if jitter is not None and not rounded_once:
                results = [jitter.result(n, given, r) for r in results]
            if jitter is not None and n.op_type == "Equal" and not exact:
                results = jitter.equal(n, given, results)
            pure = by_reference and v.pure.issuperset(read) and not reference_is_wrong(n, given, self.opset)
            native = v.native.issuperset(read) and not runtime_is_wrong(n, given, self.opset)
            native = native and halves.isdisjoint(read)
            for name, r in zip(n.output, results, strict=False):
                if name:
                    values[name] = r
                    v.pure |= {name} if pure else set()
                    v.native |= {name} if native else set()
                    v.exact |= {name} if exact and rounded_once else set()
                    v.open |= {name} if opened else set()
                    # ONNX Runtime passes some results in half precision on before they are rounded
                    halves |= {name} if isinstance(r, np.ndarray) and r.dtype == np.float16 else set()
        return v


def _model(
    nodes: Sequence[Any], inputs: Any, outputs: Any, constants: Any, opset: int, domains: Mapping[str, int]
) -> Any:
    graph = helper.make_graph(nodes, "program", inputs, outputs, constants)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in domains.items())]
    return helper.make_model(graph, opset_imports=imports, ir_version=9 if opset <= 22 else 11)


Key = tuple[bytes, int, int]
"""A node, its opset, and the version of its domain."""
_evaluators: OrderedDict[Key, Any] = OrderedDict()
_sessions: OrderedDict[Any, Any] = OrderedDict()
_types: dict[Any, tuple[tuple[Any, Any], ...]] = {}
MOST_EVALUATORS = 64
MOST_TYPES = 512


def evaluate(
    node: Any, given: Mapping[str, Any], opset: int, domains: Mapping[str, int] | None = None
) -> tuple[list[Any], bool]:
    """Evaluate one node by the reference, or by ONNX Runtime where the reference is wrong or has none.

    Returns:
        Its results, and whether the reference evaluated it.

    Raises:
        Invalid: Neither the reference nor ONNX Runtime evaluates it.
    """
    if has_formula(node):
        return by_formula(node, given), True
    if node.op_type == "SequenceInsert":  # `onnx.reference` inserts at `position % len`, so that an end is the front
        items = [*given[node.input[0]]]
        place = int(given[node.input[2]]) if len(node.input) > 2 else len(items)
        items.insert(place, given[node.input[1]])
        return [items], True
    key = (node.SerializeToString(deterministic=True), opset, (domains or {}).get(node.domain, 0))
    reason = ""
    if reference_is_wrong(node, given, opset):
        try:
            return _by_runtime(node, given, key, domains or {}), False
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    try:
        evaluator = _evaluators.get(key)
        if evaluator is None:
            inputs = [helper.make_tensor_value_info(name, 1, None) for name in given]
            outputs = [helper.make_tensor_value_info(name, 1, None) for name in node.output if name]
            evaluator = ReferenceEvaluator(_model([node], inputs, outputs, [], opset, domains or {}))
            _evaluators[key] = evaluator
            if len(_evaluators) > MOST_EVALUATORS:
                _evaluators.popitem(last=False)
        with np.errstate(all="ignore"):
            results = iter(evaluator.run(None, dict(given)))
        values = [_checked(next(results)) if name else None for name in node.output]
        return _typed(node, given, values, key, domains or {}), True
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    try:
        return _by_runtime(node, given, key, domains or {}), False
    except Exception as error:
        raise Invalid(f"{node.op_type}: {reason}; {type(error).__name__}: {error}") from None


def _typed(node: Any, given: Mapping[str, Any], values: list[Any], key: Key, domains: Mapping[str, int]) -> list[Any]:
    """Return results in the types of the operator's definition: the reference at times gives others.

    Raises:
        ValueError: The reference gives integers for floats.
    """
    if any(isinstance(v, list) or not isinstance(v, np.ndarray) for v in (*given.values(), *values) if v is not None):
        return values
    signature = (*key, tuple(f"{a.dtype}{a.shape}" for a in given.values()))
    if signature not in _types:
        inputs = [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for k, a in given.items()
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        inferred = onnx.shape_inference.infer_shapes(_model([node], inputs, outputs, [], key[1], domains))
        known = {o.name: _dtype_and_shape(o.type.tensor_type) for o in inferred.graph.output}
        if len(_types) > MOST_TYPES:
            _types.clear()
        _types[signature] = tuple(known.get(name, (None, None)) for name in node.output)
    result = []
    for v, (dtype, shape) in zip(values, _types[signature], strict=True):
        if v is not None and shape is not None and v.shape != shape:
            raise ValueError(f"expected {shape}, got {v.shape}")
        if v is not None and dtype is not None and v.dtype != dtype:
            if v.dtype.kind != dtype.kind:
                raise ValueError(f"expected {dtype}, got {v.dtype}")
            with np.errstate(all="ignore"):
                v = v.astype(dtype)
        result.append(v)
    return result


def _dtype_and_shape(t: Any) -> tuple[Any, Any]:
    """Return what type inference knows of a value."""
    dtype = helper.tensor_dtype_to_np_dtype(t.elem_type) if t.elem_type else None
    known = t.HasField("shape") and all(d.HasField("dim_value") for d in t.shape.dim)
    return dtype, tuple(d.dim_value for d in t.shape.dim) if known else None


def _checked(value: Any) -> Any:
    """Return a result as an array; a list is a sequence."""
    if isinstance(value, list):
        return [np.asarray(v) for v in value]
    if value is None:
        raise ValueError("no value")
    value = np.asarray(value)
    if value.dtype == object:
        raise ValueError("not a tensor of numbers")
    return value


def _by_runtime(node: Any, given: Mapping[str, Any], key: Key, domains: Mapping[str, int]) -> list[Any]:
    from tests.fuzz.importers.oracles import session

    if any(isinstance(v, list) for v in given.values()):
        raise ValueError("a sequence")
    signature = (*key, tuple(f"{a.dtype}{a.shape}" for a in given.values()))
    run = _sessions.get(signature)
    if run is None:
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for name, a in given.items()
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        run = _sessions[signature] = session(_model([node], inputs, outputs, [], key[1], domains))
        if len(_sessions) > MOST_EVALUATORS:
            _sessions.popitem(last=False)
    results = iter(run.run(None, dict(given)))
    return [_checked(next(results)) if name else None for name in node.output]


def opset_of(domain: str) -> int:
    return int(onnx.defs.onnx_opset_version() if not domain else 1)
