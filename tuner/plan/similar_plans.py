"""Plans of similar devices, as a pack holds them, for tasks without times on this device.

Tests: `tests/tuner/pack/test_pack.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from relax_tune.database.records import Target, VariantRecord
from relax_tune.database.store import Store
from relax_tune.tuner.learn.device_records import records_in_regime, similar_targets
from relax_tune.tuner.plan.plans import TaskPlan, plan_from_stored, plan_task
from relax_tune.tuner.plan.select import DispatchPlan
from relax_tune.tuner.plan.stored_plans import plan_sets
from relax_tune.tuner.task.variants import TaskVariants


@dataclass(frozen=True, eq=False)
class SimilarPlans:
    """The plans of the devices most similar to this one, from the records of a pack.

    Attributes:
        store: Records of the pack.
        model: The model's key.
        workloads: Keys of the model's tasks.
    """

    store: Store
    device: Target
    model: str
    workloads: frozenset[str]

    def plan(
        self, task_variants: TaskVariants, exclude: Collection[str] = ()
    ) -> tuple[DispatchPlan, dict[str, VariantRecord]] | None:
        """Return the plan of the most similar device whose variants can all be generated here, and the variants.

        Args:
            exclude: Keys of variants that may not be dispatched.
        """
        refused = dict.fromkeys(exclude, "failed here")
        for target in similar_targets(self.store, self.device):
            plan = self._plan(target.key, task_variants, refused)
            if plan is not None and all(k in plan.times for k in plan.plan.variants):
                return plan.plan, {k: plan.variants[k] for k in plan.plan.variants}
        return None

    def _plan(self, target: str, task_variants: TaskVariants, refused: dict[str, str]) -> TaskPlan | None:
        task = task_variants.task
        records = records_in_regime(self.store, target, task.key, task.regime)
        if not records:
            return None
        sets = plan_sets(self.store, target, self.model, self.workloads)
        if sets:
            return plan_from_stored(task_variants, records, *sets[-1].plan(task.key), refused=refused)
        return plan_task(task_variants, records, refused=refused)
