"""Artifacts: the same bytes for the same model, and nothing altered gets in."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from relax_tune.errors import ArtifactError
from relax_tune.runtime.artifact import Artifact, device_kind, load_artifact, new_artifact, save_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.program import SCHEMA, SMALL, BufferSpec

RNG = np.random.default_rng(5)


@pytest.fixture
def saved(tmp_path: Path, small: Any) -> Path:
    return save_artifact(tmp_path / "model.rta", small.program("c"), small.constants, {"note": "a test"})


def forged(path: Path, change: dict[str, bytes], order: tuple[str, ...] | None = None) -> Path:
    """The artifact with members replaced and every hash made to fit, as somebody who means harm would."""
    import hashlib

    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members |= change
    if "manifest.json" not in change:
        manifest = json.loads(members["manifest.json"])
        for name in manifest["members"]:
            digest = hashlib.blake2b(members[name], digest_size=32).hexdigest()
            manifest["members"][name] = {"bytes": len(members[name]), "blake2b": digest}
        members["manifest.json"] = json.dumps(manifest).encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in order or members:
            archive.writestr(name, members[name])
        archive.comment = b"blake2b:" + b"0" * 64
    data = stream.getvalue()
    path.write_bytes(data[:-64] + hashlib.blake2b(data[:-72], digest_size=32).hexdigest().encode())
    return path


def test_round_trip_runs(device: Device, small: Any, tmp_path: Path) -> None:
    kind = device.info.kind
    program = small.program(kind)
    path = save_artifact(tmp_path / "m.rta", program, small.constants, {"fingerprint": dict(device.info.fingerprint)})
    loaded = load_artifact(path)
    assert loaded.program == program and loaded.device_kind == kind and loaded.constants["bias"].nbytes == 12
    np.testing.assert_array_equal(loaded.constants["bias"], small.constants["bias"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # same fingerprint: nothing to warn about
        model = loaded.open(device)
    with model:
        for n in (0, 1, 7):
            x = RNG.standard_normal((n, 3), dtype=np.float32)
            np.testing.assert_allclose(model.run({"x": x})[0], small.reference(x), rtol=1e-5, atol=1e-5)


def test_artifact_without_kernels_keeps_device_kind(tmp_path: Path, small: Any) -> None:
    """A build may call libraries only."""
    program = small.program("c")
    bare = replace(program, kernels=(), prepare=(), calls=())
    for kind in ("c", "opencl"):
        saved = save_artifact(tmp_path / "m.rta", bare, small.constants, kind=kind)
        assert load_artifact(saved).device_kind == new_artifact(bare, small.constants, kind=kind).device_kind == kind
        again = load_artifact(saved).save(tmp_path / "again.rta")
        assert again.read_bytes() == saved.read_bytes()
    assert new_artifact(program, small.constants, kind="opencl").device_kind == "c"  # kernels tell


@pytest.mark.ccompiler
def test_model_opens_device_by_name(saved: Path, small: Any) -> None:
    with load_artifact(saved).open() as model:
        x = RNG.standard_normal((6, 3), dtype=np.float32)
        np.testing.assert_allclose(model.run([x])[0], small.reference(x), rtol=1e-5, atol=1e-5)


def test_a_device_of_another_kind_is_refused(device: Device, small: Any, tmp_path: Path) -> None:
    other = "c" if device.info.kind == "opencl" else "opencl"
    path = save_artifact(tmp_path / "m.rta", small.program(other), small.constants)
    with pytest.raises(ArtifactError, match=f"expected a device of kind {other}, got {device.info.kind}"):
        load_artifact(path).open(device)


@pytest.mark.opencl
@pytest.mark.process
@pytest.mark.parametrize("part", ["PoCL 3.0", "oclgrind"])
def test_artifact_opens_driver_named_by_fingerprint(part: str, small: Any, tmp_path: Path) -> None:
    device = open_device(f"opencl:{part}")
    facts = dict(device.info.fingerprint)
    device.close()
    path = save_artifact(tmp_path / "m.rta", small.program("opencl"), small.constants, {"fingerprint": facts})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with load_artifact(path).open() as model:
            assert dict(model.executor.device.info.fingerprint) == facts
    facts["platform"] = "a driver of another machine"
    path = save_artifact(tmp_path / "other.rta", small.program("opencl"), small.constants, {"fingerprint": facts})
    with pytest.warns(UserWarning, match="tuned on another device"), load_artifact(path).open() as model:
        assert "PoCL" in dict(model.executor.device.info.fingerprint)["platform"]


def test_another_fingerprint_warns(device: Device, small: Any, tmp_path: Path) -> None:
    facts = dict(device.info.fingerprint) | {"cpu": "something else"}
    path = save_artifact(tmp_path / "m.rta", small.program(device.info.kind), small.constants, {"fingerprint": facts})
    with pytest.warns(UserWarning, match=r"tuned on another device \(cpu differ\)"):
        load_artifact(path).open(device).close()


@pytest.mark.process
def test_same_bytes(saved: Path, small: Any, tmp_path: Path) -> None:
    again = save_artifact(tmp_path / "other" / "m.rta", small.program("c"), dict(small.constants), {"note": "a test"})
    assert again.read_bytes() == saved.read_bytes()
    code = (
        "import sys; from relax_tune.runtime.artifact import *;"
        "a = load_artifact(sys.argv[1]); save_artifact(sys.argv[2], a.program, a.constants, a.manifest['extra'])"
    )
    third = tmp_path / "third.rta"
    environment = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", code, str(saved), str(third)], check=True, env=environment)
    assert third.read_bytes() == saved.read_bytes()
    assert not list(tmp_path.glob(".*")), "no temporary file stays"


def test_every_truncation_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    places = {0, 1, 3, 4, 100, len(data) // 2, len(data) - 73, len(data) - 64, len(data) - 1}
    for size in places | set(random.Random(0).sample(range(len(data)), 40)):
        saved.write_bytes(data[:size])
        with pytest.raises(ArtifactError, match=r"model\.rta"):
            load_artifact(saved)
    saved.write_bytes(data + b"x")
    with pytest.raises(ArtifactError):
        load_artifact(saved)


def test_every_flipped_bit_is_refused(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    generator = random.Random(1)
    for place in [*generator.sample(range(len(data)), 300), len(data) - 1, len(data) - 65, len(data) - 73]:
        changed = bytearray(data)
        changed[place] ^= 1 << generator.randrange(8)
        saved.write_bytes(changed)
        with pytest.raises(ArtifactError):
            load_artifact(saved)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="readable file"):
        load_artifact(tmp_path / "missing.rta")
    with pytest.raises(ArtifactError, match="readable file"):
        load_artifact(tmp_path)
    plain = tmp_path / "plain.rta"
    plain.write_text("hello")
    with pytest.raises(ArtifactError, match="another kind of file"):
        load_artifact(plain)
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(ArtifactError, match="another kind of zip"):
        load_artifact(plain)


def test_forged_parts_are_refused(saved: Path, small: Any) -> None:
    original = saved.read_bytes()
    manifest = json.loads(zipfile.ZipFile(saved).read("manifest.json"))
    (program,) = json.loads(zipfile.ZipFile(saved).read("programs.json"))
    forged(saved, {})
    assert isinstance(load_artifact(saved), Artifact), "the forger of this test makes files that would be read"
    attempts: list[tuple[dict[str, bytes], tuple[str, ...] | None, str]] = [
        ({"manifest.json": json.dumps(manifest | {"schema": 1}).encode()}, None, "expected schema 2 .*got 1"),
        ({"manifest.json": json.dumps(manifest | {"format": "x"}).encode()}, None, "expected format"),
        ({"manifest.json": json.dumps(manifest | {"members": {}}).encode()}, None, "expected hashes"),
        ({"manifest.json": json.dumps(manifest | {"extra": 3}).encode()}, None, "expected hashes"),
        ({"manifest.json": json.dumps(manifest | {"device_kind": "opencl"}).encode()}, None, "its kernels c"),
        ({"manifest.json": b"[" * 100_000}, None, "expected JSON"),
        ({"programs.json": b"\xff\xfe"}, None, "UTF-8"),
        ({"programs.json": json.dumps([program | {"schema": SCHEMA + 1}]).encode()}, None, "expected schema"),
        ({"programs.json": b"[]"}, None, "at least one program"),
        ({"programs.json": json.dumps([program, program]).encode()}, None, "distinct names"),
        ({"constants.safetensors": b"\0" * 16}, None, "safetensors"),
        ({"constants.safetensors": safetensors.numpy.save({"bias": np.zeros(4, np.float32)})}, None, "constant bias"),
        ({"constants.safetensors": safetensors.numpy.save({})}, None, r"missing \['bias'\]"),
        ({"x.py": b"boom"}, None, "expected the members"),
        ({}, ("programs.json", "manifest.json", "constants.safetensors"), "expected the members"),
    ]
    for change, order, says in attempts:
        saved.write_bytes(original)
        forged(saved, change, order)
        with pytest.raises(ArtifactError, match=says):
            load_artifact(saved)


def test_save_refuses_mismatched_parts(tmp_path: Path, small: Any) -> None:
    program = small.program("c")
    with pytest.raises(ArtifactError, match=r"missing \['bias'\]"):
        save_artifact(tmp_path / "m.rta", program, {})
    with pytest.raises(ArtifactError, match="constant bias: expected float32"):
        save_artifact(tmp_path / "m.rta", program, {"bias": np.zeros(3)})
    with pytest.raises(ArtifactError, match="JSON values"):
        save_artifact(tmp_path / "m.rta", program, small.constants, {"x": object()})
    with pytest.raises(ArtifactError, match="index of a scalar slot"):
        save_artifact(tmp_path / "m.rta", replace(program, storages=(10_000,)), small.constants)
    mixed = (*program.kernels, small.program("opencl").kernels[0])
    with pytest.raises(ArtifactError):
        save_artifact(tmp_path / "m.rta", replace(program, kernels=mixed), small.constants)
    with pytest.raises(ArtifactError, match="one language, got c, opencl"):
        device_kind([replace(program, kernels=mixed)])
    assert not list(tmp_path.iterdir())


def test_constants_of_every_dtype_and_odd_shapes(tmp_path: Path, small: Any) -> None:
    program = small.program("c")
    three = program.buffers[1].shape[0]
    zero = program.calls[1].choice  # the slot of the constant 0
    dtypes = ["bool", "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float64", *SMALL]
    extra = [BufferSpec(f"k.{d}", d, (three, three), "const") for d in dtypes]
    extra += [BufferSpec("scalar", "float32", (), "const"), BufferSpec("empty", "float32", (zero, three), "const")]
    program = replace(program, buffers=(*program.buffers, *extra))
    constants = dict(small.constants)
    constants |= {f"k.{d}": np.arange(9).reshape(3, 3).astype(np.float32).astype(d).T for d in dtypes}
    constants |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.float32)}
    loaded = load_artifact(save_artifact(tmp_path / "m.rta", program, constants))
    for name, array in constants.items():
        assert loaded.constants[name].tobytes() == array.tobytes()
        assert loaded.constants[name].dtype == array.dtype and loaded.constants[name].shape == array.shape
