"""Messages survive their trip, foreign text is refused, and random data depend on name and seed alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import MeasureError, UserError
from relax_tune.runtime.program.program import BufferSpec, CallSite, CallVariant, Fill, Program, Symbol
from relax_tune.runtime.program.scalars import ScalarBuilder
from relax_tune.tuner.measure.codec import decode_batch, decode_results, encode_batch, encode_results
from relax_tune.tuner.measure.device_process.compare import difference
from relax_tune.tuner.measure.device_process.inputs import random_array, random_constants, random_inputs
from relax_tune.tuner.measure.messages import (
    STAGES,
    CheckCase,
    MeasureRequest,
    MeasureResult,
    ShapeTiming,
    TimingPolicy,
    UnitState,
)

seconds = st.floats(0, 1e6, allow_nan=False)
symbols = st.dictionaries(st.sampled_from(["n", "m", "b"]), st.integers(-(2**63), 2**63 - 1), max_size=3)
dtypes = st.sampled_from(["float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8", "bool"])
arrays = st.builds(
    lambda name, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(name),
    dtypes,
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 5),
)


@st.composite
def requests(draw: st.DrawFn) -> list[MeasureRequest]:
    made = []
    for identity in draw(st.lists(st.text(max_size=5), unique=True, max_size=4)):
        outputs = draw(st.lists(arrays, max_size=2))
        tolerances = st.lists(seconds, min_size=len(outputs), max_size=len(outputs)).map(tuple)
        case = CheckCase(draw(symbols), draw(st.integers(0, 9)), tuple(outputs), draw(tolerances), draw(tolerances))
        timings = tuple(draw(st.lists(symbols, max_size=3)))
        stops = tuple(draw(st.none() | seconds) for _ in timings) if draw(st.booleans()) else ()
        low = draw(st.integers(1, 9))
        policy = TimingPolicy(low, low + draw(st.integers(0, 9)), draw(seconds), draw(seconds), stops)
        made.append(MeasureRequest(identity, draw(st.text()), (case,), timings, policy, 2.5, draw(st.integers(0, 3))))
    return made


@settings(max_examples=examples(40), deadline=None)
@given(requests())
def test_batch_codec_round_trips(batch: list[MeasureRequest]) -> None:
    again = decode_batch(encode_batch(batch))
    assert len(again) == len(batch)
    for old, new in zip(batch, again):
        for name in ("id", "program_json", "timings", "policy", "deadline_secs", "constant_seed"):
            assert getattr(new, name) == getattr(old, name)
        for old_case, new_case in zip(old.checks, new.checks, strict=True):
            assert (new_case.symbols, new_case.seed, new_case.rtol, new_case.atol) == (
                old_case.symbols,
                old_case.seed,
                old_case.rtol,
                old_case.atol,
            )
            for wanted, found in zip(old_case.expected, new_case.expected, strict=True):
                assert found.dtype == wanted.dtype and found.shape == wanted.shape and np.array_equal(found, wanted)


def test_equal_expected_arrays_travel_once() -> None:
    big = np.arange(10_000, dtype=np.float32)
    batch = [
        MeasureRequest(str(number), "{}", (CheckCase({}, 0, (big.copy(),), (0.0,), (0.0,)),), ()) for number in range(9)
    ]
    assert len(encode_batch(batch)) < 2 * len(encode_batch(batch[:1]))


def test_codec_keeps_the_slack_of_each_output() -> None:
    slack = np.arange(6.0).reshape(2, 3)
    case = CheckCase({}, 0, (np.zeros((2, 3)), np.zeros(4)), (0.0, 0.0), (0.0, 0.0), (slack, None))
    ((request,),) = (decode_batch(encode_batch([MeasureRequest("a", "{}", (case,), ())])),)
    first, second = request.checks[0].slack
    assert first is not None and np.array_equal(first, slack) and second is None
    with pytest.raises(MeasureError, match="slack"):
        CheckCase({}, 0, (np.zeros((2, 3)),), (0.0,), (0.0,), (np.zeros(6),))


def batch_of(*expected: np.ndarray) -> list[MeasureRequest]:
    return [
        MeasureRequest(str(n), "{}", (CheckCase({}, 0, (array,), (0.0,), (0.0,)),), ())
        for n, array in enumerate(expected)
    ]


def test_codec_writes_large_arrays_to_files_once(tmp_path: Path) -> None:
    first, second, small = np.arange(9000.0), np.ones((70, 90), np.float32).T, np.arange(3)
    text = encode_batch(batch_of(first, second, first.copy(), small), tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 2 and len(text) < 3000
    for request, wanted in zip(decode_batch(text, tmp_path), (first, second, first, small), strict=True):
        (found,) = request.checks[0].expected
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    encode_batch(batch_of(second, small), tmp_path)
    (kept,) = tmp_path.iterdir()
    assert files[kept] == kept.stat().st_mtime_ns, "written once"


@pytest.mark.parametrize("name", ["../secret", "", "0" * 31, 7])
def test_only_arrays_of_the_folder_are_read(name: object, tmp_path: Path) -> None:
    (tmp_path.parent / "secret").write_bytes(bytes(72_000))
    record = json.loads(encode_batch(batch_of(np.arange(9000.0)), tmp_path))
    for folder in (None, tmp_path):
        changed = dict(record["arrays"][0], **({} if folder is None else {"file": name}))
        with pytest.raises(MeasureError, match=r"array|file|data"):
            decode_batch(json.dumps({"arrays": [changed], "requests": record["requests"]}), folder)


timings = st.builds(
    ShapeTiming, symbols, st.lists(seconds, max_size=4).map(tuple), st.integers(1, 64), st.just("warm"), st.booleans()
)
good = st.builds(
    lambda id, times, checked, build: MeasureResult(id, "ok", None, "", tuple(times), checked, build, 0.5),
    st.text(max_size=5),
    st.lists(timings, max_size=3),
    st.booleans(),
    seconds,
)
bad = st.builds(
    lambda id, stage, message, unit: MeasureResult(id, "failed", stage, message, unit=unit),
    st.text(max_size=5),
    st.sampled_from(STAGES),
    st.text(),
    st.builds(UnitState, st.text(), st.text(), st.text(), st.none() | seconds, st.none() | seconds),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(good | bad, unique_by=lambda result: result.id, max_size=5))
def test_result_codec_round_trips(results: list[MeasureResult]) -> None:
    assert decode_results(encode_results(results)) == results


GOOD_RESULT = json.loads(encode_results([MeasureResult("a", "ok", timings=(ShapeTiming({"n": 1}, (0.5,)),))]))


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("id",), 3, "id"),
        (("status",), "fine", "status"),
        (("stage",), "compile", "stage"),
        (("build_secs",), -1.0, "build_secs"),
        (("run_secs",), float("nan"), "run_secs"),
        (("checked",), 1, "checked"),
        (("timings",), None, "timings"),
        (("timings", 0, "samples_secs"), ["0.5"], "samples_secs"),
        (("timings", 0, "samples_secs"), [float("inf")], "samples_secs"),
        (("timings", 0, "symbols"), {"n": 1.5}, "symbols"),
        (("timings", 0, "launches_per_sample"), 0, "launches_per_sample"),
    ],
)
def test_a_foreign_answer_is_refused_by_field(path: tuple[str | int, ...], value: object, word: str) -> None:
    record = json.loads(json.dumps(GOOD_RESULT))
    place = record["results"][0]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(MeasureError, match=word):
        decode_results(json.dumps(record))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [3]}', '{"results": {}}', "nonsense"])
def test_codec_malformed_answer_is_refused(text: str) -> None:
    with pytest.raises(MeasureError):
        decode_results(text)


def test_codec_repeated_ids_are_refused() -> None:
    text = encode_results([MeasureResult("a", "ok"), MeasureResult("a", "ok")])
    with pytest.raises(MeasureError, match="distinct ids"):
        decode_results(text)


def test_messages_with_impossible_values_are_refused() -> None:
    with pytest.raises(MeasureError, match="rtol"):
        CheckCase({}, 0, (np.zeros(1),), (), (0.0,))
    with pytest.raises(MeasureError, match="min_repeats"):
        TimingPolicy(min_repeats=5, max_repeats=4)
    with pytest.raises(MeasureError, match="stop_above"):
        MeasureRequest("a", "{}", (), ({"n": 1},), TimingPolicy(stop_above=(1.0, 2.0)))
    with pytest.raises(MeasureError, match="deadline_secs"):
        MeasureRequest("a", "{}", (), (), deadline_secs=0.0)


@settings(max_examples=examples(40), deadline=None)
@given(st.text(max_size=5), dtypes, st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**63))
def test_random_arrays_depend_on_name_and_seed_alone(name: str, dtype: str, shape: list[int], seed: int) -> None:
    for fill in (Fill(), Fill("integers", 0, 7), Fill("normal", high=0.1)):
        first = random_array(name, dtype, tuple(shape), fill, seed)
        assert first.dtype == np.dtype(dtype) and first.shape == tuple(shape) and first.flags.c_contiguous
        assert np.array_equal(first, random_array(name, dtype, tuple(shape), fill, seed))
        if fill.kind == "integers" and first.size:
            assert first.min() >= 0 and first.max() < 7


def test_offsets_rise_from_zero() -> None:
    fill = Fill("offsets", 0, 8)
    for seed in range(3):
        found = random_array("start", "int32", (4001,), fill, seed)
        steps = np.diff(found)
        assert found[0] == 0 and set(steps.tolist()) == set(range(17)) and 7.5 < steps.mean() < 8.5
    assert random_array("start", "int8", (900,), fill, 0).max() == 127
    assert random_array("start", "int32", (0,), fill, 0).size == 0


def test_other_names_and_seeds_give_other_numbers() -> None:
    base = random_array("x", "float32", (100,), Fill(), 1)
    assert not np.array_equal(base, random_array("y", "float32", (100,), Fill(), 1))
    assert not np.array_equal(base, random_array("x", "float32", (100,), Fill(), 2))
    assert abs(float(random_array("x", "float32", (10_000,), Fill("normal", high=3.0), 1).std()) - 3.0) < 0.2


def signature(names: tuple[str, ...]) -> Program:
    """One input and one constant a name; shapes (n, 2) and (2, 3)."""
    scalars = ScalarBuilder()
    n, zero, two, three = scalars.symbol(0), scalars.const(0), scalars.const(2), scalars.const(3)
    inputs = [BufferSpec(name, "float32", (n, two), "input") for name in names]
    constants = [BufferSpec(f"w_{name}", "float32", (two, three), "const") for name in names]
    return Program(
        symbols=(Symbol("n", 1, 9),),
        scalars=scalars.code,
        checks=(),
        buffers=(*inputs, *constants),
        storages=(),
        kernels=(),
        prepare=(),
        calls=(CallSite("call", "", zero, (CallVariant("tuned", ()),)),),
        inputs=tuple(range(len(names))),
        outputs=(),
    )


def test_every_variant_of_a_task_sees_the_same_data() -> None:
    one, other = signature(("a", "b")), signature(("extra", "b", "a"))
    a, b = random_inputs(one, {"n": 5}, 3)
    _, other_b, other_a = random_inputs(other, {"n": 5}, 3)
    assert a.shape == (5, 2) and np.array_equal(a, other_a) and np.array_equal(b, other_b)
    assert np.array_equal(random_constants(one)["w_a"], random_constants(other)["w_a"])
    assert random_constants(one, 1)["w_a"].shape == (2, 3)


@pytest.mark.parametrize("wrong", [{}, {"n": 0}, {"n": 10}, {"m": 3}, {"n": 3, "m": 3}])
def test_wrong_symbols_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match="n"):
        random_inputs(signature(("a",)), wrong, 0)


@pytest.mark.parametrize(
    ("found", "wanted", "right"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0005], [1.0, 2.0], True),
        ([1.0, 2.1], [1.0, 2.0], False),
        ([np.nan, np.inf, -np.inf], [np.nan, np.inf, -np.inf], True),
        ([np.nan], [1.0], False),
        ([1.0], [np.nan], False),
        ([np.inf], [1.0], False),
        ([1.0], [np.inf], False),
        ([np.inf], [-np.inf], False),
        ([], [], True),
    ],
)
def test_floats_are_compared_with_tolerance(found: list[float], wanted: list[float], right: bool) -> None:
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        text = difference("y", np.array(found, dtype), np.array(wanted, dtype), 1e-3, 1e-3)
        assert (text is None) == right, text


def test_integers_are_compared_exactly_and_the_worst_element_is_named() -> None:
    wanted = np.zeros((3, 4), np.int64)
    found = wanted.copy()
    assert difference("y", found, wanted, 1.0, 1.0) is None
    found[0, 1], found[2, 3] = 1, -9
    text = difference("y", found, wanted, 1.0, 1.0)
    assert text is not None and "2 of 12" in text and "(2, 3)" in text and "-9" in text
    assert difference("y", found[:2], wanted, 0.0, 0.0) is not None
    assert difference("y", found.astype(np.int32), wanted, 0.0, 0.0) is not None
