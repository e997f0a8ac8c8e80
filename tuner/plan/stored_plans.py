"""Plans in the database: the plans of a model form a set, which replaces the previous set all at once.

A plan's text holds its entries with their guards, each dispatched variant, the model of its set and the set's name. The name
is a hash of all plans of the set, so equal sets have one name. Storing the newest set again adds nothing. An earlier set
becomes the current one by storing its texts once more: nothing is ever removed. A set of another database that was merged is
listed, under its origin, and becomes the current one in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from relax_tune.database.records import PlanRecord, VariantRecord, canonical_json, parse_json
from relax_tune.database.store import Store
from relax_tune.errors import DatabaseError
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.plan.select import DispatchPlan, GuardTest, PlanEntry

StoredPlan = tuple[DispatchPlan, Mapping[str, VariantRecord]]
"""A plan and its variants by key."""


@dataclass(frozen=True)
class PlanSet:
    """All plans of a model that were stored in one set, by workload.

    Each has the version it had when the set was last stored.
    """

    name: str
    records: Mapping[str, PlanRecord]

    @property
    def origins(self) -> tuple[str, ...]:
        """Ids of the other databases that the plans are from; empty for a set of this one."""
        return tuple(sorted({r.origin for r in self.records.values() if r.origin}))

    def plan(self, workload: str) -> StoredPlan:
        """Return the plan of a workload.

        Raises:
            DatabaseError: The entries are not a plan of this format.
        """
        return read_plan(self.records[workload])


def plan_texts(model: str, plans: Mapping[str, TaskPlan]) -> dict[str, str]:
    """Return the texts of a set, by workload. The same plans give the same texts."""
    bodies = {workload: _body(plan) for workload, plan in sorted(plans.items())}
    name = _set_name(model, bodies)
    return {w: canonical_json({**body, "model": model, "set": name}) for w, body in bodies.items()}


def _set_name(model: str, plans: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of a set of plans: a hash of the model's key, and of entries and variants by workload."""
    return hashlib.blake2b(canonical_json([model, plans]).encode(), digest_size=6).hexdigest()


def _body(plan: TaskPlan) -> dict[str, Any]:
    entries = [
        {"tests": [[asdict(test), outcome] for test, outcome in e.tests], "variant": e.variant}
        for e in plan.plan.entries
    ]
    variants = {key: plan.variants[key] for key in plan.plan.variants}
    stored = {
        k: {"kind": v.kind, "sketch": v.sketch, "trace": v.trace, "parameters": v.parameters}
        for k, v in sorted(variants.items())
    }
    return {"entries": entries, "variants": stored}


def plan_sets(store: Store, target: str, model: str, workloads: frozenset[str]) -> list[PlanSet]:
    """List the sets of a model that contain a plan for each of these workloads.

    They are in the order in which they became the current set here, so the last is the current one. Sets of other databases that
    were never current here come first.
    """
    sets: dict[str, dict[str, PlanRecord]] = {}
    for record in sorted(store.plans(target), key=lambda p: (p.turn, p.origin, p.version)):
        document = parse_json(record.entries, "plan entries")
        # The text comes from a database, in which others may have written anything.
        if record.workload in workloads and isinstance(document, dict) and document.get("model") == model:
            sets.setdefault(str(document.get("set")), {})[record.workload] = record
    whole = [PlanSet(name, records) for name, records in sets.items() if set(records) == workloads]
    return sorted(whole, key=lambda s: sorted((w, r.turn, r.version) for w, r in s.records.items()))


def read_plan(record: PlanRecord) -> StoredPlan:
    """Return a plan and its variants from a record.

    Raises:
        DatabaseError: The entries are not a plan of this format.
    """
    where = f"plan {record.version} of workload {record.workload}"
    document = parse_json(record.entries, where)
    try:
        variants = {key: VariantRecord(**data) for key, data in document["variants"].items()}
        entries = tuple(
            PlanEntry(tuple((_test(data), bool(outcome)) for data, outcome in e["tests"]), str(e["variant"]))
            for e in document["entries"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatabaseError(f"{where}: expected entries and variants, got others: {error!r:.80}; tune again") from None
    # A plan without an unconditional last entry would leave some shape without a kernel.
    whole = entries and not entries[-1].tests and all(e.variant in variants for e in entries)
    if not whole or any(v.key != key for key, v in variants.items()):
        raise DatabaseError(f"{where}: expected a total list over its own variants, got another; tune again")
    return DispatchPlan(entries, 0.0), variants


def _test(data: dict[str, Any]) -> GuardTest:
    numbers = {f.name: data[f.name] for f in fields(GuardTest) if f.name != "axes"}
    axes = tuple(data["axes"])
    plain = all(type(x) is int for x in (*axes, *numbers.values()))
    if not axes or not plain or min(axes) < 0 or numbers["divisor"] < 1 or numbers["modulus"] < 0:
        raise ValueError(f"a test {data!r}")
    return GuardTest(axes, **numbers)
