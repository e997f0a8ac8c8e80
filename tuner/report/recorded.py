"""Tasks from records: times by shape, the dispatched variant, regret, and the convergence of the search.

Tests: `tests/tuner/report/test_report.py`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.tuner.plan.plans import Shape, pooled
from relax_tune.tuner.plan.stored_plans import StoredPlan
from relax_tune.tuner.report.subject import GROUPS, Facets, Group
from relax_tune.tuner.task.unfused_variants import in_parts

PAUSE_SECS = 200.0
"""A longer time between two records exceeds every deadline of a kernel, so it is a pause between runs."""


def group_of(variant: VariantRecord) -> Group:
    """Return the kind of a variant, or `unfused` for one of several parts."""
    return "unfused" if in_parts(variant) else variant.kind


@cache
def operators_of(name: str) -> tuple[str, ...]:
    """Return the operators that a task is named after, such as `matmul` and `add` of `fused_matmul_add_1`; `other` without any."""
    words, names, at = re.findall(r"[a-z0-9]+", name.lower()), list[str](), 0
    while at < len(words):
        end = next((e for e in range(len(words), at, -1) if "_".join(words[at:e]) in OPERATORS), None)
        if end is not None:
            names.append("_".join(words[at:end]))
        at = at + 1 if end is None else end
    return tuple(dict.fromkeys(names)) or ("other",)


@dataclass(frozen=True, slots=True)
class SearchStep:
    """A moment at which the search had measured a better variant.

    Attributes:
        trials: Candidates measured so far, of all tasks or as a mean.
        secs: Seconds of measuring so far.
        lag: Best time so far relative to the final time, at least 1.
    """

    trials: float
    secs: float
    lag: float


@dataclass(frozen=True, eq=False)
class RecordedTask:
    """The records of one task on one device in one regime.

    Attributes:
        plan: The dispatch to assess; None if no plan is known.
        labels: Names of the symbols in the model; empty for the names in the task.
        calls: Number of calls in one run of the model; None if unknown.
        weights: Anchors with their weights; empty for the shapes that most batches have, with equal weights.
        runs: Ids of the runs whose search and failures are shown; None for all.
        text: Text of the tensor function; empty if unknown.
        regime: State of the caches of its records.
    """

    key: str
    name: str
    records: Sequence[Measurement]
    plan: StoredPlan | None = None
    labels: tuple[str, ...] = ()
    calls: int | None = None
    weights: Mapping[Shape, float] | None = None
    runs: frozenset[str] | None = None
    text: str = ""
    regime: str = "warm"

    @cached_property
    def facets(self) -> Facets:
        """Facets of the task: its operators, and the groups of the variants that are dispatched or, without a plan, the fastest."""
        keys = {k for s in self.shapes if (k := self.dispatched(s) if self.plan else self._fastest(s)) is not None}
        groups = {self.group(key) for key in keys}
        return Facets(self.name, operators_of(self.name), tuple(g for g in GROUPS if g in groups))

    def facets_at(self, shape: Shape, *groups: str | None) -> Facets:
        """Return the facets of a time at a shape, of a variant of these groups or of any."""
        # without spaces, which separate the pairs of an attribute
        sizes = tuple(("_".join(self.name_of(axis).split()), size) for axis, size in enumerate(point_of(shape)))
        return replace(self.facets, groups=tuple(g for g in groups if g is not None), sizes=sizes)

    def group(self, key: str | None) -> Group | None:
        """Return the kind of a variant that was timed or is in the plan."""
        planned = {} if self.plan is None else self.plan[1]
        variant = None if key is None else self.variants.get(key) or planned.get(key)
        return None if variant is None else group_of(variant)

    def _fastest(self, shape: Shape) -> str | None:
        timed = ((rows[shape], key) for key, rows in self.medians.items() if shape in rows)
        return min(timed, default=(0.0, None))[1]

    @cached_property
    def shown_records(self) -> list[Measurement]:
        """Records of the shown runs."""
        return [r for r in self.records if self.runs is None or r.job in self.runs]

    def of_runs(self) -> RecordedTask:
        """Return the task with the records of its shown runs only."""
        return self if self.runs is None else replace(self, records=self.shown_records, plan=None, runs=None)

    @cached_property
    def _pooled(self) -> tuple[dict[str, dict[Shape, float]], dict[str, VariantRecord]]:
        samples, variants = pooled(self.records)
        medians = {key: {s: statistics.median(own) for s, own in rows.items()} for key, rows in samples.items()}
        return medians, variants

    @property
    def medians(self) -> dict[str, dict[Shape, float]]:
        """Median seconds by variant and shape, without variants that have failed."""
        return self._pooled[0]

    @property
    def variants(self) -> dict[str, VariantRecord]:
        """The timed variants by key."""
        return self._pooled[1]

    @cached_property
    def shapes(self) -> list[Shape]:
        """All timed shapes, the smallest first."""
        shapes = {shape for rows in self.medians.values() for shape in rows}
        return sorted(shapes, key=lambda s: (math.prod(max(x, 1) for _, x in s), point_of(s)))

    @cached_property
    def anchors(self) -> dict[Shape, float]:
        """The anchor shapes with their weights."""
        if self.weights:
            return dict(self.weights)
        batches: dict[tuple[str, str], set[Shape]] = {}
        for r in self.records:  # records of one batch share the start of their id
            if shape_of_record(r) in self.medians.get(r.variant.key, ()):
                batches.setdefault((r.variant.key, r.id.rpartition(".")[0]), set()).add(shape_of_record(r))
        sets = Counter(map(frozenset, batches.values()))
        if not sets:
            return {}
        most = max(sets.values())
        chosen = max((s for s, count in sets.items() if count == most), key=lambda s: (len(s), sorted(s)))
        return {shape: 1 / len(chosen) for shape in self.shapes if shape in chosen}

    def dispatched(self, shape: Shape) -> str | None:
        """Return the key of the variant that the plan dispatches at a shape; None without a plan that knows it."""
        if self.plan is None:
            return None
        try:
            return self.plan[0].choose(point_of(shape))
        except IndexError:  # a plan over more symbols than the records have
            return None

    def best(self, shape: Shape, group: Group | None = None) -> float | None:
        """Return the smallest median seconds at a shape, of all variants or of one group."""
        return min(
            (
                rows[shape]
                for key, rows in self.medians.items()
                if shape in rows and (group is None or group_of(self.variants[key]) == group)
            ),
            default=None,
        )

    def dispatched_secs(self, shape: Shape) -> float | None:
        """Return the median seconds of the dispatched variant at a shape; None if it was not timed there."""
        key = self.dispatched(shape)
        return None if key is None else self.medians.get(key, {}).get(shape)

    def fastest(self, shape: Shape, group: Group) -> str | None:
        """Return the key of the variant of a group with the smallest median seconds at a shape."""
        timed = ((rows[shape], key) for key, rows in self.medians.items() if shape in rows)
        return min((t for t in timed if group_of(self.variants[t[1]]) == group), default=(0.0, None))[1]

    @cached_property
    def named_variants(self) -> tuple[str, ...]:
        """Keys of the variants that are dispatched at a shape, or the fastest of their group there."""
        keys = (k for s in self.shapes for k in (self.dispatched(s), *(self.fastest(s, g) for g in GROUPS)))
        return tuple(dict.fromkeys(k for k in keys if k is not None))

    def regret(self, shape: Shape) -> float | None:
        """Return the relative excess of the dispatched variant's time over the best time on record at a shape."""
        own, best = self.dispatched_secs(shape), self.best(shape)
        return None if own is None or best is None else own / best - 1

    @cached_property
    def mean_regret(self) -> float | None:
        """The regret over the anchors that have one, by their weights and the best times; None if none has."""
        known = {s: w for s, w in self.anchors.items() if self.regret(s) is not None}
        best = sum(w * (self.best(s) or 0.0) for s, w in known.items())
        own = sum(w * (self.dispatched_secs(s) or 0.0) for s, w in known.items())
        return own / best - 1 if best > 0 else None

    @cached_property
    def secs(self) -> float | None:
        """Seconds of a call with the dispatched variants, over the anchors by weight; None if a time is missing.

        Without a plan, seconds with the best variants.
        """
        total = 0.0
        for shape, weight in self.anchors.items():
            time = self.best(shape) if self.plan is None else self.dispatched_secs(shape)
            if time is None:
                return None
            total += weight * time
        return total if self.anchors else None

    @cached_property
    def trials(self) -> int:
        """Number of tuned candidates of the shown runs."""
        return len({r.variant.key for r in self.shown_records if group_of(r.variant) == "tuned"})

    @cached_property
    def failures(self) -> list[Measurement]:
        """Failed measurements of the shown runs."""
        return [r for r in self.shown_records if r.status == "failed"]

    def name_of(self, axis: int) -> str:
        """Return the name of a symbol."""
        return self.labels[axis] if axis < len(self.labels) else f"s{axis}"

    def shape_text(self, shape: Shape) -> str:
        """Return a shape as text, such as `b=1, n=8`."""
        return ", ".join(f"{self.name_of(a)}={x}" for a, x in enumerate(point_of(shape))) or "one shape"

    @cached_property
    def convergence(self) -> list[SearchStep]:
        """The steps of the search: each better variant of the shown runs, and the end.

        A variant counts from the time it was first measured at an anchor, with the median of all its samples. Pauses of more
        than PAUSE_SECS are left out.
        """
        events = sorted((r for r in self.shown_records if r.measured_at > 0), key=lambda r: (r.measured_at, r.id))
        best: dict[Shape, float] = {}
        trials: set[str] = set()
        improvements: list[tuple[int, float, float]] = []
        clock = _Stopwatch()
        for record in events:
            secs = clock.at(record)
            if group_of(record.variant) == "tuned":
                trials.add(record.variant.key)
            shape = shape_of_record(record)
            time = self.medians.get(record.variant.key, {}).get(shape)
            if shape in self.anchors and time is not None and time < best.get(shape, math.inf):
                best[shape] = time
                if len(best) == len(self.anchors):
                    improvements.append((len(trials), secs, sum(w * best[s] for s, w in self.anchors.items())))
        if not improvements:
            return []
        end = improvements[-1][2]
        steps = {trial: SearchStep(trial, secs, time / end) for trial, secs, time in improvements}
        steps[len(trials)] = SearchStep(len(trials), clock.secs, 1.0)
        return list(steps.values())


