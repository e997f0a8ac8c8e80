"""MiniLM in one headless Chromium: ours on WebAssembly and WebGPU, and ONNX Runtime Web.

    python -m experiments.end_to_end.web_peers --work FOLDER --peer-python PYTHON --onnxruntime-web FOLDER [--wasm FILE.rta]
        [--untuned FILE.rta] [--gpu FILE.rta] [--only wasm|WebGPU]

Artifacts that are not given are built without records. `--only` measures one kind and takes the other from the results.

PYTHON has torch, transformers and onnxscript: it writes the model as ONNX. The second folder is npm's package onnxruntime-web. The page is
isolated from other origins, so that ONNX Runtime may use threads. Start, first result (16 tokens) and peak memory are measured in a new
browser each, with files on loopback; the peak is that of the page's process. Latency is the median of calls after the first, in tabs
that take turns. Contenders on WebGPU run on a software adapter: their results and bytes are compared, their times are not. Every result
is compared with the result of Python's runtime. Writes results/web_peers.json and .md.

TVM is not included: npm has its runtime for the web (@mlc-ai/web-runtime 0.27.0-dev0), but Emscripten links a model's module with TVM's
runtime compiled for wasm. The wheel 0.27.0 has the sources of that runtime without headers that they include (`tvm/support/io.h`,
`src/support/bytes_io.h` and seven more), so Emscripten 3.1.6 stops at the first one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import mimetypes
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

import relax_tune as rt
from experiments.end_to_end import e2e
from experiments.harness.e2e_cases import geomean, minilm_folder
from experiments.harness.pages import RESULTS, ROOT, environment, write_page
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.web.server import ServedModel
from relax_tune.tuner.web.wasm import WasmFiles, wasm_files

STATIC = ROOT / "tuner" / "web" / "static"
LENGTHS = (1, 8, 16, 32, 64, 128, 256, 512)
FIRST = 16
CHECKED = (1, 8)  # lengths at which software adapters are compared: longer ones take minutes
ONE, TWO, UNTUNED = "ours, wasm, 1 thread", "ours, wasm, 2 threads", "ours, untuned, wasm, 2 threads"
THEIR_ONE, THEIR_TWO = "ONNX Runtime, wasm, 1 thread", "ONNX Runtime, wasm, 2 threads"
TIMED = (ONE, TWO, UNTUNED, THEIR_ONE, THEIR_TWO)
NAMES = (*TIMED, "ours, WebGPU", "ONNX Runtime, WebGPU")
ARGUMENTS = ("--no-sandbox", "--enable-unsafe-webgpu", "--disable-background-networking", "--no-first-run")
VISIT_SECS, VISIT_CALLS = 0.6, 20
PAGE = """<!doctype html><title>contender</title><script type="module">
const length = (n) => BigInt64Array.from({ length: n }, (_, k) => BigInt(1000 + 7 * k));
const ones = (n) => new BigInt64Array(n).fill(1n);
async function ours(expected, threads) {
  const { Model } = await import("/ours/relax-tune.js");
  const facts = await (await fetch("/model.json")).json();
  const { url, bytes, digest } = facts;
  const source = expected === "webgpu" ? { url, bytes, digest } : { wasm: { ...facts[expected], threads } };
  const model = await Model.load(source, () => {}, () => {});
  return async (n) => {
    const [got] = await model.run("main", {
      input_ids: { dtype: "int64", shape: [1, n], data: length(n) }, attention_mask: { dtype: "int64", shape: [1, n], data: ones(n) },
    });
    return got.data;
  };
}
async function theirs(expected, threads) {
  const ort = await import(expected === "wasm" ? "/ort/ort.wasm.min.mjs" : "/ort/ort.webgpu.min.mjs");
  ort.env.wasm.numThreads = threads;
  ort.env.wasm.wasmPaths = "/ort/";
  const session = await ort.InferenceSession.create("/model.onnx", { executionProviders: [expected] });
  const [ids, mask] = session.inputNames;
  return async (n) => {
    const got = await session.run({
      [ids]: new ort.Tensor("int64", length(n), [1, n]), [mask]: new ort.Tensor("int64", ones(n), [1, n]),
    });
    return (await got[session.outputNames[0]].getData()).slice();
  };
}
const makers = {
  "ours, wasm, 1 thread": () => ours("wasm", 1), "ours, wasm, 2 threads": () => ours("wasm", 2),
  "ours, untuned, wasm, 2 threads": () => ours("untuned", 2), "ours, WebGPU": () => ours("webgpu"),
  "ONNX Runtime, wasm, 1 thread": () => theirs("wasm", 1), "ONNX Runtime, wasm, 2 threads": () => theirs("wasm", 2),
  "ONNX Runtime, WebGPU": () => theirs("webgpu", 1),
};
window.start = async (name, n) => {
  const begun = performance.now();
  window.run = await makers[name]();
  const ready = performance.now();
  const got = await window.run(n);
  return { ready: (ready - begun) / 1e3, first: (performance.now() - begun) / 1e3, got: [...got] };
};
window.result = async (n) => [...(await window.run(n))];
window.visit = async (n, seconds, most) => {
  const samples = [];
  const end = performance.now() + 1e3 * seconds;
  do {
    const begun = performance.now();
    await window.run(n);
    samples.push((performance.now() - begun) / 1e3);
  } while (samples.length < most && performance.now() < end);
  return samples;
};
window.loaded = true;
</script>"""
ISOLATED = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",
}


def answer(files: Mapping[str, Path | bytes], ort: Path, handler: BaseHTTPRequestHandler) -> None:
    name = handler.path.partition("?")[0]
    found: Path | bytes | None = files.get(name)
    for start, folder in (("/ours/", STATIC), ("/ort/", ort)):
        if name.startswith(start) and "/" not in name[len(start) :]:
            found = folder / name[len(start) :]
    if found is None or (isinstance(found, Path) and not found.is_file()):
        handler.send_error(404)
        return
    data = found if isinstance(found, bytes) else found.read_bytes()
    kinds = {".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm"}
    kind = "text/html" if name == "/" else kinds.get(Path(name).suffix) or mimetypes.guess_type(name)[0]
    handler.send_response(200)
    for key, value in {**ISOLATED, "Content-Type": kind or "application/octet-stream"}.items():
        handler.send_header(key, value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@contextmanager
def served(files: Mapping[str, Path | bytes], ort: Path) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(files, ort, self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("expected Chromium, got none: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS), timeout=120_000)
        yield browser
        browser.close()


def tab(browser: Any, address: str) -> Any:
    page = browser.new_context().new_page()
    page.set_default_timeout(300_000)
    page.goto(address)
    page.wait_for_function("window.loaded && window.crossOriginIsolated")
    return page


def peak_bytes(browser: Any) -> int:
    """The greatest resident memory that a page's process has had."""
    found = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    peaks = []
    for process in found:
        if process["type"] == "renderer":
            lines = Path(f"/proc/{process['id']}/status").read_text().splitlines()
            peaks += [int(x.split()[1]) << 10 for x in lines if x.startswith("VmHWM")]
    return max(peaks)


