"""The measuring page in headless Chromium: a model tuned on the browser's WebGPU, and every way of being bad."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("tornado", reason="tornado is not installed (extra browser)")

from tests.support.tuner_models import opened
from tests.tuner.measure.measure_programs import request
from tests.tuner.web.pages import launched, opened_browser

import relax_tune as rt
from relax_tune.database.reference import SPREAD
from relax_tune.database.store import open_store
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.text import save_text
from relax_tune.ir.op.reduction.reduce import LayerNorm, Softmax
from relax_tune.tuner.measure.browser.runner import BrowserRunner

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.slow]
ADDRESS = re.compile(r"open (https?://\S+#\S+) in a browser")
LIMIT_SECS = 300.0
T = TypeVar("T")


@pytest.fixture
def browser() -> Iterator[Any]:
    with opened("webgpu"), opened_browser() as found:
        yield found


def beside(work: Callable[[], T]) -> Future[T]:
    """Run something in a thread of its own: the browser's driver belongs to this one."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def open_runner(browser: Any, **more: Any) -> tuple[BrowserRunner, Any, Queue[str]]:
    """A runner, the page that it measures on, and the addresses that it prints."""
    addresses: Queue[str] = Queue()

    def notice(text: str) -> None:
        found = ADDRESS.search(text)
        if found:
            addresses.put(found[1])

    starting = beside(lambda: BrowserRunner("127.0.0.1:0", wait_secs=120, notice=notice, **more))
    page = browser.new_context(viewport={"width": 360, "height": 700}).new_page()
    page.goto(addresses.get(timeout=60))
    return waited(page, starting), page, addresses


def waited(page: Any, future: Future[T], secs: float = LIMIT_SECS) -> T:
    """Wait for a result while the browser's driver goes on."""
    for _ in range(int(secs * 10)):
        if future.done():
            break
        page.wait_for_timeout(100)
    return future.result(0)


def test_page_measures_good_candidates_and_refuses_bad_ones(browser: Any) -> None:
    runner, page, _ = open_runner(browser)
    with runner:
        fingerprint = dict(runner.device_info().fingerprint)
        assert "HeadlessChrome" in fingerprint["agent"] and fingerprint["platform"] == "browser"
        kinds = ["good", "syntax", "wrong", "silent", "stale", "overrun", "also-good"]
        results = waited(page, runner.submit([request(kind, "webgpu") for kind in kinds]))
        stages = [result.stage for result in results]
        assert stages == [None, "compile", "wrong-result", "wrong-result", "wrong-result", "wrong-result", None]
        assert all(min(t.samples_secs) > 0 for r in results if r.ok for t in r.timings)
        assert page.locator("#kernels").inner_text() != "0"
        assert "timestamps" in page.locator("#timer").inner_text()
        page.context.close()


def test_page_fits_a_phone_and_follows_the_keyboard(browser: Any) -> None:
    runner, page, addresses = open_runner(browser)
    with runner:
        wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide[0] <= wide[1] == 360
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "stop"
        page.keyboard.press("Enter")
        page.locator("#status", has_text="Stopped. The job waits").wait_for()
        asked = runner.submit([request("good", "webgpu")])
        assert addresses.get(timeout=60)
        page.keyboard.press("Enter")
        page.locator("#status", has_text="Measuring.").wait_for()
        assert waited(page, asked)[0].ok
    page.locator("#status", has_text="The job has ended.").wait_for()
    page.context.close()


def test_page_loaded_again_goes_on_and_old_address_is_refused(browser: Any) -> None:
    runner, page, _ = open_runner(browser)
    with runner:
        first = page.url
        page.reload()
        page.locator("#status", has_text="Measuring.").wait_for()
        assert waited(page, runner.submit([request("good", "webgpu")]))[0].ok
        other = browser.new_context().new_page()
        other.goto(first)
        other.wait_for_selector("#trouble:not([hidden])")
        assert "got one that is used already" in other.locator("#trouble").inner_text()
        assert waited(page, runner.submit([request("good", "webgpu")]))[0].ok
        other.context.close()
    page.context.close()


