"""The variants of a task: tuned, library, unfused and generic ones, and the stages and the program of each.

Tests: `tests/tuner/task/test_unfused_variants.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from relax_tune.database.records import VariantRecord
from relax_tune.errors import (
    BuildError,
    ParseError,
    RelaxTuneError,
    ScheduleError,
    UnexpectedErrorWarning,
    warn_unexpected,
)
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.codegen.loop_passes import LEAST, most_passes
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.intervals import Interval
from relax_tune.ir.passes.fusion.unfuse import FunctionStep, cut_points, split_at
from relax_tune.ir.passes.library.library_forms import Alternative
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.program.program import Program
from relax_tune.schedules.sketch import simplify_func
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.program.program_builder import KernelStage, Stage, candidate_program
from relax_tune.tuner.task.domain import Domain
from relax_tune.tuner.task.library_variants import LibraryVariants
from relax_tune.tuner.task.sketch_set import SketchSet
from relax_tune.tuner.task.step_stages import stages_outside
from relax_tune.tuner.task.task import Task
from relax_tune.tuner.task.unfused_variants import UnfusedVariant, choices_of_parts, in_parts, parts_of

LONGEST_SOURCE = 1 << 20
"""Characters of a tuned kernel's source."""


@dataclass(frozen=True, eq=False)
class TaskVariants:
    """Everything that can be dispatched for a task on a machine.

    Attributes:
        alternatives: Library routines that are available on the machine.
    """

    task: Task
    hardware: HardwareInfo
    target: CodeTarget
    alternatives: tuple[Alternative, ...] = ()
    _stages: dict[str, tuple[Stage, ...]] = field(default_factory=dict, init=False)
    _programs: dict[str, Program] = field(default_factory=dict, init=False)

    @cached_property
    def sketch_set(self) -> SketchSet:
        """The sketches of the task, which give its tuned variants and its generic one."""
        return SketchSet(self.task, self.hardware)

    @cached_property
    def library(self) -> LibraryVariants:
        """The variants around one library call."""
        return LibraryVariants(self.task.func, self.hardware, self.alternatives)

    @cached_property
    def unfused(self) -> UnfusedVariants:
        """The variants that compute the task as several functions."""
        return UnfusedVariants(self)

    def calling_libraries(self) -> tuple[VariantRecord, ...]:
        """Return the variants around one library call or, if there are none, the unfused variants that call libraries."""
        return self.library.variants or tuple(v for v in self.unfused.variants if v.kind == "library")

    def stages(self, record: VariantRecord) -> tuple[Stage, ...]:
        """Return the scheduled functions and library calls of a variant.

        Raises:
            BuildError: The record does not apply to this task in this version, or a loop exceeds `CodeTarget.loop_passes`.
        """
        stages = self._stages.get(record.key)
        if stages is None:
            with self._errors_as_build_errors(record):
                stages = self._stages_of(record)
                _check_loop_passes(stages, self.task.func.symbols, self.task.ranges, self.target)
            self._stages[record.key] = stages
        return stages

    def _stages_of(self, record: VariantRecord) -> tuple[Stage, ...]:
        stages: tuple[Stage, ...] | None
        if in_parts(record):
            stages = self.unfused.stages(parts_of(record))
        elif record.kind == "library":
            stages = self.library.stages(record)
        elif record.kind == "generic":
            stages = (KernelStage(simplify_func(self.sketch_set.generic_schedule.func)),)  # equal to a replay
        else:
            scheduled = self.sketch_set.scheduled(record)
            stages = None if scheduled is None else (KernelStage(scheduled),)
        if stages is None:
            raise BuildError(
                f"the record {record.key} of task {self.task.name!r} does not apply: expected a variant that the rules of this "
                f"version make, got {record.sketch!r:.80} of another version or hand; tune again"
            )
        return stages

    def program(self, record: VariantRecord) -> Program:
        """Return the program that measures a variant.

        Raises:
            BuildError: As `stages`, or no code can be generated.
        """
        program = self._programs.get(record.key)
        if program is None:
            stages = self.stages(record)
            with self._errors_as_build_errors(record):
                program = candidate_program(self.task.func, record.kind, stages, self.target, self.task.symbol_names)
                if record.kind == "tuned":
                    _check_source(program)
            self._programs[record.key] = program
        return program

    @contextmanager
    def _errors_as_build_errors(self, record: VariantRecord) -> Iterator[None]:
        """Turn any error of a variant's schedule or code into BuildError; an unexpected one is also warned about."""
        try:
            yield
        except (ScheduleError, ParseError) as error:
            raise BuildError(f"the record {record.key} of task {self.task.name!r} does not apply: {error}") from None
        except (RelaxTuneError, UnexpectedErrorWarning):
            raise
        except Exception as error:  # a fault in one variant must not end the tuning of its task
            warn_unexpected(f"the {record.kind} variant {record.sketch}", self.task.name, error)
            raise BuildError(f"{self.task.name}: {record.sketch}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class UnfusedVariants:
    """The variants that cut a task around its matmuls. Each part is computed by a library routine or as the rules guess."""

    whole: TaskVariants

    @cached_property
    def cuts(self) -> tuple[str, ...]:
        """Names of the blocks that begin the second and later parts; empty if the task is not cut."""
        return cut_points(self.whole.task.func)

    @cached_property
    def parts(self) -> tuple[tuple[FunctionStep, TaskVariants], ...]:
        """The parts and the variants of each, shared by all unfused variants."""
        return tuple((step, self._part(step.func)) for step in split_at(self.whole.task.func, self.cuts))

    def _part(self, func: PrimFunc) -> TaskVariants:
        # A part is not measured by itself, so its domain has no points.
        task = Task(workload_key(func), print_text(func, normalise=True), func, (), Domain((), ()))
        return replace(self.whole, task=task)

    @cached_property
    def variants(self) -> tuple[VariantRecord, ...]:
        if not self.cuts:
            return ()
        options = [(*p.library.first_of_each_routine, p.sketch_set.best_guess()) for _, p in self.parts]
        return tuple(UnfusedVariant(self.cuts, chosen).record() for chosen in choices_of_parts(options))

    def stages(self, variant: UnfusedVariant) -> tuple[Stage, ...] | None:
        """Return the stages of an unfused variant; None if it cuts the task at other blocks."""
        if not variant.begins or variant.begins != self.cuts:
            return None
        pairs = zip(self.parts, variant.variants, strict=True)
        return tuple(s for (step, part), record in pairs for s in stages_outside(step, part.stages(record)))


def _check_source(program: Program) -> None:
    """Refuse a candidate whose source would take a compiler minutes. The generic form, which is the last resort, may be longer.

    Raises:
        BuildError: The source is longer than `LONGEST_SOURCE`.
    """
    for kernel in program.kernels:
        if len(kernel.source) > LONGEST_SOURCE:
            raise BuildError(
                f"{kernel.name}: expected at most {LONGEST_SOURCE} characters of source, got {len(kernel.source)}"
            )


def _check_loop_passes(
    stages: Sequence[Stage], symbols: Sequence[Var], ranges: Sequence[Interval], target: CodeTarget
) -> None:
    """Refuse a kernel whose work-items may loop more often than the device permits.

    Some devices end such loops early without an error, so the results would be wrong.

    Args:
        ranges: Value ranges of the symbols; empty if unknown, then nothing is checked.

    Raises:
        BuildError: A loop may run more often than `CodeTarget.loop_passes` at some shape.
    """
    if target.loop_passes is None or len(ranges) < len(symbols):
        return
    env = _env(dict(zip(symbols, ranges, strict=True)))
    for stage in stages:
        if not isinstance(stage, KernelStage):
            continue
        inner = _env({v: interval(e, env) for v, e in stage.meaning.items()}) if stage.meaning else env
        passes = most_passes(stage.func, target, inner)
        if passes is None or passes > target.loop_passes:
            raise BuildError(
                f"{stage.func.name}: expected at most {target.loop_passes} passes of a work-item through its loops, after which this "
                f"device ends them without an error, got {'no bound' if passes is None else f'up to {passes}'}; give the model's "
                "symbols lower upper bounds, or use another device"
            )


def _env(ranges: Mapping[Var, Interval]) -> Env:
    return Env({v: (LEAST if low is None else low, high) for v, (low, high) in ranges.items()})
