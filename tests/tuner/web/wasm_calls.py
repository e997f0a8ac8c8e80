"""Artifacts of target c:wasm32 as WebAssembly: what they need, and calls of the browser's runtime in node."""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import relax_tune as rt
from relax_tune.ir.core.function import IRModule

SCRIPT = Path(__file__).parents[3] / "tuner" / "web" / "static" / "relax-tune.js"
RUN = """
import { Worker as Thread } from "node:worker_threads";
let before = "";
const address = process.argv[2];
const SHIM = `const { parentPort, workerData: { url, address, before } } = require("node:worker_threads");
  globalThis.postMessage = (message, moved) => parentPort.postMessage(message, moved);
  (async () => {
    await (await fetch(address + "model.json")).text(); // which itself compiles WebAssembly
    new Function(before)();
    await import(url);
    parentPort.on("message", (data) => globalThis.onmessage({ data }));
  })();`;
globalThis.Worker = class { // of browsers, which node has by another name
  constructor(url) {
    this.thread = new Thread(SHIM, { eval: true, execArgv: [], workerData: { url: url.href, address, before } });
    this.thread.on("message", (data) => this.onmessage({ data }));
    this.thread.on("error", (error) => this.onerror({ message: error.message, preventDefault() {} }));
  }
  postMessage(message, moved) { this.thread.postMessage(message, moved); }
  terminate() { void this.thread.terminate(); }
};
const { Model, Session, tensor } = await import(process.argv[1]);
let text = "";
for await (const piece of process.stdin) text += piece;
const asked = JSON.parse(text);
({ before } = asked);
const given = (inputs) => Object.fromEntries(inputs.map(([name, dtype, shape, numbers]) => [name, tensor(dtype, shape, numbers)]));
const plain = (found) => found.map(({ shape, data }) => [shape, [...data].map(Number)]);
const answers = [];
let model = null;
try {
  const facts = await (await fetch(address + "model.json")).json();
  for (const part of [facts, ...Object.values(facts.wasm)]) if (part.url) part.url = address + part.url;
  new Function(before)();
  let read = 0;
  model = await Model.load(facts, (done, total) => { read = done / total; }, () => {});
  answers.push([model.device.name, read]);
  let session = null;
  for (const { call, open, run, inputs, kept } of asked.steps) {
    try {
      if (open) {
        const [, ...state] = await model.run(call, given(inputs));
        const named = Object.fromEntries(state.map((tensor, k) => [kept[k], tensor]));
        session = new Session(model, open, named, Object.fromEntries(kept.map((name, k) => [name, k + 1])));
      }
      else if (run) answers.push(plain(await session.run(given(inputs))));
      else answers.push(plain(await model.run(call, given(inputs))));
    } catch (error) { answers.push(`${error.name}: ${error.message}`); }
  }
} catch (error) { answers.push(`${error.name}: ${error.message}`); if (error.name !== "ModelError") console.error(error); }
model?.close();
console.log(JSON.stringify(answers));
"""


def needs_clang() -> None:
    """Skip where there is no clang for WebAssembly."""
    missing = [p for p in ("clang", "wasm-ld", "node") if shutil.which(p) is None]
    if not Path("/usr/include/wasm32-wasi").is_dir():
        missing.append("wasi-libc")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def built(module: IRModule, path: Path) -> Path:
    """An artifact of target c:wasm32."""
    return rt.build(module, target="c:wasm32", db="memory://").save(path)


def opened_here(path: Path) -> rt.Model:
    """The same artifact in this process, on this machine's processor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its plans are another processor's
        return rt.load(path)


def listed(inputs: Mapping[str, NDArray[Any]]) -> list[Any]:
    return [(n, str(a.dtype), list(a.shape), a.reshape(-1).tolist()) for n, a in inputs.items()]


def in_node(address: str, *steps: Mapping[str, Any], before: str = "") -> list[Any]:
    """The answers of steps in node: name of the device and share of bytes read, then results or the sentence of an error.

    before: a script that runs first. A step names a function to `call`, opens a session, or runs it."""
    command = ["node", "--no-warnings", "--input-type=module", "-e", RUN, SCRIPT.as_uri(), address]
    done = subprocess.run(
        command,
        input=json.dumps({"before": before, "steps": steps}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return list(json.loads(done.stdout))


def arrays(answer: Sequence[Any]) -> list[NDArray[np.float64]]:
    assert not isinstance(answer, str), answer
    return [np.array(data).reshape(shape) for shape, data in answer]
