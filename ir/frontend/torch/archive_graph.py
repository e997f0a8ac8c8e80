"""Validate the JSON of a .pt2 archive by an allowlist, and rewrite it for torch.

torch imports modules, runs functions and compiles text that such JSON names: operators, symbolic dims, guards, names of nodes,
containers of results. Only what this module knows remains: operators that the caller allows, expressions of a small grammar,
names that are identifiers, plain containers, and places in source files. The rest is left out, or refused.

Tests: `tests/ir/frontend/torch/test_archive.py`.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from relax_tune.errors import ParseError

Check = Callable[[Any, str], Any]
"""Read a value at a place. Returns the value to write for torch. Raises ParseError for any other."""

SYMBOL = re.compile(r"(?:s|u|z|i|f|p|zf|zuf)\d{1,6}")
_NAME = re.compile(r"[A-Za-z_]\w{0,1023}", re.ASCII)
# no quotes, backslashes and line ends: torch writes names of parameters and keys of containers into Python text
_KEY = re.compile(r"[\w.:/ +\-]{0,1023}")
_NUMBER = re.compile(r"-?\d{1,40}(?:\.\d{0,40})?(?:e[+-]?\d{1,3})?|inf|-inf|nan")
_FRAME = re.compile(r'File "([^"\n]{1,500})", line (\d{1,8}), in ([^\n]{0,200})(?:\n +(?!File ")([^\n]{0,500}))?')
FUNCTIONS = frozenset({
    "Integer", "Rational", "Add", "Mul", "Mod", "Max", "Min", "Eq", "Equality", "Ne", "Unequality", "Lt", "Le", "Gt", "Ge",
    "StrictLessThan", "LessThan", "StrictGreaterThan",
    "GreaterThan", "And", "Or", "Not", "Abs", "floor", "ceiling",
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "FloatTrueDiv",
    "IntTrueDiv",
    "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt", "RoundDecimal", "ToFloat", "Identity",
})  # fmt: skip
"""Functions of dims, as sympy and torch name them."""
POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"})
MAX_POWER = 64
MAX_EXPRESSION = 1 << 14
MAX_TEXT = 1 << 20
DIALECTS = ("ATEN", "TRAINING", "")
BYTES: Mapping[int, int] = {
    1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 9: 4, 10: 8, 11: 16, 12: 1, 13: 2, 28: 2, 29: 1, 30: 1, 31: 1, 32: 1, 33: 1, 34: 4,
    35: 8,
}  # fmt: skip
"""Bytes of an element, by torch's number of its type."""


def refuse(where: str, expected: str, got: object) -> ParseError:
    return ParseError(f"{where}: expected {expected}, got {got!r:.120}")


def whole(value: Any, where: str) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise refuse(where, "a whole number of 64 bits", value)
    return value


def number(value: Any, where: str) -> Any:
    if isinstance(value, float) or type(value) is int:
        return str(value) if value != value or abs(value) == float("inf") else value
    if value in ("Infinity", "-Infinity", "NaN"):
        return value
    raise refuse(where, "a number", value)


def boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise refuse(where, "true or false", value)
    return value


def text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise refuse(where, f"a text of at most {MAX_TEXT} characters", value)
    return value


