"""Options shared by all tests."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).parent / "golden"
HEAVY = frozenset((Path(__file__).parent / "support" / "heavy.txt").read_text().splitlines())
_first_states: dict[tuple[str, str], Any] = {}
"""States of generators of random numbers by module and name, before the first test."""
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

# Other tests run at the same time, so no example has a time limit. Other settings stay those of Hypothesis's current profile.
settings.register_profile("relax-tune", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("relax-tune")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/* with what the code gives now")
    parser.addoption(
        "--fast", action="store_true", help="only tests without devices and processes, with few examples per property"
    )
    parser.addoption("--heavy", action="store_true", help="the tests marked `heavy` too, and all examples per property")


def pytest_report_header() -> list[str]:
    """Say which processor runs the tests, and what the described ones are tested by."""
    from tests.support import processors  # after sys.path is set, and after pytest_configure

    return processors.report()


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
    if os.environ.get("RELAX_TUNE_TEST_PROCESSOR"):
        stand_in_for_this_processor(config, os.environ["RELAX_TUNE_TEST_PROCESSOR"])


def stand_in_for_this_processor(config: pytest.Config, name: str) -> None:
    """Run all tests as on a described processor: `tests.support.processors`."""
    from tests.support.processors import PROCESSORS  # after sys.path is set

    if name not in PROCESSORS or not PROCESSORS[name].runs_here:
        able = [p.name for p in PROCESSORS.values() if p.runs_here]
        raise pytest.UsageError(
            f"Expected RELAX_TUNE_TEST_PROCESSOR to be a processor that this machine can stand in for, got {name!r}; "
            f"there are: {', '.join(able)}"
        )
    folder = Path(tempfile.mkdtemp(prefix="relax-tune-processor-"))
    patch = pytest.MonkeyPatch()
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.add_cleanup(patch.undo)
    PROCESSORS[name].stand_in(patch, folder)


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
    """Leave out heavy tests and repeated pairs of parameters, and in the fast lane what needs a device, a compiler, a process or time."""
    from tests.support.effort import pairwise  # after sys.path is set, and after pytest_configure

    refused = NOT_FAST if config.getoption("--fast") else frozenset()
    if not config.getoption("--heavy"):
        refused |= {"heavy"}
    combined: dict[str, list[pytest.Function]] = {}
    for item in items:
        if HEAVY & {item.nodeid, item.nodeid.split("[")[0]}:
            item.add_marker(pytest.mark.heavy)
        names = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "pairwise" in names and "heavy" not in names:
            combined.setdefault(item.nodeid.split("[")[0], []).append(item)
    for of_function in combined.values():
        # by identity: combinations share the objects, which need not be hashable
        chosen = pairwise([{n: id(v) for n, v in item.callspec.params.items()} for item in of_function])
        for item in (item for at, item in enumerate(of_function) if at not in chosen):
            item.add_marker(pytest.mark.heavy)
    out = [item for item in items if refused & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in set(out)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Switch off the self-test of builds, in fixtures too, for tests without the marker `self_test`."""
    from relax_tune.tuner.settings import Settings  # after sys.path is set, and after pytest_configure

    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("self_test") is None:
            patch.setenv("RELAX_TUNE_SELF_TEST", "false")  # of commands
            names = [f.name for f in fields(Settings)]
            defaults = dict(zip(names, Settings.__init__.__defaults__ or (), strict=True)) | {"self_test": False}
            patch.setattr(Settings.__init__, "__defaults__", tuple(defaults.values()))
        return (yield)


@pytest.fixture(autouse=True)
def same_random_numbers(request: pytest.FixtureRequest) -> None:
    """Give each test the same numbers of its module's generators, whichever tests ran before it."""
    helpers = {getattr(v, "__module__", None) for v in vars(request.module).values() if callable(v)}
    for module in (
        request.module,
        *(sys.modules.get(name) for name in sorted(filter(None, helpers)) if name.startswith("tests.")),
    ):
        for name, generator in vars(module).items() if module else ():
            if isinstance(generator, np.random.Generator):
                state = _first_states.setdefault((module.__name__, name), copy.deepcopy(generator.bit_generator.state))
                generator.bit_generator.state = copy.deepcopy(state)


@pytest.fixture(autouse=True)
def no_process_in_the_fast_lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the fast lane that starts a process fails, and says which marker it lacks."""
    if request.config.getoption("--fast"):

        def refuse(*arguments: Any, **named: Any) -> NoReturn:
            pytest.fail("this test starts a process: mark it `process`, so that the fast lane leaves it out")

        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        monkeypatch.setattr(os, "fork", refuse)


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
            f"expected the golden file {path}; make it with: pytest {request.node.nodeid} --update-golden"
        )
        assert text + "\n" == path.read_text(), f"{name} changed; if that is meant, run pytest with --update-golden"

    return check


@pytest.fixture(autouse=True)
def verified_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify the module before and after every pass that a test runs."""
    pipeline = sys.modules.get("relax_tune.ir.passes.pipeline")
    if pipeline is not None:
        monkeypatch.setattr(pipeline.PassManager, "always_verify", True)
