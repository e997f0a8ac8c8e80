"""A model with records in one portable file.

The file (suffix `.rtp`) is a `hashed_zip` of three members besides the manifest. `program.relax` is the text of the imported program, with
the bounds of its symbols. `weights.safetensors` has the weights. `records.jsonl` has the records of the model's tasks on any device:
measurements, and plans with their guards.

A pack contains neither machine code nor sources of kernels. A recorded schedule is a list of steps, which is replayed only if the rules
of this version generate the same list. The author of a pack is trusted with the results of its model, like the author of any model.

Tests: `tests/tuner/pack/test_pack.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_tune.database.exchange.jsonl import export_lines, import_lines
from relax_tune.database.records import Measurement
from relax_tune.database.store import MemoryStore, Store
from relax_tune.errors import ArtifactError, BuildError, DatabaseError, DeduceError, ParseError, UserError, VerifyError
from relax_tune.ir.check.untrusted import accept
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.hashed_zip import Content, FileFormat, Member, read_file, read_text, write_file
from relax_tune.runtime.program.program import SMALL
from relax_tune.runtime.stored_weights import weights_from_bytes, weights_to_bytes
from relax_tune.tuner.job.lowered_model import lowered_module, model_key
from relax_tune.tuner.plan.stored_plans import plan_sets, read_plan
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.extract import extract_tasks

SUFFIX = ".rtp"
_PROGRAM, _WEIGHTS, _RECORDS = "program.relax", "weights.safetensors", "records.jsonl"
PACK = FileFormat("relax-tune pack", "pack", SUFFIX, 1, ((_PROGRAM, _WEIGHTS, _RECORDS),), "pack", "packed")
SHAPING = ("effort", "qkv", "attention", "precision", "activations", "weights", "caches", "checks")
"""Settings that decide which tasks a model has, and at which shapes they are timed. A pack stores their values."""


@dataclass(frozen=True, slots=True)
class ModelPack:
    """A model with the settings that shape its tasks, and records of any devices.

    Attributes:
        model: Key of the model.
        digest: Hash of the file that the pack was read from; empty if it was not read.
    """

    module: IRModule
    settings: Settings
    records: Store
    model: str
    digest: str = ""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the pack to a file. The same pack gives the same bytes. Raises `ArtifactError` if the file cannot be written."""
        constants = self.module.constants
        lines = "".join(line + "\n" for line in export_lines(self.records))
        members: dict[str, Member] = {
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
    """Return a model with all records of its tasks, without the names of hosts, workers and jobs, and without dates.

    Raises:
        VerifyError: The module is not well-formed.
        BuildError: The text of the module does not parse to an equal module.
    """
    module = accept(module, "the module")
    key = model_key(module)
    read = parse_module(print_text(module), OPERATORS, module.constants)
    if model_key(read) != key or print_text(read) != print_text(module):
        raise BuildError("the text of the program does not parse to the same program; report the model")
    tasks = extract_tasks(lowered_module(module, settings), settings.anchors)
    records = MemoryStore(key)  # the id depends only on the model, so the same records give the same pack
    workloads = frozenset(t.key for t in tasks)
    known = {w.key: w for w in store.workloads(None) if w.key in workloads}
    for target in store.targets():
        measurements = [r for t in tasks for r in store.query(target.key, t.key)]
        if not measurements:
            continue
        records.add_target(target)
        for workload in sorted({r.workload for r in measurements}):
            records.add_workload(known[workload])
        for environment in sorted({r.environment for r in measurements} - {""}):
            if (facts := store.environment(environment)) is not None:
                records.add_environment(facts)
        records.add_measurements(_anonymous(r) for r in measurements)
        for plans in plan_sets(store, target.key, key, workloads)[-1:]:
            records.put_plans(target.key, {w: p.entries for w, p in plans.records.items()})
    return ModelPack(module, settings, records, key)


def _anonymous(record: Measurement) -> Measurement:
    return replace(record, job="", worker="", host="", unit="", measured_at=0.0)


def read_pack(path: str | os.PathLike[str], digest: str | None = None) -> ModelPack:
    """Read and verify a pack. No frontend is imported and nothing is executed.

    Args:
        digest: Hash that the pack must have, as `relax-tune pack` printed it; None accepts any.

    Raises:
        ArtifactError: The file is missing, truncated, altered, not a pack, of another schema or hash, or its parts do not belong
            together.
    """
    content = read_file(PACK, path)
    where = f"pack {path}"
    if digest is not None and content.digest != digest.strip().lower():
        raise ArtifactError(
            f"{where}: expected the hash {digest:.80}, got {content.digest}; the file was altered or is another pack"
        )
    try:
        module, settings = _module(where, content), _settings(content)
        model = model_key(module)
        records = read_text(PACK, where, _RECORDS, content.members[_RECORDS], _records)
    except (ParseError, VerifyError, DeduceError, UserError, DatabaseError) as error:
        raise ArtifactError(f"{where}: {error}; pack it again") from None
    if content.manifest["extra"].get("model") != model:
        raise ArtifactError(f"{where}: program and weights do not have the key in the manifest; pack the model again")
    return ModelPack(module, settings, records, model, content.digest)


def _module(where: str, content: Content) -> IRModule:
    small = content.manifest["extra"].get("small")
    if not isinstance(small, dict) or any(v not in SMALL for v in small.values()):
        raise UserError("the manifest lists unknown types of weights")
    try:
        weights = weights_from_bytes(content.members[_WEIGHTS], small)
    except ValueError as error:
        raise UserError(f"{_WEIGHTS}: not safetensors: {error}") from None
    text = read_text(PACK, where, _PROGRAM, content.members[_PROGRAM], str)
    return accept(parse_module(text, OPERATORS, weights), _WEIGHTS)


def _settings(content: Content) -> Settings:
    values: Any = content.manifest["extra"].get("settings")
    if not isinstance(values, Mapping) or not set(values) <= set(SHAPING):
        raise UserError(f"expected settings among {', '.join(SHAPING)} in the manifest")
    return Settings(**values)


def _records(text: str) -> Store:
    """Read the records. Raises `DatabaseError` for the first invalid one."""
    store = MemoryStore()
    report = import_lines(store, text.splitlines())
    if report.problems:
        first = report.problems[0]
        raise DatabaseError(f"{_RECORDS}: line {first.line}: {first.why}")
    for target in store.targets():
        for plan in store.plans(target.key):
            read_plan(plan)
    return store
