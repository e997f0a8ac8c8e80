"""Options shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

GOLDEN = Path(__file__).parent / "golden"
HEAVY = frozenset((Path(__file__).parent / "support" / "heavy.txt").read_text().splitlines())
NOT_FAST = frozenset(
    [
        "ccompiler",
        "chromium",
        "clblast",
        "cross",
        "cuda",
        "minilm",
        "nvrtc",
        "onednn",
        "opencl",
        "postgres",
        "process",
        "slow",
        "torch",
    ]
)

# Tests share modules such as tests.support.zoo; --import-mode=importlib leaves sys.path alone.
sys.path.insert(0, str(Path(__file__).parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/* with what the code gives now")
    parser.addoption(
        "--fast", action="store_true", help="only tests without devices and processes, with few examples per property"
    )
    parser.addoption("--heavy", action="store_true", help="the tests marked `heavy` too, and all examples per property")


def pytest_configure(config: pytest.Config) -> None:
    # Locks of units lie in the temporary folder: with one each, workers need not wait for each other.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="relax-tune-tests-")
        os.chmod(os.environ["TMPDIR"], 0o1777)  # servers run as another user
        tempfile.tempdir = None
        config.add_cleanup(lambda: shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True))
    # modules read it when they are imported: `tests.support.effort`
    for effort in ("fast", "heavy"):
        if config.getoption(f"--{effort}"):
            os.environ["RELAX_TUNE_TEST_EFFORT"] = effort


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keep what collection makes out of garbage collection: it grows large, and stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out heavy tests, and in the fast lane what needs a device, a compiler, a process or time."""
    refused = NOT_FAST if config.getoption("--fast") else frozenset()
    if not config.getoption("--heavy"):
        refused |= {"heavy"}
    for item in items:
        if HEAVY & {item.nodeid, item.nodeid.split("[")[0]}:
            item.add_marker(pytest.mark.heavy)
    out = [item for item in items if refused & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in set(out)]


@pytest.fixture(autouse=True)
def no_process_in_the_fast_lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the fast lane that starts a process fails, and says which marker it lacks."""
    if request.config.getoption("--fast"):

        def refuse(*arguments: Any, **named: Any) -> NoReturn:
            pytest.fail("this test starts a process: mark it `process`, so that the fast lane leaves it out")

        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        monkeypatch.setattr(os, "fork", refuse)


@pytest.fixture(autouse=True)
def builds_without_self_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of tests without the marker `self_test` run no kernel by themselves."""
    if request.node.get_closest_marker("self_test") is None:
        monkeypatch.setenv("RELAX_TUNE_SELF_TEST", "false")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text must be what `tests/golden/<name>` holds; `--update-golden` writes it instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
            return
        assert path.exists(), (
            f"wanted the golden file {path}; make it with: pytest {request.node.nodeid} --update-golden"
        )
        assert text + "\n" == path.read_text(), f"{name} changed; if that is meant, run pytest with --update-golden"

    return check


@pytest.fixture(autouse=True)
def verified_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify the module before and after every pass that a test runs."""
    pipeline = sys.modules.get("relax_tune.ir.passes.pipeline")
    if pipeline is not None:
        monkeypatch.setattr(pipeline.PassManager, "always_verify", True)
