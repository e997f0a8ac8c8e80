"""`relax-tune` processes that tests start, stop and look after; and what a database says they did."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relax_tune.database.records import Measurement
from relax_tune.database.store import Store

MARK = "RELAX_TEST_MARK"
VALIDATION_BATCHES = 40  # more than any job of these tests needs
# Tests may run in the background of a shell, which then ignores Ctrl-C for all below it; a terminal does not.
_START = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = (sys.executable, "-c", f"{_START}; from relax_tune.tuner.cli.start import main; main()")


def small_model(folder: Path, seed: int = 0, inner: int = 24, layers: int = 1) -> Path:
    """A network of `layers` + 1 dense layers and a softmax over n rows as an ONNX file: a few tasks, tuned in a few seconds.

    Args:
        inner: width of the first layer; each further one is wider by 1.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    widths = [16, *range(inner, inner + layers)]
    sizes = {"last": (widths[-1], 12)}
    for number, pair in enumerate(itertools.pairwise(widths)):
        sizes |= {f"w{number}": pair, f"b{number}": pair[1:]}
    constants = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name) for name, shape in sizes.items()
    ]
    nodes, value = [], "x"
    for n in range(layers):
        nodes += [
            helper.make_node("MatMul", [value, f"w{n}"], [f"h{n}"]),
            helper.make_node("Add", [f"h{n}", f"b{n}"], [f"a{n}"]),
            helper.make_node("Relu", [f"a{n}"], [f"r{n}"]),
        ]
        value = f"r{n}"
    nodes += [helper.make_node("MatMul", [value, "last"], ["o"]), helper.make_node("Softmax", ["o"], ["y"], axis=-1)]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 12])],
        constants,
    )
    path = folder / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(path))
    return path


class JobProcess:
    """A `relax-tune` command in a session of its own, as a terminal starts one. All its descendants inherit a mark."""

    def __init__(self, folder: Path, *arguments: str, log: str = "log") -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.errors = folder / f"{log}.err"
        self.output = folder / f"{log}.out"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RELAX_TUNE_") and k != "COLUMNS"}
        environment = kept | {
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "RELAX_TUNE_CACHE": str(folder / "cache"),
            "TMPDIR": str(scratch(folder)),
        }
        with open(self.errors, "wb") as errors, open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def wait_until_it_listens(self) -> None:
        """Until its own handler of signals is in place: it catches SIGTERM, which plain Python does not."""
        give_up = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < give_up:
            caught = int(_status(self.process.pid).get("SigCgt", "0"), 16)
            if caught >> (signal.SIGTERM - 1) & 1:
                return
            time.sleep(0.002)

    def wait(self, secs: float = 120) -> int:
        return self.process.wait(secs)

    def marked(self) -> list[int]:
        """Processes (zombies aside) that carry its mark, itself included."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if wanted in (entry / "environ").read_bytes() and _status(int(entry.name))["State"][0] not in "ZX":
                        found.append(int(entry.name))
                except (OSError, KeyError):
                    continue
        return found

    def children(self) -> list[int]:
        return [pid for pid in self.marked() if pid != self.process.pid]

    def orphans(self, within_secs: float = 20) -> list[int]:
        """What is still there of an ended command after a moment to die."""
        give_up = time.monotonic() + within_secs
        while (left := self.marked()) and time.monotonic() < give_up:
            time.sleep(0.05)
        return left

    def said(self) -> str:
        return self.errors.read_text(errors="replace")

    def kill(self) -> None:
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


def scratch(folder: Path) -> Path:
    """Where the commands of a folder put temporary files."""
    (folder / "tmp").mkdir(exist_ok=True)
    return folder / "tmp"


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@dataclass(frozen=True)
class Done:
    """What a database says was tried. points: (workload, variant, point) that have a time or a failure (point None), without the
    shapes plans were validated at: which these are depends on what was fast.
    trials: (workload, variant) -> how many trials were spent on it, over all jobs."""

    points: frozenset[tuple[str, str, str | None]]
    trials: Counter[tuple[str, str]]
    ids: frozenset[str]

    @property
    def tuned(self) -> Counter[str]:
        """Different variants by workload."""
        return Counter(workload for workload, _ in self.trials)


def work_done(store: Store) -> Done:
    """All of the only target of a database, which must be sound."""
    assert store.check() == []
    (target,) = store.targets()
    records = store.query(target.key)
    points = {
        (r.workload, r.variant.key, str(sorted(r.symbols.items())) if r.status == "ok" else None)
        for r in records
        if not any(_is_of(r, f"validation{n + 1}") for n in range(VALIDATION_BATCHES))
    }
    trials = Counter(
        (workload, variant)
        for _, workload, variant in {(_batch(r), r.workload, r.variant.key) for r in records if _is_trial(r)}
    )
    return Done(frozenset(points), trials, frozenset(r.id for r in records))


def _batch(record: Measurement) -> str:
    return record.id.split(".")[0]


def _is_trial(record: Measurement) -> bool:
    """Whether it comes of the first measuring of its variant, rather than of contenders being timed again."""
    return _is_of(record, "trial")


def _is_of(record: Measurement, part: str) -> bool:
    """The id is a hash of what was asked."""
    text = f"{record.workload}:{record.target}:{record.variant.key}:{record.job}:{part}"
    return _batch(record) == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
