"""Artifacts of target `c:wasm32` as WebAssembly: exported as C, compiled by clang, and stored in the cache of compiled kernels.

A browser gets two files: the module, with what its arguments are checked by and a hash at its end, and the weights, whose hashes are in
the module. The module is there in two forms: for one thread, and for several that share its memory, which a page may have only where it
is isolated from other origins.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.atomic_write import write_whole
from relax_tune.runtime.device import host
from relax_tune.runtime.device.binaries import cache_folder, hashed, is_own_file, private_folder
from relax_tune.runtime.device.wasm.compiler import COMPILE_FLAGS, PROCESSOR, THREADS_FLAGS, Clang
from relax_tune.runtime.hashed_zip import FileFormat, digest_at_end, write_file
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.export.c_export import Exported, export_c

_PROGRAMS, _SINGLE, _THREADS = "programs.json", "model.wasm", "threads.wasm"
MODULE = FileFormat("relax-tune module", "module", ".module", 2, ((_PROGRAMS, _SINGLE, _THREADS),), "serve", "served")
PIECE_BYTES = 1 << 20
"""Bytes of the weights per hash in the module's manifest."""
_NAME = "model"
_STACK_BYTES = 1 << 20
_EXPORTS = ("aligned_alloc", "free", *(f"{_NAME}_{f}" for f in ("create", "reserve", "run", "error")))
_COMPILE = (*COMPILE_FLAGS, "-std=c11")
_LINK = (
    "--target=wasm32-wasi", "-mexec-model=reactor", "-lm", "-Wl,--gc-sections", "-Wl,--strip-all",
    f"-Wl,-z,stack-size={_STACK_BYTES}", "-Wl,--stack-first", *(f"-Wl,--export={name}" for name in _EXPORTS),
)  # fmt: skip
_OF_THREADS = ("threads_serve", "threads_team", "threads_fail")
_MEMORY_BYTES = 16 << 20
"""Memory that threads share at first: `MEMORY` of the browser's wasm.ts."""
THREADS_LINK = (
    "-Wl,--import-memory", "-Wl,--shared-memory", "-Wl,--no-check-features", f"-Wl,--initial-memory={_MEMORY_BYTES}",
    f"-Wl,--max-memory={1 << 32}", *(f"-Wl,--export={name}" for name in ("__stack_pointer", *_OF_THREADS)),
)  # fmt: skip
"""Linking of the form for several threads. `--no-check-features`: wasi-libc is compiled for one; only the first thread allocates."""


@dataclass(frozen=True, slots=True)
class WasmFiles:
    """The files of a model that a browser downloads.

    module: the compiled module and its programs; weights: the weights
    """

    module: Path
    weights: Path

    def facts(self) -> dict[str, Any]:
        """Return address, size and hash of each file. Raises OSError for one that cannot be read."""
        digests = {"module": digest_at_end(self.module), "weights": self.weights.stem}
        paths = {"module": self.module, "weights": self.weights}
        return {
            name: {"url": f"model.{name}", "bytes": os.path.getsize(path), "digest": digests[name]}
            for name, path in paths.items()
        }


def is_wasm(artifact: Artifact) -> bool:
    """Return True for an artifact of target `c:wasm32`."""
    fingerprint = artifact.manifest["extra"].get("fingerprint")
    return artifact.device_kind == "c" and isinstance(fingerprint, dict) and fingerprint.get("cpu") == PROCESSOR


def wasm_files(artifact: Artifact) -> WasmFiles:
    """Compile an artifact of target `c:wasm32`, unless the cache has it.

    Raises: UserError for an artifact that C cannot express; BuildError with clang's messages, and where it is not installed.
    """
    clang = Clang()
    cache = cache_folder() / "wasm"
    with private_folder(cache) as folder, tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as opened:
        work = Path(opened)
        exported = export_c(artifact, work, _NAME)
        programs = json.dumps([_described(p) for p in artifact.programs], separators=(",", ":"))
        texts = [(work / file).read_text() for file in exported.files if file.endswith((".c", ".h"))]
        weights = (work / f"{_NAME}.weights").read_bytes()
        options = (*_COMPILE, *_LINK, *THREADS_FLAGS, *THREADS_LINK)
        module = f"{hashed((clang.version, *options, programs, *texts))}.module"
        identity = f"{weights[16:48].hex()}.weights"
        if not is_own_file(folder / identity):
            write_whole(folder / identity, memoryview(weights))
        if not is_own_file(folder / module):
            _compile(clang, work, exported)
            members = {
                _PROGRAMS: programs.encode(),
                **{name: (work / name).read_bytes() for name in (_SINGLE, _THREADS)},
            }
            write_file(MODULE, folder / module, members, {"weights": hashes_of(weights)}, {})
    return WasmFiles(cache / module, cache / identity)


def hashes_of(weights: bytes) -> dict[str, Any]:
    """Return the hashes of the pieces of a file of weights, which a browser computes while others arrive."""
    starts = range(0, len(weights), PIECE_BYTES)
    hashes = [hashlib.sha256(weights[at : at + PIECE_BYTES]).hexdigest() for at in starts]
    return {"piece_bytes": PIECE_BYTES, "sha256": hashes}


def _described(program: Program) -> dict[str, Any]:
    """Return a program as JSON without what the module holds: kernels and their launches."""
    document = json.loads(program.to_json())
    calls = [{**c, "variants": [{**v, "steps": []} for v in c["variants"]]} for c in document["calls"]]
    return {**document, "kernels": [], "prepare": [], "calls": calls}


def _compile(clang: Clang, work: Path, exported: Exported) -> None:
    """Compile and link an export in its folder, for one thread and for several. Raises BuildError with clang's messages."""
    sources = [(source, tuple(flags)) for source, flags in exported.sources.items()]
    single = [(f"{source}.o", source, flags) for source, flags in sources]
    team = (*THREADS_FLAGS, f"-D{_NAME}_TEAM")
    shared = [(f"{source}.shared.o", source, (*flags, *team)) for source, flags in [*sources, (f"{_NAME}_team.c", ())]]

    def unit(output: str, source: str, flags: Sequence[str]) -> None:
        clang.run([*_COMPILE, *flags, "-c", source, "-o", output], work)

    with ThreadPoolExecutor(max(1, host.usable_cpus())) as pool:
        list(pool.map(lambda each: unit(*each), [*single, *shared]))
    clang.run([*_LINK, *(output for output, _, _ in single), "-o", _SINGLE], work)
    clang.run([*_LINK, *THREADS_LINK, *(output for output, _, _ in shared), "-o", _THREADS], work)
