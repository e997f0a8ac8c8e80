"""Traces: the recorded primitives of a schedule, as data.

A trace is JSON: `{"tunables": {name: domain}, "steps": [[primitive, {argument: value}]]}`. An argument is a name, a
number, None, `{"tunable": name}`, `{"expr": text}` over tunables and slots of shape symbols (`s0 // 4 + 1`, see
`relax_tune.schedules.symbols`), or a list of these. A trace replays on any structurally equal function and prints as Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, Var, as_int, const, free_vars, postorder, substitute
from relax_tune.ir.core.expr_text import format_expr
from relax_tune.schedules.symbols import LIMIT, SymbolSlot, read_scalars, require_name, slot_named

# Longest text accepted as a trace.
MAX_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """One applied primitive; `args` in the order of its parameters, after the function."""

    primitive: str
    args: tuple[tuple[str, Any], ...]

    def as_python(self) -> str:
        """Print the step as a line of Python over a `Schedule` called `s`."""
        return f"s.apply({', '.join(self.parts)})"

    @property
    def parts(self) -> tuple[str, ...]:
        """The arguments of the call in `as_python`: the primitive, then each argument."""
        return (repr(self.primitive), *(f"{k}={_show(v)}" for k, v in self.args))

    @property
    def names(self) -> tuple[str, ...]:
        """The strings among the arguments, in order: names of loops, blocks and buffers, and words such as kinds."""
        return tuple(v for _, value in self.args for v in each(value) if isinstance(v, str))


@dataclass(frozen=True, slots=True)
class Trace:
    """Steps in order, and the tunables they mention."""

    steps: tuple[Step, ...] = ()
    tunables: tuple[Tunable, ...] = ()

    def to_json(self) -> str:
        """Encode canonically: the same trace gives the same bytes."""
        data = {
            "tunables": {t.name: list(t.domain) for t in self.tunables},
            "steps": [[s.primitive, {k: _encode(v) for k, v in s.args}] for s in self.steps],
        }
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Trace:
        """Decode a trace. Raises ScheduleError for any other text."""
        try:
            # Before parsing: a record of a foreign database may be of any size.
            if len(text) > MAX_CHARACTERS:
                raise ValueError(f"{len(text)} characters")
            data = json.loads(text)
            tunables = {n: _tunable(n, domain) for n, domain in data["tunables"].items()}
            steps = tuple(_step(name, args, tunables) for name, args in data["steps"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ScheduleError) as error:
            raise ScheduleError(
                f"expected a schedule trace (JSON with tunables and steps), got text with {error!r}"
            ) from None
        return Trace(steps, tuple(tunables.values()))

    def with_values(self, values: Mapping[str, int]) -> Trace:
        """Replace every tunable by its value. Raises ScheduleError for a missing or foreign value."""
        for t in self.tunables:
            if values.get(t.name) not in t.domain:
                raise ScheduleError(
                    f"tunable {t.name!r} expects one of {list(t.domain)}, got {values.get(t.name)!r} among the parameters"
                )
        return Trace(tuple(Step(s.primitive, tuple((k, _put(v, values)) for k, v in s.args)) for s in self.steps))

    def as_python(self, values: Mapping[str, int] | None = None) -> str:
        """Print the trace as a Python program over a `Schedule` called `s`, which runs as it is.

        Args:
            values: Numbers for the tunables, which are free without them.

        Raises:
            ScheduleError: For a value that is missing or outside its domain.
        """
        if values is None:
            lines = [f"{t.name} = Tunable({t.name!r}, {list(t.domain)})" for t in self.tunables]
        else:
            self.with_values(values)
            lines = [f"{t.name} = {values[t.name]}  # of {', '.join(map(str, t.domain))}" for t in self.tunables]
        # The program imports and defines only the names that its expressions use, so that it runs as printed.
        exprs = [e for step in self.steps for _, v in step.args for e in each(v) if isinstance(e, Expr)]
        nodes = tuple(postorder(exprs))
        places = sorted({v.position for v in nodes if isinstance(v, SymbolSlot)})
        lines += [f"s{at} = s.func.symbols[{at}]" for at in places]
        operations = {n.op for n in nodes}
        imports = ["Tunable"] if values is None and self.tunables else []
        imports += [f"{o}imum as {o}" for o in ("max", "min") if o in operations]
        header = [f"from relax_tune.ir.core.expr import {', '.join(imports)}"] if imports else []
        return "\n".join([*header, *lines, *(step.as_python() for step in self.steps)])


def each(value: Any) -> tuple[Any, ...]:
    """Return the elements of a list argument, or the argument itself."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _encode(value: Any) -> Any:
    if isinstance(value, Tunable):
        return {"tunable": value.name}
    if isinstance(value, Expr):
        number = as_int(value)
        return {"expr": format_expr(value)} if number is None else number
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    return value


def _tunable(name: str, domain: Any) -> Tunable:
    if not all(type(x) is int and x < LIMIT for x in domain):
        raise ScheduleError(f"expected whole numbers below {LIMIT} as the domain of {name!r}, got {domain!r}")
    return Tunable(require_name(name), domain)


def _step(name: Any, args: Any, tunables: Mapping[str, Tunable]) -> Step:
    if not isinstance(name, str) or not all(k.isidentifier() for k in args):
        raise ScheduleError(f"expected a primitive's name and its arguments by name, got {name!r} and {list(args)}")
    return Step(name, tuple((k, _decode(v, tunables)) for k, v in args.items()))


def _decode(value: Any, tunables: Mapping[str, Tunable], parts: bool = True) -> Any:
    if isinstance(value, dict) and "expr" in value:
        expression = read_scalars(
            value["expr"], lambda n: tunables[n] if n in tunables else slot_named(n), "the tunables, s0, s1, ..."
        )
        if len(expression) != 1:
            raise ScheduleError(f"expected one expression, got {value['expr']!r}")
        return expression[0]
    if isinstance(value, dict):
        return tunables[value["tunable"]]
    if isinstance(value, list) and parts:
        return tuple(_decode(v, tunables, parts=False) for v in value)
    if value is None or isinstance(value, (str, bool)) or (type(value) is int and abs(value) < LIMIT):
        return value
    raise ScheduleError(f"expected a name, a whole number, a tunable, an expression or a list of those, got {value!r}")


def _put(value: Any, values: Mapping[str, int]) -> Any:
    if isinstance(value, Expr):
        numbers: dict[Var, Expr] = {t: const(values[t.name]) for t in free_vars(value) if isinstance(t, Tunable)}
        return scalar_value(substitute(value, numbers))
    if isinstance(value, tuple):
        return tuple(_put(v, values) for v in value)
    return value


def scalar_value(e: Expr) -> Expr | int:
    """Return a literal as a number, any other expression as it is."""
    number = as_int(e)
    return e if number is None else number


def _show(value: Any) -> str:
    if isinstance(value, Expr):
        return format_expr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_show(v) for v in value) + "]"
    return repr(value)
