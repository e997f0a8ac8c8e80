"""Artifacts in headless Chromium: results of Python's runtime, pages by keyboard and on a phone, errors in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import tiny_decoders
from tests.support.tuner_models import feed_forward, minilm_folder, opened
from tests.tuner.web.pages import call, opened_browser, served

import relax_tune as rt
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.tuner.web.server import ServedModel, served_model

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.slow]
LENGTHS = (1, 2, 3, 7, 16, 37, 64, 128)
PROMPT = [5, 9, 2, 11]
STEPS = 6


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as found:
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with opened("webgpu"):
        return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def layers(place: Path) -> Path:
    """Two linear layers, 1 to 128 rows."""
    return rt.build(feed_forward(), target="webgpu", db="memory://").save(place / "layers.rta")


@pytest.fixture(scope="module")
def decoder(place: Path) -> Path:
    folder, _ = tiny_decoders.write(place, "llama3")
    module = load_hf(folder, bounds={"b": (1, 4)})
    return rt.build(module, target="webgpu", db="memory://").save(place / "decoder.rta")


@pytest.fixture(scope="module")
def address(layers: Path) -> Iterator[str]:
    with served(ServedModel(layers, "search")) as found:
        yield found


@pytest.fixture(scope="module")
def generation(decoder: Path) -> Iterator[str]:
    with served(served_model(decoder)) as found:
        yield found


def answer(body: bytes, route: Any) -> None:
    route.fulfill(body=body)


def shown(browser: Any, url: str, width: int = 800, script: str = "", **answers: Any) -> Any:
    """A page; `answers` replace the server's for model.json (`facts`) or model.rta (`artifact`)."""
    page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
    if script:
        page.add_init_script(script)
    for name, pattern in (("facts", "**/model.json"), ("artifact", "**/model.rta")):
        if name in answers:
            page.route(pattern, partial(answer, answers[name]))
    page.goto(url)
    return page


def trouble(page: Any) -> str:
    page.wait_for_selector("#trouble:not([hidden])", timeout=120_000)
    return str(page.locator("#trouble").inner_text())


def ready(page: Any) -> Any:
    page.wait_for_selector("body[data-ready=true], #trouble:not([hidden])", timeout=300_000)
    assert page.locator("#trouble").is_hidden(), page.locator("#trouble").inner_text()
    return page


def test_layers_browser_gives_results_of_python(browser: Any, address: str, layers: Path) -> None:
    page = shown(browser, address + "model.json")
    with rt.load(layers) as model:
        for n in LENGTHS:
            x = np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32)
            (found,) = call(page, "main", {"x": x})
            np.testing.assert_allclose(found, model.run([x])[0], atol=1e-4, rtol=0)


def test_decoder_browser_keeps_caches_and_gives_tokens_of_python(browser: Any, generation: str, decoder: Path) -> None:
    with rt.load(decoder) as model:
        wanted = rt.generate(model, np.array([PROMPT]), STEPS)[0, len(PROMPT) :]
        ids = np.array([PROMPT, PROMPT[::-1]], np.int64)
        results = model.run([ids], "prefill")
    page = ready(shown(browser, generation))
    page.fill("#prompt", " ".join(map(str, PROMPT)))
    page.fill("#most", str(STEPS))
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#status", has_text="tokens, done").wait_for(timeout=120_000)
    assert page.locator("#output").inner_text() == " ".join(map(str, wanted))
    for got, array in zip(call(page, "prefill", {"input_ids": ids}), results, strict=True):
        np.testing.assert_allclose(got, array, atol=1e-4, rtol=0)
    page.context.close()


def test_second_load_comes_from_the_cache(browser: Any, generation: str) -> None:
    page, asked = shown(browser, generation + "model.json"), list[str]()
    page.context.on("request", lambda request: asked.append(request.url))
    for _ in range(2):
        page.goto(generation)
        ready(page)
    assert sum(url.endswith("model.rta") for url in asked) == 1
    page.context.close()


WITHOUT = "Object.defineProperty(navigator, 'gpu', { value: undefined });"
NO_ADAPTER = "navigator.gpu.requestAdapter = async () => null;"
NO_MEMORY = """GPUDevice.prototype.popErrorScope = async () => new GPUOutOfMemoryError('full');"""


