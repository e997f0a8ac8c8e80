"""Kernels of single functions: results against NumPy, checks, times, descriptions and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import relax_tune as rt
from relax_tune.errors import BuildError, RelaxTuneError, ScheduleError, UserError, VerifyError
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.stmt import BufferStore, map_blocks
from relax_tune.tuner.kernels.kernel import Kernel
from relax_tune.tuner.kernels.target import TYPICAL, device_target
from relax_tune.tuner.kernels.timing import KernelTiming

MATMUL = rt.parse_prim_func("""
@prim_func(outputs=1)
def matmul(x: Buffer((n, 48), f32), w: Buffer((48, 64), f32), y: Buffer((n, 64), f32)):
    for i in serial(n):
        for j in serial(64):
            for k in serial(48):
                with block("matmul"):
                    vi = spatial(n, i)
                    vj = spatial(64, j)
                    vk = reduce(48, k)
                    with init():
                        y[vi, vj] = 0.0
                    y[vi, vj] = y[vi, vj] + x[vi, vk] * w[vk, vj]
""")
SPLIT = rt.parse_prim_func("""
@prim_func(outputs=2)
def parts(x: Buffer((n,), f32), low: Buffer((m,), f32), twice: Buffer((n,), f32), m: i64):
    for i in serial(m):
        with block("low"):
            vi = spatial(m, i)
            low[vi] = x[min(vi, n - 1)]
    for j in serial(n):
        with block("twice"):
            vj = spatial(n, j)
            twice[vj] = x[vj] * 2.0