def name(value: Any, where: str) -> str:
    """Read the name of a node: torch compiles Python text that holds it."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or keyword.iskeyword(value):
        raise refuse(where, "an identifier", value)
    return value


def key(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise refuse(where, "letters, digits and . : / + - _", value)
    return value


def listed(item: Check) -> Check:
    def check(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise refuse(where, "a list", value)
        return [item(v, f"{where}[{p}]") for p, v in enumerate(value)]

    return check


def mapped(keys: Check, item: Check) -> Check:
    def check(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(where, "an object", value)
        return {keys(k, where): item(v, f"{where}.{k:.80}") for k, v in value.items()}

    return check


def optional(item: Check) -> Check:
    return lambda value, where: None if value is None else item(value, where)


def record(**fields: Check) -> Check:
    """Read an object's known fields. Unknown ones are left out, as are fields that it lacks."""

    def check(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(where, "an object", value)
        return {f: item(value[f], f"{where}.{f}") for f, item in fields.items() if f in value}

    return check


def union(**kinds: Check) -> Check:
    """Read an object of one field, whose name is the kind of its value."""

    def check(value: Any, where: str) -> dict[str, Any]:
        kind = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else None
        if kind not in kinds:
            raise refuse(where, f"one of {', '.join(kinds)}", kind if isinstance(kind, str) else value)
        return {kind: kinds[kind](value[kind], f"{where}.{kind}")}

    return check


def always(value: Any) -> Check:
    """Write a fixed value in place of any value."""
    return lambda _value, _where: value


@lru_cache(maxsize=4096)
def expression(source: str) -> str:
    """Read the text of a symbolic dim, which torch passes to sympy to evaluate, and return it in a normal form."""
    try:
        tree = ast.parse(source, mode="eval").body if len(source) <= MAX_EXPRESSION else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    where = "symbolic dim"
    if tree is None:
        raise refuse(where, f"an expression of dims of at most {MAX_EXPRESSION} characters", source)
    try:
        _scalar(tree, where, powers=True)
        # Torch gets the text of the tree that was checked, not the text of the file, which its parser might read
        # otherwise.
        return ast.unparse(tree)
    except RecursionError:
        raise refuse(where, "an expression of few brackets and signs inside one another", source) from None


def _scalar(e: ast.expr, where: str, powers: bool) -> None:
    """Refuse anything but an expression of dims. powers: Whether a power is allowed; it is not within another power."""
    if isinstance(e, ast.Constant) and (type(e.value) is float or isinstance(e.value, bool)):
        return
    if isinstance(e, ast.Constant) and type(e.value) is int and e.value < 1 << 63:
        return
    if isinstance(e, ast.Name) and (SYMBOL.fullmatch(e.id) or e.id in ("true", "false", "oo", "int_oo")):
        return
    if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub):
        return _scalar(e.operand, where, powers)
    if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv | ast.Mod):
        _scalar(e.left, where, powers)
        return _scalar(e.right, where, powers)
    if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Pow):
        return _power(e.left, e.right, where, powers)
    if isinstance(e, ast.Compare):
        for part in (e.left, *e.comparators):
            _scalar(part, where, powers)
        return
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Name):
        return _called(e, e.func.id, where, powers)
    raise refuse(where, "an expression of dims", ast.unparse(e))


def _called(e: ast.Call, function: str, where: str, powers: bool) -> None:
    flags = [k for k in e.keywords if k.arg is not None and k.arg.isidentifier() and isinstance(k.value, ast.Constant)]
    if len(flags) != len(e.keywords) or any(type(k.value.value) not in (bool, int) for k in flags):  # type: ignore[attr-defined]
        raise refuse(where, "flags of a symbol", ast.unparse(e))
    first = e.args[0] if e.args else None
    literal = first.value if isinstance(first, ast.Constant) and len(e.args) == 1 else None
    if function == "Symbol" and isinstance(literal, str) and SYMBOL.fullmatch(literal):
        return
    if function == "Float" and isinstance(literal, str) and _NUMBER.fullmatch(literal):
        return
    if function in POWERS and len(e.args) == 2 and not flags:
        return _power(e.args[0], e.args[1], where, powers)
    if function not in FUNCTIONS or flags:
        raise refuse(where, "a function of dims", ast.unparse(e))
    for argument in e.args:
        _scalar(argument, where, powers)


def _power(base: ast.expr, exponent: ast.expr, where: str, powers: bool) -> None:
    """Refuse powers that are not small: numbers would grow without end while sympy reads them."""
    inner = exponent.args[0] if isinstance(exponent, ast.Call) and exponent.args else exponent
    inner = inner.operand if isinstance(inner, ast.UnaryOp) else inner
    if not powers or not isinstance(inner, ast.Constant) or type(inner.value) is not int or inner.value > MAX_POWER:
        raise refuse(where, f"a power of at most {MAX_POWER}, within no other", ast.unparse(exponent))
    _scalar(exponent, where, False)
    _scalar(base, where, False)


def spec(value: Any, where: str) -> str:
    """Read the container of a program's inputs or results: nested lists, tuples and dicts.

    Containers of other packages become dicts where they name their fields, so that torch imports no class."""
    try:
        protocol, tree = json.loads(text(value, where))
    except (ValueError, TypeError, RecursionError):
        raise refuse(where, "a JSON list of 1 and a tree", value) from None
    if protocol != 1:
        raise refuse(where, "protocol 1", protocol)
    return json.dumps([1, _container(tree, where)])


