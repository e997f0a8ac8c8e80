"""Traces: the recorded primitives of a schedule, as data (DESIGN 2 and 6).

A trace is JSON: `{"tunables": {name: domain}, "steps": [[primitive, {argument: value}]]}`. An argument is a name, a number,
a list of those, None, or `{"tunable": name}`. It replays on any structurally equal function and prints as Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_tune.errors import ScheduleError
from relax_tune.ir.expr import Expr, Tunable, as_int


@dataclass(frozen=True, slots=True)
class Step:
    """One applied primitive; `args` in the order of its parameters, after the function."""

    primitive: str
    args: tuple[tuple[str, Any], ...]

    def as_python(self) -> str:
        """The step as a line of Python over a `Schedule` called `s`."""
        args = "".join(f", {k}={_show(v)}" for k, v in self.args)
        return f"s.apply({self.primitive!r}{args})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names among the arguments, in order; of loops, blocks and buffers, and words such as kinds."""
        parts = [v for _, value in self.args for v in (value if isinstance(value, (list, tuple)) else (value,))]
        return tuple(v for v in parts if isinstance(v, str))


@dataclass(frozen=True, slots=True)
class Trace:
    """Steps in order, the tunables they mention, and the facts they rely on being true of the tunables."""

    steps: tuple[Step, ...] = ()
    tunables: tuple[Tunable, ...] = ()

    def to_json(self) -> str:
        """Canonical text; the same trace gives the same bytes."""
        data = {
            "tunables": {t.name: list(t.domain) for t in self.tunables},
            "steps": [[s.primitive, {k: _encode(v) for k, v in s.args}] for s in self.steps],
        }
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Trace:
        """Raises ScheduleError for text that is no trace."""
        try:
            data = json.loads(text)
            tunables = {str(n): Tunable(str(n), [int(x) for x in d]) for n, d in data["tunables"].items()}
            steps = tuple(
                Step(str(name), tuple((str(k), _decode(v, tunables)) for k, v in args.items()))
                for name, args in data["steps"]
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ScheduleError(
                f"wanted a schedule trace (JSON with tunables and steps), found text with {error!r}"
            ) from None
        return Trace(steps, tuple(tunables.values()))

    def with_values(self, values: Mapping[str, int]) -> Trace:
        """The trace with every tunable replaced by its value. Raises ScheduleError for a missing or foreign value."""
        for t in self.tunables:
            if values.get(t.name) not in t.domain:
                raise ScheduleError(
                    f"tunable {t.name!r} wants one of {list(t.domain)}, found {values.get(t.name)!r} among the parameters"
                )
        return Trace(tuple(Step(s.primitive, tuple((k, _put(v, values)) for k, v in s.args)) for s in self.steps))

    def as_python(self, values: Mapping[str, int] | None = None) -> str:
        """The trace as a Python program over a `Schedule` called `s`; its tunables are free, or numbers when `values` are
        given. Raises ScheduleError for a value that is missing or outside its domain."""
        if values is None:
            lines = [f"{t.name} = Tunable({t.name!r}, {list(t.domain)})" for t in self.tunables]
        else:
            self.with_values(values)
            lines = [f"{t.name} = {values[t.name]}  # of {', '.join(map(str, t.domain))}" for t in self.tunables]
        return "\n".join([*lines, *(step.as_python() for step in self.steps)])


def _encode(value: Any) -> Any:
    if isinstance(value, Tunable):
        return {"tunable": value.name}
    if isinstance(value, Expr):
        number = as_int(value)
        if number is None:
            raise ScheduleError(f"a trace holds names, numbers and tunables; found the expression {value!r}")
        return number
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    return value


def _decode(value: Any, tunables: Mapping[str, Tunable]) -> Any:
    if isinstance(value, dict):
        return tunables[value["tunable"]]
    if isinstance(value, list):
        return tuple(_decode(v, tunables) for v in value)
    return value


def _put(value: Any, values: Mapping[str, int]) -> Any:
    if isinstance(value, Tunable):
        return values[value.name]
    if isinstance(value, tuple):
        return tuple(_put(v, values) for v in value)
    return value


def _show(value: Any) -> str:
    if isinstance(value, Tunable):
        return value.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_show(v) for v in value) + "]"
    return repr(value)
