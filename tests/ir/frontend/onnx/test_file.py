"""Reading ONNX files: symbols and their bounds, weights in place, external data, and what is no model."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.frontend.onnx.onnx_models import check, model, onnx
from tests.support.effort import examples

from relax_tune.errors import ParseError, RelaxTuneError, UserError
from relax_tune.ir.core.graph import Function
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.reference import evaluate_function

DENSE = "(float[n, 3] x) => (float[n, 2] y) <float[3, 2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}> { y = MatMul(x, w) }"


def external(folder: Path, location: str = "weights.bin", offset: int = 8, length: int = 24) -> Path:
    """DENSE with its weight in a file of 8 other bytes and then the weight."""
    proto = model(DENSE)
    t = proto.graph.initializer[0]
    values = onnx.numpy_helper.to_array(t)
    (folder / "weights.bin").write_bytes(b"\0" * 8 + values.tobytes())
    t.ClearField("float_data")
    t.ClearField("raw_data")
    t.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        t.external_data.add(key=key, value=value)
    path = folder / "dense.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_load_onnx_named_and_unnamed_dims_become_symbols() -> None:
    proto = model("(float[n, 3] x, float[n, k] z) => (float[q] y) { y = Concat<axis = 1>(x, z) }")
    proto.graph.input[1].type.tensor_type.shape.dim[1].ClearField("value")
    module = load_onnx(proto, {"n": (2, 9)})
    assert [(b.var.name, b.lower, b.upper) for b in module.bounds] == [("n", 2, 9), ("z_1", 1, None)]
    main = module.functions["main"]
    assert isinstance(main, Function)
    assert repr(main.ret_info) == "Tensor((n, 3 + z_1), f32)"


@pytest.mark.parametrize("names", ["?", "None", "none", "unk", "unk__7", "-1", "unknown", "*", "_"])
def test_load_onnx_dims_of_one_placeholder_are_independent(names: str) -> None:
    """Exporters call every unknown dim alike; only at one size for all would they be one dim."""
    proto = model("(float[p, q] x, float[p, r] z) => (float[s, t] y) { y = Concat<axis = 1>(x, z) }")
    for i in proto.graph.input:
        for d in i.type.tensor_type.shape.dim:
            d.dim_param = names
    module = check(proto, [np.ones((2, 3), np.float32), np.zeros((2, 4), np.float32)])
    assert [b.var.name for b in module.bounds] == ["x_0", "x_1", "z_0", "z_1"]


@pytest.mark.parametrize("name", ["n", "none_of_these", "nullable", "批", "unk_batch", "N1", "dim-1"])
def test_load_onnx_dims_of_one_name_are_one_symbol(name: str) -> None:
    proto = model("(float[p] x, float[q] z) => (float[r] y) { y = Add(x, z) }")
    for i in proto.graph.input:
        i.type.tensor_type.shape.dim[0].dim_param = name
    assert len(load_onnx(proto, {name: (1, 5)}).bounds) == 1


def test_bounds_name_symbols() -> None:
    with pytest.raises(UserError, match=r"bounds of m: .* which are n"):
        load_onnx(model(DENSE), {"m": (1, 4)})
    with pytest.raises(UserError, match="symbol 'n'"):
        load_onnx(model(DENSE), {"n": (4, 1)})


def test_paths_bytes_and_protos_are_the_same_model(tmp_path: Path) -> None:
    proto = model(DENSE)
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for source in (proto, proto.SerializeToString(), path, str(path)):
        np.testing.assert_array_equal(evaluate_function(load_onnx(source), [x]), x @ np.arange(1, 7).reshape(3, 2))
    assert load_model(path, {"n": (1, 7)}).bounds[0].upper == 7


def test_weights_are_views() -> None:
    proto = model(DENSE)
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "w"))
    module = load_onnx(proto)
    assert not module.constants["w"].flags.owndata
    np.testing.assert_array_equal(module.constants["w"], values)


def test_external_data_is_mapped(tmp_path: Path) -> None:
    module = load_onnx(external(tmp_path))
    assert isinstance(module.constants["w"], np.memmap)
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(evaluate_function(module, [x]), [[9, 12], [9, 12]])


@pytest.mark.parametrize("changes, message", [
    ({"location": "../weights.bin"}, "inside the model's folder"),
    ({"location": "/etc/hostname"}, "inside the model's folder"),
    ({"location": "other.bin"}, "does not exist"),
    ({"offset": 16}, "is the file complete"),
    ({"length": 20}, "is the file complete"),
])  # fmt: skip
def test_load_onnx_missing_external_data_raises(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(64))
    with pytest.raises(ParseError, match=message):
        load_onnx(external(folder, **changes))


def cached(place: Path, blobs: str = "models--o--m/blobs") -> Path:
    """DENSE as a cache of the Hugging Face hub holds it: links into a folder of blobs."""
    revision, blob = place / "models--o--m/snapshots/4f1a/onnx", place / blobs
    for folder in (revision, blob):
        folder.mkdir(parents=True)
    for file, name in ((external(blob), "a1b2"), (blob / "weights.bin", "c3d4")):
        file.rename(blob / name)
        (revision / file.name).symlink_to(os.path.relpath(blob / name, revision))
    return revision / "dense.onnx"


def test_load_onnx_from_cache_of_the_hub_follows_links_to_blobs(tmp_path: Path) -> None:
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(evaluate_function(load_model(cached(tmp_path)), [x]), [[9, 12], [9, 12]])


@pytest.mark.parametrize("blobs", ["models--o--other/blobs", "models--o--m/blobs/inner", "models--o--m/other", "blobs"])
def test_load_onnx_from_cache_of_the_hub_follows_no_link_elsewhere(tmp_path: Path, blobs: str) -> None:
    with pytest.raises(ParseError, match="link out of it"):
        load_model(cached(tmp_path, blobs))


def test_load_onnx_from_cache_with_a_link_as_blobs_follows_none(tmp_path: Path) -> None:
    """A folder that whoever wrote the model could unpack anywhere does not open another one."""
    path = cached(tmp_path)
    blobs, moved = tmp_path / "models--o--m/blobs", tmp_path / "elsewhere"
    blobs.rename(moved)
    blobs.symlink_to(moved)
    with pytest.raises(ParseError, match="link out of it"):
        load_model(path)


def test_load_onnx_from_folder_named_as_in_a_cache_follows_no_link(tmp_path: Path) -> None:
    path = cached(tmp_path)
    (tmp_path / "models--o--m").rename(tmp_path / "mine")
    with pytest.raises(ParseError, match="link out of it"):
        load_model(tmp_path / "mine" / path.relative_to(tmp_path / "models--o--m"))


def test_external_data_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="load the model by its path"):
        load_onnx(external(tmp_path).read_bytes())


@pytest.mark.parametrize("content", [b"", b"hello, world", b"\x08\x09", bytes(100)])
def test_load_onnx_other_content_raises(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ParseError, match=r"m\.onnx: expected an ONNX model.*really ONNX"):
        load_onnx(path)
    with pytest.raises(ParseError, match=r"expected an ONNX model, .*No such file"):
        load_onnx(tmp_path / "missing.onnx")


def test_every_truncation_is_an_error() -> None:
    whole = model(DENSE).SerializeToString()
    for cut in range(len(whole)):
        with pytest.raises(RelaxTuneError):
            load_onnx(whole[:cut])


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_altered_bytes_never_end_in_anything_but_our_errors(data: st.DataObject) -> None:
    whole = bytearray(model(DENSE).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RelaxTuneError):
        load_onnx(bytes(whole))


def test_load_onnx_old_opset_or_foreign_type_message_advises() -> None:
    with pytest.raises(ParseError, match=r"opset 1 to \d+, got -1"):
        load_onnx(model(DENSE, -1))
    with pytest.raises(ParseError, match=r"input 'x': .* got COMPLEX64"):
        load_onnx(model("(complex64[n] x) => (complex64[n] y) { y = Neg(x) }"))
    proto = model(DENSE)
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ParseError, match="input 'x': expected a number of dims"):
        load_onnx(proto)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("onnx"):
            raise ImportError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'relax-tune\[onnx\]'"):
        load_onnx(b"")


@pytest.mark.parametrize("dims", [(1 << 32, 1 << 32), (1 << 62, 4), (1 << 31, 1 << 31, 4)])
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("kind", ["FLOAT", "INT4", "BOOL"])
def test_load_onnx_tensor_with_size_wrapping_around_is_refused(dims: tuple[int, ...], raw: bool, kind: str) -> None:
    """The product of these dims is 0 modulo 2**64."""
    tensor = onnx.TensorProto(name="w", data_type=getattr(onnx.TensorProto, kind), dims=dims)
    if raw:
        tensor.raw_data = b""
    output = onnx.helper.make_tensor_value_info("y", tensor.data_type, None)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["w"], ["y"])], "g", [], [output], [tensor])
    with pytest.raises(ParseError, match="tensor 'w'"):
        load_onnx(onnx.helper.make_model(graph))