@pytest.mark.heavy
def test_endless_kernel_is_a_timeout_and_next_tab_goes_on(browser: Any) -> None:
    runner, page, addresses = open_runner(browser)
    with runner:
        asked = runner.submit([request("hang", "webgpu", deadline_secs=3.0), request("good", "webgpu")])
        fresh = None
        try:
            results = waited(page, asked, 60)
        except TimeoutError:  # the browser does not get over it: another one opens the new address
            address = addresses.get(timeout=60)
            browser.close()
            fresh = launched(browser.browser_type)
            page = fresh.new_context().new_page()
            page.goto(address)
            results = waited(page, asked)
        assert [result.stage for result in results] == ["timeout", None]
        assert "within 3 s" in results[0].message and "the page's device was closed" in results[0].message
    if fresh is not None:
        fresh.close()


def two_functions(width: int = 48, upper: int = 64) -> IRModule:
    """softmax(layer_norm(x)) over n rows: nothing that a software adapter takes minutes to compile."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, upper), width))
    scale, shift = (g.constant(name, np.linspace(0.5, 2, width, dtype=np.float32)) for name in ("scale", "shift"))
    return g.finish(g.call(Softmax(), g.call(LayerNorm(), x, scale, shift)))


def reference(module: IRModule, x: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    wide = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    powers = np.exp(wide * module.constants["scale"] + module.constants["shift"])
    return powers / powers.sum(-1, keepdims=True)


def run_beside_page(arguments: list[str], folder: Path, browser: Any) -> None:
    """Run a command of relax-tune that measures in a browser, and the page whose address it prints."""
    program = [sys.executable, "-c", "from relax_tune.tuner.cli.start import main; main()"]
    command = [*program, *arguments, "--target", "webgpu", "--browser", "127.0.0.1:0"]
    job = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert job.stdout is not None
    lines: list[str] = []
    page = browser.new_context(viewport={"width": 360, "height": 700}).new_page()
    for line in job.stdout:
        lines.append(line)
        found = ADDRESS.search(line)
        if found:
            page.goto(found[1])
            break
    assert page.url.startswith("http://127.0.0.1:"), "".join(lines)
    rest = beside(job.stdout.read)
    lines.append(waited(page, rest))
    assert job.wait(60) == 0, "".join(lines)
    page.locator("#status", has_text="The job has ended.").wait_for()
    page.context.close()


@pytest.mark.heavy
def test_model_tuned_in_browser_is_built_from_records(browser: Any, tmp_path: Path) -> None:
    module, db = two_functions(), f"sqlite:///{tmp_path / 'records.db'}"
    save_text(module, tmp_path / "model.relax")
    tuning = ["tune", "model.relax", "--trials", "4", "--effort", "quick", "--out", "m.rta"]
    run_beside_page([*tuning, "--db", db], tmp_path, browser)
    with open_store(db) as store:
        (target,) = store.targets()
        assert dict(target.fingerprint)["platform"] == "browser" and "Chrome" in target.name
        keys = {m.variant.key for m in store.query(target.key, kinds=["tuned"]) if m.stage is None}
    assert keys
    built = rt.build(module, target="webgpu:browser", db=db)
    assert {v.key for call in built.program.calls for v in call.variants if v.label == "tuned"} & keys
    with rt.load(built.save(tmp_path / "again.rta")) as model:
        for n in (1, 37, 64):
            x = np.random.default_rng(n).standard_normal((n, 48)).astype(np.float32)
            np.testing.assert_allclose(model.run([x])[0], reference(module, x), atol=1e-5)


def test_reference_renewed_in_browser_replaces_stored_times(browser: Any, tmp_path: Path) -> None:
    module, db = two_functions(), f"sqlite:///{tmp_path / 'records.db'}"
    save_text(module, tmp_path / "model.relax")
    run_beside_page(["tune", "model.relax", "--trials", "1", "--effort", "quick", "--db", db], tmp_path, browser)
    with open_store(db) as store:
        (target,) = store.targets()
        stored = dict(target.reference)
        altered = {name: 1000 * secs for name, secs in stored.items()}
        store.set_reference(target.key, altered)
    run_beside_page(["db", "reference", "--renew", "--db", db], tmp_path, browser)
    with open_store(db) as store:
        (target,) = store.targets()
    renewed = {name: secs for name, secs in target.reference if SPREAD not in name}
    assert renewed
    assert all(0 < secs < altered[name] / 10 for name, secs in renewed.items())
