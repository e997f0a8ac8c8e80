"""Plans of like devices, as a pack holds them, for tasks that have no times here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from relax_tune.database.records import Target, VariantRecord
from relax_tune.database.store import Store
from relax_tune.tuner.learn.like_devices import like_targets
from relax_tune.tuner.plan.plans import TaskPlan, kept_plan, plan_task
from relax_tune.tuner.plan.regimes import records_for
from relax_tune.tuner.plan.select import DispatchPlan
from relax_tune.tuner.plan.stored_plans import plan_sets
from relax_tune.tuner.task.task import Choices


@dataclass(frozen=True, eq=False)
class LikePlans:
    """The plans of the devices most like this one, from the records of a pack.

    store: the pack's records
    here: the device
    model: the model's key
    workloads: keys of the model's tasks
    """

    store: Store
    here: Target
    model: str
    workloads: frozenset[str]

    def plan(
        self, choices: Choices, without: Collection[str] = ()
    ) -> tuple[DispatchPlan, dict[str, VariantRecord]] | None:
        """Return the plan of the likest device all of whose variants the own rules make here, and these; else None.

        without: variants that may not be dispatched"""
        refused = dict.fromkeys(without, "failed here")
        for target in like_targets(self.store, self.here):
            found = self._plan(target.key, choices, refused)
            if found is not None and all(k in found.times for k in found.plan.variants):
                return found.plan, {k: found.variants[k] for k in found.plan.variants}
        return None

    def _plan(self, target: str, choices: Choices, refused: dict[str, str]) -> TaskPlan | None:
        task = choices.task
        records = records_for(self.store, target, task.key, task.regime)
        if not records:
            return None
        sets = plan_sets(self.store, target, self.model, self.workloads)
        if sets:
            return kept_plan(choices, records, *sets[-1].plan(task.key), refused=refused)
        return plan_task(choices, records, refused=refused)
