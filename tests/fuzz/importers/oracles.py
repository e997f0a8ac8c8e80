"""Oracles of ONNX programs: `onnx.reference`, ONNX Runtime without graph optimisations, and the range of moved evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tests.fuzz.importers.program import Array, Invalid, Program
from tests.fuzz.importers.rounding import Jitter

RUNS, MORE_RUNS = 4, 24
"""Moved evaluations of a program with inexact nodes, and of one whose results differ."""


def session(model: Any) -> Any:
    """Return a session of ONNX Runtime that executes the model as it is, in one thread.

    Raises:
        ImportError: ONNX Runtime is not installed.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    # products of unsigned and signed bytes are exact then; on AVX2 without VNNI, sums of two saturate at 16 bits by default
    options.add_session_config_entry("session.x64quantprecision", "1")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Runtime:
    """ONNX Runtime on a program: one session, or one for each output where it has no kernel for some node."""

    def __init__(self, program: Program, types: Mapping[str, Any]) -> None:
        self.sessions: list[tuple[list[str], list[str], Any]] = []
        parts = [program, *(program.copy(outputs=[o]).needed() for o in program.outputs)]
        for part in parts:
            try:
                self.sessions.append((part.outputs, [*part.inputs], session(part.proto(types))))
            except Exception:
                continue
            if part is program:
                break

    def results(self, call: Mapping[str, Array]) -> dict[str, Array]:
        """Run a call. Raises RuntimeError and others where a session refuses it."""
        values: dict[str, Array] = {}
        for outputs, inputs, run in self.sessions:
            values.update(zip(outputs, run.run(outputs, {i: call[i] for i in inputs}), strict=True))
        return values


