"""An artifact with compiled kernels in a root file system as of the image `serve`: Python, NumPy, this package, and no compiler."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from tests.deploy.test_unit_restrictions import NAMESPACE, missing

import relax_tune as rt
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.device.host import c_library

ROOT = Path(__file__).parents[2]
PACKAGES = ("numpy", "ml_dtypes", "safetensors")
SERVER = """
import os, shutil, sys
import numpy as np
import relax_tune as rt

places = [place for top in os.listdir("/") if top != "proc" for place in os.walk(f"/{top}")]
assert not [name for _, _, names in places for name in names if "libgomp" in name or name in ("gcc", "cc", "clang", "as", "ld", "sh")]
assert not os.path.exists("/usr/include") and not any(map(shutil.which, ("gcc", "cc", "sh")))
data = np.load("/work/inputs.npz")
with rt.load(sys.argv[1]) as model:
    np.savez("/work/outputs.npz", *(model.run([data[name]])[0] for name in data.files))
    print(model.executor.device.provenance())
"""
pytestmark = [
    pytest.mark.process,
    pytest.mark.ccompiler,
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=f"there are no mount namespaces here: {missing()}"),
    pytest.mark.skipif(c_library() is None, reason="libraries are found by ldd of the GNU C library"),
]


def libraries_of(files: Iterable[Path]) -> set[Path]:
    """Libraries that programs and libraries load from outside of packages, with the loader."""
    done = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True)
    return {Path(path) for path in re.findall(r"(?:=> |\t)(/\S+) \(0x", done.stdout) if "site-packages" not in path}


def package_folders() -> dict[str, Path]:
    folders = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        folders[name] = Path(spec.origin).parent
    bundled = folders["numpy"].with_name("numpy.libs")
    return folders | ({"numpy.libs": bundled} if bundled.is_dir() else {})


def serve(tree: Path, work: Path, artifact: str) -> subprocess.CompletedProcess[str]:
    """Run the server on an artifact in `work`, in a root file system that is made below `tree`."""
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    standard = Path(sysconfig.get_path("stdlib"))
    folders = package_folders()
    native = [
        python,
        *(standard / "lib-dynload").glob("*.so"),
        *(f for d in folders.values() for f in d.rglob("*.so*")),
    ]
    for library in libraries_of(native):
        (tree / library.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, tree / library.relative_to("/"))
    mounts = {tree / "site" / name: folder for name, folder in folders.items()}
    mounts |= {tree / standard.relative_to("/"): standard, tree / "work": work, tree / "proc": Path("/proc")}
    for place in (*mounts, tree / "tmp", tree / python.parent.relative_to("/")):
        place.mkdir(parents=True, exist_ok=True)
    shutil.copy(python, tree / python.relative_to("/"))
    hidden = shutil.ignore_patterns("tuner", "ir", "schedules", "database", "__pycache__")
    shutil.copytree(ROOT / "src" / "relax_tune", tree / "site" / "relax_tune", ignore=hidden)
    (work / "server.py").write_text(SERVER)
    binds = "\n".join(f"mount --rbind '{folder}' '{place}'" for place, folder in mounts.items())
    variables = {
        "PYTHONPATH": "/site",
        "PATH": "/bin:/usr/bin",
        "RELAX_TUNE_CACHE": "/tmp/cache",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    set_variables = " ".join(f"{name}={value}" for name, value in variables.items())
    command = f"exec env -i {set_variables} {shutil.which('chroot')} '{tree}' {python} /work/server.py /work/{artifact}"
    return subprocess.run([*NAMESPACE, f"{binds}\n{command}"], capture_output=True, text=True, timeout=300)


def test_artifact_with_objects_is_served_without_compiler_and_libgomp(tmp_path: Path) -> None:
    random, work = np.random.default_rng(0), tmp_path / "work"
    work.mkdir()
    matrix = random.standard_normal((64, 96), np.float32)
    graph = rt.GraphBuilder()
    x = graph.input("x", (graph.symbol("n", 1, 512), 64))
    model = graph.finish(graph.call(Relu(), graph.call(Matmul(), x, graph.constant("weight", matrix))))
    artifact = rt.build(model, target="c", db="memory://", self_test=False)
    artifact.compiled_for(["native"]).save(work / "objects.rta")
    artifact.save(work / "source.rta")
    inputs = [random.standard_normal((rows, 64), np.float32) for rows in (1, 7, 300)]
    np.savez(work / "inputs.npz", *inputs)
    done = serve(tmp_path / "root", work, "objects.rta")
    assert done.returncode == 0 and "'objects': 'native'" in done.stdout, done.stdout + done.stderr
    with np.load(work / "outputs.npz") as outputs:
        for name, given in zip(outputs.files, inputs, strict=True):
            expected = np.maximum(given.astype(np.float64) @ matrix, 0)
            np.testing.assert_allclose(outputs[name], expected, rtol=1e-4, atol=1e-4)
    done = serve(tmp_path / "second", work, "source.rta")
    assert done.returncode == 1 and "expected gcc, got no gcc or cc on PATH" in done.stderr, done.stderr
