"""A second opinion on the NumPy meaning of operators: ONNX's, from ONNX Runtime where it is installed, else its reference.

Single operators on random arguments in double precision. Left out is what ONNX leaves open: NaN in extremes and orders, division
by 0, the order of equal elements, casts of numbers that do not fit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.fuzz.draft import ELEMENTS, Draft, Grower, arguments, sizes_of
from tests.fuzz.operators import ENTRIES

from relax_tune.errors import RelaxTuneError
from relax_tune.ir.core.dtype import is_floating
from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.interp.graph_values import actual_info
from relax_tune.ir.op.base import Deduction, OperatorSpec
from relax_tune.ir.op.registry import ELEMENTWISE

Array = np.ndarray[Any, Any]
OPSET = 20


@dataclass(frozen=True)
class Node:
    """An ONNX node. extra: inputs after the inputs of the operator. result: the number of the output that is compared."""

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    extra: Sequence[Array] = ()
    result: int = 0


def _reduction(kind: str) -> Callable[[Any, Sequence[Array]], Node | None]:
    def node(op: Any, args: Sequence[Array]) -> Node:
        axes = range(args[0].ndim) if op.axes is None else op.axes
        return Node(kind, {"keepdims": int(op.keepdims)}, (np.array(list(axes), np.int64),))

    return node


def _where_not_empty(kind: str) -> Callable[[Any, Sequence[Array]], Node | None]:
    return lambda op, args: _reduction(kind)(op, args) if args[0].size and not _has_nan(args[0]) else None


def _ordered(kind: str) -> Callable[[Any, Sequence[Array]], Node | None]:
    return lambda op, args: None if any(map(_has_nan, args)) else Node(kind)


def _plain(kind: str, **attributes: Any) -> Callable[[Any, Sequence[Array]], Node | None]:
    return lambda op, args: Node(kind, attributes)


def _arg_max(op: Any, args: Sequence[Array]) -> Node | None:
    kind = {"axis": op.axis, "keepdims": 0, "select_last_index": int(op.last)}
    return Node("ArgMin" if op.least else "ArgMax", kind) if args[0].size and not _has_nan(args[0]) else None


def _scattered(op: Any, args: Sequence[Array]) -> Node | None:
    if op.mode == "replace" or any(map(_has_nan, args)) or not all(a.size for a in args):
        return None  # which of several updates counts, and extremes of NaN, are ours
    where = {"axis": op.axis} if op.name == "scatter_elements" else {}
    return Node("ScatterElements" if where else "ScatterND", {"reduction": op.mode, **where})


def _modulo(op: Any, args: Sequence[Array]) -> Node | None:
    return Node("Mod") if np.all(args[1] != 0) else None


def _scan(op: Any, args: Sequence[Array]) -> Node | None:
    return Node("CumSum", {"exclusive": int(op.exclusive), "reverse": int(op.reverse)}, (np.array(op.axis),))


def _has_nan(a: Array) -> bool:
    return is_floating(a.dtype) and bool(np.isnan(a).any())


NODES: Mapping[str, Callable[[Any, Sequence[Array]], Node | None]] = {
    **{name: _plain(op.onnx.name) for name, op in ELEMENTWISE.items() if op.onnx},
    "gelu": _plain("Gelu"), "relu": _ordered("Relu"), "add": _plain("Add"), "sub": _plain("Sub"), "mul": _plain("Mul"),
    "div": _plain("Div"), "maximum": _ordered("Max"), "minimum": _ordered("Min"), "logical_and": _plain("And"),
    "power": _plain("Pow"), "fmod": _plain("Mod", fmod=1), "modulo": _modulo, "where": _plain("Where"),
    "matmul": lambda op, args: None if op.transpose_b else Node("MatMul"),
    "softmax": lambda op, args: Node("Softmax", {"axis": -1}) if args[0].size else None,
    "sum": _reduction("ReduceSum"), "prod": _reduction("ReduceProd"), "mean": _where_not_empty("ReduceMean"),
    "max": _where_not_empty("ReduceMax"), "min": _where_not_empty("ReduceMin"), "arg_max": _arg_max, "cum_sum": _scan,
    "take": lambda op, args: Node("Gather", {"axis": 0}),
    "gather_elements": lambda op, args: Node("GatherElements", {"axis": op.axis}) if all(a.size for a in args) else None,
    "gather_nd": lambda op, args: Node("GatherND") if all(a.size for a in args) else None,
    "scatter_nd": _scattered, "scatter_elements": _scattered,
    "permute": lambda op, args: Node("Transpose", {"perm": list(op.axes)}),
    "concat": lambda op, args: Node("Concat", {"axis": op.axis}),
    "expand_dims": lambda op, args: Node("Unsqueeze", {}, (np.array(list(op.axes), np.int64),)),
}  # fmt: skip
"""By operator: its node, None for arguments on which ONNX says nothing or another thing."""


def differences(seed: int, count: int) -> tuple[int, list[str]]:
    """Compare random uses of operators; return how many were, and a sentence for each that differs."""
    rng, compared, result, names = random.Random(seed), 0, list[str](), sorted(NODES)
    while compared < count:
        name = rng.choice(names)
        w = Grower(rng)
        try:
            w.step(ENTRIES[name].make(w))
            draft = w.finish()
            text = difference(draft, rng)
        except RelaxTuneError:
            continue
        if text is None:
            continue
        compared += 1
        result += [f"{name}: {text}"] * bool(text)
    return compared, result


def difference(draft: Draft, rng: random.Random) -> str | None:
    """Compare the last operator of a program on random arguments; None where ONNX has nothing to say."""
    sizes = sizes_of(draft, rng)
    step = draft.steps[-1]
    if len(draft.steps) > 1 or min((d for s in draft.shapes(sizes) for d in s), default=0) < 0:
        return None
    if sum(int(np.prod(s)) for s in draft.shapes(sizes)) > ELEMENTS:
        return None
    style = rng.choice(("plain", "small", "edges"))
    given = arguments(draft, sizes, np.random.default_rng(rng.randrange(1 << 30)), style)
    args = [given[a] for a in step.args]
    args = [a.astype(np.float64) if is_floating(a.dtype) else a for a in args]
    known = {d: a.shape[k] for i, a in zip(draft.inputs, given, strict=True) for k, d in enumerate(i.dims)}
    op = step.op.substituted({d: const(n) for d, n in known.items() if isinstance(d, Var)})
    op.infer([actual_info(a) for a in args], Deduction())  # shapes that turn out not to fit
    node = NODES[op.name](op, args)
    return None if node is None else _compared(op, node, args)


def _compared(op: OperatorSpec, node: Node, args: Sequence[Array]) -> str | None:
    with np.errstate(all="ignore"):
        ours = op.evaluate(args)
        try:
            theirs = evaluate(node, args)
        except Exception:  # the reference lacks some broadcasts and types
            return None
    assert isinstance(ours, np.ndarray)
    if ours.shape != theirs.shape:
        return f"expected shape {theirs.shape}, got {ours.shape}"
    expected, got = theirs.astype(np.float64), ours.astype(np.float64)
    with np.errstate(all="ignore"):
        # sums in another order
        scale = np.max(np.abs(expected), initial=0, where=np.isfinite(expected))
        grain = 1e-6 if op.name in ("erf", "gelu") else 1e-9  # the erf of the reference has single precision
        close = np.isclose(got, expected, rtol=1e-6, atol=grain * max(1.0, float(scale)), equal_nan=True)
    unsure = np.zeros(close.shape, bool)
    if op.name in ("matmul", "sum", "prod", "mean", "cum_sum", "softmax", "scatter_nd", "scatter_elements"):
        unsure = ~np.isfinite(expected) | ~np.isfinite(got)  # the order decides what overflows
    if np.all(close | unsure):
        return ""
    at = tuple(int(i) for i in np.argwhere(~(close | unsure))[0])
    where = [a[at] if a.shape == ours.shape else a.shape for a in args]
    return f"{op!r} at {list(at)} of {where}: expected {theirs[at]!r}, got {ours[at]!r}"


def evaluate(node: Node, args: Sequence[Array]) -> Array:
    """Run one node."""
    from onnx import helper, numpy_helper

    every = [*args, *node.extra]
    names = [f"x{k}" for k in range(len(every))]
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, every)
    ]
    results = ["y", "z"][: node.result + 1]
    proto = helper.make_node(node.kind, names[: len(args) + len(node.extra)], results, **node.attributes)
    out = [helper.make_empty_tensor_value_info(r) for r in results]
    constants = [numpy_helper.from_array(a, n) for n, a in zip(names[len(args) :], node.extra)]
    graph = helper.make_graph([proto], "one", given[: len(args)], out, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    actual = _session(model).run(None, dict(zip(names, args)))
    return np.asarray(actual[node.result])


def _session(model: Any) -> Any:
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(model)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
