"""What a built model is given at run time: everything wrong is one sentence about the parameter, and nothing is broken by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.effort import examples
from tests.tuner.cli.cli_model import WORDS
from tests.wrong_input.tiny_model import generic_program, paragraph, tiny_bert

from relax_tune.errors import MeasureError, RelaxTuneError, UserError
from relax_tune.ir.core.dtype import DType, f32, i32, i64
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.gather import GatherElements, GatherND
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import AddScalar
from relax_tune.ir.op.math.logic import Less, Where
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor

LAST = len(WORDS) - 1


@pytest.fixture(
    scope="module",
    params=[pytest.param("c", marks=pytest.mark.ccompiler), pytest.param("opencl", marks=pytest.mark.opencl)],
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    try:
        opened = open_device(request.param)
    except UserError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def model(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    executor = Executor(*_reordered(tiny_bert(tmp_path_factory.mktemp("bert")), device))
    yield executor
    executor.close()


def _reordered(module: Any, device: Device) -> tuple[Any, Device, dict[str, NDArray[Any]]]:
    program, constants = generic_program(module, device)
    return program, device, constants


def ids(b: int = 2, n: int = 5, fill: int = 1) -> NDArray[np.int64]:
    return np.full((b, n), fill, np.int64)


def refused(model: Executor, inputs: Any) -> str:
    """The sentence; afterwards the model still gives what it gave before."""
    before = model.run([ids(), ids()])[0]
    with pytest.raises(RelaxTuneError) as caught:
        model.run(inputs)
    np.testing.assert_array_equal(model.run([ids(), ids()])[0], before)
    return paragraph(caught.value)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([ids(), ids(n=4)], "attention_mask: expected 5 in dim 1, got 4"),
        ([ids(), ids(b=3)], "b = 2 from dim 0 of parameter input_ids"),
        ([ids(n=25), ids(n=25)], "expected n <= 24, got 25 (from dim 1 of parameter input_ids); give a smaller input"),
        ([ids(b=5), ids(b=5)], "expected b <= 4, got 5"),
        ([ids(n=0), ids(n=0)], "expected n >= 1, got 0"),
        ([ids()[0], ids()[0]], "expected 2 dimensions (input_ids: int64 (b, n)), got 1 (5,); reshape it"),
        ([ids()[None], ids()], "got 3 (1, 2, 5)"),
        ([np.int64(3), ids()], "input_ids: expected 2 dimensions (input_ids: int64 (b, n)), got 0 ()"),
        ([ids().astype(np.uint64) + np.uint64(2**63), ids()], "(int64), got 9223372036854775809 at [0, 0]; correct it"),
        ([[[1, 2.5]], ids()], "input_ids: expected dtype int64, got float64; convert it with astype(numpy.int64)"),
        ([[[1, 2], [3]], ids()], "input_ids: expected an array (input_ids: int64 (b, n)), got a list that makes none"),
        ([[["cat"]], ids()], "expected dtype int64, got <U3"),
        (["the cat", ids()], "got a str; give a NumPy array, a tensor or nested lists"),
        ([{1: 2}, ids()], "got a dict"),
        ([iter([1]), ids()], "got a list_iterator"),
        ([ids(), ids().astype(np.float32)], "attention_mask: expected dtype int64, got float32"),
        ([ids().astype(object), ids()], "expected dtype int64, got object"),
        ([np.full((2, 5), "cat"), ids()], "expected dtype int64, got <U3"),
        ([np.zeros((2, 5), [("a", "i8")]), ids()], "expected dtype int64, got [('a', '<i8')]"),
        ([np.ma.masked_array(ids(), ids() > 0), ids()], "got a masked one"),
        ([None, None], "got None"),
        ([ids()], "expected 2 arguments (input_ids, attention_mask), got 1, missing attention_mask"),
        ([], "got 0, missing input_ids, attention_mask"),
        ([ids()] * 3, "expected 2 arguments (input_ids, attention_mask), got 3"),
        ({"input_ids": ids()}, "expected an array for parameter attention_mask, got arguments for input_ids"),
        ({}, "expected an array for parameter input_ids, got arguments for none"),
        ({"input_ids": ids(), "attention_mask": ids(), "token_type_ids": ids()}, "got unknown token_type_ids"),
        ({1: ids(), "input_ids": ids(), "attention_mask": ids(), None: ids()}, "got unknown 1, None"),
        ({0: ids(), 1: ids()}, "expected an array for parameter input_ids, got arguments for 0, 1"),
        (ids(), "got a ndarray; a single array still goes into a list"),
        (None, "in the order input_ids, attention_mask, got None"),
        (7, "got a int"),
        ("the cat", "got a str"),
        (b"the cat", "got a bytes"),
        (iter([ids(), ids()]), "got a list_iterator"),
    ],
)  # fmt: skip
def test_wrong_arguments(model: Executor, inputs: Any, says: str) -> None:
    assert says in refused(model, inputs)


@pytest.mark.parametrize("value", [LAST + 1, -1, 10**9, 2**63 - 1, -(2**63)])
def test_token_ids_outside_the_vocabulary(model: Executor, value: int) -> None:
    given = ids(2, 5)
    given[1, 3] = value
    text = refused(model, {"input_ids": given, "attention_mask": ids()})
    assert (
        f"input_ids: expected values from 0 to {LAST}, which the model uses as indices, got {value} at [1, 3]" in text
    )


def test_the_ends_of_the_vocabulary_are_inside(model: Executor) -> None:
    assert (
        np.isfinite(model.run([ids(fill=0), ids()])[0]).all()
        and np.isfinite(model.run([ids(fill=LAST), ids()])[0]).all()
    )


def test_layouts_do_not_matter(model: Executor) -> None:
    """Strided, transposed, broadcast, read-only and unaligned arrays, and subclasses that mean the same."""
    generator = np.random.default_rng(3)
    tokens = generator.integers(0, LAST + 1, (2, 5))
    wanted = model.run([tokens, ids()])[0]
    wide = np.zeros((4, 10), np.int64)
    wide[::2, ::2] = tokens
    raw = np.zeros(2 * 5 * 8 + 1, np.uint8)
    unaligned = raw[1:].view(np.int64).reshape(2, 5)
    unaligned[:] = tokens
    frozen = tokens.copy()
    frozen.flags.writeable = False
    for tokens_again in (
        wide[::2, ::2],
        np.asfortranarray(tokens),
        tokens[::-1][::-1],
        unaligned,
        frozen,
        tokens.view(np.matrix),
        tokens.astype(np.int32),
        tokens.astype(">i8"),
        tokens.tolist(),
        memoryview(tokens),
    ):
        np.testing.assert_array_equal(model.run([tokens_again, np.broadcast_to(np.int64(1), (2, 5))])[0], wanted)


def test_more_than_memory_can_hold(device: Device) -> None:
    g = GraphBuilder()
    n = g.symbol("n", 0, None)
    x = g.input("x", (n,), f32)
    executor = Executor(*_reordered(g.finish(g.call(AddScalar(1.0), x)), device))
    small = np.arange(5, dtype=np.float32)
    for size in (2**50, 2**58, 2**61 - 1):
        with pytest.raises(RelaxTuneError) as caught:
            executor.run([np.lib.stride_tricks.as_strided(small, (size,), (0,))])
        assert isinstance(caught.value, (MeasureError, UserError)) and "main" in str(caught.value)
        np.testing.assert_array_equal(executor.run([small])[0], small + 1)
    executor.close()


def test_closed_model_refuses_to_run(device: Device) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 0, 9),), f32)
    executor = Executor(*_reordered(g.finish(g.call(AddScalar(1.0), x)), device))
    executor.run([np.zeros(3, np.float32)])
    executor.close()
    executor.close()
    with pytest.raises(UserError, match="closed; open it again"):
        executor.run([np.zeros(3, np.float32)])
    with pytest.raises(UserError, match="closed"):
        executor.bind({"n": 3})


# -- indices: those from outside are refused, those the model computes stay inside ------------------------------------------


def gatherer(kind: str, dtype: DType, fixed: bool, device: Device) -> Executor:
    """`y = x[i + 0 * computed]` in its three forms; x is (6, 3) or (v, 3) of f32."""
    g = GraphBuilder()
    v = 6 if fixed else g.symbol("v", 1, 64)
    n = g.symbol("n", 0, 64)
    x = g.input("x", (v, 3), f32)
    where = g.input("i", {"take": (n,), "nd": (n, 1), "elements": (n, 3)}[kind], dtype)
    spec = {"take": Take(), "nd": GatherND(), "elements": GatherElements(0)}[kind]
    return Executor(*_reordered(g.finish(g.call(spec, x, where)), device))


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["take", "nd", "elements"])
@pytest.mark.parametrize("dtype", [i32, i64])
def test_indices_of_symbolic_dims_outside_are_refused(device: Device, kind: str, dtype: DType) -> None:
    executor = gatherer(kind, dtype, False, device)
    x = np.arange(18, dtype=np.float32).reshape(6, 3)
    shape = {"take": (5,), "nd": (5, 1), "elements": (5, 3)}[kind]
    np.testing.assert_array_equal(executor.run([x, np.full(shape, 5, dtype.numpy)])[0], x[[5] * 5])
    for wrong in (6, -1, np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max):
        with pytest.raises(UserError, match=f"parameter i: .*0 to 5, .*got {wrong} at"):
            executor.run([x, np.full(shape, wrong, dtype.numpy)])
    executor.close()


@pytest.mark.parametrize("kind", ["take", "nd", "elements"])
def test_indices_of_fixed_dims_are_refused(device: Device, kind: str) -> None:
    executor = gatherer(kind, i64, True, device)
    x = np.arange(18, dtype=np.float32).reshape(6, 3)
    shape = {"take": (5,), "nd": (5, 1), "elements": (5, 3)}[kind]
    np.testing.assert_array_equal(executor.run([x, np.full(shape, 5)])[0], x[[5] * 5])
    for wrong in (6, -1):
        with pytest.raises(UserError, match=f"parameter i: .*0 to 5, .*got {wrong} at"):
            executor.run([x, np.full(shape, wrong)])
    executor.close()


def test_indices_from_the_end_are_accepted_in_range(device: Device) -> None:
    g = GraphBuilder()
    x, i = g.input("x", (6, 3), f32), g.input("i", (g.symbol("n", 1, 9),), i64)
    zero = g.constant("zero", np.array(0, np.int64))
    where = g.call(Where(), g.call(Less(), i, zero), g.call(AddScalar(6), i), i)
    executor = Executor(*_reordered(g.finish(g.call(Take(), x, where)), device))
    rows = np.arange(18, dtype=np.float32).reshape(6, 3)
    np.testing.assert_array_equal(executor.run([rows, np.arange(-4, 4)])[0], rows[np.arange(-4, 4)])
    with pytest.raises(UserError, match=r"from -6 to 5, .* got 6"):
        executor.run([rows, np.array([0, 6])])
    with pytest.raises(UserError, match="got -7 at"):
        executor.run([rows, np.array([-7])])
    executor.close()


def test_computed_indices_stay_inside(device: Device) -> None:
    """Positions that a model counts itself, beyond the end of a table."""
    g = GraphBuilder()
    i = g.input("i", (g.symbol("n", 1, 9),), i64)
    table = g.constant("table", np.arange(12, dtype=np.float32).reshape(4, 3))
    executor = Executor(*_reordered(g.finish(g.call(Take(), table, g.call(AddScalar(2), i))), device))
    np.testing.assert_array_equal(executor.run([np.array([-2, 1])])[0], [[0, 1, 2], [9, 10, 11]])
    with pytest.raises(UserError, match="expected values from -2 to 1"):
        executor.run([np.array([2])])
    executor.close()


# -- anything at all ---------------------------------------------------------------------------------------------------------

DTYPES = ["i8", "i4", "u8", "f4", "f8", "?", ">i8", "O", "U3", "M8[s]", "c8"]
ANYTHING = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=3), st.booleans(), st.floats(),
    st.builds(
        lambda shape, dtype, value: np.full(shape, value).astype(dtype),
        st.lists(st.integers(0, 30), max_size=4), st.sampled_from(DTYPES), st.integers(-3, 30),
    ),
    st.builds(lambda b, n, value: np.full((b, n), value, np.int64), st.integers(0, 5), st.integers(0, 30), st.integers(-2, 30)),
)  # fmt: skip
NAMES = st.one_of(st.sampled_from(["input_ids", "attention_mask", "x"]), st.integers(), st.none())
CALLS = st.one_of(ANYTHING, st.lists(ANYTHING, max_size=3), st.dictionaries(NAMES, ANYTHING, max_size=3))


@pytest.mark.ccompiler
@settings(max_examples=examples(150), deadline=None)
@given(inputs=CALLS)
def test_no_argument_gives_anything_but_a_result_or_a_refusal(inputs: Any) -> None:
    executor = _shared_model()
    try:
        (found,) = executor.run(inputs)
    except RelaxTuneError as error:
        paragraph(error)
    else:
        assert found.dtype == np.float32 and found.ndim == 2


_MODELS: list[Executor] = []


def _shared_model() -> Executor:
    if not _MODELS:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _MODELS.append(Executor(*_reordered(tiny_bert(Path(folder, "bert")), open_device("c"))))
    return _MODELS[0]
