"""Import of ONNX models, opset 7 and later: any dim may be a symbol; weights are not copied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.dtype import f64
from relax_tune.ir.core.expr import Expr, Var, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.names import LONGEST_NAME, can_be_shown, fresh
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.onnx import (
    control,
    fourier,
    images,
    indexing,
    learning,
    math,
    neural,
    quantized,
    random,
    recurrent,
    reduce,
    resize,
    sequences,
    sizes,
    support_vectors,
    trees,
    window,
)
from relax_tune.ir.frontend.onnx import shape as onnx_shape
from relax_tune.ir.frontend.onnx.file import Source, names_read_by, read_model, sorted_nodes
from relax_tune.ir.frontend.onnx.functions import function_of, substituted
from relax_tune.ir.frontend.onnx.microsoft import attention, blocks, experts, norms, padding, products, standard
from relax_tune.ir.frontend.onnx.microsoft import quantized as integers
from relax_tune.ir.frontend.onnx.microsoft import recurrent as quantized_recurrent
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.old_forms import FIRST, modern
from relax_tune.ir.frontend.onnx.shape_values import evaluate_known
from relax_tune.ir.frontend.onnx.tensors import Array, element_type, read_tensor, require_onnx, shortest
from relax_tune.ir.frontend.onnx.versions import check_opset, problem_of, version_of
from relax_tune.ir.frontend.onnx.workarounds import (
    DENSE,
    NCHWC,
    OPTIONAL_INPUT,
    OPTIONAL_RESULT,
    RANK,
    SEQUENCE_INPUT,
    SEQUENCE_RESULT,
    fix_numbers,
)
from relax_tune.ir.frontend.shared.finish import finish_import
from relax_tune.ir.frontend.shared.node import Neighbours, WrongValueError, near_names
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, identifier

Bounds = Mapping[str, tuple[int, int]]
DEEPEST = 16
PLACEHOLDER = re.compile(r"[\W_]*|-\d+|_*(none|null|unk|unknown|undefined)_*\d*", re.IGNORECASE)
"""Names that exporters give to every unknown dim, such as `?`, `None`, `-1` and `unk__7`; dims with one of them are unrelated."""

PAST = re.compile(r"past\w*")
"""Names that exporters give to the number of positions in a cache, which has none at the first call."""

MODULES = (
    math, onnx_shape, indexing, reduce, neural, window, resize, images, recurrent, sequences, quantized, random,
    fourier, sizes,
)  # fmt: skip
SUPPORTED: Mapping[str, Handler] = {op: handler for module in MODULES for op, handler in module.HANDLERS.items()}
"""Operators of the standard domain."""
MICROSOFT: Mapping[str, Handler] = {
    op: handler
    for module in (products, norms, attention, padding, integers, blocks, experts, quantized_recurrent, standard)
    for op, handler in module.HANDLERS.items()
}
"""Operators of the domain com.microsoft."""
OTHER_DOMAINS: Mapping[tuple[str, str], Handler] = {
    **learning.HANDLERS,
    **trees.HANDLERS,
    **support_vectors.HANDLERS,
    **{("com.microsoft", op): handler for op, handler in MICROSOFT.items()},
    # ONNX Runtime's optimizer writes it in the standard domain, which does not define it
    ("", "SimplifiedLayerNormalization"): norms.simplified_layer_norm,
}
"""Operators of other domains, by domain and name."""
KNOWN = {**SUPPORTED, **control.HANDLERS}


def load_onnx(source: Source, bounds: Bounds | None = None) -> IRModule:
    """Import an ONNX model as `main(inputs in order) -> outputs` (a tuple when there are several).

    A named dim (`dim_param`) is one symbol wherever the name occurs in the inputs. An unnamed dim is a separate symbol, called
    `<input>_<axis>`; so is one whose name is a placeholder, such as `?`, `None` or `unk__7`. Symbols are at least 1 unless a
    bound is lower; symbols called `past...`, the positions in a cache, are at least 0. Where two named dims meet in a broadcast,
    either may be 1. Other undecided equalities of dims are assumed, and checked at run time. Initializers become constants that
    view the data of the file.

    Args:
        source: Path, whose folder may contain external data; bytes of a model; or `onnx.ModelProto`.
        bounds: Inclusive (lower, upper) of dim symbols by name. A bound of one number, named after an input of one integer,
            fixes its value: it is no input then, and branches and loops that it decides are not written.

    Raises:
        UserError: The package onnx is not installed, or a bound names no symbol.
        ParseError: The file is truncated or not ONNX, or has an unsupported operator or element type; the message names the node.
    """
    proto, folder = read_model(source)
    return _Importer(proto, folder, bounds or {}).run()


def name_of_dim(dim: Any) -> str:
    """Return the name of a dim of the file; "" for a placeholder."""
    return "" if PLACEHOLDER.fullmatch(dim.dim_param) else dim.dim_param


def shown(name: str) -> str:
    """Return the name of an input or result, which calls use; one that no terminal can show becomes an identifier."""
    return name if can_be_shown(name) else identifier(name)[:LONGEST_NAME]


def _title(n: Any) -> str:
    return f"{n.op_type} {n.name or (n.output[0] if n.output else '')!r}"


class _Importer:
    """Importer of one model, in one walk over its nodes."""

    def __init__(self, proto: Any, folder: Path | None, bounds: Bounds) -> None:
        self.onnx = require_onnx()
        self.proto, self.folder, self.bounds = proto, folder, bounds
        self.w = Writer(GraphBuilder(), broadcasts=True)
        self.symbols: dict[str, Var] = {}
        self.fixed: dict[str, Expr] = {}
        self.inputs: set[str] = set()
        self.unnamed: set[str] = set()
        self.given = frozenset(i.name for i in proto.graph.input)
        self.graph = "the graph"
        self.local = {(f.domain, f.name): f for f in proto.functions}
        self.named = {
            name_of_dim(d)
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
                f"initializer {graph.sparse_initializer[0].values.name!r}: expected a dense tensor, got a sparse one; {DENSE}"
            )
        numbers: set[str] = set()
        for i in graph.input:
            # Before IR version 4 every initializer is also listed among the inputs, where it is the default.
            if i.name not in env:
                value = self._fixed(i)
                if value is not None:
                    numbers.add(i.name)
                env[i.name] = self._input(i) if value is None else self.w.constant(value, i.name)
        unknown = sorted(set(self.bounds) - set(self.symbols) - set(self.fixed) - numbers)
        if unknown:
            known = ", ".join(self.symbols) or "none: every dim is a number"
            raise UserError(
                f"bounds of {', '.join(unknown)}: expected symbols of the model's inputs, which are {known}"
            )
        names = self._output_names([o.name for o in graph.output])
        self.w.reserved.update(self.inputs, names)
        self.nodes(graph.node, env, self._opsets(self.proto.opset_import), 0, [o.name for o in graph.output])
        missing = [o.name for o in graph.output if env.get(o.name) is None]  # "" included
        if missing:
            raise ParseError(f"output {missing[0]!r}: expected a node that makes it, got none; is the file complete?")
        items = [env[o.name] for o in graph.output]
        for o, item in zip(graph.output, items, strict=True):
            if isinstance(item, sequences.SequenceValue):
                raise ParseError(f"output {o.name!r}: expected a tensor, got a sequence of tensors; {SEQUENCE_RESULT}")
            if isinstance(item, sequences.NothingValue):
                raise ParseError(
                    f"output {o.name!r}: expected a tensor, got an optional without a value; {OPTIONAL_RESULT}"
                )
        return finish_import(self.w, [i for i in items if i is not None], names)

    def _opsets(self, imports: Any) -> Mapping[str, int]:
        opsets = {("" if o.domain == "ai.onnx" else o.domain): int(o.version) for o in imports}
        if opsets.get(""):
            check_opset(self.onnx, opsets[""])
        return opsets

    # inputs and outputs

    def _input(self, i: Any) -> ImportedValue:
        if i.type.WhichOneof("value") != "tensor_type":
            kind = i.type.WhichOneof("value") or "no type"
            remedy = {"sequence_type": SEQUENCE_INPUT, "optional_type": OPTIONAL_INPUT}.get(kind, "give it as a tensor")
            raise ParseError(f"input {i.name!r}: expected a tensor, got {kind}; {remedy}")
        tensor = i.type.tensor_type
        element = element_type(tensor.elem_type, f"input {i.name!r}")
        if not tensor.HasField("shape"):
            raise ParseError(
                f"input {i.name!r}: expected a number of dims, got an unknown one; {RANK.replace('NAME', repr(i.name))}"
            )
        dims: list[Expr] = []
        for axis, d in enumerate(tensor.shape.dim):
            # exporters write an unknown dim as missing, without a name, or as -1
            if d.WhichOneof("value") == "dim_value" and d.dim_value >= 0:
                dims.append(const(int(d.dim_value)))
            else:
                dims.append(self._symbol(name_of_dim(d) or self._unique_dim_name(f"{identifier(i.name)}_{axis}")))
        self.inputs.add(name := fresh(shown(i.name), self.inputs))
        return self.w.of(self.w.g.input(name, dims, element))

    def _fixed(self, i: Any) -> Array | None:
        """Return the value of an input that a bound fixes, an integer; None for other inputs."""
        tensor = i.type.tensor_type
        if i.name not in self.bounds or i.name in self.named or not tensor.HasField("shape"):
            return None
        dims = [d.dim_value for d in tensor.shape.dim]
        element = element_type(tensor.elem_type, f"input {i.name!r}")
        if not element.is_int or any(d != 1 for d in dims):
            return None
        low, high = self.bounds[i.name]
        # A number changes the graph that is imported, for instance which branch of an `If` exists, so a range is no
        # bound for it.
        if low != high:
            raise UserError(f"bound of {i.name}, an input of one integer: expected one number, got {low} to {high}")
        return np.full(dims, low, element.numpy)

    def _unique_dim_name(self, name: str) -> str:
        """Return a unique name for an unnamed dim."""
        while name in self.named:
            name += "_"
        self.named.add(name)
        self.unnamed.add(name)
        return name

    def _symbol(self, name: str) -> Expr:
        """Return the symbol of a named dim, or its size if equal bounds fix it."""
        low, high = self.bounds.get(name, (0 if PAST.fullmatch(name) and name not in self.unnamed else 1, None))
        if low == high:
            return self.fixed.setdefault(name, const(low))
        if name not in self.symbols:
            printed, names = identifier(name), {v.name for v in self.symbols.values()}
            while printed in names:  # two names may have one printed form
                printed += "_"
            self.symbols[name] = self.w.g.symbol(printed, low, high)
        return self.symbols[name]

    def _output_names(self, names: Sequence[str]) -> list[str]:
        """Reserve the names of the results, so that no intermediate value takes them."""
        return [self.w.g.fresh(shown(n)) for n in names]

    # nodes

    def nodes(
        self,
        nodes: Any,
        env: dict[str, ImportedValue | None],
        opsets: Mapping[str, int],
        depth: int,
        results: Iterable[str],
    ) -> None:
        """Import nodes in order and put what they make into `env`.

        Args:
            results: Names that are read after the last node.
        """
        listed = list(nodes)
        index = {id(n): at for at, n in enumerate(listed)}
        every = sorted_nodes(listed, env)
        read = {*results}.union(*map(names_read_by, every))
        neighbours = Neighbours((_title(n), n.input, n.output) for n in every)
        for n in every:
            inputs = [env[i] for i in n.input]
            # Optional inputs at the end may be written as empty names or left out; both mean the same.
            while inputs and inputs[-1] is None:
                inputs.pop()
            domain = "" if n.domain == "ai.onnx" else n.domain
            opset = opsets.get(domain, 0)
            version = None if domain else version_of(self.onnx, n.op_type, opset)
            # Results that nothing reads are not computed, nor are they a reason to refuse the node.
            outputs = tuple(name if name in read or not p else "" for p, name in enumerate(n.output))
            node = OnnxNode(
                n.op_type, n.name or (n.output[0] if n.output else ""), opset, tuple(inputs), self._attributes(n, inputs),
                outputs, domain, version, neighbours=neighbours.of(n.input, n.output),
                near=() if n.op_type in KNOWN else near_names(n.op_type, KNOWN),
                path=f"node {index[id(n)]} of {self.graph}", names=tuple(n.input), inner=depth > 0, given=self.given,
            )  # fmt: skip
            values = self._results(n, node, domain, opsets, depth, env)
            for position, name in enumerate(n.output):
                if name and position < len(values):
                    env[name] = values[position]
                elif name and name in read:
                    raise node.refuse(f"expected only the first {len(values)} results of it, got a reader of {name!r}")

    def _attributes(self, n: Any, inputs: Sequence[ImportedValue | None]) -> dict[str, Any]:
        """Return attributes by name. A float is the 32-bit number of the file where an input is float64, else a short decimal."""
        attributes: dict[str, Any] = {}
        exact = any(i is not None and i.info.dtype is f64 for i in inputs)
        for a in n.attribute:
            value = self.onnx.helper.get_attribute_value(a)
            if isinstance(value, self.onnx.TensorProto):
                value = read_tensor(value, self.folder)
            attributes[a.name] = shortest(value) if isinstance(value, float) and not exact else value
        return attributes

    def _controlled(
        self, node: OnnxNode, env: dict[str, ImportedValue | None], opsets: Mapping[str, int], depth: int
    ) -> Sequence[ImportedValue]:
        """Import a branch or a loop."""
        if depth >= DEEPEST:
            raise node.refuse(f"expected graphs nested at most {DEEPEST} deep, got more")

        def inside(w: Writer, graph: Any, local: dict[str, ImportedValue | None]) -> list[ImportedValue]:
            # The nodes of the inner graph are written into the body of the branch or loop.
            before, self.w = self.w, w
            around, self.graph = self.graph, f"graph {graph.name!r} in {node.path}"
            try:
                parameters = {i.name for i in graph.input}
                for t in graph.initializer:
                    if t.name not in parameters:  # of an input it is the default
                        local[t.name] = w.constant(read_tensor(t, self.folder), t.name)
                self.nodes(graph.node, local, opsets, depth + 1, [o.name for o in graph.output])
            finally:
                self.w, self.graph = before, around
            values = [local.get(o.name) for o in graph.output]
            for o, item in zip(graph.output, values, strict=True):
                if item is None:
                    raise ParseError(
                        f"result {o.name!r} of graph {graph.name!r}: expected a node that makes it, got none"
                    )
            return [i for i in values if i is not None]

        try:
            with node.errors():
                return list(control.HANDLERS[node.op](control.GraphScope(self.w, env, inside), node))
        except ParseError as error:
            numbers = self._numbers_behind(node.names[0]) if node.op == "If" and depth == 0 else {}
            if not numbers:
                raise
            raise ParseError(f"{error}; or {fix_numbers(numbers, node.name)}") from None

    def _numbers_behind(self, name: str) -> dict[str, int | None]:
        """Return the inputs of one integer that a value of the model's graph depends on, with a constant they are compared to."""
        makers = {o: n for n in self.proto.graph.node for o in n.output}
        given = {i.name: i.type.tensor_type for i in self.proto.graph.input}
        constants = {t.name: t for t in self.proto.graph.initializer}
        numbers: dict[str, int | None] = {}
        stack, visited, compared = [name], {name}, None
        while stack:
            at = stack.pop()
            maker, tensor = makers.get(at), given.get(at)
            if tensor is not None and at not in constants and tensor.HasField("shape"):
                integer = element_type(tensor.elem_type, f"input {at!r}").is_int
                if integer and all(d.dim_value == 1 for d in tensor.shape.dim):
                    numbers[at] = compared
            if maker is None:
                continue
            if maker.op_type == "Equal":
                values = (self._integer(i, makers, constants) for i in maker.input)
                compared = next((v for v in values if v is not None), None)
            new = [i for i in names_read_by(maker) if i not in visited]
            visited.update(new)
            stack += new
        return numbers

    def _integer(self, name: str, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> int | None:
        """Return the value of a constant of one integer; None for others."""
        maker = makers.get(name)
        values = [a.t for a in maker.attribute if a.name == "value"] if maker and maker.op_type == "Constant" else []
        tensor = constants.get(name) or next(iter(values), None)
        if tensor is None:
            return None
        value = read_tensor(tensor, self.folder)
        return int(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind in "iu" else None

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
        if domain == "" and node.op in control.HANDLERS:
            return self._controlled(node, env, opsets, depth)
        problem = problem_of(self.onnx, proto, node.opset, node.version) if domain == "" else None
        if problem is not None:
            raise node.refuse(problem)
        node = modern(self.w, node) if domain == "" else node
        # Arithmetic on shapes is done here: exporters write dims as chains of Shape, Gather, Mul and Concat, which
        # would otherwise be tensors that no dim can be read from.
        known = evaluate_known(self.w, node) if domain == "" else None
        if known is not None:
            return [known]
        handler = OTHER_DOMAINS.get((domain, node.op)) or (None if domain else SUPPORTED.get(node.op))
        failure: ParseError | None = None
        if handler is not None:
            try:
                with node.errors():
                    value = handler(self.w, node)
                    items = [value] if isinstance(value, ImportedValue) else list(value)
                    return [i and self.w.folded(i) for i in items]
            # The value itself is wrong, so the function body of the operator would be wrong with it.
            except WrongValueError:
                raise
            except ParseError as error:
                failure = error
        # A handler is tried first, even where the standard has a function body: it keeps the operator whole, for one
        # kernel.
        inlined = self._inlined(proto, node, domain, opsets, depth, failure)
        if inlined is not None:
            return inlined
        if domain == "com.microsoft.nchwc":
            raise node.refuse(
                "expected operators of any processor, got the blocked layout of the processor that the file was optimised on, whose "
                "block size the file does not state",
                NCHWC,
            )
        raise failure or node.refuse(
            f"expected one of the {len(SUPPORTED)} supported operators"
            + (f" of the standard domain, got domain {domain!r}" if domain else ", got one that is not")
        )

    def _inlined(
        self, proto: Any, node: OnnxNode, domain: str, opsets: Mapping[str, int], depth: int, failure: ParseError | None
    ) -> Sequence[ImportedValue | None] | None:
        """Import a node through its function body, of the model or of the standard; None without one."""
        body = self.local.get((proto.domain, proto.op_type))
        of_model = body is not None
        if body is None:
            body = function_of(self.onnx, proto, node, domain)
        if body is None:
            return None
        if depth >= DEEPEST:
            raise node.refuse(
                f"expected functions nested at most {DEEPEST} deep, got more; does a function call itself?"
            )
        env: dict[str, ImportedValue | None] = {"": None}
        for position, name in enumerate(body.input):
            env[name] = node.inputs[position] if position < len(node.inputs) else None
        read = [name for name, used in zip(body.output, (True, *map(node.is_read, range(1, len(body.output))))) if used]
        inner = {**opsets, **{("" if o.domain == "ai.onnx" else o.domain): int(o.version) for o in body.opset_import}}
        if not of_model:  # function bodies of the standard from before opset 13 mean the same in opset 13
            inner[""] = max(inner[""], FIRST)
        # names of a function body are local, hence an environment without the names at the call
        around, self.graph = self.graph, f"the function of {node.path}"
        try:
            self.nodes(substituted(self.onnx, body, proto), env, inner, depth + 1, read)
        except ParseError as error:
            if failure is not None:
                raise failure from None
            raise node.refuse(f"expected a function body that can be imported, got: {error}") from None
        finally:
            self.graph = around
        return [env.get(name) for name in body.output]
