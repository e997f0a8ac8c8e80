"""Parallel loops of WebAssembly on threads that share its memory, in node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.tuner.web.wasm_calls import needs_clang

from relax_tune.runtime.device.wasm.compiler import COMPILE_FLAGS, THREADS_FLAGS, Clang, threads_source
from relax_tune.tuner.web.wasm import THREADS_LINK

pytestmark = [pytest.mark.cross, pytest.mark.process, pytest.mark.slow]

LOOPS = """
#define LOOP(name, type, clauses) void name(int *y, const int *x, type n) { \\
  _Pragma(clauses) for (type i = 0; i < n; i++) y[i] += 2 * x[i]; }
LOOP(fixed4, int, "omp parallel for schedule(static)")
LOOP(fixed8, long long, "omp parallel for schedule(static)")
LOOP(handed4, int, "omp parallel for schedule(dynamic)")
LOOP(handed8, long long, "omp parallel for schedule(dynamic)")
LOOP(if4, int, "omp parallel for schedule(static) if(n > 5)")
LOOP(if8, long long, "omp parallel for schedule(dynamic) if(n > 5)")
void nested8(int *y, const int *x, long long n) {
#pragma omp parallel for schedule(static) collapse(2)
  for (long long i = 0; i < n; i++) for (int j = 0; j < 3; j++) y[3 * i + j] += x[i];
}
void in_turn8(int *y, const int *x, long long n) {
#pragma omp parallel for schedule(static)
  for (long long i = 0; i < n; i++) y[i] += x[i];
#pragma omp parallel for schedule(dynamic)
  for (long long i = 0; i < n; i++) y[i] += x[n - 1 - i];
}
void stopped8(int *y, const int *x, long long n) {
#pragma omp parallel for schedule(static)
  for (long long i = 0; i < n; i++) { if (i + 1 == n) __builtin_trap(); y[i] = x[i]; }
}
"""
NAMES = ("fixed4", "fixed8", "handed4", "handed8", "if4", "if8", "nested8", "in_turn8")
RUN = """
const { Worker, isMainThread, parentPort, workerData } = require("node:worker_threads");
function started(module, memory) {
  const imports = {};
  for (const { module: from, name, kind } of WebAssembly.Module.imports(module)) {
    imports[from] = { ...imports[from], [name]: kind === "memory" ? memory : () => 8 };
  }
  return new WebAssembly.Instance(module, imports).exports;
}
async function main() {
  const [, , code, threads, names] = process.argv;
  const module = new WebAssembly.Module(require("node:fs").readFileSync(code));
  const memory = new WebAssembly.Memory({ initial: 256, maximum: 65536, shared: true });
  const host = started(module, memory);
  host._initialize();
  for (let number = 1; number < Number(threads); number++) {
    const stack = host.aligned_alloc(16, 1 << 16) + (1 << 16);
    const thread = new Worker(__filename, { workerData: { module, memory, stack, number } });
    await new Promise((done) => thread.once("message", done));
    host.threads_team(number + 1);
  }
  const found = {};
  const [x, y] = [host.aligned_alloc(64, 4096), host.aligned_alloc(64, 4096)];
  const [given, made] = [new Int32Array(memory.buffer, x, 1024), new Int32Array(memory.buffer, y, 1024)];
  given.forEach((_, i) => (given[i] = 3 * i + 1));
  for (const name of names.split(",")) {
    found[name] = {};
    for (const n of [0, 1, 2, 3, 5, 6, 100, 301]) {
      for (let again = 0; again < 20; again++) {
        made.fill(0);
        host[name](y, x, name.endsWith("8") ? BigInt(n) : n);
        const text = [...made.subarray(0, 3 * n + 4)].join();
        found[name][n] ??= text;
        if (found[name][n] !== text) throw new Error(`${name} of ${n} gives ${text}`);
      }
    }
  }
  try {
    host.stopped8(y, x, 100n);
  } catch (error) {
    found.stopped = error.name;
  }
  console.log(JSON.stringify(found));
  process.exit(0);
}
if (isMainThread) main();
else {
  const { module, memory, stack, number } = workerData;
  const thread = started(module, memory);
  thread.__stack_pointer.value = stack;
  parentPort.postMessage("ready");
  try {
    thread.threads_serve(number);
  } catch {
    thread.threads_fail();
  }
}
"""


def expected(name: str, n: int) -> list[int]:
    x = [3 * i + 1 for i in range(n)]
    made = {
        "nested8": [v for v in x for _ in range(3)],
        "in_turn8": [a + b for a, b in zip(x, reversed(x), strict=True)],
    }
    found = made.get(name, [2 * v for v in x])
    return found + [0] * (3 * n + 4 - len(found))


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_clang()
    folder, clang = tmp_path_factory.mktemp("threads"), Clang()
    (folder / "run.cjs").write_text(RUN)
    (folder / "loops.c").write_text(LOOPS)
    (folder / "threads.c").write_text(threads_source())
    for name in ("loops", "threads"):
        clang.run([*COMPILE_FLAGS, *THREADS_FLAGS, "-c", f"{name}.c", "-o", f"{name}.o"], folder)
    exports = [f"-Wl,--export={name}" for name in ("aligned_alloc", "stopped8", *NAMES)]
    clang.run(
        [
            "--target=wasm32-wasi",
            "-mexec-model=reactor",
            *THREADS_LINK,
            *exports,
            "loops.o",
            "threads.o",
            "-o",
            "it.wasm",
        ],
        folder,
    )
    return folder / "it.wasm"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_parallel_loops_give_results_of_serial_ones(module: Path, threads: int) -> None:
    command = ["node", "--no-warnings", str(module.parent / "run.cjs"), str(module), str(threads), ",".join(NAMES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("stopped") == "RuntimeError"  # in whichever thread its last iteration ran
    for name, by_size in found.items():
        for n, text in by_size.items():
            assert [int(v) for v in text.split(",")] == expected(name, int(n)), (name, n)
