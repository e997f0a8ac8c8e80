"""Run by test_threads.py in a child process under ThreadSanitizer.

`model FOLDER`: one model in four threads; `unguarded FOLDER`: the same without the device's turn, which must be found; `plan FOLDER`: the
plans in C in eight threads of a program in C.

Kernels are compiled with `-fsanitize=thread` and without OpenMP: libgomp's own barriers are unknown to the sanitizer. So what is
looked for are races between calls, in the kernels; the interpreter itself is not instrumented.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.conftest import Small
from tests.runtime.device.watched import WatchedDevice

from relax_tune.errors import RelaxTuneError
from relax_tune.runtime.artifact import new_artifact
from relax_tune.runtime.program.plan_c import plans_in_c

MAIN = """
#include <pthread.h>
#include <stdio.h>
static void* work(void* bad) {
  for (int64_t n = 0; n < 20000; ++n) {
    int32_t choices[2] = {-1, -1};
    if (small_plan(&n, choices) || choices[0] != (n > 4)) *(int*)bad = 1;
  }
  return 0;
}
int main(void) {
  pthread_t threads[8];
  int bad[8] = {0}, any = 0;
  for (int i = 0; i < 8; ++i) pthread_create(&threads[i], 0, work, &bad[i]);
  for (int i = 0; i < 8; ++i) pthread_join(threads[i], 0), any |= bad[i];
  return any;
}
"""


class RaceDevice(WatchedDevice):
    """A C device whose kernels ThreadSanitizer watches."""

    flags = ("-fsanitize=thread", "-Wno-unknown-pragmas")
    link = ("-fsanitize=thread",)


class NoTurn(contextlib.nullcontext[Any]):
    """A turn that everybody has."""


def model(folder: Path, guarded: bool) -> None:
    device = RaceDevice(folder)
    if not guarded:
        device.turn = NoTurn()  # type: ignore[assignment]
    start, wrong = threading.Barrier(4), []
    with new_artifact(Small.program("c"), Small.constants).open(device) as opened:
        if not guarded:
            opened.executor.refuse_within = lambda: None  # type: ignore[method-assign]

        def work(thread: int) -> None:
            start.wait()
            for call in range(80):
                x = np.full((2000, 3), thread + call, np.float32)
                try:
                    (z,) = opened.run([x])
                except RelaxTuneError as error:
                    wrong.append(str(error))
                    continue
                if not np.allclose(z, Small.reference(x)):
                    wrong.append(f"thread {thread}, call {call}")

        opened.run([np.zeros((2000, 3), np.float32)])
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not (guarded and wrong), wrong[:3]


def plan(folder: Path) -> None:
    source, program = folder / "plan.c", folder / "plan"
    source.write_text(plans_in_c([Small.program("c")]) + MAIN)
    subprocess.run(["gcc", "-O1", "-g", "-fsanitize=thread", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    mode, where = sys.argv[1], Path(sys.argv[2])
    plan(where) if mode == "plan" else model(where, mode == "model")
    print(f"{mode} done", flush=True)
