"""Graphs of torch.compile as programs that the importer reads.

torch traces a graph to core ATen operators under the shape environment of its compilation, so that conditions on dims that the
trace assumes become guards. It also handles writes to inputs and views among inputs and results, outside of the traced graph.

Tests: `tests/tuner/test_torch_compile.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from numpy.typing import NDArray

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.frontend.torch.export import ProgramReader, decompositions, require_torch
from relax_tune.ir.frontend.torch.graph_form import GraphForm, graph_form
from relax_tune.ir.frontend.torch.program import TorchProgram

Run = Callable[[Sequence[Any]], Sequence[Any]]
ATTENTION = "aten.scaled_dot_product_attention.default"


@dataclass(frozen=True)
class GraphResult:
    """A result of a traced graph.

    Attributes:
        position: Number of the result of the program; None for a value that is known.
        value: The value that is known.
        is_size: A whole number, which the program returns as an array without dims.
        layout: Dims from the slowest to the fastest one, if the result does not lie in memory in C order.
    """

    position: int | None
    value: Any = None
    is_size: bool = False
    layout: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TracedGraph:
    """A graph of torch.compile as a program, and the places of its arguments and results.

    Attributes:
        program: The program, with the weights of the call that it was traced with.
        inputs: Positions of the arguments that are the inputs of the program.
        elements: Element type of each input.
        weights: Position of the argument of each weight, by the name of its node. Other weights are constants of the graph.
        results: The results of the graph.
        form: What graphs are compared by; None for a graph that equals no other.
        is_marked: Whether a range of sizes was given by `torch._dynamo.mark_dynamic`.
    """

    program: TorchProgram
    inputs: tuple[int, ...]
    elements: tuple[DType | None, ...]
    weights: Mapping[str, int]
    results: tuple[GraphResult, ...]
    form: GraphForm | None
    is_marked: bool

    def with_weights(self, tensors: Sequence[Any]) -> TorchProgram:
        """Return the program with other weights, in the order of `weights`."""
        values = dict(zip(self.weights, tensors, strict=True))
        reader = ProgramReader(require_torch(), SimpleNamespace(state_dict=values, constants={}), {})
        weights: dict[str, NDArray[Any]] = {}
        stored: dict[Any, str] = {}  # which weights share memory may differ between arguments
        constants = {name: reader.weight(_spec(name), weights, stored) for name in values}
        lifted = {name: key for name, key in self.program.constants.items() if name not in values}
        return replace(
            self.program,
            constants={**lifted, **constants},
            weights={**{key: self.program.weights[key] for key in lifted.values()}, **weights},
        )

    def from_one(self) -> TracedGraph:
        """Return the graph with ranges that begin at 1 where they begin at 2, since torch takes a size of 1 as fixed.

        Its program may compute graphs that torch traces for a size of 1.
        """
        if self.form is None or self.is_marked:
            return self
        symbols = tuple(replace(s, lower=1) if s.lower == 2 else s for s in self.program.symbols)
        ranges = {s: (1 if low == 2 else low, high) for s, (low, high) in self.form.ranges.items()}
        return replace(self, program=replace(self.program, symbols=symbols), form=replace(self.form, ranges=ranges))

    def at_sizes(self, graph: TracedGraph) -> TracedGraph | None:
        """Return a graph with the places of its results in this one's program, if this program computes it; else None."""
        if self.form is None or graph.form is None:
            return None
        places = self.form.outputs_for(graph.form)
        if places is None:
            return None
        results = tuple(
            GraphResult(None, value) if place is None else replace(result, position=self.results[place].position)
            for result, place, value in zip(graph.results, places, graph.form.outputs, strict=True)
        )
        return replace(graph, program=self.program, results=results)


