"""Import of ONNX models, opset 7 and later: any dim may be a symbol; weights are not copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_tune.errors import DeduceError, ParseError, UserError
from relax_tune.ir.core.expr import Expr, Var, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.names import fresh
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.onnx import attention, math, numeric, reduce, select, slices
from relax_tune.ir.frontend.onnx import shape as onnx_shape
from relax_tune.ir.frontend.onnx.control import data_sizes, graphs, optionals, recurrent, sequences
from relax_tune.ir.frontend.onnx.domains import ml, training
from relax_tune.ir.frontend.onnx.file import Source, order_of, read_model
from relax_tune.ir.frontend.onnx.functions import function_of, substituted
from relax_tune.ir.frontend.onnx.images import deformable, quantized, regions, resize, sample, window
from relax_tune.ir.frontend.onnx.node import Handler, Neighbours, OnnxNode, WrongValueError, near_names
from relax_tune.ir.frontend.onnx.numbers import determinant, random
from relax_tune.ir.frontend.onnx.old_forms import FIRST, modern
from relax_tune.ir.frontend.onnx.shape_values import evaluate_known
from relax_tune.ir.frontend.onnx.signals import spectra
from relax_tune.ir.frontend.onnx.tensors import element_type, read_tensor, require_onnx, shortest
from relax_tune.ir.frontend.onnx.versions import check_opset, problem_of, version_of
from relax_tune.ir.frontend.shared.compositions import finish_import
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, identifier

Bounds = Mapping[str, tuple[int, int]]
DEEPEST = 16

SUPPORTED: Mapping[str, Handler] = {
    **math.HANDLERS, **numeric.HANDLERS, **onnx_shape.HANDLERS, **reduce.HANDLERS, **select.HANDLERS,
    **window.HANDLERS, **attention.HANDLERS, **resize.HANDLERS, **sample.HANDLERS, **recurrent.HANDLERS,
    **sequences.HANDLERS, **slices.HANDLERS, **quantized.HANDLERS, **deformable.HANDLERS, **regions.HANDLERS,
    **random.HANDLERS, **determinant.HANDLERS, **optionals.HANDLERS,
    **spectra.HANDLERS, **data_sizes.HANDLERS,
}  # fmt: skip

OTHER_DOMAINS: Mapping[tuple[str, str], Handler] = {**ml.HANDLERS, **training.HANDLERS}
"""Operators of domains beside the standard one, by domain and name."""

KNOWN = {**SUPPORTED, **graphs.HANDLERS}


def load_onnx(source: Source, bounds: Bounds | None = None) -> IRModule:
    """Import an ONNX model as `main(inputs in order) -> outputs` (a tuple when there are several).

    A named dim (`dim_param`) is one symbol wherever the name occurs in the inputs. An unnamed dim is a symbol of its own, called
    `<input>_<axis>`. Symbols are at least 1 unless a bound is lower. Where two named dims meet in a broadcast, either may be 1.
    Other undecided equalities of dims are assumed, and checked at run time. Initializers become constants that view the
    data of the file.

    source: path, whose folder may contain external data; bytes of a model; or `onnx.ModelProto`
    bounds: inclusive (lower, upper) of dim symbols by name

    Raises: UserError when onnx is not installed or a bound names no symbol; ParseError for a truncated or other file, or an
    unsupported operator or element type, naming the node and similar names."""
    proto, folder = read_model(source)
    return _Importer(proto, folder, bounds or {}).run()


class _Importer:
    """Importer of one model, in one walk over its nodes."""

    def __init__(self, proto: Any, folder: Path | None, bounds: Bounds) -> None:
        self.onnx = require_onnx()
        self.proto, self.folder, self.bounds = proto, folder, bounds
        self.w = Writer(GraphBuilder())
        self.symbols: dict[str, Var] = {}
        self.inputs: set[str] = set()
        self.local = {(f.domain, f.name): f for f in proto.functions}
        self.named = {
            d.dim_param
            for i in proto.graph.input
            if i.type.WhichOneof("value") == "tensor_type"
            for d in i.type.tensor_type.shape.dim
        }

    def run(self) -> IRModule:
        graph = self.proto.graph
        env: dict[str, ImportedValue | None] = {"": None}
        for t in graph.initializer:
            env[t.name] = self.w.constant(read_tensor(t, self.folder), t.name)
        if graph.sparse_initializer:
            raise ParseError(
                f"initializer {graph.sparse_initializer[0].values.name!r}: wanted a dense tensor, found a sparse one"
            )
        for i in graph.input:
            if i.name not in env:
                env[i.name] = self._input(i)
        unknown = sorted(set(self.bounds) - set(self.symbols))
        if unknown:
            known = ", ".join(self.symbols) or "none: every dim is a number"
            raise UserError(f"bounds of {', '.join(unknown)}: wanted symbols of the model's inputs, which are {known}")
        names = self._output_names([o.name for o in graph.output])
        self.w.reserved.update(self.inputs, names)
        self.nodes(graph.node, env, self._opsets(self.proto.opset_import), 0)
        missing = [o.name for o in graph.output if env.get(o.name) is None]  # "" included
        if missing:
            raise ParseError(f"output {missing[0]!r}: wanted a node that makes it, found none; is the file complete?")
        items = [env[o.name] for o in graph.output]
        for o, item in zip(graph.output, items, strict=True):
            if isinstance(item, sequences.SequenceValue):
                raise ParseError(
                    f"output {o.name!r}: wanted a tensor, found a sequence of tensors; give it by ConcatFromSequence"
                )
            if isinstance(item, sequences.NothingValue):
                raise ParseError(f"output {o.name!r}: wanted a tensor, found an optional without a value")
        return finish_import(self.w, [i for i in items if i is not None], names)

    def _opsets(self, imports: Any) -> Mapping[str, int]:
        found = {("" if o.domain == "ai.onnx" else o.domain): int(o.version) for o in imports}
        if found.get(""):
            check_opset(self.onnx, found[""])
        return found

    # inputs and outputs

    def _input(self, i: Any) -> ImportedValue:
        if i.type.WhichOneof("value") != "tensor_type":
            raise ParseError(f"input {i.name!r}: wanted a tensor, found {i.type.WhichOneof('value') or 'no type'}")
        tensor = i.type.tensor_type
        element = element_type(tensor.elem_type, f"input {i.name!r}")
        if not tensor.HasField("shape"):
            raise ParseError(
                f"input {i.name!r}: wanted a number of dims, found an unknown one; export it with named dims"
            )
        dims: list[Expr] = []
        for axis, d in enumerate(tensor.shape.dim):
            # exporters write an unknown dim as missing, without a name, or as -1
            if d.WhichOneof("value") == "dim_value" and d.dim_value >= 0:
                dims.append(const(int(d.dim_value)))
            else:
                dims.append(symbol := self._symbol(d.dim_param or self._own_name(f"{identifier(i.name)}_{axis}")))
                self.w.apart.update([symbol] if d.dim_param else ())
        self.inputs.add(name := fresh(identifier(i.name), self.inputs))
        return self.w.of(self.w.g.input(name, dims, element))

    def _own_name(self, name: str) -> str:
        """Return a unique name for an unnamed dim."""
        while name in self.named:
            name += "_"
        self.named.add(name)
        return name

    def _symbol(self, name: str) -> Var:
        if name not in self.symbols:
            low, high = self.bounds.get(name, (1, None))
            printed, taken = identifier(name), {v.name for v in self.symbols.values()}
            while printed in taken:  # the text form cannot print the difference of two names
                printed += "_"
            self.symbols[name] = self.w.g.symbol(printed, low, high)
        return self.symbols[name]

    def _output_names(self, names: Sequence[str]) -> list[str]:
        """Reserve the names of the results, so that no intermediate value takes them."""
        return [self.w.g.fresh(identifier(n)) for n in names]

    # nodes

    def nodes(self, nodes: Any, env: dict[str, ImportedValue | None], opsets: Mapping[str, int], depth: int) -> None:
        """Import nodes in order and put their results into `env`."""
        every = list(nodes)
        order_of(every, env)
        beside = Neighbours(every)
        for n in every:
            inputs = [env[i] for i in n.input]
            while inputs and inputs[-1] is None:
                inputs.pop()
            domain = "" if n.domain == "ai.onnx" else n.domain
            opset = opsets.get(domain, 0)
            version = None if domain else version_of(self.onnx, n.op_type, opset)
            node = OnnxNode(
                n.op_type, n.name or (n.output[0] if n.output else ""), opset, tuple(inputs), self._attributes(n),
                tuple(n.output), () if n.op_type in KNOWN else near_names(n.op_type, list(KNOWN)),
                domain, version, beside.of(n),
            )  # fmt: skip
            results = self._results(n, node, domain, opsets, depth, env)
            for position, name in enumerate(n.output):
                if name and position < len(results):
                    env[name] = results[position]
                elif name and beside.reads(name):
                    raise node.refuse(f"wanted only the first {len(results)} results of it, found a reader of {name!r}")

    def _attributes(self, n: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for a in n.attribute:
            value = self.onnx.helper.get_attribute_value(a)
            if isinstance(value, self.onnx.TensorProto):
                value = read_tensor(value, self.folder)
            found[a.name] = shortest(value) if isinstance(value, float) else value
        return found

    def _controlled(
        self, node: OnnxNode, env: dict[str, ImportedValue | None], opsets: Mapping[str, int], depth: int
    ) -> Sequence[ImportedValue]:
        """Import a branch or a loop."""
        if depth >= DEEPEST:
            raise node.refuse(f"wanted graphs nested at most {DEEPEST} deep, found more")

        def inside(w: Writer, graph: Any, local: dict[str, ImportedValue | None]) -> list[ImportedValue]:
            before, self.w = self.w, w
            try:
                for t in graph.initializer:
                    local[t.name] = w.constant(read_tensor(t, self.folder), t.name)
                self.nodes(graph.node, local, opsets, depth + 1)
            finally:
                self.w = before
            found = [local.get(o.name) for o in graph.output]
            for o, item in zip(graph.output, found, strict=True):
                if item is None:
                    raise ParseError(
                        f"result {o.name!r} of graph {graph.name!r}: wanted a node that makes it, found none"
                    )
            return [i for i in found if i is not None]

        try:
            return list(graphs.HANDLERS[node.op](graphs.GraphScope(self.w, env, inside), node))
        except ParseError as error:
            raise error if str(error).startswith("node ") else node.refuse(str(error)) from None
        except (DeduceError, KeyError, ValueError, IndexError, OverflowError) as error:
            raise node.refuse(f"wanted arguments that fit together, found: {str(error).splitlines()[0]}") from None

    def _results(
        self,
        proto: Any,
        node: OnnxNode,
        domain: str,
        opsets: Mapping[str, int],
        depth: int,
        env: dict[str, ImportedValue | None],
    ) -> Sequence[ImportedValue | None]:
        if domain or node.op not in sequences.TAKING:
            sequences.refuse_sequences(node, () if (proto.domain, proto.op_type) in self.local else node.inputs)
        if domain == "" and node.op in graphs.HANDLERS:
            return self._controlled(node, env, opsets, depth)
        problem = problem_of(self.onnx, proto, node.opset, node.version) if domain == "" else None
        if problem is not None:
            raise node.refuse(problem)
        node = modern(self.w, node) if domain == "" else node
        known = evaluate_known(self.w, node) if domain == "" else None
        if known is not None:
            return [known]
        handler = OTHER_DOMAINS.get((domain, node.op)) if domain else SUPPORTED.get(node.op)
        failure: ParseError | None = None
        if handler is not None:
            try:
                found = handler(self.w, node)
                return [found] if isinstance(found, ImportedValue) else list(found)
            except WrongValueError:
                raise
            except ParseError as error:
                failure = error if error.args and str(error).startswith("node ") else node.refuse(str(error))
            except (DeduceError, KeyError, ValueError, IndexError, OverflowError) as error:
                # the lines after the first show the imported graph, not that of the file
                failure = node.refuse(f"wanted arguments that fit together, found: {str(error).splitlines()[0]}")
        inlined = self._inlined(proto, node, domain, opsets, depth, failure)
        if inlined is not None:
            return inlined
        raise failure or node.refuse(
            f"wanted one of the {len(SUPPORTED)} supported operators"
            + (f" of the standard domain, found domain {domain!r}" if domain else ", found one that is not")
        )

    def _inlined(
        self, proto: Any, node: OnnxNode, domain: str, opsets: Mapping[str, int], depth: int, failure: ParseError | None
    ) -> Sequence[ImportedValue | None] | None:
        """Import a node through its function body, of the model or of the standard; None without one."""
        body = self.local.get((proto.domain, proto.op_type))
        own = body is not None
        if body is None:
            body = function_of(self.onnx, proto, node, domain)
        if body is None:
            return None
        if depth >= DEEPEST:
            raise node.refuse(
                f"wanted functions nested at most {DEEPEST} deep, found more; does a function call itself?"
            )
        env: dict[str, ImportedValue | None] = {"": None}
        for position, name in enumerate(body.input):
            env[name] = node.inputs[position] if position < len(node.inputs) else None
        inner = {**opsets, **{("" if o.domain == "ai.onnx" else o.domain): int(o.version) for o in body.opset_import}}
        if not own:  # function bodies of the standard from before opset 13 mean the same in opset 13
            inner[""] = max(inner[""], FIRST)
        try:
            self.nodes(substituted(self.onnx, body, proto), env, inner, depth + 1)
        except ParseError as error:
            if failure is not None:
                raise failure from None
            raise node.refuse(f"wanted the parts it is made of, found: {error}") from None
        return [env.get(name) for name in body.output]