def gzipped(*paths: Path) -> int:
    return sum(len(gzip.compress(p.read_bytes(), 9)) for p in paths)


def sizes(model: ServedModel, untuned: WasmFiles, onnx: Path, ort: Path) -> dict[str, dict[str, int]]:
    """Bytes to download by contender: scripts and code compressed, weights as they are."""
    assert model.wasm is not None
    script, weights = gzipped(STATIC / "relax-tune.js"), onnx.stat().st_size
    engine = script + gzipped(STATIC / "wasm_worker.js")
    tuned = {"code": engine + gzipped(model.wasm.module), "weights": model.wasm.weights.stat().st_size}
    loaded = {
        "wasm": ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"),
        "webgpu": ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm"),
    }
    theirs = {kind: gzipped(*(ort / name for name in names)) for kind, names in loaded.items()}
    return {
        ONE: tuned,
        TWO: tuned,
        UNTUNED: {"code": engine + gzipped(untuned.module), "weights": untuned.weights.stat().st_size},
        "ours, WebGPU": {"code": script, "weights": model.path.stat().st_size if model.gpu else 0},
        THEIR_ONE: {"code": theirs["wasm"], "weights": weights},
        THEIR_TWO: {"code": theirs["wasm"], "weights": weights},
        "ONNX Runtime, WebGPU": {"code": theirs["webgpu"], "weights": weights},
    }