def _container(tree: Any, where: str) -> dict[str, Any]:
    if not isinstance(tree, dict) or not isinstance(tree.get("children_spec"), list):
        raise refuse(where, "a container with children", tree)
    kind, context = tree.get("type"), tree.get("context")
    if kind is None and context is None and not tree["children_spec"]:
        return {"type": None, "context": None, "children_spec": []}
    inner = [_container(c, where) for c in tree["children_spec"]]
    # Every container is written back as a tuple, list or dict: for other types torch would import their classes.
    if kind in ("builtins.tuple", "builtins.list", "torch.fx.immutable_collections.immutable_list"):
        known = "builtins.tuple" if kind == "builtins.tuple" else "builtins.list"
        return {"type": known, "context": "null", "children_spec": inner}
    try:
        keys = json.loads(context) if isinstance(context, str) else None
    except (ValueError, RecursionError):
        keys = None
    if not isinstance(keys, list) or len(keys) != len(inner):
        raise refuse(where, "lists, tuples, dicts, and containers that name their fields", kind)
    for k in keys:
        whole(k, where) if type(k) is int else key(k, where)
    return {"type": "builtins.dict", "context": json.dumps(keys), "children_spec": inner}


def metadata(value: Any, where: str) -> dict[str, str]:
    """Keep the places in source files that a node came from, for messages; leave out the rest, which torch evaluates."""
    trace = value.get("stack_trace") if isinstance(value, dict) else None
    frames = _FRAME.findall(trace) if isinstance(trace, str) else []
    # Messages show these texts, so characters that would control a terminal are replaced.
    shown = [[re.sub(r"[^ -~]", "?", part) for part in frame] for frame in frames]
    lines = [f'  File "{f}", line {line}, in {function}\n    {code or "?"}' for f, line, function, code in shown]
    return {"stack_trace": "\n".join(lines)} if lines else {}


def element(value: Any, where: str) -> int:
    if type(value) is not int or value not in BYTES:
        raise refuse(where, "the number of an element type", value)
    return value


def strided(value: Any, where: str) -> int:
    if value != 7:
        raise refuse(where, "tensors with strides, whose layout is 7", value)
    return 7


ONE_OF_PLACES = always({"type": "cpu", "index": None})
"""Device of a tensor: programs are read, not run, so that none is needed."""


def symbolic(**constants: Check) -> Check:
    hint = union(as_int=whole, as_bool=boolean, as_float=number)
    parsed = record(expr_str=lambda v, w: expression(text(v, w)), hint=optional(hint))
    return union(as_expr=parsed, **constants)


SIZE = symbolic(as_int=whole)
TENSOR_META = record(
    dtype=element, sizes=listed(SIZE), requires_grad=always(False), device=ONE_OF_PLACES, strides=listed(SIZE), storage_offset=SIZE,
    layout=strided,
)  # fmt: skip
TENSOR = record(name=name)
MAYBE_TENSOR = union(as_tensor=TENSOR, as_none=boolean)
SYM_INT, SYM_FLOAT, SYM_BOOL = (
    union(as_name=name, **own) for own in ({"as_int": whole}, {"as_float": number}, {"as_bool": boolean})
)


