"""One scheduled function as a kernel: called, checked, timed, described and tuned.

Tests: `tests/tuner/kernels/test_kernel.py`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError, ScheduleError, UserError
from relax_tune.ir.check.in_bounds import least_sizes
from relax_tune.ir.check.verify import verify
from relax_tune.ir.codegen.generate import GeneratedKernel, generate, split_kernels
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.stmt import blocks, loops, stores
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import Fill, Program
from relax_tune.schedules.cost.features import FeatureFunction
from relax_tune.schedules.primitives.loops.loops import require_independent
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import Sketch, instantiate, simplify_func
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.job.stores import Database, opened_store
from relax_tune.tuner.kernels.target import KernelTarget, device_target, text_target
from relax_tune.tuner.kernels.timing import REPEATS, KernelTiming, measured, measured_here, policy_of
from relax_tune.tuner.kernels.tuning import Bounds, bounds_by_symbol, tuned_schedule
from relax_tune.tuner.learn.prior import Coverage, family_of, packaged_prior, sketch_names, with_machine
from relax_tune.tuner.learn.recorded_rows import log_roofline
from relax_tune.tuner.option import names_arguments
from relax_tune.tuner.program.program_builder import KernelStage, candidate_program
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.settings import merge_settings
from relax_tune.tuner.task.check import check_at
from relax_tune.tuner.task.domain import CHECK_SIZES, Domain
from relax_tune.tuner.task.task import Task

Array = NDArray[Any]
Scheduled = PrimFunc | Schedule


def source(func: Scheduled, target: str = "c", *, values: Mapping[str, int] | None = None) -> str:
    """Return the source text of a function's kernels: C, OpenCL C, CUDA or WGSL.

    Args:
        func: A tensor function, whose loops run as they are written, or a schedule of one.
        target: Name of a device. `opencl`, `cuda` and `webgpu` need no such device here: without one, the text is for a typical one.
        values: Numbers for the schedule's tunables.

    Raises:
        UserError: An argument is wrong.
        BuildError: The target cannot express the function, or would ignore the kind of a loop; the message names the loop.

    Example:
        ```python
        print(rt.source(schedule, "cuda"))
        ```
    """
    original, scheduled = _scheduled(func, values)
    return "\n".join(k.source for k in _generated(original, scheduled, text_target(target)))


def kernel(func: Scheduled, target: str = "c", *, values: Mapping[str, int] | None = None) -> Kernel:
    """Return the kernel of a function on a device of this machine. Nothing is compiled before it is called or timed.

    Args:
        func: A tensor function, whose loops run as they are written, or a schedule of one.
        target: Name of a device, such as `c`, `opencl` or `cuda`.
        values: Numbers for the schedule's tunables.

    Raises:
        UserError: An argument is wrong, or there is no such device.
        VerifyError: The function is not well-formed, or an index is not proved to be inside its buffer.
        ScheduleError: Iterations of a loop that the function declares parallel may depend on each other.
        BuildError: The target cannot express the function, or would ignore the kind of a loop; the message names the loop.

    Example:
        ```python
        kernel = rt.kernel(schedule, "c")
        y = kernel(x, w)
        kernel.check()
        print(kernel.time(n=512))
        ```
    """
    original, scheduled = _scheduled(func, values)
    device = device_target(target)
    _generated(original, scheduled, device)
    return Kernel(original, scheduled, device, func if isinstance(func, Schedule) else Schedule(original))


def _scheduled(func: Scheduled, values: Mapping[str, int] | None) -> tuple[PrimFunc, PrimFunc]:
    """Return a function as it was written, and as it is scheduled, simplified and without tunables."""
    if not isinstance(func, (PrimFunc, Schedule)):
        raise UserError(
            f"expected a tensor function, as parse_prim_func returns it, or a Schedule of one, got a {type(func).__name__}"
        )
    schedule = func if isinstance(func, Schedule) else Schedule(func)
    verify(IRModule({schedule.original.name: schedule.original}))
    least_sizes(schedule.original)
    _check_kinds(schedule.original)
    given, names = dict(values or {}), [*schedule.tunables]
    if given.keys() != set(names):
        raise UserError(
            f"{schedule.func.name}: expected values for the tunables {', '.join(names) or 'of a schedule, which has none'}, got "
            f"{', '.join(map(str, given)) or 'none'}; give values={{name: number}}"
        )
    scheduled = instantiate(Sketch(schedule.func.name, schedule.func, schedule.trace, ()), given)
    if any(b.role == "prepack" for b in blocks(scheduled.body)):
        raise UserError(
            f"{schedule.func.name}: mark_prepack lays out weights once before all calls, but the inputs of a kernel may change at each; "
            "leave it out"
        )
    return replace(schedule.original, consts=()), replace(scheduled, consts=())


def _check_kinds(func: PrimFunc) -> None:
    """Prove that iterations of the loops that a text declares parallel are independent, as the steps of a schedule do.

    Raises:
        ScheduleError: There is no proof; the message names the loop.
    """
    for loop in loops(func.body, "parallel", "vectorized", "group", "item"):
        if len(stores(loop.body)) != sum(len(b.own_stores) for b in blocks(loop.body)):
            raise ScheduleError(
                f"{func.name}: expected blocks below the {loop.kind} loop {loop.var.name!r}, which say what its iterations share; got a "
                "store outside of a block"
            )
        require_independent(func, loop, loop.kind)


def _generated(original: PrimFunc, scheduled: PrimFunc, target: KernelTarget) -> list[GeneratedKernel]:
    """Return the kernels of a function.

    Raises:
        BuildError: A loop's kind or mark would have no effect.
    """
    kernels = [generate(part, target.code) for part in split_kernels(scheduled)]
    ignored = [sentence for k in kernels for sentence in k.ignored]
    if ignored:
        raise BuildError(f"{original.name} on {target.name}: these have no effect:\n  " + "\n  ".join(ignored))
    return kernels


class Kernel:
    """A function on a device. Call it with NumPy arrays; it returns fresh ones.

    A kernel that was called holds its device until `close`, or until it is no longer used. Not thread-safe.

    Attributes:
        name: Name of the function.
        schedule: The schedule; its trace prints as Python (`schedule.trace.as_python()`).
        func: The scheduled function.
    """

    def __init__(
        self,
        original: PrimFunc,
        scheduled: PrimFunc,
        target: KernelTarget,
        schedule: Schedule,
        names: Sequence[str] = (),
        symbols: Sequence[str] = (),
    ) -> None:
        self.name, self.schedule, self.func = original.name, schedule, scheduled
        self._original, self._target = original, target
        self._names = tuple(names) or tuple(b.name for b in original.buffers)
        self._symbols = tuple(symbols) or tuple(v.name for v in original.symbols)
        self._opened: Executor | None = None

    @property
    def target(self) -> str:
        """Name of the device."""
        return self._target.name

    @property
    def source(self) -> str:
        """Source text of the kernels."""
        return "\n".join(k.source for k in self._program.kernels)

    def __repr__(self) -> str:
        sizes = f"; {', '.join(self._symbols)}" if self._symbols else ""
        inputs, outputs = self._names[: len(self._original.input_buffers)], self._names[-self._original.outputs :]
        return f"<kernel {self.name}({', '.join(inputs)}{sizes}) -> {', '.join(outputs)} on {self.target}>"

    # -- programs ---------------------------------------------------------------------------------------------------

    @cached_property
    def _program(self) -> Program:
        """The program of calls, with the function's own names."""
        program = self._program_of(dict(zip(self._original.symbols, self._symbols)), self._names)
        # The contents that measurements draw are no limits of a caller's: each index is proved to be inside its buffer.
        return replace(program, buffers=tuple(replace(b, fill=Fill()) for b in program.buffers))

    @cached_property
    def _measured_program(self) -> Program:
        """The program of measurements, with the names that random inputs are drawn by."""
        return self._program_of(self._task.symbol_names, ())

    def _program_of(self, symbols: Mapping[Var, str], names: Sequence[str]) -> Program:
        stages = (KernelStage(self.func),)
        return candidate_program(self._original, "generic", stages, self._target.code, symbols, names)

    @cached_property
    def _task(self) -> Task:
        return Task("", "", self._original, (), Domain((), ()))

    # -- calls ------------------------------------------------------------------------------------------------------

    def __call__(self, *arrays: Array, **named: Any) -> Any:
        """Run the kernel.

        Args:
            arrays: The inputs, in order.
            named: Inputs by name, and values of symbols that are no dim of an input.

        Returns:
            The result; a tuple of several.

        Raises:
            UserError: An argument does not fit; the message names it.
        """
        inputs, sizes = self._arguments(arrays, named)
        if self._least_size and any(0 in np.shape(array) for array in inputs):
            raise UserError(
                f"{self.name}: expected no empty inputs, got the shapes {', '.join(str(np.shape(a)) for a in inputs)}; it reads elements "
                "of them at any size"
            )
        outputs = self._executor.run(inputs, self._given_symbols(inputs, sizes))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _arguments(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the inputs in order, and the other arguments."""
        names = self._names[: len(self._original.input_buffers)]
        if len(arrays) > len(names):
            raise UserError(f"{self.name}: expected {len(names)} inputs ({', '.join(names)}), got {len(arrays)}")
        given, sizes = dict(zip(names, arrays)), {n: v for n, v in named.items() if n not in names}
        for name in names:
            if name in named and name in given:
                raise UserError(f"{self.name}: expected input {name} once, got it by position and by name")
            if name not in named and name not in given:
                raise UserError(f"{self.name}: expected the inputs {', '.join(names)}, got none for {name}")
            given.setdefault(name, named.get(name))
        return [given[name] for name in names], sizes

    def _given_symbols(self, inputs: Sequence[Any], sizes: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the value of each symbol if some are no dim of an input; None if the dims say all."""
        binders: dict[str, int] = {}
        for buffer, array in zip(self._original.input_buffers, inputs):
            for dim, size in zip(buffer.shape, np.shape(array)):
                if isinstance(dim, Var):
                    binders.setdefault(self._symbol_names[dim], size)
        left = [n for n in self._symbols if n not in self._bound_symbols]
        self._check_sizes(left, sizes)
        return (
            tuple({**binders, **sizes}[n] for n in self._symbols)
            if left and len(binders) == len(self._bound_symbols)
            else None
        )

    @cached_property
    def _least_size(self) -> int:
        """Size of all symbols from which on no access leaves its buffer."""
        return least_sizes(self._original)

    @cached_property
    def _symbol_names(self) -> Mapping[Var, str]:
        return dict(zip(self._original.symbols, self._symbols))

    @cached_property
    def _bound_symbols(self) -> frozenset[str]:
        """Symbols that are dims of inputs."""
        dims = {d for b in self._original.input_buffers for d in b.shape if isinstance(d, Var)}
        return frozenset(self._symbol_names[v] for v in dims)

    def _check_sizes(self, names: Sequence[str], sizes: Mapping[str, Any]) -> None:
        listed = ", ".join(names)
        wrong = [n for n in names if n not in sizes] + [n for n in sizes if n not in names]
        if wrong:
            what = f"a value for each of {listed}" if names else "no other arguments than inputs"
            raise UserError(
                f"{self.name}: expected {what}, got {', '.join(sizes) or 'none'}; {wrong[0]} is {_lack(wrong[0], sizes)}"
            )
        for name in names:
            if (
                isinstance(sizes[name], bool)
                or not isinstance(sizes[name], (int, np.integer))
                or sizes[name] < self._least_size
            ):
                raise UserError(
                    f"{self.name}: expected {name} as a whole number of at least {self._least_size}, got {sizes[name]!r:.80}"
                )

    @property
    def _executor(self) -> Executor:
        if self._opened is None or self._opened.refusal:
            device = open_device(self.target)
            try:
                self._opened = Executor(self._program, device, {})
            except BaseException:
                device.close()
                raise
            self._finalizer = weakref.finalize(self, _close, self._opened)
        return self._opened

    def close(self) -> None:
        """Release the device and its memory; a later call opens it again."""
        if self._opened is not None:
            self._finalizer()
            self._opened = None

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- measurements -----------------------------------------------------------------------------------------------

    def check(self, **sizes: int) -> None:
        """Compare the results for random inputs with the unscheduled function's, computed by the interpreter.

        The kernel runs in a separate process, so that one that crashes or hangs is an error. The tolerance grows with the length of
        sums and the size of results.

        Args:
            sizes: Value of each symbol; without any, two shapes that are no multiples of common tiles.

        Raises:
            UserError: A size is missing, unknown or wrong.
            BuildError: A result differs, or the kernel fails; the message says where.
        """
        if sizes:
            self._check_sizes(self._symbols, sizes)
            points = [tuple(int(sizes[n]) for n in self._symbols)]
        else:
            points = list(dict.fromkeys((few,) * len(self._symbols) for few, _ in CHECK_SIZES))
        cases = [check_at(self._task, point) for point in points]
        self._measure((), REPEATS, cases)

    def time(self, inputs: Sequence[Array] | None = None, *, repeats: int = REPEATS, **sizes: int) -> KernelTiming:
        """Time the kernel by itself, with warm caches.

        Samples leave out the time in which other processes had the processors, and disturbed ones are taken again.

        Args:
            inputs: Arrays to run on, in order; then the kernel runs in this process. Without them it runs on random arrays in a
                separate process, which survives a kernel that crashes.
            repeats: Number of samples; a kernel of more than half a second gets two.
            sizes: Value of each symbol; with inputs only the symbols that are no dim of one.

        Raises:
            UserError: An argument is wrong.
            BuildError: The kernel fails.
            MeasureError: The device cannot measure.
        """
        policy = policy_of(repeats)
        if inputs is None:
            self._check_sizes(self._symbols, sizes)
            point = {f"s{a}": int(sizes[n]) for a, n in enumerate(self._symbols)}
            (timing,) = self._measure([point], repeats)
            return KernelTiming({n: int(sizes[n]) for n in self._symbols}, timing.samples_secs, timing.contention)
        if isinstance(inputs, np.ndarray) or not isinstance(inputs, Sequence):
            raise UserError(f"{self.name}: expected inputs as a list of arrays, got a {type(inputs).__name__}")
        arrays, _ = self._arguments(inputs, {})
        executor = self._executor
        matched, symbols, _ = executor.match(arrays, self._given_symbols(arrays, sizes))
        timing = measured_here(executor, [np.ascontiguousarray(a) for a in matched], symbols, policy)
        return KernelTiming(dict(zip(self._symbols, symbols)), timing.samples_secs, timing.contention)

    def _measure(self, points: Sequence[Mapping[str, int]], repeats: int, checks: Sequence[Any] = ()) -> Sequence[Any]:
        try:
            return measured(self._target.runner, self._measured_program, points, policy_of(repeats), checks)
        except BuildError as error:
            raise BuildError(f"{self.name} on {self.target}: {self._in_own_names(str(error))}") from None

    def _in_own_names(self, text: str) -> str:
        """Replace the names of the measured program by the function's own."""
        text = re.sub(r"\bp(\d+)\b", lambda m: _at(self._names, m), text)
        return re.sub(r"\bs(\d+)\b", lambda m: _at(self._symbols, m), text)

    @names_arguments()
    def tune(
        self,
        *,
        db: Database = None,
        trials: int | None = None,
        bounds: Bounds | None = None,
        on_progress: Callable[[TuningProgress], None] = lambda _: None,
        **overrides: Any,
    ) -> Kernel:
        """Search for the schedule of the unscheduled function that is fastest on this device.

        The search is the one of models: every candidate is checked and timed in a separate process, and the records go to the same
        database. A model with the same function reuses them, and so does a later call, which measures only what is missing.

        Args:
            db: An open store, a URL or a file; None: records.db in the user data folder.
            trials: Candidates to measure; None: by `effort`.
            bounds: Least and largest value of each symbol. The schedule is the one with the least time over sizes spread between them.
            on_progress: Called after every batch.
            overrides: Other fields of the settings of `rt.tune`, such as `effort`, `strategy` or `seed`.

        Returns:
            The kernel of the fastest schedule, whose steps `kernel.schedule.trace.as_python()` prints. It may be slower than this one,
            which was written with knowledge that the rules of the search lack: time both.

        Raises:
            UserError: An argument is wrong.
            BuildError: No candidate works.
            MeasureError: The device cannot measure.
            DatabaseError: Records cannot be stored.
        """
        chosen = merge_settings("tune", None, {**overrides, "target": self.target, "trials": trials})
        check_strategy(chosen.strategy)
        with opened_store(chosen.db if db is None else db, wait_secs=chosen.wait_secs) as (store, _):
            named = bounds_by_symbol(self.name, self._symbol_names, bounds or {})
            func, schedule = tuned_schedule(self._original, self._target, store, chosen, named, on_progress)
        return Kernel(func, simplify_func(schedule.func), self._target, schedule, self._names, self._symbols)

    # -- descriptions -----------------------------------------------------------------------------------------------

    def features(self, **sizes: int) -> dict[str, float]:
        """Return what a cost model sees of the kernel: work, bytes, tiles, reuse, in the form of `docs/design/schedules.md`.

        Counts are given as log2(1 + count), shares as they are.

        Args:
            sizes: Value of each symbol.

        Raises:
            UserError: A size is missing, unknown or wrong.
        """
        row, names = self._features(sizes)
        return dict(zip(names, map(float, row)))

    def predicted(self, **sizes: int) -> float | None:
        """Return the seconds that the installed cost model predicts for the kernel at these sizes.

        It was trained on measured kernels of other functions, and ranks schedules of one function better than it tells seconds.

        Args:
            sizes: Value of each symbol.

        Returns:
            None without such a model (it needs the package xgboost), or if it was trained on no kernels with such types, instructions
            or vectors.

        Raises:
            UserError: A size is missing, unknown or wrong.
        """
        row, names = self._features(sizes)
        hardware = self._target.hardware
        prior = packaged_prior(family_of(hardware))
        common = sketch_names(hardware)
        if prior is None or names[: len(common)] != common:
            return None
        if not prior.covers >= Coverage.of(self._original, [self.func], hardware):
            return None
        rows = row[None, : len(common)]
        log_time = prior.log_time(with_machine(rows, hardware)) + log_roofline(rows, hardware)
        return float(np.exp(log_time[0]))

    def _features(self, sizes: Mapping[str, int]) -> tuple[NDArray[np.float32], tuple[str, ...]]:
        self._check_sizes(self._symbols, sizes)
        function = FeatureFunction(Sketch(self.name, self.func, Trace(), ()), self._target.hardware)
        points = {v.name: np.asarray([sizes[n]], np.int64) for v, n in self._symbol_names.items()}
        return function({}, points)[0, 0], function.names


def _lack(name: str, sizes: Mapping[str, Any]) -> str:
    return "unknown" if name in sizes else "missing"


def _at(names: Sequence[str], match: re.Match[str]) -> str:
    number = int(match[1])
    return names[number] if number < len(names) else match[0]


def _close(executor: Executor) -> None:
    executor.close()
    executor.device.close()
