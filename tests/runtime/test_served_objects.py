"""Artifacts with compiled kernels: opened without a compiler, with one, on other processors, and after somebody altered them."""

from __future__ import annotations

import json
import platform
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.test_artifact import forged

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.artifact import Artifact, load_artifact, new_artifact, save_artifact
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.library.openblas import OpenBlas
from relax_tune.runtime.model import Model

pytestmark = pytest.mark.ccompiler
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")


@pytest.fixture
def artifact(small: Any) -> Artifact:
    return new_artifact(small.program("c"), small.constants)


@pytest.fixture
def saved(artifact: Artifact, tmp_path: Path) -> Path:
    return artifact.compiled_for(["native"]).save(tmp_path / "model.rta")


def device_of(model: Model) -> CDevice:
    device = model.executor.device
    assert isinstance(device, CDevice)
    return device


def check(model: Model, small: Any) -> None:
    for n in (0, 1, 7, 300):
        x = np.random.default_rng(n).standard_normal((n, 3), dtype=np.float32)
        np.testing.assert_allclose(model.run([x])[0], small.reference(x), rtol=1e-5)


def test_artifact_with_objects_opens_without_compiler(
    saved: Path, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path / "empty"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_artifact(saved).open()
    with model:
        assert device_of(model).provenance() == {"objects": "native", "libraries": 3, "compiled": 0}
        check(model, small)


def test_saved_objects_are_the_same_bytes_again(saved: Path, artifact: Artifact, tmp_path: Path) -> None:
    again = load_artifact(saved).save(tmp_path / "again.rta")
    assert again.read_bytes() == saved.read_bytes()
    assert artifact.compiled_for(["native"]).save(again).read_bytes() == saved.read_bytes()
    assert load_artifact(saved).without_objects().save(again).read_bytes() == artifact.save(saved).read_bytes()


def test_artifact_without_objects_compiles_source(saved: Path, small: Any) -> None:
    with load_artifact(saved).without_objects().open() as model:
        assert device_of(model).objects is None
        check(model, small)


def test_artifact_without_fitting_objects_compiles_or_names_objects(
    artifact: Artifact, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (native,) = artifact.compiled_for(["native"]).objects
    other = replace(artifact, objects=(replace(native, flags=(*native.flags, "no_such_flag")),))
    with other.open() as model:
        assert device_of(model).objects is None
        check(model, small)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(
        UserError, match=r"native needs instructions no_such_flag; this is .*--cpu .*CC=no-such-compiler"
    ):
        other.open()
    with pytest.raises(UserError, match="CC=no-such-compiler"):
        artifact.open()


@on_x86
def test_narrower_objects_without_compiler_are_used(
    artifact: Artifact, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = artifact.compiled_for(["x86-64-v2"])
    with narrow.open() as model:
        assert device_of(model).objects is None, "a compiler makes faster kernels"
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.warns(UserWarning, match="got x86-64-v2; kernels are slower"):
        model = narrow.open()
    with model:
        assert device_of(model).provenance()["objects"] == "x86-64-v2"
        check(model, small)


def test_objects_on_measured_processor_give_no_warning(artifact: Artifact) -> None:
    fingerprint = dict(CDevice().info.fingerprint)
    known = replace(artifact, manifest={**artifact.manifest, "extra": {"fingerprint": fingerprint}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known.compiled_for(["native"]).open().close()


@pytest.mark.parametrize("member", ["objects.safetensors", "manifest.json"])
def test_altered_objects_are_refused(saved: Path, member: str) -> None:
    with zipfile.ZipFile(saved) as archive:
        objects, manifest = archive.read("objects.safetensors"), json.loads(archive.read("manifest.json"))
    data = bytearray(saved.read_bytes())
    data[data.index(objects) + len(objects) // 2] ^= 1
    damaged = saved.with_name("damaged.rta")
    damaged.write_bytes(data)
    with pytest.raises(ArtifactError, match="altered or damaged"):
        load_artifact(damaged)
    manifest["objects"][0]["name"] = "x86-64-v3"
    change = {"objects.safetensors": b"none"} if member != "manifest.json" else {member: json.dumps(manifest).encode()}
    with pytest.raises(ArtifactError, match=r"objects.*build it again"):
        load_artifact(forged(saved, change))


def test_altered_file_of_the_cache_is_written_again(
    saved: Path, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "other"
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(cache))
    load_artifact(saved).open().close()
    files = {file: file.read_bytes() for file in (cache / "c").glob("object-*.so")}
    assert len(files) == 3
    for file, data in files.items():
        copy = file.with_suffix(".copy")  # this process has the file itself mapped
        copy.write_bytes(data[:4096])
        copy.replace(file)
    with load_artifact(saved).open() as model:
        check(model, small)
    assert {file: file.read_bytes() for file in files} == files


@pytest.mark.parametrize(("cpu", "says"), [(["avx9"], "got 'avx9'"), ("native", "a list of kinds")])
def test_compiled_for_wrong_kinds_raises(artifact: Artifact, cpu: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        artifact.compiled_for(cpu)


def test_compiled_for_artifact_of_another_target_raises(small: Any) -> None:
    other = new_artifact(small.program("opencl"), small.constants)
    with pytest.raises(UserError, match="target c, got one for opencl"):
        other.compiled_for(["native"])


def test_compiled_for_with_library_steps_has_the_library_s_kernel(small: Any, tmp_path: Path) -> None:
    program = small.program("c")
    call = program.calls[1]
    step = replace(call.variants[0].steps[0], kind="library", target="openblas.sgemm", grid=(), local=())
    called = replace(
        program, calls=(program.calls[0], replace(call, variants=(replace(call.variants[0], steps=(step,)),)))
    )
    (objects,) = replace(new_artifact(program, small.constants), programs=(called,)).compiled_for(["native"]).objects
    assert objects.units(OpenBlas.kernels)
    save_artifact(tmp_path / "m.rta", program, small.constants, objects=[objects])
    assert load_artifact(tmp_path / "m.rta").objects == (objects,)
