"""The parts of an artifact that a model needs, and what is shown of them.

Tests: `tests/tuner/e2e/test_summary.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from relax_tune.runtime.device.c_objects import CompiledObjects
from relax_tune.runtime.program.host_program import HostProgram
from relax_tune.runtime.program.placement import Placement
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.signature import Spec, function_specs
from relax_tune.summary import counted, listed, span


class ModelSource(Protocol):
    """The parts of an `Artifact` that a running model needs."""

    @property
    def programs(self) -> tuple[Program, ...]: ...
    @property
    def host_programs(self) -> tuple[HostProgram, ...]: ...
    @property
    def constants(self) -> Mapping[str, NDArray[Any]]: ...
    @property
    def manifest(self) -> Mapping[str, Any]: ...
    @property
    def path(self) -> str: ...
    @property
    def objects(self) -> tuple[CompiledObjects, ...]: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def functions(self) -> tuple[str, ...]: ...
    @property
    def program(self) -> Program: ...
    @property
    def inputs(self) -> tuple[Spec, ...]: ...
    @property
    def outputs(self) -> tuple[Spec, ...]: ...
    def with_weights(self, arrays: Mapping[str, Any]) -> ModelSource: ...


def source_facts(source: ModelSource) -> list[tuple[str, str]]:
    """Return what is shown of an artifact or a model: signatures, bounds, tasks, size."""
    every: dict[str, Program | HostProgram] = {p.name: p for p in source.programs}
    every |= {d.name: d for d in source.host_programs}
    facts, spans = list[tuple[str, str]](), dict[str, str]()
    for name in source.functions:
        function = every[name]
        inputs, outputs = function_specs(function)
        facts.append((name, f"({', '.join(map(str, inputs))}) -> {', '.join(map(str, outputs))}"))
        if isinstance(function, Program):
            spans |= {s.name: span(s.name, s.lower, s.upper) for s in function.symbols}
    more = [("functions", listed(source.functions, 8))] if len(facts) > 4 else []
    facts = [*facts[:4], *more, *([("bounds", listed(list(spans.values()), 8))] if spans else [])]
    extra = source.manifest["extra"]
    count, lacking = extra.get("tasks"), extra.get("unmeasured")
    if isinstance(count, int) and isinstance(lacking, list):
        names = f"; not {listed([str(n) for n in lacking])}" if lacking else ""
        facts.append(("tasks", f"{count - len(lacking)} of {count} measured{names}"))
    kernels = sum(len(p.kernels) for p in source.programs)
    size = sum(a.nbytes for a in source.constants.values()) / 1e6
    return [*facts, ("size", f"{counted(kernels, 'kernel')}, {size:.1f} MB of constants")]
