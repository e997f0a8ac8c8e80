"""Convert torch.export programs to plain data; the one module that imports torch.

Tests: `tests/ir/frontend/torch/test_archive.py`.
"""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.dtype import ALL, DType, bf16
from relax_tune.ir.frontend.shared.writer import identifier
from relax_tune.ir.frontend.torch.archive import data_archive
from relax_tune.ir.frontend.torch.fused import fused_decompositions
from relax_tune.ir.frontend.torch.program import (
    COMPLEX,
    Ref,
    TorchCall,
    TorchGraph,
    TorchProgram,
    TorchSymbol,
    TorchTensor,
)
from relax_tune.ir.frontend.torch.workarounds import EFFECT, FRACTION

# Operators not decomposed to core ATen, since their decompositions lose structure (weights repeated over the batch, views).
WHOLE = (
    "linear.default", "matmul.default", "scaled_dot_product_attention.default", "silu.default", "layer_norm.default",
    "rms_norm.default", "softmax.int", "log_softmax.int", "logsumexp.default", "gelu.default", "einsum.default", "upsample_bicubic2d.vec",
    "_upsample_nearest_exact2d.vec", "col2im.default", "stft.default", "istft.default",
)  # fmt: skip
# Arguments about the memory of a tensor, which no value depends on.
PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
DIM_CLASSES: Mapping[str, str] = {
    "Add": "add", "Mul": "mul", "FloorDiv": "floordiv", "CleanDiv": "floordiv", "Mod": "mod", "PythonMod": "mod",
    "Max": "max", "Min": "min",
}  # fmt: skip
# Whole numbers whose expression torch states: roundings of quotients of dims, and how a tensor lies in memory.
STATED = frozenset({
    "sym.trunc", "sym.floor", "sym.ceil", "sym.int", "aten.sym_storage_offset.default", "aten.sym_stride.int",
    "aten.sym_numel.default",
})  # fmt: skip
DIM_FUNCTIONS = frozenset({
    *(f"_operator.{f}" for f in (
        "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "le", "lshift", "lt", "mod", "mul", "ne", "neg", "or_", "pos", "pow",
        "rshift", "sub", "truediv",
    )),
    *(f"math.{f}" for f in ("trunc", "floor", "ceil")),
    *(f"torch.{f}" for f in ("_sym_sqrt", "sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not")),
})  # fmt: skip
"""Functions of dims in files."""
INLINED = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Operators that are replaced by the graph in their arguments."""
READ = "aten._local_scalar_dense.default"
"""The operator that reads a number from a tensor, for which torch has a symbol."""
LARGEST_SCALED = 1 << 20
"""Largest dim that a fraction multiplies."""
DIMS_FILE = "dims.json"
"""Name of the extra file of `torch.export.save` that holds the names of dims, which torch does not save."""
_FRAME = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def require_torch() -> Any:
    """Import the torch package. Raises UserError naming the extra when it is not installed."""
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.export")
    except ImportError as error:
        raise UserError(
            f"expected the torch package to read torch.export programs, got: {error}; install it with: "
            "pip install 'relax-tune[torch]'"
        ) from None
    return torch


def decompositions(torch: Any) -> Any:
    """Return torch's table of decompositions to core ATen operators, without `WHOLE` and with the functions of `fused`."""
    table = torch.export.default_decompositions()
    # Versions of torch differ in what they have: one without an operator has no decomposition of it either.
    for overload in WHOLE:
        packet, _, name = overload.partition(".")
        table.pop(getattr(getattr(torch.ops.aten, packet), name), None)
    table.update(fused_decompositions(torch))
    return table


def is_exported_program(value: object) -> bool:
    """Return True for a torch.export.ExportedProgram, without importing torch."""
    return any(
        c.__name__ == "ExportedProgram" and c.__module__.partition(".")[0] == "torch" for c in type(value).__mro__
    )


