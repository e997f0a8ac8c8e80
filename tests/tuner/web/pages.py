"""Artifacts served as `relax-tune web` does, and pages that run them in headless Chromium."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import Queue
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from relax_tune.tuner.dashboard.listen import serve
from relax_tune.tuner.web.server import ServedModel, make_web_app

ARGUMENTS = ("--no-sandbox", "--disable-background-networking", "--no-first-run")
CALL = """async ([name, inputs]) => {
  const { Model, tensor } = await import('/static/relax-tune.js');
  window.model ??= await Model.load(await (await fetch('/model.json')).json(), () => {}, () => {});
  const given = inputs.map(([name, dtype, shape, numbers]) => [name, tensor(dtype, shape, numbers)]);
  const got = await window.model.run(name, Object.fromEntries(given));
  return got.map(({ shape, data }) => [shape, [...data].map(Number)]);
}"""


@contextmanager
def served(model: ServedModel) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    for name in ("starlette", "uvicorn"):
        pytest.importorskip(name, reason=f"{name} is not installed (extra dashboard)")
    addresses: Queue[str] = Queue()
    app = make_web_app(model, None)
    threading.Thread(target=serve, args=(app, "127.0.0.1", 0, addresses.put), daemon=True).start()
    yield addresses.get(timeout=60)


@contextmanager
def opened_browser(webgpu: bool = True) -> Iterator[Any]:
    """A headless Chromium, or a skip that says what is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Chromium is not installed (Debian's package chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = launched(playwright.chromium, webgpu)
        yield browser
        browser.close()


def launched(kind: Any, webgpu: bool = True) -> Any:
    """Another browser of the kind, such as `browser.browser_type`."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    more = "--enable-unsafe-webgpu" if webgpu else "--disable-features=WebGPU,WebGPUService"
    return kind.launch(executable_path=program, args=[*ARGUMENTS, more], timeout=120_000)


def call(page: Any, function: str, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[np.float64]]:
    """Call a function of the served artifact in a page, which loads it on the first call."""
    given = [(n, str(a.dtype), list(a.shape), a.reshape(-1).tolist()) for n, a in inputs.items()]
    return [np.array(data).reshape(shape) for shape, data in page.evaluate(CALL, [function, given])]