def wanted(path: Path) -> dict[int, np.ndarray[Any, Any]]:
    """Results of Python's runtime by length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its plans are another processor's
        with rt.load(path) as model:
            arrays = {n: (1000 + 7 * np.arange(n, dtype=np.int64)).reshape(1, n) for n in LENGTHS}
            return {n: model.run([ids, np.ones_like(ids)])[0].reshape(-1) for n, ids in arrays.items()}


def measure(
    names: Sequence[str], address: str, right: Mapping[int, np.ndarray[Any, Any]], rounds: int
) -> dict[str, Any]:
    errors = {name: 0.0 for name in names}
    failed: dict[str, str] = {}
    starts: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    latency: dict[str, dict[int, list[float]]] = {name: {n: [] for n in LENGTHS} for name in names if name in TIMED}

    def judge(name: str, n: int, found: Sequence[float]) -> None:
        errors[name] = max(errors[name], float(np.abs(np.array(found) - right[n]).max()))

    for round_ in range(rounds):
        for name in names:
            if name in failed or (round_ and name not in TIMED):
                continue
            with chromium() as browser:
                page = tab(browser, address)
                try:
                    told = page.evaluate(f"window.start({name!r}, {FIRST})")
                    judge(name, FIRST, told["found"])
                    if name not in TIMED:
                        for n in CHECKED:
                            judge(name, n, page.evaluate(f"window.result({n})"))
                    starts[name].append({"ready": told["ready"], "first": told["first"], "peak": peak_bytes(browser)})
                except Exception as error:  # the sentence stands in the results
                    failed[name] = str(error).splitlines()[0][:300]
                print(
                    f"{time.strftime('%H:%M:%S')} start {round_} {name}: {starts[name][-1:]} {failed.get(name, '')}",
                    flush=True,
                )
    with chromium() as browser:
        pages = {name: tab(browser, address) for name in latency if name not in failed}
        for name, page in pages.items():
            page.evaluate(f"window.start({name!r}, {FIRST})")
            for n in LENGTHS:
                judge(name, n, page.evaluate(f"window.result({n})"))
        for round_ in range(rounds):
            for n in LENGTHS:
                order = list(pages)
                for name in order[round_ % max(len(order), 1) :] + order[: round_ % max(len(order), 1)]:
                    pages[name].bring_to_front()
                    samples = pages[name].evaluate(f"window.visit({n}, {VISIT_SECS}, {VISIT_CALLS})")
                    latency[name][n] += samples[1:] or samples  # the first finds the caches as the one before left them
            print(f"{time.strftime('%H:%M:%S')} round {round_}", flush=True)
        version = browser.version
    return {
        "chromium": version,
        "greatest_difference": errors,
        "failed": failed,
        "start": {name: {k: statistics.median(x[k] for x in s) for k in s[0]} for name, s in starts.items() if s},
        "latency_secs": {
            name: {str(n): statistics.median(s) for n, s in by.items() if s} for name, by in latency.items()
        },
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--peer-python", required=True)
    p.add_argument("--onnxruntime-web", type=Path, required=True)
    p.add_argument("--wasm", type=Path)
    p.add_argument("--untuned", type=Path)
    p.add_argument("--gpu", type=Path)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--only", default="", help="contenders whose names hold this text")
    a = p.parse_args()
    work = a.work.absolute()
    (work / "minilm").mkdir(parents=True, exist_ok=True)
    failed = e2e.prepare("minilm", work, a.peer_python, False, False)
    if failed:
        raise SystemExit(f"the model was not exported as ONNX: {failed}")
    plain = a.untuned or work / "wasm.rta"
    paths = {"c:wasm32": plain, "webgpu": a.gpu or work / "gpu.rta"}
    for target, path in paths.items():
        if not path.exists():
            module = rt.load_model(minilm_folder(), bounds={"b": (1, 1), "n": (1, 512)})
            rt.build(module, target=target, db="memory://").save(path)
    untuned = wasm_files(load_artifact(plain))
    model = ServedModel(paths["webgpu"], "search", wasm=wasm_files(load_artifact(a.wasm or plain)))
    assert model.wasm is not None
    other = untuned.facts()
    for part in other.values():
        part["url"] = part["url"].replace("model", "untuned")
    onnx, ort = work / "minilm" / "model.onnx", a.onnxruntime_web / "dist"
    files: dict[str, Path | bytes] = {
        "/": PAGE.encode(), "/model.json": json.dumps({**model.facts(), "untuned": other}).encode(), "/model.onnx": onnx,
        "/model.rta": model.path,
        "/model.module": model.wasm.module, "/model.weights": model.wasm.weights,
        "/untuned.module": untuned.module, "/untuned.weights": untuned.weights,
    }  # fmt: skip
    names = [n for n in NAMES if a.only in n]
    facts = environment()
    with served(files, ort) as address:
        record = measure(names, address, wanted(plain), a.rounds)
    before = RESULTS / "web_peers.json"
    if a.only and before.exists():
        kept = json.loads(before.read_text())
        for part in ("greatest_difference", "failed", "start", "latency_secs"):
            record[part] = {**{n: x for n, x in kept[part].items() if n not in names}, **record[part]}
    version = json.loads((a.onnxruntime_web / "package.json").read_text())["version"]
    record |= {"bytes": sizes(model, untuned, onnx, ort), "onnxruntime_web": version, "environment": facts}
    write_page("web_peers", page(record), record, record["environment"])


def page(r: Mapping[str, Any]) -> list[str]:
    names = [n for n in NAMES if n in r["start"]]
    value = partial(lambda kind, form, n: form(r["start"][n][kind]) if n in TIMED else "not ranked")
    mb, ms = (lambda x: f"{x / 1e6:.1f}"), (lambda x: f"{x * 1e3:.0f}")
    rows = [
        ["code to download, compressed, MB", *(f"{r['bytes'][n]['code'] / 1e6:.2f}" for n in names)],
        ["weights to download, MB", *(mb(r["bytes"][n]["weights"]) for n in names)],
        ["load until ready, ms", *(value("ready", ms, n) for n in names)],
        ["first result from the start, ms", *(value("first", ms, n) for n in names)],
        ["peak memory of the page's process, MB", *(mb(r["start"][n]["peak"]) for n in names)],
        ["greatest difference from Python's", *(f"{r['greatest_difference'][n]:.1e}" for n in names)],
    ]
    for n in LENGTHS:
        times = [r["latency_secs"].get(name, {}).get(str(n)) for name in names]
        rows.append([f"1 x {n} tokens, ms", *("not ranked" if t is None else f"{t * 1e3:.2f}" for t in times)])
    return [
        "# MiniLM in the browser, with ONNX Runtime Web",
        "",
        "Written by `experiments/end_to_end/web_peers.py`, which describes the comparison: MiniLM (6 layers of 384), float32, in "
        f"headless Chromium {r['chromium']}; onnxruntime-web {r['onnxruntime_web']}. "
        "Medians, tabs in turns. WebGPU ran on a software adapter, whose times",
        "are not compared.",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(f"{name} failed: {why}" for name, why in r["failed"].items()),
        behind(r),
        "TVM's web runtime needs a module linked by Emscripten with its runtime compiled for wasm, which no package holds; the wheel's",
        "sources of it lack headers, and do not compile.",
    ]


def behind(r: Mapping[str, Any]) -> str:
    """Say where the peer is faster than ours on WebAssembly with as many threads."""
    found = []
    for mine, theirs in ((ONE, THEIR_ONE), (TWO, THEIR_TWO)):
        ratios = {n: r["latency_secs"][theirs][str(n)] / r["latency_secs"][mine][str(n)] for n in LENGTHS}
        ahead = [str(n) for n, ratio in ratios.items() if ratio < 1]
        where = f"faster at {', '.join(ahead)} tokens" if ahead else "slower at every length"
        found.append(f"{theirs}, is {where} (its time over ours, geometric mean: {geomean(list(ratios.values())):.2f})")
    return f"{'; '.join(found)}."


if __name__ == "__main__":
    main()