def plain_program(source: Any, trust: bool = False, read: Container[str] = ()) -> TorchProgram:
    """Convert an `ExportedProgram`, or a .pt2 file, decomposed to core ATen operators and `WHOLE`.

    Args:
        trust: Let torch open the file, and unpickle and evaluate what is in it.
        read: Operators that the caller reads, such as `aten.relu.default`. Without `trust` a file may contain only these, and
            operators that torch decomposes.

    Raises:
        UserError: torch is not installed, or only torch could read the file.
        ParseError: The file is not such a program.
    """
    saved: str | bytes = ""
    if isinstance(source, (str, Path)):
        source, saved = _opened(require_torch(), source) if trust else _read_archive(Path(source), read)
    torch = require_torch()
    if not is_exported_program(source):
        raise ParseError(
            f"expected a torch.export.ExportedProgram, got a {type(source).__name__}; export the model first"
        )
    names = _dim_names(source) or _saved_names(source, saved)  # decomposition loses them
    table = decompositions(torch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            source = source.run_decompositions(table)
        except Exception as error:  # decompositions run the model's operators, which may raise anything
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ParseError(
                f"expected a program that torch can decompose into core ATen operators, got {type(error).__name__}: {why:.300}; "
                "export the part that it names without dynamic dims, or write it with other operators"
            ) from error
    return ProgramReader(torch, source, names).run()


def _opened(torch: Any, path: str | Path | IO[bytes], shown: object = None) -> tuple[Any, str | bytes]:
    """Open a file with torch. Returns the program, and the text of `DIMS_FILE`."""
    extra = {DIMS_FILE: ""}
    try:
        return torch.export.load(str(path) if isinstance(path, Path) else path, extra_files=extra), extra[DIMS_FILE]
    except Exception as error:  # an archive of unknown origin may raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ParseError(
            f"{shown or path}: expected a program saved by torch.export.save, got: {why:.200}; save it with this torch "
            f"({torch.__version__})"
        ) from None


def _read_archive(path: Path, read: Container[str]) -> tuple[Any, str | bytes]:
    """Read a file with the reader of `archive`, which passes only data to torch."""

    @cache
    def known(target: str) -> bool:
        return _only_computes(require_torch(), table(), read, target)

    @cache
    def table() -> Container[Any]:
        return require_torch().export.default_decompositions()  # type: ignore[no-any-return]

    try:
        data, saved = data_archive(path, known, DIMS_FILE)
    except ParseError as error:
        raise UserError(
            f"{path}: {error}. Only torch reads such a file whole, and it unpickles and evaluates parts of it, so the author of the "
            "file can run any program as you. If you trust them, give --trust-model (trust=True in Python); else save the model with "
            "a newer torch, or export it to ONNX"
        ) from None
    with data:
        return _opened(require_torch(), data, path)[0], saved


