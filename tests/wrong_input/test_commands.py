"""Wrong input at the command line: exit code 2, one paragraph on stderr, no traceback, and the folder as it was."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.effort import examples
from tests.tuner.cli.cli_model import HIDDEN, WORDS, make_bert
from tests.wrong_input.tiny_model import generic_program, tiny_bert
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.database.store import MemoryStore
from relax_tune.errors import RelaxTuneError, UserError
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.runtime.artifact import save_artifact
from relax_tune.runtime.device.registry import open_device
from relax_tune.tuner.array_files import read_arrays
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.footprint import check_footprint, task_bytes
from relax_tune.tuner.settings import Settings

pytestmark = pytest.mark.ccompiler


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its artifact for target `c`, a model of an unknown kind, and some inputs."""
    folder = tmp_path_factory.mktemp("place")
    module = tiny_bert(folder / "bert")
    device = open_device("c")
    save_artifact(folder / "m.rta", *generic_program(module, device))
    device.close()
    make_bert(folder / "strange")
    config = (folder / "strange" / "config.json").read_text()
    (folder / "strange" / "config.json").write_text(config.replace('"bert"', '"mamba"'))
    make_bert(folder / "cut")
    weights = (folder / "cut" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    ids = np.ones((2, 5), np.int64)
    arrays = {
        "right": (ids, ids), "high": (ids * len(WORDS), ids), "long": (np.ones((1, 25), np.int64),) * 2, "int32": (ids.astype("i4"), ids),
        "rank": (ids[0], ids), "differ": (ids, ids[:, :4]),
    }  # fmt: skip
    for name, (tokens, mask) in arrays.items():
        np.savez(folder / f"{name}.npz", input_ids=tokens, attention_mask=mask)
    np.savez(folder / "missing.npz", input_ids=ids)
    np.savez(folder / "extra.npz", input_ids=ids, attention_mask=ids, more=ids)
    np.savez(folder / "pickled.npz", input_ids=np.array([None]), attention_mask=ids)
    np.save(folder / "single.npy", ids)
    whole = (folder / "right.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "text.npz").write_text("hello\n")
    (folder / "empty.npz").write_bytes(b"")
    (folder / "PNG.rta").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def unchanged(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`place` as the current folder; afterwards everything in it is what it was, and nothing is new."""
    for name in list(os.environ):
        if name.startswith("RELAX_TUNE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "80")
    before = contents(place)
    with contextlib.chdir(place):
        yield place
    after = contents(place)
    assert sorted(after) == sorted(before), "nothing new, nothing gone"
    assert after == before


def one_paragraph(code: int, stdout: str, stderr: str) -> str:
    assert code == 2, f"{code}: {stdout}{stderr}"
    assert stdout == "" and "Traceback" not in stderr
    lines = stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 1600, stderr
    return lines[0]


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return one_paragraph(done.exit_code, done.stdout, done.stderr)


def process(*arguments: str, **environment: str) -> str:
    """The same in a process of its own, as a user has it."""
    done = subprocess.run(
        [sys.executable, "-c", "from relax_tune.tuner.cli.app import main; main()", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return one_paragraph(done.returncode, done.stdout, done.stderr)


PROCESSES = [
    (("tune", "nowhere", "--target", "c"), {}, "nowhere: no such file or folder"),
    (("build", "strange", "--target", "c"), {}, "expected a known model_type, got "),
    (("tune", "cut", "--target", "c"), {}, "expected a complete safetensors file"),
    (("build", "bert", "--target", "c", "--bound", "n=1:99"), {}, "at most 32 positions"),
    (("build", "bert", "--target", "metal"), {}, "got 'metal'; there are: c"),
    (("build", "bert", "--target", "c"), {"CC": "false"}, "got exit code 1; set CC"),
    (("run", "m.rta", "--inputs", "right.npz"), {"PATH": "/nonexistent"}, "got no gcc or cc on PATH; install it"),
    (("run", "m.rta", "--inputs", "high.npz", "--out", "o.npz"), {}, "input_ids: expected values from 0 to"),
    (("bench", "m.rta", "--shape", "b=1,n=25"), {}, "expected 1 <= n <= 24"),
    (("run", "m.rta", "--inputs", "right.npz"), {"RELAX_TUNE_CACHE": "/proc/nothing"}, "point RELAX_TUNE_CACHE at"),
]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(("arguments", "environment", "says"), PROCESSES)
def test_processes(unchanged: Path, arguments: tuple[str, ...], environment: dict[str, str], says: str) -> None:
    assert says in process(*arguments, **environment)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ("long", "expected n <= 24, got 25"), ("int32", "expected dtype int64, got int32"),
        ("rank", "expected 2 dimensions"), ("differ", "attention_mask: expected 5 in dim 1, got 4"), ("missing", "attention_mask"),
        ("extra", "got unknown more"), ("pickled", "expected an .npz file of plain arrays"), ("cut", "plain arrays, got: BadZipFile"),
        ("text", "expected an .npz file"), ("empty", "expected an .npz file"), ("nowhere", "does not exist; make it with numpy.savez"),
    ],
)  # fmt: skip
def test_inputs_of_run(unchanged: Path, inputs: str, says: str) -> None:
    text = refused("run", "m.rta", "--inputs", f"{inputs}.npz", "--out", "o.npz")
    assert says in text and inputs in (text if "npz" in text else inputs)


def test_other_mistakes_of_run(unchanged: Path) -> None:
    assert "got a single array" in refused("run", "m.rta", "--inputs", "single.npy")
    assert "not a regular file" in refused("run", "m.rta", "--inputs", ".")
    assert "not a regular file" in refused("run", "m.rta", "--inputs", "/dev/zero")
    assert "give one of the two" in refused("run", "m.rta")
    assert "give one of the two" in refused("run", "m.rta", "--inputs", "right.npz", "--text", "a cat")
    assert "PNG.rta" in refused("run", "PNG.rta", "--inputs", "right.npz")
    assert "m.rtb" in refused("run", "m.rtb", "--inputs", "right.npz")
    assert "--model FOLDER" in refused("run", "m.rta", "--text", "a cat")
    assert "tokenizer.json" in refused("run", "m.rta", "--text", "a cat", "--model", "nowhere")
    assert "got 'metal'" in refused("run", "m.rta", "--inputs", "right.npz", "--device", "metal")


@pytest.mark.parametrize("more", [("--activations", "int8"), ("--precision", "f16")])
def test_weights_of_16_bits_beside_other_types(unchanged: Path, more: tuple[str, str]) -> None:
    text = refused("build", "bert", "--target", "c", "--weights", "bf16", *more)
    assert "expects --precision and --activations f32" in text and more[1] in text.split("got")[1]


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", LONG, "--inputs", "right.npz"), ("run", "m.rta", "--inputs", LONG), ("run", "m.rta", "--text", "a", "--model", LONG),
        ("build", LONG, "--target", "c"), ("build", f"package:numpy/{LONG}", "--target", "c"), ("bench", LONG, "--shape", "b=1,n=1"),
        ("build", "bert", "--target", "c", "--out", LONG), ("build", "bert", "--target", LONG),
        ("build", "bert", "--target", "c", "--out", "m.rta/x/y.rta"), ("run", "m.rta", "--text", "\udcff", "--model", "bert"),
    ],
)  # fmt: skip
def test_commands_with_impossible_file_names_are_refused(unchanged: Path, arguments: tuple[str, ...]) -> None:
    refused(*arguments)


@pytest.mark.opencl
def test_an_artifact_for_another_device(unchanged: Path) -> None:
    text = refused("run", "m.rta", "--inputs", "right.npz", "--device", "opencl")
    assert "expected a device of kind c, got opencl" in text and "build it for target opencl" in text


@pytest.mark.parametrize(
    ("shape", "says"),
    [("b=1,n=0", "1 <= n <= 24"), ("b=1", "symbols"), ("b=1,n=2,q=3", "symbols"), ("b=1,n=x", "--shape expects"), ("", "--shape expects"),
     ("b=1,n=\u00b2", "--shape expects"), ("b=1,b=2,n=1", "--shape expects"), ("b=1,n=" + "9" * 5000, "--shape expects")],
)  # fmt: skip
def test_shapes_of_bench(unchanged: Path, shape: str, says: str) -> None:
    assert says in refused("bench", "m.rta", "--shape", shape)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--bound", "n=1:8", "--bound", "n=1:4"), "got n twice"),
        (("--bound", "seq=1:8"), "symbols b (batch) and n (positions), got seq"),
        (("--bound", "b=1:99999999999"), "upper <= 2147483647"),
        (("--bound", "n=0:0"), "1 <= upper"),
        (("--target", "opencl:NoSuch"), "expected one device matching 'NoSuch'"),
        (("--target", "opencll"), "got 'opencll'; there are: c"),
    ],
)  # fmt: skip
def test_mistakes_of_build(unchanged: Path, arguments: tuple[str, ...], says: str) -> None:
    first = () if "--target" in arguments else ("--target", "c")
    assert says in refused("build", "bert", *first, *arguments)


# -- anything at all in an .npz ----------------------------------------------------------------------------------------------


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(-1, 255)), min_size=1, max_size=5),
    stored=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
)
def test_damaged_npz_files(place: Path, tmp_path: Path, edits: list[tuple[float, int]], stored: int) -> None:
    save = np.savez if stored == zipfile.ZIP_STORED else np.savez_compressed
    path = tmp_path / "damaged.npz"
    save(path, a=np.arange(6).reshape(2, 3), b=np.ones(3, np.float32))
    data = bytearray(path.read_bytes())
    for where, value in edits:
        at = int(where * (len(data) - 1))
        if value < 0:
            del data[at + 1 :]
        else:
            data[at] = value
    path.write_bytes(data)
    try:
        read_arrays(path)
    except UserError as error:
        assert "\n" not in str(error)


# -- tuning that cannot be -----------------------------------------------------------------------------------------------------


def test_missing_device_makes_no_database(unchanged: Path) -> None:
    assert "got 'metal'; there are: c" in refused("tune", "bert", "--target", "metal", "--db", "new.db")
    assert "there are: c" in refused("build", "bert", "--target", "opencll", "--db", "memory://")


def test_bounds_beyond_memory_are_not_measured(place: Path) -> None:
    """A kernel that dies for want of memory would be recorded as broken, for every later job."""
    store = MemoryStore()
    device = open_device("c")
    job = device_job(load_hf(place / "bert", bounds={"b": (1, 2**31 - 1)}), device.info, store, Settings(target="c"))
    device.close()
    with pytest.raises(UserError, match=r"\(b <= 2147483647, n <= 32\) takes .* GB; lower"):
        job.tune(NoRunner())  # type: ignore[arg-type]
    assert not store.targets() and not store.jobs()
    wide = device_job(load_hf(place / "bert", bounds={"b": (1, 8)}), job.device, store, Settings(target="c"))
    check_footprint(wide.tasks, wide.module.bounds, 2**30)
    (most,) = {task_bytes(t) for t in wide.tasks if t.name == "fused_cast_mean_pool"}
    assert most == 4 * (8 * 32 * HIDDEN + 8 * HIDDEN) + 8 * (8 * 32), "x and y in f32, the mask in i64"


class NoRunner:
    """Nothing may be measured."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


# -- from Python ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: rt.load(None), lambda: rt.load(3), lambda: rt.load(b"m.rta"), lambda: rt.load(["m.rta"]), lambda: rt.load(""),
        lambda: rt.load("m.rta", device=3), lambda: rt.load("m.rta", device="metal"), lambda: rt.load("m.rta", device=b"c"),
        lambda: rt.load_model(None), lambda: rt.load_model("bert", bounds=3), lambda: rt.load_model("bert", {"q": (1, 2)}),
        lambda: rt.build("bert", target=None), lambda: rt.build("bert", target="c", db=3), lambda: rt.build(3, target="c"),
        lambda: rt.build("bert", target="c", db="memory://", bounds=3), lambda: rt.build("bert", target="c", effort=["quick"]),
        lambda: rt.tune("bert", target="c", trials="x"), lambda: rt.tune("bert", target="c", trials=1.5),
        lambda: rt.tune("bert", target="c", trials=True), lambda: rt.tune("bert", target="c", seed="x"),
        lambda: rt.tune("bert", target="c", strategy="oracle"), lambda: rt.tune("bert", target="c", scheduler=3),
        lambda: rt.tune("bert", target="metal", db="new.db"), lambda: rt.open_database("mysql://x/y"),
    ],
)  # fmt: skip
def test_wrong_arguments_from_python(unchanged: Path, call: Callable[[], object]) -> None:
    with pytest.raises(RelaxTuneError) as caught:
        call()
    assert "\n" not in str(caught.value)