""")


def tiled(columns: Any = 16) -> rt.Schedule:
    s = rt.Schedule(MATMUL)
    rows, row = s.split("i", [None, 4])
    tiles, column = s.split("j", [None, columns])
    s.reorder([rows, tiles, "k", row, column])
    s.parallel(rows)
    s.decompose_reduction("matmul", "k")
    return s


def arrays(n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, 48), np.float32), rng.standard_normal((48, 64), np.float32)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with rt.kernel(tiled(), "c") as opened:
        yield opened


@pytest.mark.ccompiler
@pytest.mark.slow
def test_kernel_call_agrees_with_numpy(kernel: Kernel) -> None:
    for n in (0, 1, 7, 64):
        x, w = arrays(n)
        np.testing.assert_allclose(kernel(x, w), x @ w, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(kernel(w=w, x=x), kernel(x, w=w))
    kernel.close()
    np.testing.assert_allclose(kernel(*arrays(3)), np.matmul(*arrays(3)), rtol=1e-5, atol=1e-4)


@pytest.mark.opencl
@pytest.mark.slow
def test_kernel_on_opencl_agrees_with_numpy() -> None:
    with rt.kernel(tiled(), "opencl") as opened:
        x, w = arrays(9)
        np.testing.assert_allclose(opened(x, w), x @ w, rtol=1e-5, atol=1e-4)
        assert "get_group_id(0)" in opened.source


@pytest.mark.ccompiler
@pytest.mark.slow
def test_kernel_of_two_results_takes_sizes_by_name() -> None:
    with rt.kernel(SPLIT, "c") as opened:
        x = np.arange(5, dtype=np.float32)
        low, twice = opened(x, m=3)
        assert low.tolist() == [0, 1, 2] and twice.tolist() == [0, 2, 4, 6, 8]
        assert len(opened.time([x], m=2, repeats=3).samples) >= 2
        with pytest.raises(UserError, match=r"value for each of m.* m is missing"):
            opened(x)


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_check_accepts_right_results_and_names_wrong_ones(kernel: Kernel) -> None:
    kernel.check()
    kernel.check(n=33)
    two = map_blocks(
        kernel.func.body,
        lambda b: replace(b, body=BufferStore(b.body.buffer, b.body.indices, const(2.0, b.body.buffer.dtype))),
    )
    wrong = Kernel(MATMUL, replace(kernel.func, body=two), device_target("c"), rt.Schedule(MATMUL))
    with pytest.raises(BuildError, match=r"matmul on c: .*wrong-result.*'n': 5.*\by\b"):
        wrong.check(n=5)


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_time_returns_samples_of_the_requested_sizes(kernel: Kernel) -> None:
    timing = kernel.time(n=16, repeats=7)
    assert timing.sizes == {"n": 16} and 5 <= len(timing.samples) <= 7 * 3
    low, high = timing.quartiles
    assert 0 < min(timing.samples) <= low <= timing.median <= high <= max(timing.samples)
    assert re.match(r"[\d.]+ [mun]?s \(quartiles .* to .*, \d+ samples", str(timing))
    x, w = arrays(11)
    own = kernel.time([x, w], repeats=3)
    assert own.sizes == {"n": 11} and len(own.samples) >= 3
    np.testing.assert_allclose(kernel(x, w), x @ w, rtol=1e-5, atol=1e-4)


def test_timing_quartiles_agree_with_numpy() -> None:
    samples = tuple(np.random.default_rng(0).random(11))
    timing = KernelTiming({}, samples, 0.5)
    expected = np.quantile(samples, [0.25, 0.5, 0.75])
    np.testing.assert_allclose([timing.quartiles[0], timing.median, timing.quartiles[1]], expected)
    assert "waited for processors 50% of the time" in str(timing)
    assert KernelTiming({}, (0.25,)).quartiles == (0.25, 0.25)


@pytest.mark.ccompiler
def test_features_count_operations_and_bytes(kernel: Kernel) -> None:
    features = kernel.features(n=100)
    count = lambda name: round(2 ** features[name] - 1, -2)
    assert count("bytes") == round(4 * (100 * 48 + 48 * 64 + 100 * 64), -2)
    assert count("flops") == round(2 * 100 * 48 * 64 + 100 * 64, -2)  # and the zeros
    assert count("parallel") == round(25, -2)


@pytest.mark.ccompiler
@pytest.mark.slow
def test_predicted_seconds_grow_with_the_work(kernel: Kernel) -> None:
    pytest.importorskip("xgboost")
    small, large = kernel.predicted(n=8), kernel.predicted(n=4096)
    if kernel._target.hardware.lanes > 8:
        assert small is None and large is None, "the installed model was trained on kernels with at most 8 lanes"
        return
    assert small is not None and large is not None and 0 < 10 * small < large


@pytest.mark.parametrize(
    ("target", "sign"),
    [("c", "RT_PARALLEL_FOR"), ("opencl", "get_group_id"), ("cuda", "blockIdx"), ("webgpu", "@compute")],
)
def test_source_is_of_the_target(target: str, sign: str) -> None:
    assert sign in rt.source(tiled(), target)


def test_source_of_a_missing_device_is_for_a_typical_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise UserError(f"no {name}")

    monkeypatch.setattr("relax_tune.tuner.kernels.target.device_target", missing)
    for target in TYPICAL:
        assert "matmul" in rt.source(tiled(), target)
    for target in ("c", "cuda:7"):
        with pytest.raises(UserError, match=f"no {target}"):
            rt.source(tiled(), target)


def test_tunables_of_a_schedule_take_values() -> None:
    s = rt.Schedule(MATMUL)
    s.split("j", [None, s.tunable("T", [8, 16])])
    assert rt.source(s, "c", values={"T": 8}) != rt.source(s, "c", values={"T": 16})
    for values, error in [({}, UserError), ({"T": 8, "U": 1}, UserError), ({"T": 9}, ScheduleError)]:
        with pytest.raises(error, match="T"):
            rt.source(s, "c", values=values)


WRONG_CALLS: dict[str, tuple[Callable[[Kernel], object], str]] = {
    "an input less": (lambda k: k(arrays(2)[0]), "none for w"),
    "an input more": (lambda k: k(*arrays(2), 3), "expected 2 inputs"),
    "an input twice": (lambda k: k(*arrays(2), x=1), "input x once"),
    "an unknown name": (lambda k: k(*arrays(2), z=1), "z is unknown"),
    "another type": (lambda k: k(arrays(2)[0].astype(np.float64), arrays(2)[1]), "expected dtype float32"),
    "another shape": (lambda k: k(arrays(2)[0], arrays(2)[1].T), "parameter w: expected 48"),
    "a text": (lambda k: k("one", arrays(2)[1]), "NumPy array"),
    "no size": (lambda k: k.time(), "each of n, got none"),
    "an unknown size": (lambda k: k.check(n=1, m=2), "m is unknown"),
    "a size that is a text": (lambda k: k.features(n="3"), "whole number"),  # type: ignore[arg-type]
    "a negative size": (lambda k: k.predicted(n=-1), "whole number"),
    "no sample": (lambda k: k.time(n=2, repeats=0), "at least 1, got 0"),
    "one array as inputs": (lambda k: k.time(arrays(2)[0]), "as a list of arrays"),  # type: ignore[arg-type]
}


@pytest.mark.ccompiler
@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_argument_is_refused_by_name(case: str, kernel: Kernel) -> None:
    call, subject = WRONG_CALLS[case]
    with pytest.raises(UserError, match=f"({subject})"):
        call(kernel)


def _item() -> rt.Schedule:
    s = rt.Schedule(MATMUL)
    s.bind("i", "item")
    return s


def _prefetch() -> rt.Schedule:
    s = tiled()
    s.prefetch("k", 4)
    return s


@pytest.mark.parametrize(
    ("make", "target", "error", "subject"),
    [
        (lambda: "matmul", "c", UserError, "got a str"),
        (tiled, 3, UserError, "got a int"),
        (_item, "c", BuildError, "work-item loop i"),
        (_prefetch, "cuda", BuildError, "prefetch of loop 'k': cuda kernels do not prefetch"),
        (lambda: replace(MATMUL, params=MATMUL.params[1:]), "c", VerifyError, "x"),
    ],
)
def test_source_of_a_wrong_schedule_is_refused(
    make: Callable[[], Any], target: Any, error: type[RelaxTuneError], subject: str
) -> None:
    with pytest.raises(error, match=subject):
        rt.source(make(), target)


def test_schedule_text_and_errors_name_loops() -> None:
    s = rt.Schedule(MATMUL)
    assert repr(s) == "<schedule of matmul after 0 steps; loops i, j, k>" and "with block" in str(s)
    with pytest.raises(ScheduleError, match="the function has i, j, k"):
        s.split("row", [None, 4])
    with pytest.raises(ScheduleError, match="got a str"):
        rt.Schedule("matmul")  # type: ignore[arg-type]
    s.split("i", [None, 4])
    assert s.original is MATMUL and s.func is not MATMUL


@pytest.mark.parametrize(
    ("step", "subject"),
    [
        (lambda s: s.split("i", 4), "list of whole numbers, expressions or None, got 4"),
        (lambda s: s.split("i", ["4", None]), "list of whole numbers"),
        (lambda s: s.reorder("j", "i"), "names, got 2 by position"),
        (lambda s: s.fuse("ij"), "list of names, got 'ij'"),
        (lambda s: s.vectorize(3), "as a text, got 3"),
        (lambda s: s.bind("i", "thread"), "group, item, got 'thread'"),
        (lambda s: s.inner_loops("matmul", "z"), "i, j, k; got 'z'"),
        (lambda s: s.cache_read(block="matmul", buffer="z", scope="local"), "it reads w, x"),
    ],
)
def test_wrong_step_is_refused_and_changes_nothing(step: Callable[[Any], object], subject: str) -> None:
    s = rt.Schedule(MATMUL)
    with pytest.raises(ScheduleError, match=subject):
        step(s)
    assert s.func is MATMUL and not s.steps


@pytest.mark.parametrize("kind", ["parallel", "vectorized", "group"])
def test_text_with_dependent_iterations_is_refused(kind: str) -> None:
    text = str(rt.Schedule(MATMUL)).replace("for k in serial", f"for k in {kind}")
    with pytest.raises(ScheduleError, match=f"{kind} expects independent iterations, but 'k'"):
        rt.source(rt.parse_prim_func(text), "c")
    plain = """
