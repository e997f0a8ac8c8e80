"""Import of torch.export programs: dynamic dims become symbols with ranges, weights keep their names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relax_tune.errors import DeduceError, ParseError, UserError
from relax_tune.ir.core.dtype import ALL, i64
from relax_tune.ir.core.expr import Expr, ge, le
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared.compositions import finish_import
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, identifier
from relax_tune.ir.frontend.torch import functions, groups, logic, math, neural, order, select
from relax_tune.ir.frontend.torch import shape as torch_shape
from relax_tune.ir.frontend.torch.complex import fourier, windows
from relax_tune.ir.frontend.torch.complex import math as complex_math
from relax_tune.ir.frontend.torch.complex.parts import constant, is_complex
from relax_tune.ir.frontend.torch.control import data_sizes, dims, graphs
from relax_tune.ir.frontend.torch.export import plain_program
from relax_tune.ir.frontend.torch.images import resize, window
from relax_tune.ir.frontend.torch.node import ComplexValue, Handler, TorchNode, as_item, dim
from relax_tune.ir.frontend.torch.program import DIMS, Ref, TorchCall, TorchGraph, TorchProgram, TorchTensor, dim_of
from relax_tune.ir.frontend.torch.special import bessel, determinant, errors, gamma, random

Bounds = Mapping[str, tuple[int, int]]

SUPPORTED: Mapping[str, Handler] = {
    **math.HANDLERS,
    **logic.HANDLERS,
    **dims.HANDLERS,
    **torch_shape.HANDLERS,
    **neural.HANDLERS,
    **window.HANDLERS,
    **resize.HANDLERS,
    **functions.HANDLERS,
    **select.HANDLERS,
    **groups.HANDLERS,
    **order.HANDLERS,
    **random.HANDLERS,
    **gamma.HANDLERS,
    **errors.HANDLERS,
    **bessel.HANDLERS,
    **determinant.HANDLERS,
    **complex_math.MADE,
    **fourier.HANDLERS,
    **windows.HANDLERS,
    **data_sizes.HANDLERS,
}


def load_torch_export(program: Any, bounds: Bounds | None = None, trust: bool = False) -> IRModule:
    """Import a torch.export program as `main(inputs in order) -> results` (a tuple when there are several).

    A dynamic dim has the name of its `torch.export.Dim`. torch does not save the names; a file may hold them beside the program:
    `torch.export.save(program, path, extra_files={"dims.json": '{"x": {"0": "batch"}}'})`. A dim without a name is `<input>_<axis>`,
    after the first input that has it by itself. Parameters and buffers become constants of their names; tied ones are one constant.
    Results have the keys of the program's result, such as `logits`.

    program: `torch.export.ExportedProgram`, or path of a .pt2 file of `torch.export.save`
    bounds: inclusive (lower, upper) of dynamic dims by name, within the exported ranges
    trust: let torch unpickle and evaluate what a file holds beside its graph and numbers

    Raises: UserError when torch is not installed, a bound does not fit, or a file needs `trust`; ParseError for another file, or
    for an unsupported operator, element type or side effect, naming the node and similar names."""
    given = str(program) if isinstance(program, Path) else program
    return import_program(plain_program(given, trust, {*SUPPORTED, *graphs.HANDLERS}), bounds)


def import_program(program: TorchProgram, bounds: Bounds | None = None) -> IRModule:
    """Import a program given as plain data, without torch; see `load_torch_export`."""
    return _Importer(program, bounds or {}).run()


def wider(name: str, low: int) -> str:
    """Return the advice for a dim that torch fixed, or took to be at least 2."""
    return (
        f'torch.export.Dim("{name}", min={low}) and an example in which this dim is 2 or more: torch takes a 1 in the example as '
        "fixed, and lets Dim.AUTO and Dim.DYNAMIC begin at 2"
    )


class _Importer:
    """Importer of one program, in one walk over its nodes."""

    def __init__(self, program: TorchProgram, bounds: Bounds) -> None:
        self.program, self.bounds = program, bounds
        self.w = Writer(GraphBuilder())
        self.symbols: dict[str, Expr] = {}
        self.data_sizes = {s.name for s in program.symbols} - set(_names([m.dims for _, m in program.inputs]))
        self.env: dict[str, Any] = {}
        self.makers = {c.name: f"{c.op} {c.name!r}" for c in program.nodes}
        self.readers: dict[str, list[str]] = {}
        self.plain = self._read_by_linear_layers_only()

    def run(self) -> IRModule:
        self._declare()
        for name, meta in self.program.inputs:
            if meta.parts is not None:
                raise ParseError(
                    f"input {name}: wanted a real tensor, found {meta.spelled}; give its parts as the last dim, as of "
                    "torch.view_as_real, and join them in the model by torch.view_as_complex"
                )
            info = self._info(meta, f"input {name}")
            self.env[name] = self.w.of(self.w.g.input(identifier(name), info.shape or (), info.dtype))
            self.w.reserved.add(identifier(name))
        self._limit()
        items = {key: constant(self.w, array, key) for key, array in self.program.weights.items()}
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
            found = self._value(value)
            if isinstance(found, ComplexValue):
                raise ParseError(
                    f"output {name!r}: wanted a real tensor, found a complex one; return torch.view_as_real of it"
                )
            if not isinstance(found, (ImportedValue, Expr, int)):
                raise ParseError(f"output {name!r}: wanted a tensor or a dim, found {found!r}")
            results.append(found if isinstance(found, ImportedValue) else as_item(self.w, dim(found), i64))
        if not results:
            raise ParseError("wanted a program with at least one result, found none")
        return finish_import(self.w, results, names)

    def _declare(self) -> None:
        """Declare the dynamic dims with their ranges, narrowed by the caller's bounds."""
        known = {s.name: s for s in self.program.symbols if s.name not in self.data_sizes}
        unknown = sorted(set(self.bounds) - set(known))
        if unknown:
            there = ", ".join(known) or "none: every dim is a number"
            ones = [f"{name}[{m.dims.index(1)}]" for name, m in self.program.inputs if 1 in m.dims]
            fixed = f"; {ones[0]} is 1: for a dim there, export with {wider(unknown[0], 1)}" if ones else ""
            raise UserError(
                f"bounds of {', '.join(unknown)}: wanted dynamic dims of the program, which are {there}{fixed}"
            )
        for name, s in known.items():
            low, high = self.bounds.get(name, (s.lower, s.upper))
            if low < s.lower or (s.upper is not None and high is not None and high > s.upper):
                limit = "any number" if s.upper is None else s.upper
                advice = wider(name, low) if low < s.lower == 2 else "a wider torch.export.Dim"
                raise UserError(
                    f"bound of {name}: wanted a range within the one the program was exported with, {s.lower} to {limit}, "
                    f"found {low} to {high}; export it with {advice}"
                )
            self.symbols[name] = self.w.g.symbol(name, low, high)

    def _limit(self) -> None:
        """Check at run time the ranges of computed dims that do not follow from those of the symbols."""
        for said, low, high in self.program.limits:
            if self._depends(said):
                continue  # on data: torch derives it from the sizes' own ranges
            e = self.w.simplify(dim_of(said, self.symbols))
            if not self.w.require(ge(e, low)) or (high is not None and not self.w.require(le(e, high))):
                limit = "any number" if high is None else high
                raise UserError(
                    f"bounds of {e!r}: wanted {low} to {limit}, as the program was exported, found none within; give others"
                )

    def _read_by_linear_layers_only(self) -> frozenset[str]:
        """Return the weights that are used only as the second argument of linear layers."""
        other: set[str] = set()
        for call in self.program.nodes:
            for name in _refs([*call.args, *call.kwargs.values()]):
                self.readers.setdefault(name, []).append(f"{call.op} {call.name!r}")
            linear = call.op == "aten.linear.default"
            read = _refs([*(a for p, a in enumerate(call.args) if not (linear and p == 1)), *call.kwargs.values()])
            other.update(self.program.constants[name] for name in read if name in self.program.constants)
        other.update(self.program.constants.get(v.name, "") for _, v in self.program.outputs if isinstance(v, Ref))
        return frozenset(self.program.weights) - other

    # nodes

    def _inside(self, w: Writer, graph: TorchGraph, args: Sequence[Any]) -> list[ImportedValue]:
        """Import a graph that is an argument of a node, by another writer. Returns its results."""
        before, self.w, self.env = (self.w, self.env), w, dict(zip(graph.params, args, strict=True))
        try:
            for call in graph.nodes:
                self.env[call.name] = self._node(call)
            found = [self._value(r) for r in graph.results]
        finally:
            self.w, self.env = before
        for item in found:
            if not isinstance(item, ImportedValue):
                raise ParseError(f"wanted tensors as results of a graph of an operator, found {item!r:.60}")
        return found

    def _node(self, call: TorchCall) -> Any:
        handler = SUPPORTED.get(call.op)
        if call.op in graphs.HANDLERS:
            handler = partial(graphs.HANDLERS[call.op], self._inside)
        near = () if handler else tuple(difflib.get_close_matches(call.op, SUPPORTED, 4, 0.6))
        known = call.op == "sym.known"
        args = tuple(dim_of(a, self.symbols) if known else self._value(a) for a in call.args)
        kwargs = {k: self._value(v) for k, v in call.kwargs.items()}
        if call.op in (
            "aten.as_strided.default",
            "aten.as_strided_copy.default",
        ):  # the reader states the layout of the tensor by dims
            kwargs["strides"] = [dim_of(s, self.symbols) for s in call.kwargs["strides"]]
            kwargs["first"] = dim_of(call.kwargs["first"], self.symbols)
        node = TorchNode(
            call.name, call.op, args, kwargs,
            (), call.source, self._beside(call), near, self.plain,
        )  # fmt: skip
        if op_is_complex := is_complex([*args, *kwargs.values(), call.result]):
            gives = is_complex(call.result)
            handler = complex_math.handler_of(call.op, SUPPORTED.get(call.op), gives)
        if handler is None and op_is_complex:
            raise node.refuse(
                "wanted an operator that is supported for complex tensors, found one that is not; compute it of the real parts, "
                "as of torch.view_as_real, torch.abs or torch.angle"
            )
        if handler is None:
            raise node.refuse(f"wanted one of the {len(SUPPORTED)} supported operators, found one that is not")
        try:
            node = self._with_results(node, call)
            found = handler(self.w, node)
            self._bind(call, found)
            if isinstance(found, (ImportedValue, ComplexValue)):
                return self._settled(node, found, node.results[0] if node.results else None)
            if isinstance(found, Sequence):
                return [
                    i if i is None else self._settled(node, i, info)
                    for i, info in zip(found, node.results, strict=True)
                ]
            return found
        except ParseError as error:
            raise error if str(error).startswith("node ") else node.refuse(str(error)) from None
        except (DeduceError, ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise node.refuse(f"wanted arguments that fit together, found: {first}") from error

    def _bind(self, call: TorchCall, found: Any) -> None:
        """Give sizes that data decide the dims of the first result that has them."""
        metas = call.result if isinstance(call.result, list) else [call.result]
        items = found if isinstance(found, Sequence) else [found]
        for m, item in zip(metas, items):
            if isinstance(m, TorchTensor) and isinstance(item, ImportedValue) and len(m.dims) == item.ndim:
                for said, d in zip(m.dims, item.shape, strict=True):
                    if isinstance(said, str) and said in self.data_sizes:
                        self.symbols.setdefault(said, d)
        if isinstance(call.kwargs.get("symbol"), str) and isinstance(found, Expr):
            self.symbols.setdefault(call.kwargs["symbol"], found)

    def _depends(self, said: Any) -> bool:
        """Return whether a dim has a symbol for a size that data decide, and that is not known so far."""
        return any(name in self.data_sizes and name not in self.symbols for name in _names(said))

    def _with_results(self, node: TorchNode, call: TorchCall) -> TorchNode:
        listed = call.result if isinstance(call.result, list) else [call.result]
        for m in listed:
            if isinstance(m, TorchTensor) and (m.element or m.parts) is None:
                raise node.refuse(
                    f"wanted results of an element type among {', '.join(map(str, ALL))}, found {m.spelled}"
                )
        infos = tuple(
            self._info(m, f"node {call.name!r}") if isinstance(m, TorchTensor) and (m.element or m.parts) else None
            for m in listed
        )
        return TorchNode(
            node.name, node.op, node.args, node.kwargs, infos, node.source, node.beside, node.near, node.plain_weights
        )

    def _settled(
        self, node: TorchNode, found: ImportedValue | ComplexValue, said: TensorInfo | None
    ) -> ImportedValue | ComplexValue:
        """Give a result the dims that torch states; undecided dims are checked at run time."""
        if isinstance(found, ImportedValue):
            return self._settled_part(node, found, said)
        return ComplexValue(*(self._settled_part(node, part, said) for part in (found.real, found.imag)))

    def _settled_part(self, node: TorchNode, found: ImportedValue, said: TensorInfo | None) -> ImportedValue:
        if said is None:
            return found
        if said.shape is None:
            if found.dtype is not said.dtype or found.ndim != said.ndim:
                raise node.refuse(f"wanted a result like torch's, {said!r}, found {found.info!r}")
            return found
        if found.dtype is not said.dtype or found.ndim != len(said.shape):
            raise node.refuse(f"wanted a result like torch's, {said!r}, found {found.info!r}")
        if all(map(self.w.g.deduction.same, found.shape, said.shape)):
            return found
        return self.w.of(self.w.reshape(self.w.tensor(found), said.shape), found.natural)

    def _beside(self, call: TorchCall) -> str:
        made = [self.makers[r] for r in dict.fromkeys(_refs([*call.args, *call.kwargs.values()])) if r in self.makers]
        parts = [
            f"{what} {', '.join(who[:4])}{' and others' if len(who) > 4 else ''}"
            for what, who in (("fed by", made), ("read by", self.readers.get(call.name, [])))
            if who
        ]
        return f"; {', '.join(parts)}" if parts else ""

    # values

    def _value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.env.get(value.name)
        return [self._value(v) for v in value] if isinstance(value, list) else value

    def _info(self, meta: TorchTensor, where: str) -> TensorInfo:
        element = meta.element or meta.parts
        if element is None:
            raise ParseError(
                f"{where}: wanted an element type among {', '.join(map(str, ALL))}, found {meta.spelled}; convert the model, "
                "as with model.float(), before exporting it"
            )
        if any(map(self._depends, meta.dims)):
            return TensorInfo(None, element, len(meta.dims))
        return TensorInfo(tuple(self.w.simplify(dim_of(d, self.symbols)) for d in meta.dims), element)


def _refs(values: Sequence[Any]) -> list[str]:
    found: list[str] = []
    for v in values:
        if isinstance(v, Ref):
            found.append(v.name)
        elif isinstance(v, list):
            found.extend(_refs(v))
    return found


def _names(said: Any) -> list[str]:
    """Return the symbols of a dim or of dims, as a program states them."""
    if isinstance(said, str):
        return [] if said in DIMS else [said]
    return [name for part in said for name in _names(part)] if isinstance(said, (list, tuple)) else []
