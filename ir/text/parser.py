"""Parse the text form: `parse_text(print_text(x))` is structurally equal to `x`.

The text is untrusted. It is parsed with the `ast` module and never executed. A refusal is a ParseError with line, column and the
text of the line.

Tests: `tests/ir/text/test_text.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from relax_tune.errors import ParseError
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.function import AnyFunction, Bound, ExternFunc, IRModule, PrimFunc
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.struct_info import CallableInfo
from relax_tune.ir.text.parse_graph import GraphReader
from relax_tune.ir.text.parse_tensor import name_of
from relax_tune.ir.text.printer import FORMAT_VERSION

# Longer text is refused first, since the parser of Python is not robust against hostile input.
MAX_CHARACTERS = 64 << 20
# Limit for the texts in records; texts of generated functions are far shorter.
RECORD_CHARACTERS = 1 << 20


def parse_text(
    text: str,
    operators: Mapping[str, type[Operator]] | None = None,
    constants: Mapping[str, NDArray[Any]] | None = None,
) -> PrimFunc | Function | ExternFunc | IRModule:
    """Parse a module, when `text` begins with `module(...)`, or the one function in it.

    Args:
        operators: graph operators by printed name.
        constants: weights of the module, which text does not contain.

    Raises:
        ParseError: names line and column, with a caret.
    """
    _check_is_text(text)
    reader = GraphReader(text, operators or {})
    if len(text) > MAX_CHARACTERS:
        raise ParseError(f"expected at most {MAX_CHARACTERS} characters of program text, got {len(text)}")
    try:
        tree = ast.parse(text)
    except SyntaxError as e:
        raise reader.error_at(e.lineno or 1, max(0, (e.offset or 1) - 1), f"not Python syntax: {e.msg}") from None
    except (RecursionError, MemoryError, ValueError) as e:
        raise reader.error_at(1, 0, f"Python's parser cannot read the text: {e}") from None
    try:
        return _module(reader, tree, constants or {})
    except RecursionError:
        raise reader.error_at(1, 0, "expected fewer levels of nesting") from None


def _check_is_text(text: object) -> None:
    if not isinstance(text, str):
        raise ParseError(f"expected the text of a program, got a {type(text).__name__}")


def parse_prim_func(text: str, most: int = MAX_CHARACTERS) -> PrimFunc:
    """Parse the one tensor function in `text`, of `most` characters. Raises ParseError."""
    _check_is_text(text)
    if len(text) > most:
        raise ParseError(f"expected at most {most} characters of a tensor function, got {len(text)}")
    function = parse_text(text)
    if not isinstance(function, PrimFunc):
        raise ParseError(f"expected the text of one tensor function, got a {type(function).__name__}")
    return function


def parse_module(
    text: str,
    operators: Mapping[str, type[Operator]] | None = None,
    constants: Mapping[str, NDArray[Any]] | None = None,
) -> IRModule:
    """Parse the module in `text`; a single function becomes a module that holds it. Raises ParseError."""
    parsed = parse_text(text, operators, constants)
    return parsed if isinstance(parsed, IRModule) else IRModule({parsed.name: parsed}, constants or {})


def _module(
    reader: GraphReader, tree: ast.Module, constants: Mapping[str, NDArray[Any]]
) -> PrimFunc | Function | ExternFunc | IRModule:
    functions: dict[str, AnyFunction] = {}
    bounds: list[Bound] = []
    is_module = False
    pending = any(isinstance(n, ast.FunctionDef) for n in tree.body)
    for node in tree.body:
        called = node.value if isinstance(node, ast.Expr) else None
        function: AnyFunction
        try:
            if isinstance(node, ast.Assign):
                limits = reader.declaration(node)
                var = reader.names[reader.one_name(node.targets[0], "a symbol")]
                if limits is not None and isinstance(var, Var):
                    bounds.append(Bound(var, *limits))
                continue
            if isinstance(node, ast.FunctionDef):
                if pending:  # the symbols in the header are known now
                    _learn_signatures(reader, tree)
                    pending = False
                key, function = _function(reader, node)
            elif called is not None:
                kind, args, options = reader.call(called, ("module", "extern"))
                if kind == "module":
                    _check_version(reader, called, args, options)
                    is_module = True
                    continue
                key, function = _extern(reader, called, args, options)
            else:
                raise reader.error(node, "expected a function, symbol(...), tunable(...), extern(...) or module(...)")
        except ValueError as e:
            raise reader.error(node, str(e)) from None
        if key in functions:
            raise reader.error(node, f"two functions are called {key!r}")
        functions[key] = function
    if is_module or bounds:
        return IRModule(functions, constants, tuple(bounds))
    if len(functions) != 1:
        raise reader.error_at(1, 0, f"expected one function, or module(...) before several; got {len(functions)}")
    return next(iter(functions.values()))


def _check_version(reader: GraphReader, node: ast.expr, args: list[ast.expr], options: dict[str, ast.expr]) -> None:
    reader.only(options, ("version",))
    version = reader.integer(options["version"], "a version number") if "version" in options else FORMAT_VERSION
    if version != FORMAT_VERSION or args:
        raise reader.error(
            node, f"expected text of version {FORMAT_VERSION}, got {version}; use the release that wrote it"
        )


def _extern(
    reader: GraphReader, node: ast.expr, args: list[ast.expr], options: dict[str, ast.expr]
) -> tuple[str, ExternFunc]:
    reader.only(options, ("key",))
    if len(args) not in (1, 2):
        raise reader.error(node, 'expected extern("routine", Callable(...))')
    name = reader.constant(args[0], str, "the routine's name in quotes")
    with reader.scope():
        signature = reader.annotation(args[1]) if len(args) == 2 else None
    if signature is not None and not isinstance(signature, CallableInfo):
        raise reader.error(args[1], "expected Callable(...)")
    key = reader.constant(options["key"], str, "a name in quotes") if "key" in options else name
    return key, ExternFunc(name, signature)


def _learn_signatures(reader: GraphReader, tree: ast.Module) -> None:
    """Record the signatures of all graph functions, since calls may come before the function."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            kind, name, options = _heading(reader, node)
            if kind == "function":
                reader.learn_signature(node, name, reader.flag(options, "pure", True))


