"""Every decoder of untrusted input, under a fuzzer that follows coverage: `python -m tests.fuzz.decoders --secs 3600`.

A decoder reads bytes, or refuses them by an error of ours. Anything else is a finding: another exception, more than `SECONDS` for
an input, more than `MEGABYTES` of memory. Inputs that lead to new places are written beside the findings. Some are kept below
`CORPUS`, and a test reads these. The fuzzer is atheris."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType

from tests.database.exchange.t4_texts import t4_measurements

from relax_tune.database.exchange.jsonl import import_lines
from relax_tune.database.memory_store import MemoryStore
from relax_tune.database.records import PlanRecord
from relax_tune.errors import RelaxTuneError
from relax_tune.ir.frontend.gguf.file import GgufFile
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.frontend.torch.archive_graph import Operators, expression
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_module, parse_prim_func
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.program.host_program import host_programs_from_json
from relax_tune.runtime.program.program import program_from_json
from relax_tune.runtime.shapes import ShapeProfile
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.measure.codec import decode_batch, decode_results
from relax_tune.tuner.plan.stored_plans import read_plan
from relax_tune.tuner.search.expressions import TextConstraint
from relax_tune.tuner.settings import parse_settings_file

CORPUS = Path(__file__).with_name("corpus")
SECONDS = 20
MEGABYTES = 4000
LONGEST = 1 << 14
"""Bytes of an input."""


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A decoder of files, for bytes in a temporary one; for a name such as `folder/config.json`, of the folder that holds it."""

    def decode(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            read(path.parent if "/" in name else path)

    return decode


def as_json(read: Callable[[object], object]) -> Callable[[bytes], object]:
    def decode(data: bytes) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return
        read(value)

    return decode


DECODERS: Mapping[str, Callable[[bytes], object]] = {
    "jsonl": lambda data: import_lines(MemoryStore(), data.splitlines(keepends=True)),
    "t4": lambda data: t4_measurements(text(data), "workload", "target"),
    "plan": lambda data: read_plan(PlanRecord("workload", "target", 1, text(data))),
    "trace": lambda data: Trace.from_json(text(data)),
    "prim_func": lambda data: parse_prim_func(text(data)),
    "module": lambda data: parse_module(text(data), OPERATORS, {}),
    "relax": in_file("model.relax", load_model),
    "onnx": load_onnx,
    "gguf": in_file("model.gguf", GgufFile),
    "config": in_file("model/config.json", load_model),
    "pt2_graph": as_json(lambda value: Operators(lambda target: target.startswith("torch.ops.aten.")).program(value, "model")),
    "pt2_dim": lambda data: expression(text(data)),
    "artifact": in_file("model.rta", load_artifact),
    "program": lambda data: program_from_json(text(data)),
    "host_programs": lambda data: host_programs_from_json(text(data)),
    "shapes": lambda data: ShapeProfile.from_json(text(data)),
    "batch": lambda data: decode_batch(text(data)),
    "results": lambda data: decode_results(text(data)),
    "constraint": lambda data: TextConstraint(text(data), ("x", "y")),
    "settings": lambda data: parse_settings_file(Path("relax-tune.toml"), data),
}  # fmt: skip

FOLLOWED: Mapping[str, tuple[str, ...]] = {
    "jsonl": ("database.exchange", "database.rows", "database.records"), "t4": ("database.exchange", "database.records"),
    "plan": ("tuner.plan.stored_plans", "database.records"), "trace": ("schedules.trace",), "prim_func": ("ir.text",),
    "module": ("ir.text",), "relax": ("ir.text", "ir.frontend.text", "ir.check"), "onnx": ("ir.frontend.onnx",),
    "gguf": ("ir.frontend.gguf",), "config": ("ir.frontend.hf",), "pt2_graph": ("ir.frontend.torch.archive",),
    "pt2_dim": ("ir.frontend.torch.archive",), "artifact": ("runtime.artifact", "runtime.validation"),
    "program": ("runtime.program", "runtime.validation"), "host_programs": ("runtime.program", "runtime.validation"),
    "shapes": ("runtime.shapes",), "batch": ("tuner.measure.codec",), "results": ("tuner.measure.codec",),
    "constraint": ("tuner.search.expressions",), "settings": ("tuner.settings",),
}  # fmt: skip
"""Modules whose coverage the fuzzer follows; each takes a while to instrument."""


def decode(name: str, data: bytes) -> None:
    """Read bytes, or refuse them by an error of ours. Any other exception is a finding."""
    with contextlib.suppress(RelaxTuneError):
        DECODERS[name](data)


def fuzz(name: str, secs: int, result: Path) -> None:
    """Fuzz one decoder in this process, which ends with it."""
    import atheris

    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={secs}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}", f"-max_len={LONGEST}", "-reduce_inputs=1",
        f"-artifact_prefix={result}/{name}-", "-verbosity=0", "-print_final_stats=1",
    ]  # fmt: skip
    for function in [f for f in gc.get_objects() if isinstance(f, FunctionType)]:
        if (function.__module__ or "").removeprefix("relax_tune.").startswith(FOLLOWED[name]):
            atheris.instrument_func(function)
    new = result / f"{name}.new"
    new.mkdir(exist_ok=True)
    atheris.Setup([sys.argv[0], *options, str(new), str(corpus)], functools.partial(decode, name))
    atheris.Fuzz()


def repeats(name: str, path: Path) -> bool:
    """Whether an input is a finding by itself. One that the fuzzer gave up while the process was stopped is none."""
    code = f"from pathlib import Path; from tests.fuzz.decoders import decode; decode({name!r}, Path({str(path)!r}).read_bytes())"
    limits = f"ulimit -t {SECONDS}; ulimit -v {MEGABYTES * 1024}"
    return subprocess.run(["sh", "-c", f'{limits}; exec "$0" -c "$1"', sys.executable, code]).returncode != 0


def fuzz_in_children(name: str, secs: int, result: Path) -> tuple[int, float, list[Path]]:
    """Fuzz a decoder in child processes for seconds of a processor. Returns inputs run, seconds, and inputs that are findings."""
    runs, used, findings = 0, 0.0, []
    while secs - used >= 1:
        command = [sys.executable, "-m", "tests.fuzz.decoders", "--here", "--only", name, "--found", str(result)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*command, "--secs", str(round(secs - used))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        runs += sum(int(n) for n in re.findall(r"number_of_executed_units: +(\d+)", done.stdout))
        if done.returncode:
            written = re.findall(r"Test unit written to (\S+)", done.stdout)
            findings = [path for path in map(Path, written) if repeats(name, path)]
            if findings or not written:
                print(done.stdout[-3000:], flush=True)
                break
    return runs, used, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--secs", type=int, default=60, help="seconds of a processor for all decoders together")
    parser.add_argument(
        "--found", type=Path, default=Path("build/decoders"), help="folder of the inputs that are findings"
    )
    parser.add_argument("--only", choices=list(DECODERS), nargs="*", default=list(DECODERS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.found.mkdir(parents=True, exist_ok=True)
    if given.here:
        fuzz(given.only[0], given.secs, given.found)
    bad = []
    for name in given.only:
        runs, used, findings = fuzz_in_children(name, max(given.secs // len(given.only), 1), given.found)
        bad += findings
        print(f"{name}: {runs} inputs in {used:.0f} s, {len(findings)} findings", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
