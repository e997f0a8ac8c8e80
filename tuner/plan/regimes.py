"""The records that stand for a task: those timed in its cache regime, else those with warm caches.

A model was perhaps tuned before its settings asked for other caches. Its times are then better than none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relax_tune.database.records import Measurement, Regime
from relax_tune.database.store import Store


def records_for(
    store: Store, target: str, workload: str, regime: Regime, counts: Callable[[Measurement], bool] = lambda _: True
) -> list[Measurement]:
    """Return the records of a workload in a regime; its warm ones where the regime has no times of tuned kernels and they have.

    A failure in the regime counts in either case. counts: a test for records that are valid here
    """
    own = store.query(target, workload, regime=regime)
    if regime == "warm":
        return own
    worth = _worth(own, counts)
    if worth == _TUNED:
        return own
    warm = store.query(target, workload, regime="warm")
    return own if _worth(warm, counts) <= worth else [*(r for r in own if r.status == "failed"), *warm]


def stands_in(regime: Regime, records: Sequence[Measurement]) -> bool:
    """Return True if the times among the records of a task in a regime are of another one."""
    return any(r.status == "ok" and r.regime != regime for r in records)


_NOTHING, _TIMED, _TUNED = 0, 1, 2


def _worth(records: Sequence[Measurement], counts: Callable[[Measurement], bool]) -> int:
    timed = [r for r in records if r.status == "ok" and r.checked and r.median_secs > 0 and counts(r)]
    if any(r.variant.kind == "tuned" for r in timed):
        return _TUNED
    return _TIMED if timed else _NOTHING
