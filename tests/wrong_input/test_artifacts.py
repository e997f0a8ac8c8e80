"""Artifacts that cannot be trusted: one `ArtifactError` that names the file, whatever was done to it."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import BIAS, small_program
from tests.runtime.test_artifact import forged
from tests.support.effort import examples
from tests.wrong_input.storage_cases import files, refused

from relax_tune.errors import ArtifactError
from relax_tune.runtime.artifact import load_artifact, save_artifact

CONSTANTS = {"bias": BIAS}
ODD: list[Any] = [
    *(None, True, -1, 0, 3, 99, 2**31, 2**62, 2**63 - 1, -(2**63), 2**63, 10**30, 10**400, 1.5, float("inf")),
    *("", "x", "input", "const", "temp", "packed", "output", "opencl", "library", "openblas.sgemm"),
    *("\ud800", "a\nb\x1b[2J", "x" * 100_000, [], [0], {}, {"a": 1}, [0] * 1000),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_artifact(tmp_path / "model.rta", small_program("c"), CONSTANTS, {"note": "a test"})


def said_of(path: Path) -> str:
    """What loading says; at most a paragraph, of our family, naming the file."""
    with pytest.raises(ArtifactError) as error:
        load_artifact(path)
    said = str(error.value)
    assert path.name in said and said.isprintable() and len(said) < 900, said[:2000]
    return said


NOT_ARTIFACTS: list[tuple[str, bytes, str]] = [
    ("empty", b"", "an empty file"),
    ("text", b"hello, this is not an artifact\n", "another kind of file"),
    ("png", b"\x89PNG\r\n\x1a\n" + bytes(50), "another kind of file"),
    ("zip start", b"PK\x03\x04" + bytes(200), "truncated, or another kind of zip"),
    ("short zip start", b"PK\x03\x04", "truncated, or another kind of zip"),
    ("database", b"SQLite format 3\0" + bytes(4080), "another kind of file"),
]


@pytest.mark.parametrize(("content", "says"), [case[1:] for case in NOT_ARTIFACTS], ids=[c[0] for c in NOT_ARTIFACTS])
def test_other_files_are_refused_by_every_command(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "model.rta").write_bytes(content)
    assert says in said_of(tmp_path / "model.rta")
    for arguments in (("run", "model.rta", "--inputs", "x.npz"), ("bench", "model.rta", "--shape", "n=1")):
        said = refused(tmp_path, *arguments)
        assert says in said and "model.rta" in said
    assert files(tmp_path) == {"model.rta": content}


def test_load_artifact_of_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.rta")
    (tmp_path / "folder.rta").mkdir()
    (tmp_path / "loop.rta").symlink_to("loop.rta")
    for name, says in (
        ("missing.rta", "no such file"),
        ("folder.rta", "got a folder"),
        ("pipe.rta", "got a device or pipe"),
        ("loop.rta", "check its name"),
        ("a" * 300 + ".rta", "File name too long"),
        ("pipe.rta/x.rta", "Not a directory"),
    ):
        assert says in refused(tmp_path, "run", name, "--inputs", "x.npz")
    with pytest.raises(ArtifactError, match="null byte"):
        load_artifact("a\0.rta")
    with pytest.raises(ArtifactError, match="device or pipe"):
        load_artifact("/dev/zero")


def test_every_class_of_byte_matters(saved: Path) -> None:
    """A flipped bit in each part of the zip, a cut in each part, and bytes too many."""
    data = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        places = [entry.header_offset + skip for entry in archive.infolist() for skip in (0, 8, 18, 26, 30, 60)]
        places += [archive.start_dir + skip for skip in (0, 10, 24, 46)]
    places += [len(data) - 94, len(data) - 73, len(data) - 65, len(data) - 64, len(data) - 1]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        saved.write_bytes(changed)
        said_of(saved)
        saved.write_bytes(data[:place])
        said_of(saved)
    for more in (b"x", b"\0" * 4096, data):
        saved.write_bytes(data + more)
        if more != data:
            said_of(saved)
    saved.write_bytes(b"x" + data)
    said_of(saved)


def test_a_newer_schema_and_another_tool_version(saved: Path) -> None:
    manifest = json.loads(zipfile.ZipFile(saved).read("manifest.json"))
    forged(saved, {"manifest.json": json.dumps(manifest | {"schema": 99, "tool_version": "9.1"}).encode()})
    said = said_of(saved)
    assert "expected schema" in said and "'9.1'" in said and "update relax-tune" in said
    save_artifact(saved, small_program("c"), CONSTANTS)
    forged(saved, {"manifest.json": json.dumps(manifest | {"tool_version": "9.1"}).encode()})
    assert load_artifact(saved).manifest["tool_version"] == "9.1", "only the schema says what can be read"


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(inner, (*at, key))


def _mutated(data: Any, places: list[tuple[Any, ...]], generator: random.Random) -> bytes:
    changed = copy.deepcopy(data)
    for _ in range(generator.choice([1, 1, 2, 4])):
        *outer, last = generator.choice(places)
        inside = changed
        try:
            for key in outer:
                inside = inside[key]
            if (act := generator.randrange(4)) == 0 and isinstance(inside, list):
                inside.insert(last, copy.deepcopy(inside[last]))
            elif act == 1:
                del inside[last]
            else:
                inside[last] = generator.choice(ODD)
        except (KeyError, IndexError, TypeError):  # an earlier change took this place away
            continue
    return json.dumps(changed).replace("Infinity", "1e999").encode()


@pytest.mark.slow
def test_load_artifact_with_mutated_program_and_fixed_hashes_is_refused(saved: Path) -> None:
    original = saved.read_bytes()
    documents = {name: json.loads(zipfile.ZipFile(saved).read(name)) for name in ("programs.json", "manifest.json")}
    places = {name: list(_places(document)) for name, document in documents.items()}
    generator = random.Random(11)
    refusals = 0
    for number in range(count := examples(1500)):
        name = "manifest.json" if number % 6 == 0 else "programs.json"
        saved.write_bytes(original)
        forged(saved, {name: _mutated(documents[name], places[name], generator)})
        try:
            load_artifact(saved)
        except ArtifactError:
            said_of(saved)
            refusals += 1
    assert refusals > 0.6 * count


def _with(path: tuple[Any, ...], value: Any) -> bytes:
    program = json.loads(small_program("c").to_json())
    inside = program
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return json.dumps([program]).encode()


HOSTILE = {
    "deep nesting": b'[{"schema": 1, "name": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]",
    "deep objects": b"[" + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"]",
    "nan": _with(("buffers", 0, "fill", "high"), float("nan")),
    "a number of many digits": b'[{"schema": ' + b"9" * 5000 + b"}]",
    "infinite": _with(("buffers", 0, "fill", "high"), 1.0).replace(b'"high": 1.0', b'"high": 1e999'),
    "lone surrogate in a source": _with(("kernels", 0, "source"), "void f() { /* \ud800 */ }"),
    "an escape sequence in a name": _with(("name",), "\x1b[2Jgone"),
    "an escape sequence in a message": _with(("checks", 0, "message"), "one\n\x1b[2Jtwo"),
    "a kernel no step names": _with(("kernels", 1, "name"), "nobody"),
    "a slot of itself": _with(("scalars",), [2, 0, 0, 0]),
    "a later slot": _with(("scalars",), [0, 1, 0, 0, 2, 0, 5, 0]),
    "a constant divided by zero": _with(("scalars",), [0, 1, 0, 0, 0, 0, 0, 0, 5, 0, 1, 0]),
    "a constant beyond int64": _with(("scalars",), [0, 2**62, 0, 0, 4, 0, 0, 0]),
    "a negative slot": _with(("buffers", 0, "shape"), [-1, 0]),
    "a storage of another": _with(("buffers", 3, "storage"), 7),
    "too many dims": _with(("buffers", 1, "shape"), [1] * 100_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_refused(saved: Path, name: str) -> None:
    forged(saved, {"programs.json": HOSTILE[name]})
    said_of(saved)


def test_a_constant_of_a_thousand_million_elements_is_not_allocated(saved: Path) -> None:
    """A program and a safetensors header that both promise what the file does not hold."""
    program = json.loads(small_program("c").to_json())
    program["scalars"] = [10**9 if number == 3 else number for number in program["scalars"]]
    header = json.dumps({"bias": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
    lying = len(header).to_bytes(8, "little") + header + bytes(64)
    huge = (2**62).to_bytes(8, "little") + header
    for constants in (lying, huge, b"\xff" * 8, b""):
        save_artifact(saved, small_program("c"), CONSTANTS)
        forged(saved, {"programs.json": json.dumps([program]).encode(), "constants.safetensors": constants})
        tracemalloc.start()
        said_of(saved)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100e6


@pytest.mark.process
@pytest.mark.ccompiler
def test_artifact_beyond_memory_is_refused_when_opened(saved: Path) -> None:
    """In a process with little memory: 10**9 elements of packed weights, and a name its kernels do not define."""
    program = json.loads(small_program("c").to_json())
    code = (
        "import sys\n"
        "from relax_tune.errors import RelaxTuneError\n"
        "from relax_tune.runtime.artifact import load_artifact\n"
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({3 << 30}, {3 << 30}))\n"
        "for path in sys.argv[1:]:\n"
        "    artifact = load_artifact(path)\n"
        "    try: artifact.open().close()\n"
        "    except RelaxTuneError as error: print(type(error).__name__, str(error).splitlines()[0])\n"
    )
    slot = len(program["scalars"]) // 4
    program["scalars"] += [0, 10**9, 0, 0]
    for buffer in program["buffers"]:
        if buffer["role"] == "packed":
            buffer["shape"] = [slot]
    program["prepare"] = []
    large = save_artifact(saved.with_name("large.rta"), small_program("c"), CONSTANTS)
    forged(large, {"programs.json": json.dumps([program]).encode()})
    program = json.loads(small_program("c").to_json())
    program["kernels"][0]["source"] = "void somebody_else(void) {}"
    nameless = forged(saved, {"programs.json": json.dumps([program]).encode()})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(large), str(nameless)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RELAX_TUNE_CACHE": str(saved.parent / "cache")},
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("MemoryLack") and "4000000000 bytes" in first
    assert second.startswith("BuildError") and "defines no such function" in second


def test_save_artifact_to_unwritable_path_is_refused(tmp_path: Path) -> None:
    program = small_program("c")
    (tmp_path / "folder.rta").mkdir()
    os.mkfifo(tmp_path / "pipe.rta")
    (tmp_path / "file").write_text("x")
    before = files(tmp_path)
    for name, says in (
        ("folder.rta", "got a folder"),
        ("pipe.rta", "got a device or pipe"),
        ("file/m.rta", "choose another place"),
        ("a" * 300 + ".rta", "File name too long"),
        ("a\0.rta", "null byte"),
        ("/proc/m.rta", "choose another place"),
    ):
        with pytest.raises(ArtifactError, match=says):
            save_artifact(tmp_path / name, program, CONSTANTS)
    assert files(tmp_path) == before


@pytest.mark.process
def test_failed_artifact_save_keeps_the_old_file(saved: Path) -> None:
    """A limit on file size stands for a full disk, which cannot be had everywhere."""
    before = files(saved.parent)
    code = (
        "import resource, signal, sys\n"
        "import numpy as np\n"
        "from tests.runtime.conftest import BIAS, small_program\n"
        "from relax_tune.errors import ArtifactError\n"
        "from relax_tune.runtime.artifact import save_artifact\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: save_artifact(sys.argv[1], small_program('c'), {'bias': BIAS})\n"
        "except ArtifactError as error: print(error)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert "free some space" in done.stdout and done.returncode == 0, done.stdout + done.stderr
    assert files(saved.parent) == before


@pytest.mark.ccompiler
def test_replaced_artifact_runs_on_while_open(saved: Path) -> None:
    artifact = load_artifact(saved)
    saved.write_bytes(b"gone")
    with artifact.open() as model:
        saved.unlink()
        x = np.ones((2, 3), np.float32)
        assert model.run([x])[0].shape == (2,)