def has_runtime() -> bool:
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass
class Expected:
    """What the oracles say of one call.

    Attributes:
        reference: Results by `onnx.reference`; an output without it is missing.
        runtime: Results by ONNX Runtime; empty where it has no kernel.
        exact: Outputs that no inexact node reaches.
    """

    program: Program
    call: Mapping[str, Array]
    seed: int
    reference: dict[str, Array]
    runtime: dict[str, Array]
    exact: set[str]

    @cached_property
    def moved(self) -> list[Mapping[str, Any] | None]:
        """Return results of moved evaluations; None for one that is refused."""
        return [self._moved(k) for k in range(RUNS)]

    @cached_property
    def moved_often(self) -> list[Mapping[str, Any] | None]:
        """Return results of more evaluations: of many elements, some are moved the same way in all of a few."""
        return [*self.moved, *(self._moved(k) for k in range(RUNS, MORE_RUNS))]

    def _moved(self, k: int) -> Mapping[str, Any] | None:
        jitter = Jitter(k if k < 2 else 2 + k % 2, np.random.default_rng([self.seed, k // 2]))
        try:
            return self.program.runs(self.call, jitter).by_name
        except (Invalid, KeyError, ValueError):
            return None


def expected(program: Program, call: Mapping[str, Array], run: Runtime | None, seed: int) -> Expected:
    """Ask the oracles about a call.

    Args:
        run: ONNX Runtime on the program; None where it is not installed.

    Raises:
        Invalid: No oracle evaluates the program, or ONNX Runtime refuses the call.
    """
    values = program.runs(call)
    judged = [o for o in program.outputs if o not in values.open]
    reference = {o: values.by_name[o] for o in judged if o in values.pure}
    runtime: dict[str, Array] = {}
    if run is not None:
        try:
            results = run.results(call)
            runtime = {o: results[o] for o in judged if o in results and o in values.native}
        except Exception as error:
            raise Invalid(f"refused by ONNX Runtime: {error}") from None
    return Expected(program, call, seed, reference, runtime, values.exact)


@dataclass
class Verdict:
    """What is wrong with the results of a call, and how many elements were judged.

    Attributes:
        wrong: Output and reason; "" for nothing.
        disagreements: Elements, and outputs of other shapes, on which the oracles disagree.
        unsure: Elements that rounding decides.
    """

    output: str = ""
    wrong: str = ""
    judged: int = 0
    disagreements: int = 0
    unsure: int = 0

    def add(self, other: Verdict) -> None:
        """Add the counts of another output, and what is wrong with it unless something is already."""
        if not self.wrong:
            self.output, self.wrong = other.output, other.wrong
        self.judged += other.judged
        self.disagreements += other.disagreements
        self.unsure += other.unsure


def judge(program: Program, e: Expected, actual: Mapping[str, Array]) -> Verdict:
    """Compare results with those of the oracles; an output on which they disagree does not count."""
    verdict = Verdict()
    for name in program.outputs:
        opinions = [np.asarray(r[name]) for r in (e.reference, e.runtime) if name in r]
        if not opinions:
            continue
        if any(o.shape != opinions[0].shape or o.dtype != opinions[0].dtype for o in opinions):
            verdict.disagreements += 1
            continue
        got = np.asarray(actual[name])
        if all(
            o.shape == got.shape and o.dtype == got.dtype and np.array_equal(o, got, equal_nan=o.dtype.kind == "f")
            for o in opinions
        ):
            verdict.judged += got.size
            continue
        if name in e.exact:
            _judge_output(verdict, name, opinions, [], got)
            continue
        first = Verdict()
        for evaluations in ("moved", "moved_often"):
            moved = [m and np.asarray(m[name]) for m in getattr(e, evaluations)]
            first = Verdict()
            if any(m is None or m.shape != opinions[0].shape for m in moved):
                first.unsure = opinions[0].size
            else:
                _judge_output(first, name, opinions, [m for m in moved if m is not None], got)
            if not first.wrong:
                break
        verdict.add(first)
    return verdict


def _judge_output(verdict: Verdict, name: str, opinions: list[Array], moved: list[Array], got: Array) -> None:
    first = opinions[0]
    if got.shape != first.shape or got.dtype != first.dtype:
        verdict.output = verdict.output or name
        verdict.wrong = verdict.wrong or f"expected {first.dtype}{first.shape}, got {got.dtype}{got.shape}"
        return
    tolerance = _tolerance(first, opinions, moved)
    agree = np.ones(first.shape, bool)
    for o in opinions[1:]:
        agree &= _close(first, o, tolerance)
    sure = np.ones(first.shape, bool)
    for m in moved:
        sure &= _close(first, m, np.full(first.shape, np.inf)) if first.dtype.kind == "f" else first == m
    right = np.zeros(first.shape, bool)
    for o in opinions:
        right |= _close(o, got, tolerance)
    verdict.judged += int((agree & sure).sum())
    verdict.disagreements += int((~agree).sum())
    verdict.unsure += int((agree & ~sure).sum())
    bad = agree & sure & ~right
    if bad.any() and not verdict.wrong:
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        verdict.output = name
        verdict.wrong = (
            f"element {list(at)} of {first.dtype}{first.shape}: expected {first[at]!r}, got {got[at]!r}"
            f" (tolerance {float(tolerance[at]):.3g}; {int(bad.sum())} wrong)"
        )


def _tolerance(first: Array, opinions: Sequence[Array], moved: Sequence[Array]) -> Array:
    """Return by how much each element may be off: 0 for exact results, else three ranges of the moved ones and some units."""
    if first.dtype.kind != "f" or not moved:
        return np.zeros(first.shape)
    with np.errstate(all="ignore"):
        every = np.stack([o.astype(np.float64) for o in (first, *moved)])
        spread = np.max(every, 0) - np.min(every, 0)
        info = np.finfo(first.dtype)
        tolerance = 3 * spread + 4 * float(info.eps) * np.max(np.abs(every), 0) + 8 * float(info.smallest_subnormal)
    return np.asarray(np.where(np.isfinite(tolerance), tolerance, 0.0))


def _close(a: Array, b: Array, tolerance: Array) -> Array:
    """Return which elements are equal, both NaN, or within the tolerance; an infinite tolerance admits finite numbers.

    An infinity stands for the largest finite number where a tolerance reaches beyond it.
    """
    if a.dtype.kind != "f":
        return np.asarray(a == b)
    with np.errstate(all="ignore"):
        wide, other = a.astype(np.float64), b.astype(np.float64)
        most = float(np.finfo(a.dtype).max)
        near = np.abs(np.clip(wide, -most, most) - np.clip(other, -most, most)) <= tolerance
        near &= (np.isfinite(wide) & np.isfinite(other)) | ((tolerance > 0) & np.isfinite(tolerance))
        return np.asarray((wide == other) | (np.isnan(wide) & np.isnan(other)) | near)
