"""Arguments as people have them, and results by name: types, memory, devices; and what is refused."""

from __future__ import annotations

import array
import copy
import gc
import pickle
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.ir.frontend.torch.test_importer import torch_python
from tests.runtime.conftest import Small
from tests.support.effort import examples

from relax_tune.errors import ModelStateError, UserError
from relax_tune.runtime.arrays import as_array
from relax_tune.runtime.artifact import new_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.program import INTEGERS, BufferSpec, Program
from relax_tune.runtime.results import Results, named

Array = NDArray[Any]
RNG = np.random.default_rng(5)


class Exported:
    """An array of another library, which knows DLPack."""

    def __init__(self, array: Array, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class Convertible:
    """An array of another library, which knows only `__array__`."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.array if dtype is None else self.array.astype(dtype)


class Broken:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise ZeroDivisionError("no numbers today")


def rows(n: int) -> Any:
    return RNG.standard_normal((n, 3), dtype=np.float32)


def convert(value: Any, dtype: str, in_place: bool = False) -> Array:
    return as_array(value, "f: parameter x", f"x: {dtype} (n,)", dtype, in_place)


@pytest.fixture
def model(device: Device, small: type[Small]) -> Iterator[Model]:
    with opened(device, small) as made:
        yield made


@contextmanager
def opened(device: Device, small: type[Small]) -> Iterator[Model]:
    with new_artifact(with_second_input(small, device.info.kind), small.constants).open(device) as made:
        yield made


def with_second_input(small: type[Small], kind: str) -> Program:
    """The small program with a second input, `w`, that it does not use."""
    program = small.program(kind)
    buffers = (*program.buffers, BufferSpec("w", "int64", program.buffers[0].shape[:1], "input"))
    return replace(program, buffers=buffers, inputs=(0, len(program.buffers)))


@pytest.mark.parametrize(
    "wrap", [np.asarray, Exported, Convertible, memoryview, lambda a: array.array("f", a)],
    ids=["numpy", "dlpack", "array", "memoryview", "buffer"],
)  # fmt: skip
def test_as_array_of_the_same_type_shares_memory(wrap: Any) -> None:
    value = wrap(np.arange(4, dtype=np.float32))
    converted = convert(value, "float32")
    np.testing.assert_array_equal(converted, np.arange(4, dtype=np.float32))
    if not isinstance(value, array.array):
        assert np.shares_memory(converted, getattr(value, "array", value))
    else:
        value[2] = 7.0
        assert converted[2] == 7.0


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from([*INTEGERS, "bool", "int4", "uint2"]), st.data())
def test_as_array_of_integers_is_exact_or_refused(dtype: str, data: st.DataObject) -> None:
    """The oracle is Python's integers."""
    source = np.dtype(data.draw(st.sampled_from(INTEGERS)))
    limits = np.iinfo(source)
    near = st.integers(-9, 300).filter(lambda x: limits.min <= x <= limits.max)
    numbers = data.draw(st.lists(near | st.integers(int(limits.min), int(limits.max)), max_size=5))
    want = ml_dtypes.iinfo(np.dtype(dtype)) if dtype != "bool" else None
    low, high = (0, 1) if want is None else (int(want.min), int(want.max))
    wrong = [x for x in numbers if not low <= x <= high]
    given_array = np.array(numbers, source)
    if wrong:
        with pytest.raises(UserError, match=rf"got {wrong[0]} at \[{numbers.index(wrong[0])}\]"):
            convert(given_array, dtype)
        return
    converted = convert(given_array, dtype)
    assert converted.dtype == np.dtype(dtype)
    assert [int(x) for x in converted.tolist()] == numbers


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_as_array_of_narrow_floats_is_widened(source: str) -> None:
    narrow = np.array([1.5, -2.0, 0.25], np.dtype(source))
    np.testing.assert_array_equal(convert(narrow, "float32"), np.array([1.5, -2.0, 0.25], np.float32))


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        ([1, 2.5], "float32", [1, 2.5]), ([[1], [2]], "float32", [[1], [2]]), ([0.1], "float32", [np.float32(0.1)]),
        (3, "int64", 3), (True, "bool", True), ((1, 0), "bool", [True, False]), (range(3), "int64", [0, 1, 2]),
        ([], "int64", []), ([0.1], "bfloat16", [0.10009765625]), (np.float64(0.1), "float32", np.float32(0.1)),
        ([float("inf")], "float32", [np.inf]), ([np.ones(2), [3, 4]], "float32", [[1, 1], [3, 4]]),
        (np.array([True, False]), "int64", [1, 0]), (np.array([1, 2], ">i2"), "int64", [1, 2]),
    ],
)  # fmt: skip
def test_as_array_of_numbers_has_the_type(value: Any, dtype: str, expected: Any) -> None:
    converted = convert(value, dtype)
    assert converted.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(converted.astype(np.float64), np.asarray(expected, np.float64))