@pytest.mark.parametrize(
    "script, message",
    [
        (WITHOUT, "This browser offers no WebGPU"),
        (NO_ADAPTER, "no adapter for it"),
        (NO_MEMORY, r"too little memory left for the constant .* \(\d+ bytes\); close other tabs"),
    ],
)
def test_missing_webgpu_or_memory_is_said_in_words(browser: Any, address: str, script: str, message: str) -> None:
    page = shown(browser, address, script=script)
    assert re.search(message, trouble(page))
    assert page.evaluate("document.getElementById('controls').disabled")
    page.context.close()


def test_lost_device_is_said_in_words(browser: Any, generation: str) -> None:
    page = ready(shown(browser, generation))
    call(page, "prefill", {"input_ids": np.array([PROMPT], np.int64)})
    with pytest.raises(Exception, match="The graphics device was lost"):
        page.evaluate("window.model.gpu.device.destroy()")
        call(page, "prefill", {"input_ids": np.array([PROMPT], np.int64)})
    page.context.close()


def test_damaged_and_foreign_artifacts_are_refused(browser: Any, address: str, layers: Path, place: Path) -> None:
    whole = layers.read_bytes()
    altered = bytearray(whole)
    altered[-2000] ^= 1
    foreign = whole.replace(b'"device_kind":"webgpu"', b'"device_kind":"opencl"')
    for data, message in (
        (whole[: len(whole) // 2], r"The download ended after [\d,]+ bytes of [\d,]+ bytes"),
        (bytes(altered), "does not fit its hash"),
        (foreign, "built for opencl, and a browser runs those for webgpu"),
        (b"PK" + bytes(4000), "not a zip of stored members"),
    ):
        page = shown(browser, address, artifact=data)
        assert re.search(message, trouble(page)), (message, trouble(page))
        page.context.close()


def test_wrong_arguments_are_refused(browser: Any, address: str, generation: str) -> None:
    page = shown(browser, address + "model.json")
    for rows, width, message in (
        (129, 24, "expected n from 1 to 128, got 129"),
        (2, 23, "expected 24 in dim 1, got 23"),
    ):
        with pytest.raises(Exception, match=message):
            call(page, "main", {"x": np.zeros((rows, width), np.float32)})
    page.context.close()
    page = ready(shown(browser, generation))
    for text, message in (
        (f"1 {tiny_decoders.VOCABULARY} 2", f"expected values from 0 to {tiny_decoders.VOCABULARY - 1}"),
        ("a cat", "Expected token ids such as 12 7 305, got a"),
        (" ", "Write a beginning"),
    ):
        page.fill("#prompt", text)
        page.click("button[type=submit]")
        assert message in trouble(page)
    page.context.close()


def test_generation_page_fits_a_phone_and_follows_the_keyboard(browser: Any, generation: str, tmp_path: Path) -> None:
    page = ready(shown(browser, generation, width=360))
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1] == 360
    reached = []
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]")
        )
    assert [name for name, _ in reached] == ["prompt", "most", "temperature", "", "stop"]
    assert all(style != "none" for _, style in reached)
    page.screenshot(path=tmp_path / "generate.png", full_page=True)
    page.context.close()


@pytest.mark.minilm
@pytest.mark.heavy
def test_minilm_browser_embeds_as_python_and_finds_the_nearest(browser: Any, place: Path, tmp_path: Path) -> None:
    module = rt.load_model(minilm_folder(), bounds={"b": (1, 8), "n": (1, 512)})
    path = rt.build(module, target="webgpu", db="memory://").save(place / "minilm.rta")
    with served(served_model(path, minilm_folder())) as found, rt.load(path) as model:
        page = ready(shown(browser, found, width=360))
        page.focus("#query")
        page.keyboard.press("Enter")
        page.wait_for_selector("#results li", timeout=300_000)
        assert (
            page.locator("#results li")
            .first.inner_text()
            .endswith("Source code is turned into instructions for a processor.")
        )
        page.screenshot(path=tmp_path / "search.png", full_page=True)
        for n in (1, 2, 5, 8, 17, 32, 48, 64):
            rng = np.random.default_rng(n)
            ids, mask = rng.integers(1000, 2000, (1, n)), np.ones((1, n), np.int64)
            (got,) = call(page, "main", {"input_ids": ids, "attention_mask": mask})
            np.testing.assert_allclose(got, model.run([ids, mask])[0], atol=1e-4, rtol=0)