class Operators:
    """Rules for graphs whose operators a caller knows.

    known: whether `torch.ops.aten.add.Tensor` and the like, named so, only computes results
    """

    def __init__(self, known: Callable[[str], bool]) -> None:
        self.known = known
        self._argument = _arguments(self)
        named = record(name=key, arg=self._argument, kind=optional(whole))
        node = record(
            target=self.target, inputs=listed(named), outputs=listed(self._argument), metadata=metadata,
            is_hop_single_tensor_return=optional(boolean), name=optional(name),
        )  # fmt: skip
        self._graph = record(
            inputs=listed(self._argument), outputs=listed(self._argument), nodes=listed(node),
            tensor_values=mapped(name, TENSOR_META), sym_int_values=mapped(name, SIZE),
            sym_bool_values=mapped(name, symbolic(as_bool=boolean)), sym_float_values=mapped(name, symbolic(as_float=number)),
            is_single_tensor_return=boolean,
        )  # fmt: skip

    def target(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not self.known(value):
            raise refuse(
                where, "an operator of aten that the importer reads or torch decomposes, or arithmetic on dims", value
            )
        return value

    def argument(self, value: Any, where: str) -> Any:
        return self._argument(value, where)

    def graph(self, value: Any, where: str) -> Any:
        objects = isinstance(value, dict) and value.get("custom_obj_values")
        if objects:
            raise refuse(f"{where}.custom_obj_values", "no objects of Python classes", objects)
        return self._graph(value, where)

    def program(self, value: Any, where: str) -> dict[str, Any]:
        """Read a program: what `models/*.json` of an archive holds."""
        module = record(graph=self.graph, signature=self._signature(), module_call_graph=_calls, metadata=always({}))
        ranges = record(min_val=optional(whole), max_val=optional(whole))
        fields: dict[str, Any] = record(
            graph_module=module, opset_version=mapped(name, whole), range_constraints=mapped(_symbol, ranges),
            schema_version=record(major=whole, minor=whole), verifiers=listed(_dialect), torch_version=key, guards_code=always([]),
        )({"torch_version": "", **value} if isinstance(value, dict) else value, where)  # fmt: skip
        for field in ("graph_module", "opset_version", "range_constraints", "schema_version"):
            if field not in fields:
                raise refuse(f"{where}.{field}", "a field of this name", None)
        return fields

    def _signature(self) -> Check:
        tensor, argument = record(arg=TENSOR), self._argument
        constant = union(as_none=boolean, as_int=whole, as_float=number, as_string=text, as_bool=boolean)
        inputs = union(
            user_input=record(arg=argument), parameter=record(arg=TENSOR, parameter_name=key),
            buffer=record(arg=TENSOR, buffer_name=key, persistent=boolean),
            tensor_constant=record(arg=TENSOR, tensor_constant_name=key), token=tensor,
            constant_input=record(name=name, value=constant),
        )  # fmt: skip
        outputs = union(
            user_output=record(arg=argument), loss_output=tensor, token=tensor,
            buffer_mutation=record(arg=TENSOR, buffer_name=key), parameter_mutation=record(arg=TENSOR, parameter_name=key),
            gradient_to_parameter=record(arg=TENSOR, parameter_name=key),
            gradient_to_user_input=record(arg=TENSOR, user_input_name=name),
            user_input_mutation=record(arg=TENSOR, user_input_name=name),
        )  # fmt: skip
        return record(input_specs=listed(inputs), output_specs=listed(outputs))


def _arguments(of: Operators) -> Check:
    return union(
        as_none=boolean, as_tensor=TENSOR, as_tensors=listed(TENSOR), as_int=whole, as_ints=listed(whole), as_float=number,
        as_floats=listed(number), as_string=text, as_strings=listed(text), as_sym_int=SYM_INT, as_sym_ints=listed(SYM_INT),
        as_scalar_type=element, as_memory_format=whole, as_layout=strided, as_device=ONE_OF_PLACES, as_bool=boolean,
        as_bools=listed(boolean), as_sym_bool=SYM_BOOL, as_sym_bools=listed(SYM_BOOL), as_graph=record(name=name, graph=of.graph),
        as_optional_tensors=listed(MAYBE_TENSOR), as_sym_float=SYM_FLOAT, as_sym_floats=listed(SYM_FLOAT),
        as_optional_tensor=MAYBE_TENSOR, as_complex=record(real=number, imag=number), as_nested_tensors=listed(listed(TENSOR)),
        as_int_lists=listed(listed(whole)), as_string_to_argument=mapped(key, of.argument), as_float_lists=listed(listed(number)),
    )  # fmt: skip


def _symbol(value: Any, where: str) -> str:
    if not isinstance(value, str) or not SYMBOL.fullmatch(value):
        expression(text(value, where))
    return str(value)


def _dialect(value: Any, where: str) -> str:
    if value not in DIALECTS:
        raise refuse(where, f"one of {', '.join(filter(None, DIALECTS))}", value)
    return str(value)


def _calls(value: Any, where: str) -> list[Any]:
    """Keep the call of the whole program, whose containers name its results."""
    whole_program = [c for c in value if isinstance(c, dict) and c.get("fqn") == ""] if isinstance(value, list) else []
    signature = record(
        inputs=always([]), outputs=always([]), in_spec=spec, out_spec=spec, forward_arg_names=optional(listed(name))
    )
    return [record(fqn=key, signature=optional(signature))(call, where) for call in whole_program]
