"""Versions of ONNX operators that the importer supports, and refusal of others.

An operator has a new version, numbered by opset, when its attributes, inputs or types change. A node uses the newest version that is
not newer than the opset of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_tune.errors import ParseError
from relax_tune.ir.op.registry import ELEMENTWISE

OLDEST = 1
CONVERT = "convert it with onnx.version_converter.convert_version(model, {version})"

VERSIONS: Mapping[str, tuple[int, ...]] = {
    **{operator.onnx.name: operator.onnx.versions for operator in ELEMENTWISE.values() if operator.onnx},
    "Add": (7, 13, 14), "And": (7,), "ArgMax": (1, 11, 12, 13),
    "ArgMin": (1, 11, 12, 13), "Attention": (23, 24, 25),
    "AveragePool": (7, 10, 11, 19, 22), "BatchNormalization": (7, 9, 14, 15), "Cast": (6, 9, 13, 19, 21, 23, 24, 25, 28),
    "BitCast": (26,), "BitShift": (11, 28),
    "CastLike": (15, 19, 21, 23, 24, 25), "Ceil": (6, 13), "Celu": (12, 28), "Clip": (6, 11, 12, 13), "Concat": (4, 11, 13),
    "Constant": (1, 9, 11, 12, 13, 19, 21, 23, 24, 25), "ConstantOfShape": (9, 20, 21, 23, 24, 25), "Conv": (1, 11, 22),
    "CumProd": (26,), "CumSum": (11, 14), "DepthToSpace": (1, 11, 13, 28),
    "DequantizeLinear": (10, 13, 19, 21, 23, 24, 25, 28), "Div": (7, 13, 14), "Dropout": (7, 10, 12, 13, 22),
    "Einsum": (12, 28), "EyeLike": (9, 22), "ReverseSequence": (10, 28), "GRU": (7, 14, 22), "LSTM": (7, 14, 22),
    "RNN": (7, 14, 22),
    "Elu": (6, 22), "Expand": (8, 13),
    "Flatten": (1, 9, 11, 13, 21, 23, 24, 25), "Gather": (1, 11, 13), "GatherElements": (11, 13),
    "GatherND": (11, 12, 13), "Gelu": (20,), "Gemm": (7, 9, 11, 13), "GlobalAveragePool": (1, 22), "GlobalMaxPool": (1, 22),
    "Greater": (7, 9, 13), "GreaterOrEqual": (12, 16), "GroupNormalization": (21,),
    "HardSigmoid": (6, 22), "HardSwish": (14, 22), "Hardmax": (1, 11, 13),
    "Identity": (1, 13, 14, 16, 19, 21, 23, 24, 25), "InstanceNormalization": (6, 22), "IsInf": (10, 20), "IsNaN": (9, 13, 20),
    "LayerNormalization": (17,), "LeakyRelu": (6, 16),
    "LogSoftmax": (1, 11, 13), "LpNormalization": (1, 22), "LpPool": (2, 11, 18, 22), "MatMul": (1, 9, 13),
    "MatMulInteger": (10,), "Max": (6, 8, 12, 13), "MaxPool": (1, 8, 10, 11, 12, 22), "Mean": (6, 8, 13), "Min": (6, 8, 12, 13),
    "Mish": (18, 22), "Mod": (10, 13, 28), "Mul": (7, 13, 14), "Neg": (6, 13), "OneHot": (9, 11, 28),
    "PRelu": (7, 9, 16), "Pad": (2, 11, 13, 18, 19, 21, 23, 24, 25), "Pow": (7, 12, 13, 15), "QLinearMatMul": (10, 21),
    "QuantizeLinear": (10, 13, 19, 21, 23, 24, 25, 28), "Range": (11, 27), "Reciprocal": (6, 13), "ReduceL1": (1, 11, 13, 18),
    "ReduceL2": (1, 11, 13, 18), "ReduceLogSum": (1, 11, 13, 18, 28), "ReduceLogSumExp": (1, 11, 13, 18, 28),
    "ReduceMax": (1, 11, 12, 13, 18, 20), "ReduceMean": (1, 11, 13, 18), "ReduceMin": (1, 11, 12, 13, 18, 20),
    "ReduceProd": (1, 11, 13, 18), "ReduceSum": (1, 11, 13), "ReduceSumSquare": (1, 11, 13, 18),
    "Reshape": (5, 13, 14, 19, 21, 23, 24, 25), "Scatter": (9,), "ScatterElements": (11, 13, 16, 18),
    "ScatterND": (11, 13, 16, 18), "Selu": (6, 22), "Shape": (1, 13, 15, 19, 21, 23, 24, 25),
    "Sign": (9, 13), "Size": (1, 13, 19, 21, 23, 24, 25), "Slice": (1, 10, 11, 13),
    "Softmax": (1, 11, 13), "Softplus": (1, 22), "SpaceToDepth": (1, 13, 28), "Split": (2, 11, 13, 18),
    "Squeeze": (1, 11, 13, 21, 23, 24, 25), "Sub": (7, 13, 14), "Sum": (6, 8, 13),
    "TensorScatter": (24,), "Tile": (6, 13), "TopK": (1, 10, 11, 24), "Transpose": (1, 13, 21, 23, 24, 25), "Trilu": (14,),
    "Unsqueeze": (1, 11, 13, 21, 23, 24, 25), "Where": (9, 16), "Xor": (7,),
    # signals
    "DFT": (17, 20), "MelWeightMatrix": (17,), "STFT": (17,),
    # images
    "AffineGrid": (20,), "CenterCropPad": (18,), "Col2Im": (18,), "ConvTranspose": (1, 11, 22), "GlobalLpPool": (2, 22),
    "GridSample": (16, 20, 22), "LRN": (1, 13), "MaxUnpool": (9, 11, 22), "Resize": (10, 11, 13, 18, 19),
    "RoiAlign": (10, 16, 22),
    "Upsample": (7, 9), "ConcatFromSequence": (11,), "SequenceAt": (11,), "SequenceConstruct": (11,), "SequenceEmpty": (11,),
    "SequenceErase": (11,), "SequenceInsert": (11,), "SequenceLength": (11,), "SplitToSequence": (11, 24),
    "Optional": (15, 28), "OptionalGetElement": (15, 18, 28), "OptionalHasElement": (15, 18, 28),
    "ConvInteger": (10,), "DeformConv": (19, 22), "Det": (11, 22), "MaxRoiPool": (1, 22), "QLinearConv": (10,),
    # sizes that data decide
    "Compress": (9, 11, 28), "NonMaxSuppression": (10, 11), "NonZero": (9, 13), "Unique": (11, 28),
    # random numbers
    "Bernoulli": (15, 22), "Multinomial": (7, 22), "RandomNormal": (1, 22), "RandomNormalLike": (1, 22),
    "RandomUniform": (1, 22),
    "RandomUniformLike": (1, 22),
}  # fmt: skip
"""Supported versions by operator, from the one in force at opset 7 on."""


def check_opset(onnx: Any, version: int) -> None:
    """Refuse an opset that is too old, or newer than the installed package. Raises ParseError."""
    newest = int(onnx.defs.onnx_opset_version())
    if version < OLDEST:
        raise ParseError(
            f"expected opset {OLDEST} to {newest}, got {version}; {CONVERT.format(version=max(OLDEST, 18))}"
        )
    if version > newest:
        raise ParseError(
            f"expected opset {OLDEST} to {newest}, the newest that the installed onnx {onnx.__version__} knows, got {version}; "
            f"install a newer onnx, or export the model with opset {newest}"
        )


def version_of(onnx: Any, op: str, opset: int) -> int | None:
    """Return the version of a standard operator in force at an opset; None for an unknown operator."""
    # Files state opsets as int64, and onnx's look-ups take a C int.
    if not 0 < opset < 2**31:
        return None
    try:
        return int(onnx.defs.get_schema(op, opset, "").since_version)
    except onnx.defs.SchemaError:
        return None


def problem_of(onnx: Any, proto: Any, opset: int, version: int | None) -> str | None:
    """Return None, or why a node violates the definition of its operator or has an unsupported version."""
    if version is None:
        # An operator that is unknown at this opset but known at a later one: the opset of the file is probably too
        # low.
        later = sorted(
            s.since_version
            for s in onnx.defs.get_all_schemas_with_history()
            if not s.domain and s.name == proto.op_type
        )
        if later and later[0] > opset:
            return f"expected an operator of opset {opset}, got one that came with opset {later[0]}; is the model's opset right?"
        return None
    read = VERSIONS.get(proto.op_type)
    if read is not None and version not in read:
        return (
            f"expected the operator as of opset {', '.join(map(str, read))}, got its definition of opset {version}, which is not "
            f"known here; {CONVERT.format(version=max(read))}"
        )
    context = onnx.checker.C.CheckerContext()
    # The checker needs a version of the file format; it does not decide how a node is checked.
    context.ir_version, context.opset_imports = 9, {"": opset}
    try:
        onnx.checker.check_node(proto, context)
    except onnx.checker.ValidationError as error:
        reason = str(error).strip().splitlines()[0]
        return f"expected a node as opset {opset} defines it, got: {reason.rstrip('.')}"
    return None