def _only_computes(torch: Any, table: Container[Any], read: Container[str], target: str) -> bool:
    """Return whether an operator of a file computes results, and does nothing else.

    True for arithmetic on dims, for operators that the importer reads, and for operators of aten that torch decomposes by `table`, also
    in place."""
    path = re.fullmatch(r"torch\.ops\.([a-z]\w*)\.(\w+)(?:\.(\w+))?", target, re.ASCII)
    if path is None or (path[1] != "higher_order") != (path[3] is not None):
        return target in DIM_FUNCTIONS
    if path[1] == "higher_order":
        return f"higher_order.{path[2]}" in read or path[2] in INLINED
    if path[1] != "aten":
        return ".".join(path.groups()) in read
    operator = getattr(getattr(torch.ops.aten, path[2], None), path[3], None)
    if not isinstance(operator, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(operator.name()):
        return False  # aten has functions of TorchScript too, such as aten::save
    # Torch decomposes operators of the table into others, or computes them by a formula of others: both only compute.
    return (
        str(operator) in read
        or operator in table
        or operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        or (path[2].endswith("_") and _only_computes(torch, table, read, f"torch.ops.aten.{path[2][:-1]}.{path[3]}"))
    )


def _scaled(e: Any) -> tuple[Any, int, int] | None:
    """Read a dim times a number, rounded down, as (dim, numerator, denominator).

    None for another expression, and where no simple ratio rounds as the product of floats does, for dims up to `LARGEST_SCALED`."""
    factors = [f for f in e.args[0].args if not f.is_Float]
    numbers = [float(f) for f in e.args[0].args if f.is_Float]
    if (
        type(e.args[0]).__name__ != "Mul"
        or len(factors) != 1
        or type(factors[0]).__name__ != "ToFloat"
        or len(numbers) != 1
    ):
        return None
    ratio = Fraction(numbers[0])
    if ratio.denominator > 1 << 10:  # such as 0.7: the nearest simple ratio, if it rounds alike
        ratio = ratio.limit_denominator(1 << 10)
        # 0.7 as a double is not 7 / 10, so the two may round differently at some dim; all dims up to the limit are
        # tried.
        dims = np.arange(LARGEST_SCALED + 1)
        if not np.array_equal(np.trunc(dims * numbers[0]), dims * ratio.numerator // ratio.denominator):
            return None
    return (factors[0].args[0], *ratio.as_integer_ratio()) if numbers[0] > 0 and ratio.numerator <= 1 << 20 else None


def _dim_names(exported: Any) -> dict[str, str]:
    """Return the user's names of dynamic dims by place, `input[axis]`; empty for a saved program, which lacks them."""
    names: dict[str, str] = {}
    for node in exported.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        for dim in getattr(value, "shape", ()):
            known = getattr(getattr(getattr(dim, "node", None), "shape_env", None), "source_name_to_debug_name", {})
            for place, name in known.items():
                at = re.fullmatch(r"L((?:\[[^\]]+\])+)\.size\(\)\[(\d+)\]", place)
                if at:
                    input_name = "_".join(re.findall(r"\w+", at[1]))
                    names[f"{input_name}[{at[2]}]"] = str(name)
    return names


def _saved_names(exported: Any, saved: str | bytes) -> dict[str, str]:
    """Read the names of dims by place from the text that was saved with a program, such as `{"x": {"0": "batch"}}`.

    Raises:
        ParseError: A place is not a dynamic dim, or a symbol has two names.
    """
    if not saved:
        return {}

    def wrong(expected: str, value: object) -> ParseError:
        return ParseError(
            f"{DIMS_FILE} in the program: expected {expected}, got {value!r:.80}; save the program with others"
        )

    try:
        data = json.loads(saved)
    except (ValueError, RecursionError) as error:
        raise wrong("a JSON object of the names of dims by input and axis", str(error)) from None
    if not isinstance(data, dict) or not all(isinstance(axes, dict) for axes in data.values()):
        raise wrong("an object of the names of dims by input and axis", data)
    shapes = {n.name: getattr(n.meta.get("val"), "shape", ()) for n in exported.graph.nodes if n.op == "placeholder"}
    names: dict[str, str] = {}
    symbols: dict[str, str] = {}
    for place, name in ((f"{value}[{axis}]", name) for value, axes in data.items() for axis, name in axes.items()):
        if not isinstance(name, str) or not name.isidentifier():
            raise wrong(f"an identifier as the name of {place}", name)
        value, _, axis = place[:-1].rpartition("[")
        dims = shapes.get(value, ())
        dim = dims[int(axis)] if axis.isdecimal() and int(axis) < len(dims) else None
        expr = getattr(getattr(dim, "node", None), "expr", None)
        if expr is None or not expr.is_symbol:
            raise wrong("inputs of the program and axes whose dims are dynamic", place)
        if symbols.setdefault(str(expr), name) != name or list(symbols.values()).count(name) > 1:
            raise wrong(f"one name for each dim that differs, and one dim for {name}", place)
        names[place] = name
    return names


class ProgramReader:
    """Converter of one program, in one walk over its nodes."""

    def __init__(self, torch: Any, exported: Any, names: Mapping[str, str]) -> None:
        self.torch, self.exported, self.saved_names = torch, exported, names
        self.types: dict[Any, DType] = {getattr(torch, d.name): d for d in ALL if hasattr(torch, d.name)}
        self.names: dict[str, str] = {}
        self.scaled: list[tuple[Any, int, int | None]] = []  # ranges of dims that are multiplied by fractions

    def run(self) -> TorchProgram:
        nodes = list(self.exported.graph.nodes)
        signature = self.exported.graph_signature
        specs = dict(zip((n.name for n in nodes if n.op == "placeholder"), signature.input_specs))
        self._name_symbols([n for n in nodes if n.op == "placeholder" and specs[n.name].kind.name == "USER_INPUT"])
        inputs: list[tuple[str, TorchTensor]] = []
        constants: dict[str, str] = {}
        weights: dict[str, NDArray[Any]] = {}
        stored: dict[Any, str] = {}
        calls: list[TorchCall] = []
        state: dict[str, tuple[str, TorchTensor]] = {}
        initial: dict[str, str] = {}
        outputs: tuple[tuple[str, Any], ...] = ()
        # the state: buffers that the program writes to are the last inputs, and their new values the last results
        written = [spec.target for spec in signature.output_specs if spec.kind.name == "BUFFER_MUTATION"]
        for n in nodes:
            if n.op == "placeholder":
                spec = specs[n.name]
                if spec.target in written and spec.kind.name == "BUFFER":
                    state[spec.target] = n.name, self._meta(n.meta["val"])
                    initial[n.name] = self.weight(spec, weights, stored)
                elif spec.kind.name == "USER_INPUT":
                    annotation = self._input(n, spec)
                    if annotation is not None:
                        inputs.append((n.name, annotation))
                else:
                    constants[n.name] = self.weight(spec, weights, stored)
            elif n.op == "output":
                outputs = self._outputs(n, signature)
            # A node that names an inner graph is no computation; the operator that takes the graph converts it.
            elif self._graph_of(n) is None:
                calls.append(self._call(n))
        buffers = [state[target] for target in written]
        return TorchProgram(
            self._symbols(), (*inputs, *buffers), constants, weights, tuple(calls), outputs, tuple(self._limits()),
            {name: initial[name] for name, _ in buffers},
        )  # fmt: skip

    # dims

    def _name_symbols(self, inputs: list[Any]) -> None:
        """Name each dim by the user's name, or after the first input and axis that has it by itself."""
        used: set[str] = set()
        for n in inputs:
            for axis, dim in enumerate(getattr(n.meta.get("val"), "shape", ())):
                expression = getattr(getattr(dim, "node", None), "expr", None)
                if expression is None or not expression.is_symbol or str(expression) in self.names:
                    continue
                name = identifier(self.saved_names.get(f"{n.name}[{axis}]", f"{n.name}_{axis}"))
                while name in used:
                    name += "_"
                used.add(name)
                self.names[str(expression)] = name

    def _symbols(self) -> tuple[TorchSymbol, ...]:
        symbols: dict[str, TorchSymbol] = {}
        for expr, span in self.exported.range_constraints.items():
            if expr.is_symbol:
                name = self.names.get(str(expr), str(expr))
                # The end of an unlimited range is an object of sympy's infinity.
                upper = int(span.upper) if span.upper.is_Integer else None
                symbols[name] = TorchSymbol(name, max(int(span.lower), 0) if span.lower.is_Integer else 0, upper)
        for name in self.names.values():
            symbols.setdefault(name, TorchSymbol(name, 0, None))
        return tuple(symbols.values())

    def _limits(self) -> Iterator[tuple[Any, int, int | None]]:
        """Yield the ranges of computed dims, such as twice a symbol."""
        for expr, span in self.exported.range_constraints.items():
            if not expr.is_symbol and not expr.is_Integer:
                upper = int(span.upper) if span.upper.is_Integer else None
                yield self._expr(expr), max(int(span.lower), 0) if span.lower.is_Integer else 0, upper
        yield from self.scaled

    def _dim(self, dim: Any) -> Any:
        if isinstance(dim, int):
            return int(dim)
        return self._expr(dim.node.expr)

    def _of_layout(self, value: Any) -> bool:
        """Return whether a number depends on where torch would place data in memory: it has a symbol that nothing reads."""
        symbols = () if isinstance(value, int) else map(str, value.node.expr.free_symbols)
        # Torch names symbols that depend on data `u0`, `u1` and so on.
        return any(s.startswith("u") and s not in self.names for s in symbols)

    def _expr(self, e: Any) -> Any:
        if e.is_Integer:
            return int(e)
        if e.is_symbol:
            return self.names.get(str(e), str(e))
        kind = type(e).__name__
        if kind == "Pow" and e.args[1].is_Integer and int(e.args[1]) > 0:
            return ["mul", *[self._expr(e.args[0])] * int(e.args[1])]
        if kind in ("TruncToInt", "FloorToInt", "CeilToInt") and type(e.args[0]).__name__ == "IntTrueDiv":
            over, under = map(self._expr, e.args[0].args)
            # Dims are not negative, so rounding towards 0 and downwards are the same.
            return ["floordiv", ["add", over, under, -1] if kind == "CeilToInt" else over, under]
        scaled = _scaled(e) if kind == "TruncToInt" else None
        if scaled is not None:
            dim, over, under = scaled
            self.scaled.append((self._expr(dim), 0, LARGEST_SCALED))
            return ["floordiv", ["mul", self._expr(dim), over], under]
        if kind not in DIM_CLASSES:
            raise ParseError(
                f"expected dims of {', '.join(sorted(set(DIM_CLASSES.values())))}, got {e}; workaround: {FRACTION}"
            )
        return [DIM_CLASSES[kind], *map(self._expr, e.args)]

    # values

    def _meta(self, value: Any) -> Any:
        if isinstance(value, self.torch.Tensor):
            return TorchTensor(tuple(map(self._dim, value.shape)), self.types.get(value.dtype), str(value.dtype))
        return [self._meta(v) for v in value] if isinstance(value, (tuple, list)) else None

    def _input(self, n: Any, spec: Any) -> TorchTensor | None:
        annotation = self._meta(n.meta.get("val"))
        if isinstance(annotation, TorchTensor):
            return annotation
        if type(spec.arg).__name__ == "ConstantArgument":  # fixed while exporting
            return None
        raise ParseError(
            f"input {n.name}: expected a tensor, got {type(n.meta.get('val')).__name__}; export it as a tensor"
        )

    def weight(self, spec: Any, weights: dict[str, NDArray[Any]], stored: dict[Any, str]) -> str:
        """Return the name of a parameter, buffer or constant. Tied weights, which share memory, share a name."""
        target = str(spec.target)
        if spec.kind.name == "TOKEN":
            called = [n.args[1] for n in self.exported.graph.nodes if "with_effects" in str(n.target)]
            raise ParseError(
                f"operator {called[0] if called else 'of the program'}: expected a program that only computes results, got an "
                f"effect: a check of values at run time; workaround: {EFFECT}"
            )
        tensor = self.exported.state_dict.get(target, self.exported.constants.get(target))
        if not isinstance(tensor, self.torch.Tensor):
            raise ParseError(f"{spec.kind.name.lower()} {target}: expected a tensor, got {type(tensor).__name__}")
        parts = COMPLEX.get(str(tensor.dtype))
        if tensor.dtype not in self.types and parts is None:
            raise ParseError(
                f"weight {target}: expected an element type among {', '.join(map(str, ALL))}, got {tensor.dtype}; convert "
                "the model, as with model.float(), before exporting it"
            )
        # Views of one memory are the same weight only if they read it in the same way.
        layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj())
        # Empty tensors all have the address 0.
        key = (tensor.data_ptr(), *layout) if tensor.numel() else target
        if key not in stored:
            stored[key] = target
            values, element = tensor.detach().cpu(), self.types.get(tensor.dtype)
            if element is None:  # NumPy has no complex numbers of 16-bit parts
                pairs = np.asarray(self.torch.view_as_real(values.resolve_conj()).numpy(), order="C")
                weights[target] = pairs.view([("real", pairs.dtype), ("imag", pairs.dtype)])[..., 0]
                return target
            if element is bf16 or element.is_small:  # torch exports only its bits to NumPy
                values = values.contiguous().view(self.torch.int16 if element is bf16 else self.torch.uint8)
            weights[target] = np.asarray(values.numpy(), order="C").view(element.numpy)
        return stored[key]

    def _call(self, n: Any) -> TorchCall:
        kwargs = {k: self._argument(v) for k, v in n.kwargs.items() if k not in PLACEMENT}
        # The last frame outside of torch is the line of the user's model.
        frames = [f for f in _FRAME.findall(n.meta.get("stack_trace") or "") if "/torch/nn/" not in f[0]]
        source = f"{Path(frames[-1][0]).name}:{frames[-1][1]}: {frames[-1][2].strip()}" if frames else ""
        args = tuple(map(self._argument, n.args)) if n.op == "call_function" else ()
        if isinstance(target := kwargs.get("dtype"), DType) and target.is_small and target.is_float:
            kwargs["saturate"] = self._saturates(n.kwargs["dtype"])
        op, value = self._operator(n), n.meta.get("val")
        if op in ("aten.as_strided.default", "aten.as_strided_copy.default"):
            # Strides count in the memory of the operand, so its own layout is needed to understand them.
            viewed = n.args[0].meta["val"]
            kwargs["strides"] = [self._dim(s) for s in viewed.stride()]
            kwargs["first"] = self._dim(viewed.storage_offset())
        if op == READ and isinstance(value, self.torch.SymInt) and any(user.op != "output" for user in n.users):
            kwargs["symbol"] = self._dim(value)
        if op in STATED and isinstance(value, (int, self.torch.SymInt)) and not self._of_layout(value):
            op, args = "sym.known", (self._dim(value),)
        return TorchCall(n.name, op, args, kwargs, self._meta(value), source)

    def _graph_of(self, n: Any) -> Any:
        """Return the graph that a node names, as branches and loops have; None for other nodes."""
        named = getattr(n.graph.owning_module, n.target, None) if n.op == "get_attr" else None
        return named.graph if isinstance(named, self.torch.fx.GraphModule) else None

    def _inner(self, graph: Any) -> TorchGraph:
        nodes = list(graph.nodes)
        params = tuple(n.name for n in nodes if n.op == "placeholder")
        calls = (n for n in nodes if n.op not in ("placeholder", "output") and self._graph_of(n) is None)
        results = nodes[-1].args[0]
        listed = results if isinstance(results, (list, tuple)) else [results]
        return TorchGraph(params, tuple(map(self._call, calls)), tuple(map(self._argument, listed)))

    def _saturates(self, element: Any) -> bool:
        """Return whether a cast to a small float saturates; versions of torch differ."""
        return bool(self.torch.tensor(1e30).to(element).float().isfinite())

    def _operator(self, n: Any) -> str:
        target: Callable[..., Any] | str = n.target
        if isinstance(target, str) or n.op != "call_function":
            return f"{n.op} {target}"
        name = getattr(target, "__name__", str(target))
        if isinstance(target, self.torch._ops.OpOverload):
            return str(target)
        if isinstance(target, self.torch._ops.HigherOrderOperator):
            return f"higher_order.{target.name()}"
        if getattr(target, "__module__", "") in ("_operator", "math", "torch"):
            return name if name == "getitem" else f"sym.{name.removeprefix('sym_')}"
        return str(target)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, self.torch.fx.Node):
            graph = self._graph_of(value)
            return Ref(value.name) if graph is None else self._inner(graph)
        if isinstance(value, (list, tuple)):
            return [self._argument(v) for v in value]
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return value
        return self.types.get(value, str(value))

    def _outputs(self, n: Any, signature: Any) -> tuple[tuple[str, Any], ...]:
        results: list[Any] = []
        changed: list[tuple[str, Any]] = []
        state: list[tuple[str, Any]] = []
        for value, spec in zip(n.args[0], signature.output_specs, strict=True):
            if spec.kind.name in ("BUFFER_MUTATION", "USER_INPUT_MUTATION"):
                written = state if spec.kind.name == "BUFFER_MUTATION" else changed
                written.append((identifier(f"new_{spec.target}"), self._argument(value)))
            elif spec.kind.name == "USER_OUTPUT":
                results.append(self._argument(value))
            else:
                raise ParseError(
                    f"output {value}: expected results, and new values of buffers and inputs, got one of kind {spec.kind.name}"
                )
        return (*zip(self._output_names(len(results)), results, strict=True), *changed, *state)

    def _output_names(self, count: int) -> list[str]:
        """Name results by the keys of their structure, such as `logits`, or else `output` or `output_0`, `output_1` ..."""
        tree = self.torch.utils._pytree
        names = ["output"] if count == 1 else [f"output_{p}" for p in range(count)]
        try:
            paths, _ = tree.tree_flatten_with_path(
                tree.tree_unflatten(list(range(count)), self.exported.call_spec.out_spec)
            )
        except Exception:  # structures of packages that are not imported here
            return names
        for path, position in paths:
            parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in path]
            if isinstance(position, int) and any(not p.isdigit() for p in parts):
                names[position] = identifier("_".join(parts))
        return names
