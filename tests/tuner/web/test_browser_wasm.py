"""Artifacts in a headless Chromium without WebGPU: the same pages on WebAssembly, and as the fallback of an artifact for WebGPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import tiny_decoders
from tests.support.tuner_models import feed_forward, minilm_folder
from tests.tuner.web.pages import call, opened_browser, served
from tests.tuner.web.wasm_calls import built, needs_clang, opened_here

import relax_tune as rt
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.web.server import ServedModel, served_model
from relax_tune.tuner.web.wasm import WasmFiles, wasm_files

pytestmark = [pytest.mark.cross, pytest.mark.process, pytest.mark.slow]
LENGTHS = (1, 2, 3, 7, 16, 37, 64, 128)
PROMPT = [5, 9, 2, 11]
STEPS = 6


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    needs_clang()
    with opened_browser(webgpu=False) as found:
        yield found


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Two linear layers, 1 to 128 rows, for both."""
    needs_clang()
    path = built(feed_forward(), tmp_path_factory.mktemp("wasm") / "layers.rta")
    return ServedModel(path, "search", wasm=wasm_files(load_artifact(path)))


def shown(browser: Any, url: str, script: str = "") -> Any:
    page = browser.new_context(viewport={"width": 360, "height": 800}).new_page()
    page.add_init_script(script)
    page.goto(url)
    page.wait_for_selector("body[data-ready=true], #trouble:not([hidden])", timeout=300_000)
    return page


WITHOUT = "Object.defineProperty(navigator, 'gpu', { value: undefined });"
NO_ADAPTER = "Object.defineProperty(navigator, 'gpu', { value: { requestAdapter: async () => null } });"


@pytest.mark.parametrize("script, why", [(WITHOUT, "offers no WebGPU"), (NO_ADAPTER, "has WebGPU, but no adapter")])
def test_fallback_is_used_and_gives_results_of_python(browser: Any, layers: ServedModel, script: str, why: str) -> None:
    with served(layers) as address, opened_here(layers.path) as model:
        page = shown(browser, address, script)
        said = page.locator("#status").inner_text()
        assert re.match(rf"Ready, on WebAssembly(, \d threads)?\. This browser {why}", said), said
        for n in LENGTHS:
            x = np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32)
            (found,) = call(page, "main", {"x": x})
            np.testing.assert_allclose(found, model.run([x])[0], atol=1e-4, rtol=0)
        page.context.close()


ONE_THREAD = """async () => {
  const { Model } = await import('/static/relax-tune.js');
  const { wasm } = await (await fetch('/model.json')).json();
  window.model = await Model.load({ wasm: { ...wasm, threads: 1 } }, () => {}, () => {});
  return window.model.device.name;
}"""


def test_threads_give_results_of_one_thread_beside_the_page(browser: Any, layers: ServedModel) -> None:
    with served(replace(layers, gpu=False)) as address:
        page = shown(browser, address)
        several = min(4, page.evaluate("navigator.hardwareConcurrency"))
        assert page.locator("#status").inner_text() == (
            f"Ready, on WebAssembly, {several} threads" if several > 1 else "Ready, on WebAssembly"
        )
        assert page.workers  # calls hold no thread of the page
        inputs = [np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32) for n in LENGTHS]
        shared = [call(page, "main", {"x": x})[0] for x in inputs]
        assert page.evaluate(ONE_THREAD) == "WebAssembly"
        for x, found in zip(inputs, shared, strict=True):
            np.testing.assert_array_equal(call(page, "main", {"x": x})[0], found)
        page.context.close()


def test_page_not_isolated_has_one_thread(browser: Any, layers: ServedModel) -> None:
    """Another server may send no header that isolates its pages."""

    def bare(route: Any) -> None:
        answer = route.fetch()
        kept = {k: v for k, v in answer.headers.items() if k != "cross-origin-embedder-policy"}
        route.fulfill(response=answer, headers=kept)

    with served(replace(layers, gpu=False)) as address:
        page = browser.new_context().new_page()
        page.route("**/*", bare)
        page.goto(address)
        page.wait_for_selector("body[data-ready=true]", timeout=300_000)
        assert page.locator("#status").inner_text() == "Ready, on WebAssembly"
        x = np.ones((3, 24), np.float32)
        with opened_here(layers.path) as model:
            np.testing.assert_allclose(call(page, "main", {"x": x})[0], model.run([x])[0], atol=1e-4, rtol=0)
        page.context.close()


