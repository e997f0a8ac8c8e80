"""Import of torch.export programs: dynamic dims become symbols with ranges, weights keep their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.dtype import ALL, i64
from relax_tune.ir.core.expr import Expr, ge, le
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared.finish import finish_import
from relax_tune.ir.frontend.shared.node import Neighbours, near_names
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, identifier
from relax_tune.ir.frontend.torch import (
    compare,
    control,
    dims,
    fourier,
    groups,
    indexing,
    math,
    neural,
    order,
    random,
    reduce,
    resize,
    sizes,
    special,
    window,
)
from relax_tune.ir.frontend.torch import complex as torch_complex
from relax_tune.ir.frontend.torch import shape as torch_shape
from relax_tune.ir.frontend.torch.export import plain_program
from relax_tune.ir.frontend.torch.node import ComplexValue, Handler, TorchNode, as_item, dim
from relax_tune.ir.frontend.torch.program import DIMS, Ref, TorchCall, TorchGraph, TorchProgram, TorchTensor, dim_of

Bounds = Mapping[str, tuple[int, int]]

MODULES = (
    math, compare, dims, torch_shape, indexing, reduce, order, groups, neural, window, resize, random, special,
    fourier, sizes,
)  # fmt: skip
SUPPORTED: Mapping[str, Handler] = {
    **{op: handler for module in MODULES for op, handler in module.HANDLERS.items()},
    **torch_complex.CONSTRUCTORS,
}


def load_torch_export(program: Any, bounds: Bounds | None = None, trust: bool = False) -> IRModule:
    """Import a torch.export program as `main(inputs in order) -> results` (a tuple when there are several).

    A dynamic dim has the name of its `torch.export.Dim`. torch does not save the names; a file may hold them as extra data:
    `torch.export.save(program, path, extra_files={"dims.json": '{"x": {"0": "batch"}}'})`. A dim without a name is `<input>_<axis>`,
    after the first input that has it by itself. Parameters and buffers become constants of their names; tied ones are one constant.
    Results have the keys of the program's result, such as `logits`; the new values of written inputs follow, `new_<name>`. Buffers that
    the program writes to are the last inputs, and their new values the last results. `initial_state()` returns their first values.

    Args:
        program: `torch.export.ExportedProgram`, or path of a .pt2 file of `torch.export.save`.
        bounds: Inclusive (lower, upper) of dynamic dims by name, within the exported ranges.
        trust: Let torch unpickle and evaluate what a file holds besides its graph and numbers.

    Raises:
        UserError: torch is not installed, a bound does not fit, or a file needs `trust`.
        ParseError: The file is not such a program, or has an unsupported operator, element type or side effect; the message
            names the node.
    """
    source = str(program) if isinstance(program, Path) else program
    return import_program(plain_program(source, trust, {*SUPPORTED, *control.HANDLERS}), bounds)


def import_program(program: TorchProgram, bounds: Bounds | None = None) -> IRModule:
    """Import a program given as plain data, without torch; see `load_torch_export`."""
    return _Importer(program, bounds or {}).run()


def wider(name: str, low: int) -> str:
    """Return the advice for a dim that torch fixed, or took to be at least 2."""
    return (
        f'torch.export.Dim("{name}", min={low}) and an example in which this dim is 2 or more: torch takes a 1 in the example as '
        "fixed, and lets Dim.AUTO and Dim.DYNAMIC begin at 2"
    )


INITIAL_STATE = "initial_state"
"""Name of the function of the initial state, which `Model.session` calls."""


class _Importer:
    """Importer of one program, in one walk over its nodes."""

    def __init__(self, program: TorchProgram, bounds: Bounds) -> None:
        self.program, self.bounds = program, bounds
        self.w = Writer(GraphBuilder())
        self.symbols: dict[str, Expr] = {}
        # Symbols that no input has stand for sizes that data decide.
        self.data_sizes = {s.name for s in program.symbols} - set(_names([m.dims for _, m in program.inputs]))
        self.env: dict[str, Any] = {}
        self.neighbours = Neighbours((f"{c.op} {c.name!r}", _refs_of(c), (c.name,)) for c in program.nodes)
        self.plain = self._read_by_linear_layers_only()
        self.signed = self._numbers_of_any_sign()

    def run(self) -> IRModule:
        self._declare()
        for name, meta in self.program.inputs:
            if meta.parts is not None:
                raise ParseError(
                    f"input {name}: expected a real tensor, got {meta.spelled}; give its parts as the last dim, as of "
                    "torch.view_as_real, and join them in the model by torch.view_as_complex"
                )
            info = self._info(meta, f"input {name}")
            self.env[name] = self.w.of(self.w.g.input(identifier(name), info.shape or (), info.dtype))
            self.w.reserved.add(identifier(name))
        self._limit()
        items = {key: torch_complex.constant(self.w, array, key) for key, array in self.program.weights.items()}
        self.env.update((name, items[key]) for name, key in self.program.constants.items())
        names, results = [], []
        for name, value in self.program.outputs:
            if value is not None:
                names.append(self.w.g.fresh(name))
        self.w.reserved.update(names)
        for call in self.program.nodes:
            self.env[call.name] = self._node(call)
        for name, value in self.program.outputs:
            if value is None:
                continue
            result = self._value(value)
            if isinstance(result, ComplexValue):
                raise ParseError(
                    f"output {name!r}: expected a real tensor, got a complex one; return torch.view_as_real of it"
                )
            if not isinstance(result, (ImportedValue, Expr, int)):
                raise ParseError(f"output {name!r}: expected a tensor or a dim, got {result!r}")
            results.append(result if isinstance(result, ImportedValue) else as_item(self.w, dim(result), i64))
        if not results:
            raise ParseError("expected a program with at least one result, got none")
        module = finish_import(self.w, results, names)
        return self._with_state(module) if self.program.state else module

    def _with_state(self, module: IRModule) -> IRModule:
        """Add the function of the initial values of the buffers that the program writes to."""
        w = Writer(GraphBuilder(INITIAL_STATE))
        items = [w.constant(self.program.weights[k], f"initial_{name}") for name, k in self.program.state.items()]
        initial = finish_import(w, items, list(self.program.state), INITIAL_STATE)
        return replace(
            module,
            functions={**module.functions, **initial.functions},
            constants={**module.constants, **initial.constants},
        )

    def _declare(self) -> None:
        """Declare the dynamic dims with their ranges, narrowed by the caller's bounds."""
        known = {s.name: s for s in self.program.symbols if s.name not in self.data_sizes}
        unknown = sorted(set(self.bounds) - set(known))
        if unknown:
            there = ", ".join(known) or "none: every dim is a number"
            ones = [f"{name}[{m.dims.index(1)}]" for name, m in self.program.inputs if 1 in m.dims]
            fixed = f"; {ones[0]} is 1: for a dim there, export with {wider(unknown[0], 1)}" if ones else ""
            raise UserError(
                f"bounds of {', '.join(unknown)}: expected dynamic dims of the program, which are {there}{fixed}"
            )
        for name, s in known.items():
            low, high = self.bounds.get(name, (s.lower, s.upper))
            if low < s.lower or (s.upper is not None and high is not None and high > s.upper):
                limit = "any number" if s.upper is None else s.upper
                advice = wider(name, low) if low < s.lower == 2 else "a wider torch.export.Dim"
                raise UserError(
                    f"bound of {name}: expected a range within the one the program was exported with, {s.lower} to {limit}, "
                    f"got {low} to {high}; export it with {advice}"
                )
            self.symbols[name] = self.w.g.symbol(name, low, high)

    def _limit(self) -> None:
        """Check at run time the ranges of computed dims that do not follow from the ranges of the symbols."""
        for stated, low, high in self.program.limits:
            if self._depends(stated):
                continue  # the range depends on data: torch derives it from the ranges of the sizes
            e = self.w.simplify(dim_of(stated, self.symbols))
            if not self.w.require(ge(e, low)) or (high is not None and not self.w.require(le(e, high))):
                limit = "any number" if high is None else high
                raise UserError(
                    f"bounds of {e!r}: expected {low} to {limit}, as the program was exported, got none within; give others"
                )

    def _read_by_linear_layers_only(self) -> frozenset[str]:
        """Return the weights that are used only as the second argument of linear layers."""
        other: set[str] = set()
        for call in self.program.nodes:
            linear = call.op == "aten.linear.default"
            read = _refs([*(a for p, a in enumerate(call.args) if not (linear and p == 1)), *call.kwargs.values()])
            other.update(self.program.constants[name] for name in read if name in self.program.constants)
        other.update(self.program.constants.get(v.name, "") for _, v in self.program.outputs if isinstance(v, Ref))
        return frozenset(self.program.weights) - other

    def _numbers_of_any_sign(self) -> frozenset[str]:
        """Return the nodes that read a number from a tensor on which no dim depends: it may be below 0."""
        nodes, readers = self.program.nodes, defaultdict[str, list[str]](list)
        for call in nodes:
            for name in _refs_of(call):
                readers[name].append(call.op)
        results = [m for c in nodes for m in (c.result if isinstance(c.result, list) else [c.result])]
        sizes = set(_names([m.dims for m in results if isinstance(m, TorchTensor)]))
        return frozenset(
            call.name
            for call in nodes
            if isinstance(symbol := call.kwargs.get("symbol"), str) and symbol not in sizes
            if all(op == "sym.float" or (op.startswith("aten.") and "slice" not in op) for op in readers[call.name])
        )

    # nodes

    def _inside(self, w: Writer, graph: TorchGraph, args: Sequence[Any]) -> list[ImportedValue]:
        """Import a graph that is an argument of a node, by another writer. Returns its results."""
        # A graph reads only its parameters, so it gets an environment without the names around it.
        before, self.w, self.env = (self.w, self.env), w, dict(zip(graph.params, args, strict=True))
        try:
            for call in graph.nodes:
                self.env[call.name] = self._node(call)
            results = [self._value(r) for r in graph.results]
        finally:
            self.w, self.env = before
        for item in results:
            if not isinstance(item, ImportedValue):
                raise ParseError(f"expected tensors as results of a graph of an operator, got {item!r:.60}")
        return results

    def _node(self, call: TorchCall) -> Any:
        handler = SUPPORTED.get(call.op)
        # handlers of operators with graphs also need the importer of a graph
        if call.op in control.HANDLERS:
            handler = partial(control.HANDLERS[call.op], self._inside)
        known = call.op == "sym.known"
        args = tuple(dim_of(a, self.symbols) if known else self._value(a) for a in call.args)
        kwargs = {k: self._value(v) for k, v in call.kwargs.items()}
        # The reader states the layout of the tensor by dims.
        if call.op in ("aten.as_strided.default", "aten.as_strided_copy.default"):
            kwargs["strides"] = [dim_of(s, self.symbols) for s in call.kwargs["strides"]]
            kwargs["first"] = dim_of(call.kwargs["first"], self.symbols)
        if call.name in self.signed:
            kwargs["signed"] = True
        node = TorchNode(
            call.op, call.name, args, kwargs, (), call.source, self.plain,
            neighbours=self.neighbours.of(_refs_of(call), (call.name,)),
            near=() if handler else near_names(call.op, SUPPORTED),
        )  # fmt: skip
        if op_is_complex := torch_complex.is_complex([*args, *kwargs.values(), call.result]):
            gives = torch_complex.is_complex(call.result)
            handler = torch_complex.handler_of(call.op, SUPPORTED.get(call.op), gives)
        if handler is None and op_is_complex:
            raise node.refuse(
                "expected an operator that is supported for complex tensors, got one that is not; compute it of the real parts, "
                "as of torch.view_as_real, torch.abs or torch.angle"
            )
        if handler is None:
            raise node.refuse(f"expected one of the {len(SUPPORTED)} supported operators, got one that is not")
        with node.errors():
            node = self._with_results(node, call)
            result = handler(self.w, node)
            self._bind(call, result)
            if isinstance(result, (ImportedValue, ComplexValue)):
                return self._settled(node, result, node.results[0] if node.results else None)
            if isinstance(result, Sequence):
                return [
                    i if i is None else self._settled(node, i, info)
                    for i, info in zip(result, node.results, strict=True)
                ]
            return result

    def _bind(self, call: TorchCall, result: Any) -> None:
        """Give sizes that data decide the dims of the first result that has them."""
        metas = call.result if isinstance(call.result, list) else [call.result]
        items = result if isinstance(result, Sequence) else [result]
        for m, item in zip(metas, items):
            if isinstance(m, TorchTensor) and isinstance(item, ImportedValue) and len(m.dims) == item.ndim:
                for stated, d in zip(m.dims, item.shape, strict=True):
                    if isinstance(stated, str) and stated in self.data_sizes:
                        self.symbols.setdefault(stated, d)
        if isinstance(call.kwargs.get("symbol"), str) and isinstance(result, Expr):
            self.symbols.setdefault(call.kwargs["symbol"], result)

    def _depends(self, stated: Any) -> bool:
        """Return whether a dim has a symbol for a size that data decide, and that is not known so far."""
        return any(name in self.data_sizes and name not in self.symbols for name in _names(stated))

    def _with_results(self, node: TorchNode, call: TorchCall) -> TorchNode:
        listed = call.result if isinstance(call.result, list) else [call.result]
        for m in listed:
            if isinstance(m, TorchTensor) and (m.element or m.parts) is None:
                raise node.refuse(
                    f"expected results of an element type among {', '.join(map(str, ALL))}, got {m.spelled}"
                )
        infos = tuple(
            self._info(m, f"node {call.name!r}") if isinstance(m, TorchTensor) and (m.element or m.parts) else None
            for m in listed
        )
        return replace(node, results=infos)

    def _settled(
        self, node: TorchNode, value: ImportedValue | ComplexValue, stated: TensorInfo | None
    ) -> ImportedValue | ComplexValue:
        """Give a result the dims that torch states; undecided dims are checked at run time."""
        if isinstance(value, ImportedValue):
            return self._settled_part(node, value, stated)
        return ComplexValue(*(self._settled_part(node, part, stated) for part in (value.real, value.imag)))

    def _settled_part(self, node: TorchNode, item: ImportedValue, stated: TensorInfo | None) -> ImportedValue:
        if stated is None:
            return item
        if stated.shape is None:
            if item.dtype is not stated.dtype or item.ndim != stated.ndim:
                raise node.refuse(f"expected a result like torch's, {stated!r}, got {item.info!r}")
            return item
        if item.dtype is not stated.dtype or item.ndim != len(stated.shape):
            raise node.refuse(f"expected a result like torch's, {stated!r}, got {item.info!r}")
        if all(map(self.w.g.deduction.same, item.shape, stated.shape)):
            return item
        # A reshape to the stated dims: it is checked at run time, and later operators see the dims that torch reasons
        # with.
        return self.w.of(self.w.reshape(self.w.tensor(item), stated.shape), item.natural)

    # values

    def _value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.env.get(value.name)
        return [self._value(v) for v in value] if isinstance(value, list) else value

    def _info(self, meta: TorchTensor, where: str) -> TensorInfo:
        element = meta.element or meta.parts
        if element is None:
            raise ParseError(
                f"{where}: expected an element type among {', '.join(map(str, ALL))}, got {meta.spelled}; convert the model, "
                "as with model.float(), before exporting it"
            )
        if any(map(self._depends, meta.dims)):
            return TensorInfo(None, element, len(meta.dims))
        return TensorInfo(tuple(self.w.simplify(dim_of(d, self.symbols)) for d in meta.dims), element)


def _refs_of(call: TorchCall) -> list[str]:
    return _refs([*call.args, *call.kwargs.values()])


def _refs(values: Sequence[Any]) -> list[str]:
    names: list[str] = []
    for v in values:
        if isinstance(v, Ref):
            names.append(v.name)
        elif isinstance(v, list):
            names.extend(_refs(v))
    return names


def _names(stated: Any) -> list[str]:
    """Return the symbols of a dim or of dims, as a program states them."""
    if isinstance(stated, str):
        return [] if stated in DIMS else [stated]
    return [name for part in stated for name in _names(part)] if isinstance(stated, (list, tuple)) else []