@prim_func(outputs=1)
def f(x: Buffer((8,), f32), y: Buffer((8,), f32)):
    for i in KIND(8):
        y[0] = x[i]
"""
    with pytest.raises(ScheduleError, match=f"{kind} loop 'i'"):
        rt.source(rt.parse_prim_func(plain.replace("KIND", kind)), "c")


def test_text_with_independent_iterations_is_accepted() -> None:
    text = str(rt.Schedule(MATMUL)).replace("for i in serial", "for i in parallel")
    assert "RT_PARALLEL_FOR" in rt.source(rt.parse_prim_func(text), "c")


REACHING = """
@prim_func(outputs=1)
def f(x: Buffer((n,), f32), at: Buffer((n,), i64), y: Buffer((n,), f32)):
    for i in serial(n):
        with block("y"):
            vi = spatial(n, i)
            y[WRITE] = x[READ]
"""


def reaching(read: str = "vi", write: str = "vi") -> rt.Schedule:
    return rt.Schedule(rt.parse_prim_func(REACHING.replace("READ", read).replace("WRITE", write)))


@pytest.mark.parametrize(
    ("read", "write", "buffer"),
    [
        ("vi + 1", "vi", "x"),
        ("vi - 1", "vi", "x"),
        ("vi * 2", "vi", "x"),
        ("at[vi]", "vi", "x"),
        ("at[vi + 1]", "vi", "at"),
        ("vi", "vi + 1", "y"),
        ("vi", "at[vi]", "y"),
    ],
)
def test_index_possibly_outside_of_a_buffer_is_refused(read: str, write: str, buffer: str) -> None:
    for use in (rt.kernel, rt.source):
        with pytest.raises(VerifyError, match=rf"\b{buffer}\b"):
            use(reaching(read, write), "c")


def test_integer_inputs_may_have_any_values() -> None:
    text = (
        REACHING.replace("f32", "i64")
        .replace("READ", "vi")
        .replace("WRITE", "vi")
        .replace("= x[vi]", "= x[vi] * 3 + at[vi]")
    )
    x, at = np.array([-5, 0, 1 << 40]), np.array([7, -9, 2])
    with rt.kernel(rt.parse_prim_func(text), "c") as opened:
        np.testing.assert_array_equal(opened(x, at), x * 3 + at)


def test_limited_indices_are_accepted_and_empty_inputs_refused() -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal(9, np.float32)
    at = rng.integers(0, 9, 9)
    with rt.kernel(reaching("min(max(at[vi], 0), n - 1)"), "c") as gathered:
        np.testing.assert_array_equal(gathered(x, at), x[at])
    with rt.kernel(reaching(), "c") as copied:
        assert copied(x[:0], at[:0]).shape == (0,)
    with rt.kernel(SPLIT, "c") as opened:
        with pytest.raises(UserError, match="no empty inputs"):
            opened(x[:0], m=3)
        with pytest.raises(UserError, match="at least 1, got 0"):
            opened(x, m=0)


def test_index_limited_by_a_condition_is_accepted() -> None:
    text = """
@prim_func(outputs=1)
def shifted(x: Buffer((n,), f32), y: Buffer((n,), f32)):
    for i in serial(n):
        if i + 1 < n:
            with block("inner"):
                vi = spatial(n, i)
                y[vi] = x[vi + 1]
        else:
            with block("last"):
                vj = spatial(n, i)
                y[vj] = 0.0
"""
    x = np.arange(7, dtype=np.float32)
    with rt.kernel(rt.parse_prim_func(text), "c") as opened:
        np.testing.assert_array_equal(opened(x), [1, 2, 3, 4, 5, 6, 0])