@pytest.mark.parametrize("missing", ["WebAssembly.Memory", "Worker"])
def test_browser_without_memory_or_workers_for_threads_has_one(browser: Any, layers: ServedModel, missing: str) -> None:
    refusal = f"globalThis.{missing} = class {{ constructor() {{ throw new RangeError('none'); }} }};"

    def altered(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=refusal + answer.text())

    with served(replace(layers, gpu=False)) as address, opened_here(layers.path) as model:
        page = browser.new_context().new_page()
        page.route("**/wasm_worker.js", altered)
        page.goto(address)
        page.wait_for_selector("body[data-ready=true]", timeout=300_000)
        assert page.locator("#status").inner_text() == "Ready, on WebAssembly"
        x = np.ones((3, 24), np.float32)
        np.testing.assert_allclose(call(page, "main", {"x": x})[0], model.run([x])[0], atol=1e-4, rtol=0)
        page.context.close()


def test_second_load_comes_from_the_cache(browser: Any, layers: ServedModel) -> None:
    asked: list[str] = []
    with served(replace(layers, gpu=False)) as address:
        page = browser.new_context().new_page()
        page.context.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        for _ in range(2):
            page.goto(address)
            page.wait_for_selector("body[data-ready=true]", timeout=300_000)
            assert page.locator("#status").inner_text().startswith("Ready, on WebAssembly")
        page.context.close()
    assert (asked.count("model.module"), asked.count("model.weights")) == (1, 1)


@pytest.mark.parametrize("part", ["module", "weights"])
def test_altered_file_is_refused(browser: Any, layers: ServedModel, tmp_path: Path, part: str) -> None:
    assert layers.wasm is not None
    data = bytearray(getattr(layers.wasm, part).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / part).write_bytes(data)
    files = {"module": layers.wasm.module, "weights": layers.wasm.weights, part: tmp_path / part}
    with served(replace(layers, wasm=WasmFiles(**files))) as address:
        page = shown(browser, address)
        assert "does not fit its hash" in page.locator("#trouble").inner_text()
        assert page.evaluate("document.getElementById('controls').disabled")
        page.context.close()


@pytest.mark.heavy
def test_decoder_browser_without_webgpu_gives_tokens_of_python(browser: Any, tmp_path: Path) -> None:
    folder, _ = tiny_decoders.write(tmp_path, "llama3")
    path = built(load_hf(folder, bounds={"b": (1, 4)}), tmp_path / "decoder.rta")
    with opened_here(path) as model:
        wanted = rt.generate(model, np.array([PROMPT]), STEPS)[0, len(PROMPT) :]
    with served(served_model(path)) as address:
        page = shown(browser, address)
        page.fill("#prompt", " ".join(map(str, PROMPT)))
        page.fill("#most", str(STEPS))
        page.click("button[type=submit]")
        page.locator("#status", has_text="tokens, done").wait_for(timeout=120_000)
        assert page.locator("#output").inner_text() == " ".join(map(str, wanted))
        page.context.close()


@pytest.mark.minilm
@pytest.mark.heavy
def test_minilm_browser_without_webgpu_embeds_as_python(browser: Any, tmp_path: Path) -> None:
    module = rt.load_model(minilm_folder(), bounds={"b": (1, 8), "n": (1, 512)})
    path = built(module, tmp_path / "minilm.rta")
    with served(served_model(path, minilm_folder())) as address, opened_here(path) as model:
        page = shown(browser, address)
        page.focus("#query")
        page.keyboard.press("Enter")
        page.wait_for_selector("#results li", timeout=300_000)
        first = page.locator("#results li").first.inner_text()
        assert first.endswith("Source code is turned into instructions for a processor.")
        for n in (1, 2, 5, 8, 17, 32, 48, 64):
            rng = np.random.default_rng(n)
            ids, mask = rng.integers(1000, 2000, (1, n)), np.ones((1, n), np.int64)
            (got,) = call(page, "main", {"input_ids": ids, "attention_mask": mask})
            np.testing.assert_allclose(got, model.run([ids, mask])[0], atol=1e-4, rtol=0)
        page.context.close()
