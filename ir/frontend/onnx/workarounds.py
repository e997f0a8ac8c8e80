"""What to do about the refusals of ONNX models, as the end of a message.

Tests: `tests/ir/frontend/onnx/test_workarounds.py`, which carries out each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.ir.core.dtype import ALL

MANY = 3
"""Names that a message lists."""

INITIALIZER = (
    "where a caller gives it, store it in the file: "
    "`model.graph.initializer.append(onnx.numpy_helper.from_array(value, NAME))`"
)
RANK = "state it: `input.CopyFrom(onnx.helper.make_tensor_value_info(NAME, TYPE, ['batch', 'length']))` with a name for each dim"
DENSE = "store it as a dense tensor in `model.graph.initializer`"
NCHWC = (
    "write the file again at a level that every processor runs: "
    "`session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED`"
)
SEQUENCE_INPUT = "take each tensor as an input, and make the sequence by a SequenceConstruct node in the file"
OPTIONAL_INPUT = "take the tensor itself as an input; drop OptionalGetElement, and store OptionalHasElement's answer as an initializer"
SEQUENCE_RESULT = "give it by ConcatFromSequence, or its tensors by SequenceAt"
OPTIONAL_RESULT = "leave it out of the graph's outputs"


def cut(inputs: Sequence[str], outputs: Sequence[str], inner: bool) -> str:
    """Return how to go on without a node: it is computed by the caller, between two models.

    Args:
        inputs: Names of the tensors that the node reads.
        outputs: Names of its results.
        inner: Whether the node is in a graph of another node, or in a function.
    """
    if inner:
        return "workaround: export the model without this node, or cut the file around the node that contains it"
    before, after = (", ".join(names[:MANY]) + ", ..." * (len(names) > MANY) for names in (inputs, outputs))
    return (
        f"workaround: compute the node outside, between the model up to {before or 'its inputs'} and the model from "
        f"{after or 'its results'} on; `onnx.utils.extract_model` writes both"
    )


def fix_numbers(numbers: Mapping[str, int | None], node: str) -> str:
    """Return how to leave out a side of an If, whose condition depends on inputs of one integer.

    Args:
        numbers: The inputs, with a value of each, if one is known.
    """
    values = {name: "VALUE" if n is None else str(n) for name, n in numbers.items()}
    python = ", ".join(f"{name!r}: ({v}, {v})" for name, v in values.items())
    flags = " ".join(f"--bound {name}={v}:{v}" for name, v in values.items())
    return f"fix what the condition of If {node!r} reads, which leaves out its other side, such as bounds={{{python}}}, or {flags}"


def element_types() -> str:
    """Return what to do about an element type that is not supported."""
    return (
        f"the types are {', '.join(map(str, ALL))}; cast such a number, and compute texts outside: "
        "`onnx.utils.extract_model` writes the part of the model behind them"
    )