@pytest.mark.parametrize(
    ("value", "dtype", "says"),
    [
        (np.ones(2), "float32", "expected dtype float32, got float64; convert it with astype(numpy.float32)"),
        (np.ones(2, np.float32), "bfloat16", "convert it with astype(ml_dtypes.bfloat16)"),
        (np.ones(2, np.int64), "float32", "expected dtype float32, got int64"),
        (np.ones(2, np.float32), "int64", "expected dtype int64, got float32"),
        (np.ones(2, np.complex64), "float32", "got complex64"),
        ([1.0], "int64", "expected dtype int64, got float64"),
        ([True], "float32", "expected dtype float32, got bool"),
        ([1e39], "float32", "expected numbers in the range of float32, got 1e+39 at [0]"),
        ([1, 2**70], "int64", "expected an array (x: int64 (n,)), got a list"),
        ([[1, 2], [3]], "float32", "got a list that makes none"),
        (Broken(), "float32", "got a Broken that makes none: no numbers today"),
        (object(), "float32", "got a object; give a NumPy array, a tensor or nested lists"),
        ({"x": 1}, "float32", "got a dict"),
        ({1, 2}, "float32", "got a set"),
        ("text", "float32", "got a str"),
        (None, "float32", "got None"),
        (Exported(np.ones(2, np.float32), (2, 1)), "float32", "in the host's memory, got a Exported on cuda:1"),
        (Exported(np.ones(2, np.float32), (99, 0)), "float32", "got a Exported on another device:0"),
        (np.ma.masked_array(np.ones(2, np.float32)), "float32", "got a masked one"),
    ],
)  # fmt: skip
def test_as_array_of_something_else_is_refused(value: Any, dtype: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        convert(value, dtype)
    assert says in str(caught.value) and str(caught.value).startswith("f: parameter x: ")


@pytest.mark.parametrize("value", [[1.0], 1.0, np.ones(2, np.int32), Convertible(np.ones(2, np.float32))])
def test_as_array_in_place_refuses_copies(value: Any) -> None:
    with pytest.raises(UserError, match="x: expected"):
        convert(value, "float32", in_place=True)


def test_model_is_called_by_position_and_name(model: Model, small: type[Small]) -> None:
    x, w = rows(4), [1, 2, 3, 4]
    expected = small.reference(x)
    for out in (model(x, w), model(x=x, w=w), model(x, w=w), model({"x": x, "w": w}), model.run([x, w])):
        assert isinstance(out, Results) and len(out) == 1 and out.names == ("z",)
        (z,) = out
        assert z is out[0] and z is out["z"] and z is dict(out)["z"] and out[-1:] == [z]
        np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model(Exported(x), np.arange(4, dtype=np.int32))[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arrays", "by_name", "says"),
    [
        ((1,), {"x": 1}, "main|small: .*got x by position and by name"),
        ((1, 2, 3), {"w": 1}, "by position and by name"),
        ((1, 2, 3), {"q": 1}, "got 3 by position"),
        ((1, 2, 3), {}, "expected 2 arguments"),
        ((1,), {}, "missing w"),
        ((1,), {"q": 2}, "array for parameter w"),
        ((), {"x": 1, "w": 2, "q": 3}, "got unknown q"),
    ],
)  # fmt: skip
def test_model_called_with_wrong_names_is_refused(model: Model, arrays: Any, by_name: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        model(*arrays, **by_name)


def test_results_without_the_name_are_refused() -> None:
    out = named([1, 2], ("a", "b"))
    with pytest.raises(UserError, match="among a, b, got 'c'"):
        out["c"]
    assert "a" in out and "c" not in out and 2 in out and repr(out) == "Results(a=1, b=2)"
    for copied in (copy.copy(out), pickle.loads(pickle.dumps(out))):
        assert copied == out == [1, 2] and copied["b"] == 2
    first, *rest = out
    assert (first, rest) == (1, [2])


@pytest.mark.parametrize("wrap", [np.asarray, Exported, Convertible], ids=["numpy", "dlpack", "array"])
@pytest.mark.ccompiler
def test_call_on_the_processor_reads_arguments_in_place(
    small: type[Small], wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device("c")
    x, placed, place = rows(6), list[Array](), device.place

    def watched(buffer: Any, into: Array | None) -> bool:
        placed.extend([] if into is None else [into])
        return place(buffer, into)

    monkeypatch.setattr(device, "place", watched)
    with closing(device), opened(device, small) as model:
        (z,) = model(wrap(x), np.zeros(6, np.int64))
    assert any(np.shares_memory(a, x) for a in placed) and any(np.shares_memory(a, z) for a in placed)


def test_bound_call_over_exported_memory_reads_new_elements(model: Model, small: type[Small]) -> None:
    x, z = rows(5), np.empty(5, np.float32)
    call = model.bind([Exported(x), np.zeros(5, np.int64)], [Exported(z)])
    for _ in range(3):
        x[:] = rows(5)
        out = call.run()
        assert out["z"] is out[0]
        np.testing.assert_allclose(z, small.reference(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="got int32, which cannot be read in place"):
        model.bind([x, np.zeros(5, np.int32)])
    with pytest.raises(UserError, match=r"x: float32 \(n, 3\)\), got a list"):
        model.bind([x.tolist(), np.zeros(5, np.int64)])


def test_result_left_on_the_device_has_the_elements(model: Model, device: Device, small: type[Small]) -> None:
    x = rows(8)
    left = model.run([x, np.zeros(8, np.int64)], on_device=True)["z"]
    assert isinstance(left, np.ndarray if device.info.kind == "c" else DeviceArray)
    for read in (np.asarray(left), np.from_dlpack(left), np.array(left, np.float64)):
        np.testing.assert_allclose(read, small.reference(x), rtol=1e-5, atol=1e-5)


@pytest.mark.ccompiler
@pytest.mark.opencl
def test_result_of_another_device_is_copied(small: type[Small]) -> None:
    with closing(open_device("opencl")) as first, closing(open_device("c")) as second:
        x = rows(3)
        programs = [replace(small.program(d.info.kind), calls=(), outputs=(0,)) for d in (first, second)]
        with (
            new_artifact(programs[0], small.constants).open(first) as a,
            new_artifact(programs[1], small.constants, kind="c").open(second) as b,
        ):
            left = a.run([x], on_device=True)[0]
            np.testing.assert_array_equal(b(left)[0], x)
            unread = a.run([x], on_device=True)[0]
            gc.collect()
        with pytest.raises(ModelStateError, match="an open model"):
            unread.numpy()
        np.testing.assert_array_equal(left.numpy(), x)


OF_TORCH = """
import sys
import numpy as np, torch
import relax_tune as rt
from relax_tune.runtime.arrays import as_array, as_tensor, any_tensor
from relax_tune.errors import UserError
convert = lambda t, dtype, in_place=False: as_array(t, "x", "x", dtype, in_place)

for name in ("float32", "int64", "bool", "uint8", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
    t = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, name)).T
    a = convert(t, name)
    assert a.dtype == np.dtype(name) and a.shape == (3, 2) and a.__array_interface__["data"][0] == t.data_ptr(), name
    assert a.astype(np.float32).tolist() == t.float().tolist(), name
    back = as_tensor(a)
    assert back.dtype == t.dtype and back.data_ptr() == t.data_ptr() and torch.equal(back.float(), t.float()), name

weight = torch.nn.Parameter(torch.ones(2))
assert convert(weight, "float32", True).__array_interface__["data"][0] == weight.data_ptr()
assert convert(torch.tensor([1, 2], dtype=torch.int32), "int64").tolist() == [1, 2]
assert any_tensor([np.ones(1), weight]) and any_tensor({"x": weight}) and not any_tensor([np.ones(1)])
for bad in (torch.ones(2).double(), torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.tensor([300])):
    try:
        convert(bad, "uint8" if bad.dtype == torch.int64 else "float32")
    except UserError as error:
        print(error)

with rt.load(sys.argv[1], device="c:threads=1") as model:
    x = torch.arange(12.0).reshape(4, 3)
    out = model(x, w=[0] * 4)
    again = model.run([x.numpy(), torch.zeros(4, dtype=torch.int32)])
    assert isinstance(out["z"], torch.Tensor) and torch.equal(out[0], again["z"])
    assert isinstance(model(x.numpy(), [0] * 4)["z"], np.ndarray)
    call = model.bind([x, torch.zeros(4, dtype=torch.int64)])
    (z,) = call.run()
    assert torch.equal(z, out["z"])
    x += 1
    call.run()
    assert torch.equal(z, model(x, [0] * 4)["z"]) and not torch.equal(z, out["z"])
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.ccompiler
def test_tensors_of_torch_share_memory_or_are_refused(small: type[Small], tmp_path: Path) -> None:
    python, environment = torch_python()
    path = new_artifact(with_second_input(small, "c"), small.constants).save(tmp_path / "small.rta")
    done = subprocess.run([python, "-c", OF_TORCH, str(path)], capture_output=True, env=environment, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    says = (
        "float64; convert it with to(torch.float32)",
        "layout sparse_coo; call its to_dense()",
        "got one on the device meta",
        "got 300",
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(says) and all(text in line for text, line in zip(says, lines))
