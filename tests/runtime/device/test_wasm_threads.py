"""Parallel loops of WebAssembly on threads that share its memory, in node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.tuner.web.wasm_calls import needs_clang

from relax_tune.runtime.device.c_compiler import TEAM
from relax_tune.runtime.device.wasm.compiler import COMPILE_FLAGS, THREADS_FLAGS, Clang
from relax_tune.tuner.web.wasm import THREADS_LINK

pytestmark = [pytest.mark.cross, pytest.mark.process, pytest.mark.slow]

LOOPS = """
typedef long long i64;
void team_run(void (*)(const void *, i64, i64), const void *, i64, int);
struct given { int *y; const int *x; i64 n; };
#define PART(name, body) static void name##_part(const void *data, i64 first, i64 end) { \\
  const struct given d = *(const struct given *)data; \\
  for (i64 i = first; i < end; i++) { body; } }
#define LOOP(name, uneven, body) PART(name, body) \\
  void name(int *y, const int *x, i64 n) { const struct given d = {y, x, n}; team_run(name##_part, &d, n, uneven); }
LOOP(even, 0, d.y[i] += 2 * d.x[i])
LOOP(uneven, 1, d.y[i] += 2 * d.x[i])
PART(plain, d.y[i] += d.x[i])
PART(turned, d.y[i] += d.x[d.n - 1 - i])
void in_turn(int *y, const int *x, i64 n) {
  const struct given d = {y, x, n};
  team_run(plain_part, &d, n, 0);
  team_run(turned_part, &d, n, 1);
}
LOOP(stopped, 0, if (i + 1 == d.n) __builtin_trap(); d.y[i] = d.x[i])
"""
NAMES = ("even", "uneven", "in_turn")
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
  const got = {};
  const [x, y] = [host.aligned_alloc(64, 4096), host.aligned_alloc(64, 4096)];
  const [given, made] = [new Int32Array(memory.buffer, x, 1024), new Int32Array(memory.buffer, y, 1024)];
  given.forEach((_, i) => (given[i] = 3 * i + 1));
  for (const name of names.split(",")) {
    got[name] = {};
    for (const n of [0, 1, 2, 3, 5, 6, 100, 301]) {
      for (let again = 0; again < 20; again++) {
        made.fill(0);
        host[name](y, x, BigInt(n));
        const text = [...made.subarray(0, n + 4)].join();
        got[name][n] ??= text;
        if (got[name][n] !== text) throw new Error(`${name} of ${n} gives ${text}`);
      }
    }
  }
  try {
    host.stopped(y, x, 100n);
  } catch (error) {
    got.stopped = error.name;
  }
  console.log(JSON.stringify(got));
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
    found = [a + b for a, b in zip(x, reversed(x), strict=True)] if name == "in_turn" else [2 * v for v in x]
    return found + [0] * 4


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_clang()
    folder, clang = tmp_path_factory.mktemp("threads"), Clang()
    (folder / "run.cjs").write_text(RUN)
    (folder / "loops.c").write_text(LOOPS)
    (folder / "team.c").write_text("#define TEAM(name) team_##name\n#define TEAM_LINKAGE\n" + TEAM.read_text())
    for name in ("loops", "team"):
        clang.run([*COMPILE_FLAGS, *THREADS_FLAGS, "-c", f"{name}.c", "-o", f"{name}.o"], folder)
    exports = [f"-Wl,--export={name}" for name in ("aligned_alloc", "stopped", *NAMES)]
    clang.run(
        [
            "--target=wasm32-wasi",
            "-mexec-model=reactor",
            *THREADS_LINK,
            *exports,
            "loops.o",
            "team.o",
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