def trace_graph(graph: Any, arguments: Sequence[Any], run: Run) -> tuple[Callable[..., Any], TracedGraph]:
    """Trace a graph that torch.compile passes to a backend, in the context of that compilation.

    Whole numbers that are a dim of no tensor, such as a count that is passed to the model, become constants: torch compiles the graph
    again for others.

    Args:
        graph: The `torch.fx.GraphModule`.
        arguments: The arguments of the call that is compiled: tensors with their elements, and symbolic numbers.
        run: Computes the results of the traced graph from all of its arguments.

    Returns:
        The function of the arguments that torch calls in place of the graph, and the graph.

    Raises:
        ParseError: torch cannot trace the graph, or it draws random numbers or uses another device than the processor.
    """
    torch = require_torch()
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch.export._trace import _ignore_backend_decomps
    from torch.export.exported_program import _override_composite_implicit_decomp

    with suppress(ImportError):  # a version of torch without these parts starts again after the graph is traced
        _fix_numbers_of_model(torch, graph)
    _fix_other_numbers(torch, graph, arguments)
    captured: list[tuple[Any, Sequence[int], Sequence[Any], Any]] = []

    def capture(traced: Any, _: Sequence[Any]) -> Callable[..., Any]:
        context = torch._guards.TracingContext.get()
        about = context.fw_metadata
        captured.append((traced, about.static_input_indices or (), about.input_info, context.fake_mode.shape_env))
        return lambda *values: run(values)

    whole, table = _decomposition_tables()
    with ExitStack() as stack:
        stack.enter_context(_ignore_backend_decomps())
        # without it, torch decomposes linear layers, products and attention before it looks into the table
        stack.enter_context(_override_composite_implicit_decomp(whole))
        try:
            call = aot_module_simplified(graph, arguments, capture, inference_compiler=capture, decompositions=table)
        except torch._dynamo.exc.TorchDynamoException:
            raise  # it tells torch to compile in another way
        except Exception as error:  # operators of the model may raise anything
            why = (str(error).splitlines() or [""])[0]
            raise ParseError(
                f"torch cannot trace it to core ATen operators: {type(error).__name__}: {why:.300}"
            ) from error
    ((traced, fixed, inputs, environment),) = captured
    if len(inputs) != len(arguments) or len(traced.graph.find_nodes(op="placeholder")) != len(arguments):
        raise ParseError("it has inputs that share memory, and writes to one of them")
    weights = [
        i for i in fixed
        if isinstance(arguments[i], torch.Tensor) and not inputs[i].mutates_data and not arguments[i].is_inference()
    ]  # fmt: skip
    return call, _Conversion(torch, graph, traced, arguments, environment).run(weights)


@cache
def _decomposition_tables() -> tuple[Any, Any]:
    """Return the decompositions of composite operators, and of others. torch takes longer to find them than to trace a layer."""
    torch = require_torch()
    from torch.export.exported_program import _split_decomp_table_to_cia_and_python_decomp

    composite, others = _split_decomp_table_to_cia_and_python_decomp(decompositions(torch))
    return composite, others


def _fix_numbers_of_model(torch: Any, graph: Any) -> None:
    """Make floats that are attributes or globals of a model, and no arguments of it, constants of the graph.

    torch passes floats as tensors. It finds in the traced graph that most of them have to be constants, and then starts again.

    Raises:
        TorchDynamoException: It tells torch to start again with these constants, before the graph is traced.
    """
    from torch._dynamo import source as sources
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    again = False
    for node in graph.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        number = getattr(node.meta.get("example_value"), "item_memo", None)
        if source is None or not isinstance(number, torch.SymFloat):
            continue
        symbol = number.node._expr  # `expr` is its value where torch has fixed it
        fixed = sources.is_from_unspecialized_nn_module_source(source) or sources.is_from_global_source(source)
        known = not symbol.is_symbol or not symbol_is_type(symbol, SymT.FLOAT)
        if fixed and not known and not TensorifyState.should_specialize(symbol.name):
            TensorifyState.specialize(symbol.name)
            again = True
    if again:
        raise TensorifyScalarRestartAnalysis


def _fix_other_numbers(torch: Any, graph: Any, arguments: Sequence[Any]) -> None:
    """Fix symbolic numbers that no dim of a tensor has by itself. Reading one adds a guard to the compilation."""
    nodes = graph.graph.find_nodes(op="placeholder")
    dims = [d for n in nodes for d in getattr(n.meta.get("example_value"), "shape", ())]
    bound = {str(d.node.expr) for d in dims if isinstance(d, torch.SymInt) and d.node.expr.is_symbol}
    for value in arguments:
        if isinstance(value, torch.SymInt) and {str(s) for s in value.node.expr.free_symbols} - bound:
            int(value)
        elif isinstance(value, torch.SymFloat):
            float(value)


def _spec(target: str, kind: str = "PARAMETER", arg: object = None) -> Any:
    return SimpleNamespace(kind=SimpleNamespace(name=kind), target=target, arg=arg)