class _Stopwatch:
    """Seconds of measuring, over several runs without the pauses between them."""

    def __init__(self) -> None:
        self.secs = 0.0
        self._last = math.inf

    def at(self, record: Measurement) -> float:
        """Return the seconds until a record; records come in order of time."""
        gap = record.measured_at - self._last
        self.secs += gap if 0 < gap <= PAUSE_SECS else 0.0
        self._last = record.measured_at
        return self.secs


def point_of(shape: Shape) -> tuple[int, ...]:
    """Return the values of a shape's symbols, by number."""
    return tuple(x for _, x in sorted(shape, key=lambda s: (len(s[0]), s[0])))


def shape_of_record(record: Measurement) -> Shape:
    """Return the shape of a measurement."""
    return tuple(sorted(record.symbols.items()))


def all_tasks(tasks: Sequence[RecordedTask]) -> list[SearchStep]:
    """Return the convergence over several tasks: the geometric mean of their lags, over the sums of trials and seconds.

    It begins when every task has a time at each anchor.
    """
    known = [t for t in tasks if t.convergence]
    events: list[tuple[float, str, int, Measurement]] = sorted(
        (r.measured_at, r.id, number, r) for number, t in enumerate(known) for r in t.shown_records if r.measured_at > 0
    )
    clock = _Stopwatch()
    trials: list[set[str]] = [set() for _ in known]
    lags: dict[int, float] = {}
    steps: dict[int, SearchStep] = {}
    for _, _, number, record in events:
        secs = clock.at(record)
        if group_of(record.variant) == "tuned":
            trials[number].add(record.variant.key)
        own = [s for s in known[number].convergence if s.trials <= len(trials[number])]
        if own:
            lags[number] = own[-1].lag
        if len(lags) == len(known):
            total = sum(map(len, trials))
            lag = math.exp(sum(map(math.log, lags.values())) / len(lags))
            steps[total] = SearchStep(total, secs, lag)
    return list(steps.values())
