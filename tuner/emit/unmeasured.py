"""Tasks without records, for which a build dispatches untuned kernels: a warning, or an error.

Tests: `tests/tuner/e2e/test_api.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.database.store import MemoryStore, Store
from relax_tune.errors import BuildError, UserError
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.settings import Policy

TUNE = "`relax-tune tune` with this model, target and database measures them"
MORE = "more candidates or time may measure them, and the notes say what failed"
"""Remedies of tasks without a record: for a build, and for a tuning job, which has just tried."""
BY_RECORDS: tuple[Policy, ...] = ("measured", "stored")
"""Policies whose plans come from records."""
_SHOWN = 5


def check_required(required: bool, policy: Policy, flag: str) -> None:
    """Refuse to require records of a policy that uses none.

    Args:
        flag: How the caller requires them, for the message.

    Raises:
        UserError: The policy uses no records.
    """
    if required and policy not in BY_RECORDS:
        raise UserError(f"{flag} expects the policy {' or '.join(BY_RECORDS)}, got {policy}, which needs no records")


def lacking_note(name: str, plan: TaskPlan) -> str | None:
    """Return a note on the form that is dispatched for a task without a usable record; None for a task that has one."""
    if plan.times:
        return None
    kinds = {"predicted" if k in plan.predicted else plan.variants[k].kind for k in plan.plan.variants}
    return (
        f"{name}: no usable record for this device, so the {kinds.pop()} form is dispatched; "
        "run `relax-tune tune` to measure some"
    )


def other_notes(notes: Sequence[str], plans: Sequence[Mapping[str, TaskPlan]]) -> list[str]:
    """Return the notes of a build that `unmeasured_warning` does not summarise."""
    lacking = tuple(filter(None, (lacking_note(name, plan) for own in plans for name, plan in own.items())))
    return [note for note in notes if not note.endswith(lacking)]


def unmeasured_warning(
    plans: Sequence[Mapping[str, TaskPlan]],
    policy: Policy,
    store: Store,
    device: str,
    required: bool,
    remedy: str = TUNE,
) -> str | None:
    """Return a sentence about the tasks without a usable record; None if all have one, or the policy needs none.

    An empty store in memory has no records on purpose, so it causes no warning.

    Args:
        plans: By task, for each device.
        device: Name for people.
        required: Whether such a task is an error.
        remedy: What measures the tasks: `TUNE` or `MORE`.

    Raises:
        BuildError: Records are required and missing; the message lists the tasks.
    """
    names = list(dict.fromkeys(name for own in plans for name, plan in own.items() if not plan.times))
    if policy not in BY_RECORDS or not names:
        return None
    total = len({name for own in plans for name in own})
    what = f"{len(names)} of {total} tasks have no usable record for {device} in {store.where}"
    if required:
        raise BuildError(f"expected a measured record of every task, but {what}: {', '.join(names)}; {remedy}")
    # Somebody who builds without any database did not ask for tuned kernels, so a warning at each build would be
    # noise.
    if isinstance(store, MemoryStore) and store.where == MemoryStore.where and not store.targets():
        return None
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{what}, so untuned kernels are dispatched for {shown}; {remedy}"