class _Conversion:
    """Conversion of one traced graph to a program in the form that `ProgramReader` reads."""

    def __init__(self, torch: Any, graph: Any, traced: Any, arguments: Sequence[Any], environment: Any) -> None:
        self.torch, self.traced, self.arguments, self.environment = torch, traced, arguments, environment
        self.names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
        self.nodes = traced.graph.find_nodes(op="placeholder")

    def run(self, weights: Sequence[int]) -> TracedGraph:
        self._check()
        self._rewrite_numbers()
        form = graph_form(self.torch, self.traced, self.names, weights, self.environment.var_to_range)
        owned: dict[str, Any] = {}
        places: dict[str, int] = {}
        specs: list[Any] = []
        inputs: list[int] = []
        for position, (node, name) in enumerate(zip(self.nodes, self.names, strict=True)):
            if not isinstance(self.arguments[position], self.torch.Tensor):
                self._replace_number(node)
                continue
            node._rename(name.removeprefix("l_").strip("_"))
            if position in weights:
                places[node.name], owned[node.name] = position, self.arguments[position]
                specs.append(_spec(node.name))
            else:
                inputs.append(position)
                specs.append(_spec(node.name, "USER_INPUT"))
        specs += self._lift_constants(owned)
        results, outputs = self._results()
        program = SimpleNamespace(
            graph=self.traced.graph,
            graph_signature=SimpleNamespace(input_specs=specs, output_specs=outputs),
            range_constraints=dict(self.environment.var_to_range),
            state_dict=owned,
            constants={},
        )
        plain = ProgramReader(self.torch, program, {}).run()
        elements = tuple(meta.element for _, meta in plain.inputs)
        marks = [r for a in self.arguments for r in getattr(a, "_dynamo_dynamic_range", ())]
        is_marked = any(r.min is not None for r in marks)
        return TracedGraph(plain, tuple(inputs), elements, places, results, form, is_marked)

    def _rewrite_numbers(self) -> None:
        """Write operators as the importer reads them; torch has other forms for numbers that are arguments of a model."""
        aten = self.torch.ops.aten
        for node in self.traced.graph.nodes:
            if node.target is self.torch.ops.prims.convert_element_type.default:
                node.target = aten._to_copy.default
                node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}

    def _check(self) -> None:
        """Refuse random numbers, which have to differ between calls, and other devices than the processor."""
        for node in self.traced.graph.nodes:
            # attention is tagged for its dropout, which the importer refuses
            tags = () if str(node.target) == ATTENTION else getattr(node.target, "tags", ())
            if self.torch.Tag.nondeterministic_seeded in tags:
                raise ParseError(f"operator {node.target} draws random numbers, which have to differ between calls")
            value = node.meta.get("val")
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, self.torch.Tensor) and item.device.type != "cpu":
                    raise ParseError(f"expected tensors of the processor, got one on {item.device}")

    def _replace_number(self, node: Any) -> None:
        """Replace a number by its value, or by its expression of the dims of tensors."""
        value = node.meta["val"]
        if isinstance(value, self.torch.SymInt) and value.node.expr.is_number:
            value = int(value)
        if isinstance(value, self.torch.SymInt):
            with self.traced.graph.inserting_after(self.nodes[-1]):
                size = self.traced.graph.call_function(self.torch.ops.aten.sym_numel.default, ())
            size.meta["val"] = value  # `ProgramReader` reads only this expression
            node.replace_all_uses_with(size)
        else:
            for user in list(node.users):
                swap = lambda n: value if n is node else n
                user.args, user.kwargs = (self.torch.fx.map_arg(a, swap) for a in (user.args, user.kwargs))
        self.traced.graph.erase_node(node)

    def _lift_constants(self, owned: dict[str, Any]) -> list[Any]:
        """Turn tensors that the graph holds into placeholders of weights. Return their specifications."""
        specs = []
        for node in self.traced.graph.find_nodes(op="get_attr"):
            value = getattr(self.traced, node.target, None)
            if not isinstance(value, self.torch.Tensor):
                continue
            with self.traced.graph.inserting_before(node):
                placeholder = self.traced.graph.placeholder(f"constant_{node.name}")
            placeholder.meta = {**node.meta, "val": value}
            node.replace_all_uses_with(placeholder)
            self.traced.graph.erase_node(node)
            owned[placeholder.name] = value
            specs.append(_spec(placeholder.name))
        return specs

    def _results(self) -> tuple[tuple[GraphResult, ...], list[Any]]:
        """Return the results of the graph, and keep only computed ones in the program."""
        output = self.traced.graph.output_node()
        results: list[GraphResult] = []
        computed: list[Any] = []
        for item in output.args[0]:
            if not isinstance(item, self.torch.fx.Node):
                results.append(GraphResult(None, item))
                continue
            value = item.meta["val"]
            tensor = isinstance(value, self.torch.Tensor)
            results.append(GraphResult(len(computed), None, not tensor, _layout(value) if tensor else None))
            computed.append(item)
        output.args = (tuple(computed),)
        return tuple(results), [_spec("", "USER_OUTPUT") for _ in computed]


def _layout(value: Any) -> tuple[int, ...] | None:
    """Return the dims of a tensor from the slowest to the fastest one in memory; None in C order, and where elements overlap."""
    sizes = [d if isinstance(d, int) else d.node.hint for d in value.shape]
    strides = [s if isinstance(s, int) else s.node.hint for s in value.stride()]
    if any(h is None for h in (*sizes, *strides)):
        return None
    order = sorted(range(len(sizes)), key=lambda d: -strides[d])
    dense = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != dense:
            return None
        dense *= sizes[dim]
    return tuple(order) if order != sorted(order) else None
