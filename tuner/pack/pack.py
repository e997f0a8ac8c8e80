"""A model with records in one portable file.

The file (suffix `.rtp`) is a `hashed_zip` of three members besides the manifest. `program.relax` is the text of the program with the
bounds of its symbols, as it was imported. `weights.safetensors` holds the weights. `records.jsonl` holds what is on record for the
model's tasks, of any devices: measurements, and the plans with their guards.

Nothing in it is machine code, or a kernel's source. A schedule on record is a list of steps, which is replayed only where the own
rules make the same list. Whoever writes a pack is trusted with the results of its model, as the author of any model is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from relax_tune.database.exchange.jsonl import export_lines, import_lines
from relax_tune.database.records import Measurement
from relax_tune.database.store import MemoryStore, Store
from relax_tune.errors import ArtifactError, BuildError, DatabaseError, DeduceError, ParseError, UserError, VerifyError
from relax_tune.ir.check.strangers import accept
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.artifact import weights_from_bytes, weights_to_bytes
from relax_tune.runtime.hashed_zip import Content, FileFormat, read_file, read_text, write_file
from relax_tune.runtime.program.program import SMALL
from relax_tune.tuner.job.job import lowered_module, model_key
from relax_tune.tuner.plan.stored_plans import plan_sets, read_plan
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.extract import extract_tasks

SUFFIX = ".rtp"
_PROGRAM, _WEIGHTS, _RECORDS = "program.relax", "weights.safetensors", "records.jsonl"
PACK = FileFormat("relax-tune pack", "pack", SUFFIX, 1, ((_PROGRAM, _WEIGHTS, _RECORDS),), "pack", "packed")
SHAPING = ("effort", "qkv", "attention", "precision", "activations", "weights", "caches", "checks")
"""Settings that decide which tasks a model has, and at which shapes they are timed. A pack holds their values."""


@dataclass(frozen=True, slots=True)
class ModelPack:
    """A model with the settings that shape its tasks, and records of any devices.

    model: the model's key
    digest: the hash of the file it was read from; empty if it was not
    """

    module: IRModule
    settings: Settings
    records: Store
    model: str
    digest: str = ""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as one file. The same pack gives the same bytes. Raises ArtifactError when it cannot be written."""
        constants = self.module.constants
        lines = "".join(line + "\n" for line in export_lines(self.records))
        members = {
            _PROGRAM: (print_text(self.module) + "\n").encode(),
            _WEIGHTS: weights_to_bytes(constants),
            _RECORDS: lines.encode(),
        }
        extra = {
            "model": self.model,
            "settings": {name: getattr(self.settings, name) for name in SHAPING},
            "small": {name: a.dtype.name for name, a in sorted(constants.items()) if a.dtype.name in SMALL},
        }
        return write_file(PACK, path, members, extra, {})


def make_pack(module: IRModule, store: Store, settings: Settings) -> ModelPack:
    """Return a model with everything on record for its tasks. Names of hosts, workers and jobs, and dates, are left out.

    Raises: VerifyError for a module that is not well-formed, BuildError for a module whose text does not give it back.
    """
    module = accept(module, "the module")
    key = model_key(module)
    read = parse_module(print_text(module), OPERATORS, module.constants)
    if model_key(read) != key or print_text(read) != print_text(module):
        raise BuildError("wanted a program whose text gives it back, found one that does not; report the model")
    tasks = extract_tasks(lowered_module(module, settings), settings.anchors)
    kept = MemoryStore(key)  # the same pack of the same records
    workloads = frozenset(t.key for t in tasks)
    known = {w.key: w for w in store.workloads(None) if w.key in workloads}
    for target in store.targets():
        found = [r for t in tasks for r in store.query(target.key, t.key)]
        if not found:
            continue
        kept.add_target(target)
        for workload in sorted({r.workload for r in found}):
            kept.add_workload(known[workload])
        for environment in sorted({r.environment for r in found} - {""}):
            if (facts := store.environment(environment)) is not None:
                kept.add_environment(facts)
        kept.add_measurements(_anonymous(r) for r in found)
        for plans in plan_sets(store, target.key, key, workloads)[-1:]:
            kept.put_plans(target.key, {w: p.entries for w, p in plans.records.items()})
    return ModelPack(module, settings, kept, key)


def _anonymous(record: Measurement) -> Measurement:
    return replace(record, job="", worker="", host="", unit="", measured_at=0.0)


def read_pack(path: str | os.PathLike[str], digest: str | None = None) -> ModelPack:
    """Read and verify a pack, with no frontend. Executes nothing.

    digest: the hash it is to have, as `relax-tune pack` printed it; None: any

    Raises: ArtifactError for a file that is missing, truncated, altered, no pack, of a newer schema, or of another hash. The same for
    parts that do not belong together.
    """
    content = read_file(PACK, path)
    where = f"pack {path}"
    if digest is not None and content.digest != digest.strip().lower():
        raise ArtifactError(
            f"{where}: wanted the hash {digest:.80}, found {content.digest}: another pack, or altered; get the right one"
        )
    try:
        module, settings = _module(where, content), _settings(content)
        model = model_key(module)
        records = read_text(PACK, where, _RECORDS, content.members[_RECORDS], _records)
    except (ParseError, VerifyError, DeduceError, UserError, DatabaseError) as error:
        raise ArtifactError(f"{where}: {error}; pack it again") from None
    if content.manifest["extra"].get("model") != model:
        raise ArtifactError(f"{where}: wanted the program and weights of its manifest, found others; pack it again")
    return ModelPack(module, settings, records, model, content.digest)


def _module(where: str, content: Content) -> IRModule:
    small = content.manifest["extra"].get("small")
    if not isinstance(small, dict) or any(v not in SMALL for v in small.values()):
        raise UserError("wanted the types of its small weights, found others")
    try:
        weights = weights_from_bytes(content.members[_WEIGHTS], small)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{_WEIGHTS}: wanted safetensors, found something else: {error}") from None
    text = read_text(PACK, where, _PROGRAM, content.members[_PROGRAM], str)
    return accept(parse_module(text, OPERATORS, weights), _WEIGHTS)


def _settings(content: Content) -> Settings:
    found: Any = content.manifest["extra"].get("settings")
    if not isinstance(found, Mapping) or not set(found) <= set(SHAPING):
        raise UserError(f"wanted the settings {', '.join(SHAPING)}, found others")
    return Settings(**found)


def _records(text: str) -> Store:
    """Read the records. Raises DatabaseError for the first one that is not sound."""
    store = MemoryStore()
    report = import_lines(store, text.splitlines())
    if report.problems:
        first = report.problems[0]
        raise DatabaseError(f"{_RECORDS}: line {first.line}: {first.why}")
    for target in store.targets():
        for plan in store.plans(target.key):
            read_plan(plan)
    return store
