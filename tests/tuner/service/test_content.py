"""Files by content: stored once, read as they were, refused when altered; the files of each kind of model."""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path

import numpy as np
import pytest
from tests.tuner.cli.cli_model import make_bert

from relax_tune.errors import TryAgainLater, UserError
from relax_tune.tuner.service.content import ContentStore
from relax_tune.tuner.service.model_files import model_files


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ContentStore:
    """A folder, and fsspec's own file system in memory, which stands for buckets: it knows no paths of this machine."""
    pytest.importorskip("fsspec", reason="fsspec is not installed (extra jobs)")
    return ContentStore(str(tmp_path / "files") if request.param == "folder" else f"memory://{uuid.uuid4().hex}/files")


def test_file_comes_back_by_hash(store: ContentStore, tmp_path: Path) -> None:
    given = tmp_path / "given.bin"
    given.write_bytes(bytes(range(256)) * 9000)
    key = store.put_file(given)
    assert key == hashlib.sha256(given.read_bytes()).hexdigest() == store.put_file(given)
    assert store.fetch_file(key, tmp_path / "new" / "copy").read_bytes() == given.read_bytes()


def test_cut_file_is_refused_then_stored_anew(store: ContentStore, tmp_path: Path) -> None:
    given = tmp_path / "given.bin"
    given.write_bytes(b"whole")
    key = store.put_file(given)
    with store._fs.open(store._place(key), "wb") as file:
        file.write(b"who")
    with pytest.raises(UserError, match="altered or truncated"):
        store.fetch_file(key, tmp_path / "copy")
    assert store.put_file(given) == key
    assert store.fetch_file(key, tmp_path / "copy").read_bytes() == b"whole"


def test_fetched_file_follows_no_link_and_replaces_nothing(store: ContentStore, tmp_path: Path) -> None:
    given, precious = tmp_path / "given.bin", tmp_path / "precious"
    given.write_bytes(b"fetched")
    precious.write_bytes(b"precious")
    key = store.put_file(given)
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for name in ("link", "dangling", "precious"):
        with pytest.raises((TryAgainLater, UserError)):
            store.fetch_file(key, tmp_path / name)
    assert precious.read_bytes() == b"precious" and not (tmp_path / "none").exists()


def test_missing_file_and_wrong_key_are_named(store: ContentStore, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no file"):
        store.fetch_file("0" * 64, tmp_path / "copy")
    with pytest.raises(UserError, match="64 hex digits"):
        store.fetch_file("../x", tmp_path / "copy")


def test_folder_of_a_model_comes_back_whole(store: ContentStore, tmp_path: Path) -> None:
    bert = make_bert(tmp_path / "bert")
    (bert / "pytorch_model.bin").write_bytes(b"pickled")
    (bert / "1_Pooling").mkdir()
    (bert / "1_Pooling" / "config.json").write_text("{}")
    (tmp_path / "work").mkdir()
    found = store.fetch_model(store.put_model(bert, tmp_path / "work"), tmp_path / "fetched")
    names = sorted(p.relative_to(found).as_posix() for p in found.rglob("*") if p.is_file())
    assert names == ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]
    assert (found / "model.safetensors").read_bytes() == (bert / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"opens": "", "files": []},
        {"opens": "", "files": [["../x", "0" * 64]]},
        {"opens": "", "files": [["/etc/x", "0" * 64]]},
        {"opens": "", "files": [["a"]]},
        {"opens": 1, "files": [["a", "0" * 64]]},
        {"opens": "", "files": [["a", "0" * 64], ["./a", "0" * 64]]},
        {"opens": "", "files": [["a", "0" * 64], ["a/b", "0" * 64]]},
        {"opens": "", "files": [["a\n\u001b[2Jb", "0" * 64]]},
        {"opens": "", "files": [["a" * 256, "0" * 64]]},
        {"opens": "", "files": [[".", "0" * 64]]},
        {"opens": "", "files": [["\ud800", "0" * 64]]},
    ],
)
def test_list_of_files_leading_outside_is_refused(document: object, tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed (extra jobs)")
    store = ContentStore(str(tmp_path / "files"))
    (tmp_path / "list").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"is not a model|lacks its file"):
        store.fetch_model(store.put_file(tmp_path / "list"), tmp_path / "fetched")


@pytest.mark.parametrize("name", ["重み\u3000一.json", "a b.json", "1_Pooling/config.json", "caf\u00e9\u00a0.json"])
def test_model_of_names_in_any_language_comes_back(store: ContentStore, tmp_path: Path, name: str) -> None:
    bert = make_bert(tmp_path / "bert")
    (bert / name).parent.mkdir(exist_ok=True)
    (bert / name).write_text("{}")
    (tmp_path / "work").mkdir()
    found = store.fetch_model(store.put_model(bert, tmp_path / "work"), tmp_path / "fetched")
    assert (found / name).read_text() == "{}"


def test_unknown_and_unreachable_places_are_named(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed (extra jobs)")
    with pytest.raises(UserError, match="--files expects a folder or a URL"):
        ContentStore("nowhere://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(TryAgainLater, match="could not store file"):
        ContentStore(str(tmp_path / "file" / "below")).put_file(tmp_path / "file")


def test_model_files_of_a_text_are_text_and_weights(tmp_path: Path) -> None:
    for name in ("m.relax", "m.safetensors", "other.safetensors"):
        (tmp_path / name).write_text("x")
    assert model_files(tmp_path / "m.relax") == (tmp_path, ["m.relax", "m.safetensors"])
    with pytest.raises(UserError, match="no such file"):
        model_files(tmp_path / "none.onnx")
    with pytest.raises(UserError, match=r"config.json is missing"):
        model_files(tmp_path)


def test_model_files_of_onnx_have_external_data(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    weights = onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "w")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    shape = helper.make_tensor_value_info("x", kind, ["n", 64]), helper.make_tensor_value_info("y", kind, ["n", 64])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [shape[0]], [shape[1]], [weights])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph), str(path), save_as_external_data=True, location="m.data", size_threshold=0)
    assert model_files(path) == (tmp_path, ["m.onnx", "m.data"])
    found = onnx.load(str(path), load_external_data=False)
    (entry,) = [e for e in found.graph.initializer[0].external_data if e.key == "location"]
    entry.value = "../secret"
    path.write_bytes(found.SerializeToString())
    (tmp_path.parent / "secret").write_text("")
    with pytest.raises(UserError, match=r"'../secret' is not in the same folder"):
        model_files(path)


@pytest.mark.parametrize("name", ["vocab.txt", "1_Pooling/config.json"])
def test_model_files_of_a_folder_with_a_link_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    """A foreign folder must not copy this user's other files to where services read them."""
    (tmp_path / "private").write_text("private")
    folder = tmp_path / "model"
    (folder / name).parent.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / name).symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match="a link to"):
        model_files(folder)


def test_model_files_of_a_text_with_linked_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("private")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.relax").write_text("")
    (tmp_path / "model" / "m.safetensors").symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match="a link to"):
        model_files(tmp_path / "model" / "m.relax")


def test_model_files_of_a_cache_of_the_hub_are_blobs(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--o--m" / "blobs", tmp_path / "models--o--m" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    (blobs / "0").write_text("{}")
    (folder / "config.json").symlink_to(Path("..", "..", "blobs", "0"))
    assert model_files(folder) == (folder, ["config.json"])
