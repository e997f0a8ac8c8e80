"""The standard order of passes, from operators to fused tensor functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relax_tune.ir.function import IRModule, PrimFunc
from relax_tune.ir.graph import CallTIR, Function
from relax_tune.ir.op.base import RuntimeCheck
from relax_tune.ir.passes.cleanup import CancelViews, DeadCode, Deduce, FoldConstants, TidyNames
from relax_tune.ir.passes.collapse import CollapseDims
from relax_tune.ir.passes.fuse import FuseOps
from relax_tune.ir.passes.legalize import Legalize

Pass = Callable[[IRModule], IRModule]

STANDARD: tuple[Pass, ...] = (
    Deduce(),
    FoldConstants(),
    DeadCode(),
    Legalize(strict=True),
    FuseOps(),
    DeadCode(),
    CollapseDims(),
    CancelViews(),
    FoldConstants(),
    DeadCode(),
    TidyNames(),
)


@dataclass(frozen=True, slots=True, eq=False)
class LoweredModule:
    """A module whose graph functions hold only `call_tir`, `call_dps_library`, views, tuples and match_cast.

    checks: what deduction left to run time; stages: every pass that changed something with the module it made."""

    module: IRModule
    checks: tuple[RuntimeCheck, ...]
    stages: tuple[tuple[str, IRModule], ...]

    @property
    def main(self) -> Function:
        found = self.module.functions["main"]
        assert isinstance(found, Function)
        return found

    @property
    def prims(self) -> Mapping[str, PrimFunc]:
        """The unique tensor functions by name."""
        return {n: f for n, f in self.module.functions.items() if isinstance(f, PrimFunc)}

    def calls(self) -> tuple[CallTIR, ...]:
        """Every call of a tensor function in `main`, in order."""
        return tuple(b.value for b in self.main.bindings if isinstance(b.value, CallTIR))


def run_passes(module: IRModule, passes: tuple[Pass, ...]) -> tuple[tuple[str, IRModule], ...]:
    """Each pass that changed something, and the module after it."""
    found: list[tuple[str, IRModule]] = []
    for step in passes:
        new = step(module)
        if new is not module:
            found.append((repr(step), new))
        module = new
    return tuple(found)


def lower(module: IRModule, passes: tuple[Pass, ...] = STANDARD) -> LoweredModule:
    """Deduce, fold, legalise, fuse, collapse dims and clean up.

    Raises: DeduceError for a graph that cannot fit together, BuildError for one whose dims are not known enough."""
    checks = Deduce.checks(module)
    stages = run_passes(module, passes)
    return LoweredModule(stages[-1][1] if stages else module, checks, stages)