def _heading(reader: GraphReader, node: ast.FunctionDef) -> tuple[str, str, dict[str, ast.expr]]:
    """Return the kind of a function, its name, and the options of its decorator."""
    a = node.args
    if a.posonlyargs or a.kwonlyargs or a.vararg or a.kwarg or a.defaults:
        raise reader.error(node, "expected plain annotated parameters")
    twice = [x.arg for i, x in enumerate(a.args) if x.arg in {y.arg for y in a.args[:i]}]
    if twice or len(node.decorator_list) != 1:
        raise reader.error(
            node, "expected @prim_func(outputs=...) or @function on the line before, and no other decorator"
        )
    decorator = node.decorator_list[0]
    if name_of(decorator) == "function":
        return "function", node.name, {}
    kind, args, options = reader.call(decorator, ("prim_func", "function"))
    reader.only(options, ("outputs", "name") if kind == "prim_func" else ("pure", "name", "names"))
    if args:
        raise reader.error(decorator, f"{kind} takes options only")
    name = reader.constant(options["name"], str, "a name in quotes") if "name" in options else node.name
    return kind, name, options


def _function(reader: GraphReader, node: ast.FunctionDef) -> tuple[str, PrimFunc | Function]:
    kind, name, options = _heading(reader, node)
    if kind == "function":
        return name, reader.function(node, name, reader.flag(options, "pure", True), options.get("names"))
    outputs = reader.integer(options["outputs"], "how many of the buffers are outputs") if "outputs" in options else 1
    return name, reader.prim_func(node, name, outputs)
