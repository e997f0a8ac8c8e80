"""TVM's memory plan of one of our graphs, for `end_to_end/memory_plan.py`: the same operators built in Relax, through TVM's own passes.

Weights are parameters there, so that neither plan counts them. Needs the package apache-tvm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import tvm  # type: ignore[import-not-found]
from tvm import relax
from tvm import tirx as tir

from relax_tune.ir.core.expr import Const, Expr, Op, Var
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Constant, Function, GVar
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.passes.graph.decompose import Decompose

op = relax.op
BUILD: Mapping[str, Callable[[Any, list[Any], Callable[[Expr], Any]], Any]] = {
    "Add": lambda o, x, e: op.add(*x),
    "Mul": lambda o, x, e: op.multiply(*x),
    "AddScalar": lambda o, x, e: op.add(x[0], relax.const(o.value, "float32")),
    "MulScalar": lambda o, x, e: op.multiply(x[0], relax.const(o.value, "float32")),
    "Rsqrt": lambda o, x, e: op.rsqrt(x[0]),
    "Sigmoid": lambda o, x, e: op.sigmoid(x[0]),
    "Gelu": lambda o, x, e: op.nn.gelu(x[0]),
    "Softmax": lambda o, x, e: op.nn.softmax(x[0], -1),
    "Mean": lambda o, x, e: op.mean(x[0], list(o.axes), o.keepdims),
    "Cast": lambda o, x, e: op.astype(x[0], o.dtype.name),
    "ExpandDims": lambda o, x, e: op.expand_dims(x[0], list(o.axes)),
    "Reshape": lambda o, x, e: op.reshape(x[0], [e(d) for d in o.shape]),
    "Permute": lambda o, x, e: op.permute_dims(x[0], list(o.axes)),
    "Concat": lambda o, x, e: op.concat(x, o.axis),
    "Take": lambda o, x, e: op.take(x[0], x[1], 0),
    "Slice": lambda o, x, e: op.strided_slice(x[0], [o.axis], [e(o.begin)], [e(o.end)]),
    "LayerNorm": lambda o, x, e: op.nn.layer_norm(x[0], x[1], x[2], [-1], o.eps),
    "Matmul": lambda o, x, e: op.matmul(x[0], op.permute_dims(x[1], [0, 1, 3, 2]) if o.transpose_b else x[1]),
    "MeanPool": lambda o, x, e: op.divide(
        op.sum(op.multiply(x[0], op.expand_dims(x[1], [-1])), [1]), op.sum(x[1], [1], True)
    ),
    "L2Normalize": lambda o, x, e: op.multiply(x[0], op.rsqrt(op.sum(op.multiply(x[0], x[0]), [-1], True))),
}
FUSING = (
    relax.transform.LegalizeOps(),
    relax.transform.AnnotateTIROpPattern(),
    relax.transform.FoldConstant(),
    relax.transform.FuseOps(),
    relax.transform.FuseTIR(),
    relax.transform.DeadCodeElimination(),
)
PASSES = (
    *FUSING,
    relax.transform.RewriteDataflowReshape(),
    relax.transform.ToNonDataflow(),
    relax.transform.RemovePurityChecking(),
    relax.transform.CallTIRRewrite(),
    relax.transform.StaticPlanBlockMemory(),
)


def from_graph(module: IRModule) -> Any:
    """The graph `main` in Relax."""
    main = Decompose()(module).functions["main"]
    assert isinstance(main, Function)
    symbols: dict[Var, Any] = {b.var: tir.Var(b.var.name, "int64") for b in module.bounds}

    def scalar(e: Expr) -> Any:
        if isinstance(e, Const):
            return tir.IntImm("int64", int(e.value))
        if isinstance(e, Var):
            return symbols[e]
        assert isinstance(e, Op), e
        build = {
            "add": tir.Add,
            "sub": tir.Sub,
            "mul": tir.Mul,
            "floordiv": tir.FloorDiv,
            "min": tir.Min,
            "max": tir.Max,
        }
        return build[e.op](*map(scalar, e.args))

    def kind(info: StructInfo) -> Any:
        assert isinstance(info, TensorInfo) and info.shape is not None and info.dtype is not None
        return relax.TensorType([scalar(d) for d in info.shape], info.dtype.name)

    def parameter(v: GVar | Constant) -> Any:
        return relax.Var(v.name.replace(".", "_"), kind(v.info))

    values: dict[GVar | Constant, Any] = {p: parameter(p) for p in main.params}
    for b in main.bindings:
        assert isinstance(b.value, Call), b.value
        values |= {a: parameter(a) for a in b.value.args if isinstance(a, Constant) and a not in values}
    builder = relax.BlockBuilder()
    with builder.function("main", list(values.values())):
        with builder.dataflow():
            for b in main.bindings:
                assert isinstance(b.value, Call)
                args = [values[a] for a in b.value.args if isinstance(a, (GVar, Constant))]
                made = builder.emit(BUILD[type(b.value.op).__name__](b.value.op, args, scalar))
                known = isinstance(made.ty.shape, relax.ShapeExpr)  # of a symbolic slice it is not
                values[b.var] = made if known else builder.match_cast(made, kind(b.var.info))
            assert isinstance(main.ret, GVar)
            out = builder.emit_output(values[main.ret])
        builder.emit_func_output(out)
    return builder.get()


def planned(made: Any, upper: Mapping[str, int] | None = None) -> Callable[[Mapping[str, int]], int]:
    """Return the bytes of TVM's plan as a function of the symbols' values: its storages, and tensors without a storage, except the results.

    upper: bounds of the symbols, with which TVM makes a constant plan.
    """
    if upper is not None:
        made["main"] = made["main"].with_attr("tir_var_upper_bound", dict(upper))
    with tvm.target.Target("llvm"), tvm.transform.PassContext(opt_level=3):
        for step in PASSES:
            made = step(made)
    main = made["main"]
    sizes: list[Any] = []
    returned = main.body.body
    aliases: dict[Any, Any] = {}
    tensors: dict[Any, Any] = {}
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Var):
                aliases[binding.var] = value
            if not isinstance(value, relax.Call):
                continue
            name = getattr(value.op, "name", "")
            if name == "relax.memory.alloc_storage":
                sizes.append(value.args[0].values[0])
            elif name == "relax.builtin.alloc_tensor":
                tensors[binding.var] = value
    while returned in aliases:
        returned = aliases[returned]
    for var, value in tensors.items():
        if not var.same_as(returned):
            count: Any = tir.IntImm("int64", 1)
            for d in value.args[0].values:
                count = count * d
            sizes.append(count * (tvm.DataType(value.args[1].value).bits // 8))
    texts = [str(s) for s in sizes]
    names = {"T": SimpleNamespace(int64=int, max=max, min=min, if_then_else=lambda c, a, b: a if c else b)}

    def at(values: Mapping[str, int]) -> int:
        return sum(eval(text, {**names, **values}) for text in texts)  # TVM prints scalars as Python

    return at
