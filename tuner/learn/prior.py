"""The prior: a cost model trained on the records of many workloads, for candidates of functions that nobody measured.

It predicts log(seconds / roofline) from the features that all sketches share (`schedules/cost/features`) and from the machine's
limits, so that it applies to any function on any machine of its family: processors or GPUs. `Prior.train` makes one from a
database.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, reduce
from importlib.util import find_spec
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np

from relax_tune.database.records import Regime
from relax_tune.database.store import Store
from relax_tune.errors import UserError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.printable import printable
from relax_tune.runtime.atomic_write import reason, write_whole
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.schedules.cost.features import sketch_features
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.learn.recorded_rows import RecordedRows
from relax_tune.tuner.learn.trees import Trees
from relax_tune.tuner.search.space import FeatureArray, FloatArray, IntArray

FORM = 4
"""Version of the file format."""
MOST_BYTES, MOST_HEAD, MOST_NAMES = 16 << 20, 1 << 20, 4096
"""Limits of a file: its bytes, the bytes of its first line, the columns."""
PACKAGED = Path(__file__).parent / "priors"
ROWS = 4096
"""Most rows of a workload on one target in one regime."""
SKETCHES = 16
TREES, DEPTH, ETA = 400, 7, 0.08
REGIMES: tuple[Regime, ...] = ("warm", "flushed")
LANGUAGES = ("c", "opencl", "cuda")
RELATED = {"webgpu": "opencl"}
"""For a language without trained rows, the language whose kernels resemble its kernels most."""
GroupKey = tuple[str, str, str, int]
"""Target, workload, regime, number of the shape."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The functions, sketches and machines that a prior has rows of.

    The feature columns count elements and bytes, so they cannot distinguish a kernel with one instruction for four products from
    one with four instructions. A prior is therefore applied only to kernels that its rows cover.

    Attributes:
        dtypes: Element types of buffers, by name.
        intrinsics: Machine instructions that sketches were tensorized with, by name.
        lanes: f32 elements of the widest vectors.
    """

    dtypes: frozenset[str] = frozenset()
    intrinsics: frozenset[str] = frozenset()
    lanes: int = 0

    @staticmethod
    def of(func: PrimFunc, scheduled: Iterable[PrimFunc], hardware: HardwareInfo) -> Coverage:
        """Return the coverage of rows of some sketches of a function on a machine."""
        return Coverage(
            frozenset(b.dtype.short for b in (*func.buffers, *func.allocs)),
            frozenset(x.marks.intrinsic for f in scheduled for x in loops(f.body) if x.marks.intrinsic),
            hardware.lanes,
        )

    def __or__(self, other: Coverage) -> Coverage:
        return Coverage(self.dtypes | other.dtypes, self.intrinsics | other.intrinsics, max(self.lanes, other.lanes))

    def __ge__(self, other: Coverage) -> bool:
        """Return True if this covers everything that the other covers."""
        narrower = other.lanes <= self.lanes
        return narrower and other.dtypes <= self.dtypes and other.intrinsics <= self.intrinsics

    def to_json(self) -> dict[str, Any]:
        return {"dtypes": sorted(self.dtypes), "intrinsics": sorted(self.intrinsics), "lanes": self.lanes}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Coverage:
        """Read the data of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: The data has another form.
        """
        return Coverage(
            frozenset(map(str, fields["dtypes"])), frozenset(map(str, fields["intrinsics"])), int(fields["lanes"])
        )


@dataclass(frozen=True, eq=False)
class PriorRows:
    """Rows of many workloads.

    Attributes:
        features: (N, F) f32.
        log_time: (N,) log(seconds / roofline).
        groups: (N,) indices into `keys`, one group for each workload, target, regime and shape.
        coverage: Coverage of the rows of each key.
    """

    features: FeatureArray
    log_time: FloatArray
    groups: IntArray
    keys: tuple[GroupKey, ...]
    coverage: tuple[Coverage, ...]

    def without(self, left_out: Collection[int]) -> PriorRows:
        """Return the rows of the other groups."""
        mask = ~np.isin(self.groups, sorted(left_out))
        return PriorRows(self.features[mask], self.log_time[mask], self.groups[mask], self.keys, self.coverage)

    @property
    def covered(self) -> Coverage:
        """The coverage of all rows."""
        return reduce(or_, (self.coverage[n] for n in np.unique(self.groups)), Coverage())


def family_of(hardware: HardwareInfo) -> str:
    """Return the family of machines whose sketches have the same features."""
    return "gpu" if hardware.is_gpu else "processor"


def recorded_rows(store: Store, device: DeviceInfo) -> PriorRows:
    """Return the rows of all records of machines of the device's family.

    A target without recorded limits counts only if it is of the device's kind, whose limits it gets.

    Raises:
        UserError: No records apply.
    """
    here = HardwareInfo.from_limits(device.kind, dict(device.limits))
    features, times, groups, keys = [], [], [], list[GroupKey]()
    coverage: list[Coverage] = []
    for target in store.targets():
        limits = target.limits or (device.limits if target.kind == device.kind else ())
        hardware = HardwareInfo.from_limits(target.kind, dict(limits))
        if not limits or family_of(hardware) != family_of(here):
            continue
        reader = RecordedRows(store, hardware)
        for workload in store.workloads(target.key):
            reader.know(workload.key, workload.text)
            for regime in REGIMES:
                rows = reader.part(
                    regime, target.key, workload=workload.key, count=ROWS, sketches=SKETCHES, libraries=True
                )
                if rows is None:
                    continue
                ok = np.isfinite(rows.log_time)
                features.append(with_machine(rows.features[ok], hardware))
                times.append(rows.log_time[ok])
                groups.append(rows.groups[ok] + len(keys))
                count = int(rows.groups.max(initial=-1)) + 1
                keys += [(target.key, workload.key, regime, n) for n in range(count)]
                coverage += [Coverage.of(*reader.scheduled(workload.key), hardware)] * count
    if not features:
        raise UserError(
            f"expected records of tuned kernels on a {family_of(here)}, got none in {store.where} that apply to this version's "
            "schedules; run `relax-tune tune` first"
        )
    return PriorRows(
        np.concatenate(features), np.concatenate(times), np.concatenate(groups), tuple(keys), tuple(coverage)
    )


def with_machine(features: FeatureArray, hardware: HardwareInfo) -> FeatureArray:
    """Append the machine's columns to features (..., F): its limits on a log scale, and its language."""
    own = np.asarray(list(_machine(hardware).values()), np.float32)
    return np.concatenate([features, np.broadcast_to(own, (*features.shape[:-1], len(own)))], axis=-1)


def _machine(hardware: HardwareInfo) -> Mapping[str, float]:
    facts = asdict(hardware)
    kind = facts.pop("language")
    # Instructions are in `Coverage`, which must match exactly; as columns they would only identify single machines.
    for name in ("element_bytes", "group_axes", "has_byte_dots", "has_bf16_dots", "has_tile_products"):
        del facts[name]
    language = float(LANGUAGES.index(RELATED.get(kind, kind)))
    return {"language": language, **{name: float(np.log2(1 + value)) for name, value in facts.items()}}


@cache
def sketch_names(hardware: HardwareInfo) -> tuple[str, ...]:
    """Return the names of the features of any sketch on a machine, in order."""
    b = TensorBuilder("copy")
    x, y = b.input("x", (8,)), b.output("y", (8,))
    b.compute(y, lambda i: x[i])
    return tuple(f.name for f in sketch_features(b.finish(), hardware))


def feature_names(hardware: HardwareInfo) -> tuple[str, ...]:
    """Return the names of a prior's columns, in order: first of sketches, then of the machine."""
    return (*sketch_names(hardware), *(f"machine {name}" for name in _machine(hardware)))


@dataclass(frozen=True, eq=False)
class Prior:
    """A trained model.

    Attributes:
        family: Family of machines.
        names: Names of the columns, in order.
        about: Description of the training data, for people.
    """

    family: str
    names: tuple[str, ...]
    trees: Trees
    covers: Coverage
    about: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def train(rows: PriorRows, hardware: HardwareInfo, about: Mapping[str, Any] | None = None) -> Prior:
        """Train a prior for the family of a machine. Every group has the same weight, independent of its number of rows."""
        import xgboost as xgb

        counts = np.bincount(rows.groups, minlength=len(rows.keys))
        # A function that was tuned for long must not outweigh all others.
        weights = 1.0 / np.maximum(counts[rows.groups], 1)
        data = xgb.DMatrix(rows.features, label=rows.log_time, weight=weights / weights.mean(), nthread=1)
        parameters = {
            "objective": "reg:squarederror", "tree_method": "hist", "max_depth": DEPTH, "eta": ETA, "subsample": 0.7,
            "colsample_bytree": 0.7, "min_child_weight": 4, "nthread": 1, "seed": 0, "verbosity": 0,
        }  # fmt: skip
        return Prior(
            family_of(hardware),
            feature_names(hardware),
            Trees.of(xgb.train(parameters, data, TREES)),
            rows.covered,
            dict(about or {}),
        )

    @cached_property
    def _booster(self) -> Any:
        return self.trees.booster(len(self.names))

    def log_time(self, features: FeatureArray) -> FloatArray:
        """Return log(seconds / roofline) (N,) of rows (N, F)."""
        return np.asarray(self._booster.inplace_predict(np.ascontiguousarray(features)), np.float64)

    def save(self, path: Path) -> None:
        """Write the prior: a line of JSON, then the compressed arrays of `Trees`.

        Raises:
            UserError: The file cannot be written.
        """
        head = {
            "form": FORM,
            "family": self.family,
            "names": list(self.names),
            "covers": self.covers.to_json(),
            "about": dict(self.about),
            "trees": len(self.trees.counts),
            "nodes": len(self.trees.left),
            "base": self.trees.base,
        }
        trees = self.trees.to_bytes()
        try:
            write_whole(path, memoryview(json.dumps(head, sort_keys=True).encode() + b"\n" + trees))
        except OSError as error:
            raise UserError(f"{path}: the prior could not be written: {reason(error)}") from None

    def check_fit(self, hardware: HardwareInfo, where: str) -> None:
        """Check that the prior fits a machine and this version.

        Raises:
            UserError: It is for another family of machines, or has other features.
        """
        if self.family != family_of(hardware):
            raise UserError(
                f"{where}: expected a prior for a {family_of(hardware)}, got one for a {self.family:.20}; train one for it"
            )
        if self.names != feature_names(hardware):
            raise UserError(
                f"{where}: expected a prior of this version's features, got one of others; run `relax-tune model train` again"
            )

    @staticmethod
    def read(path: Path) -> Prior:
        """Read a prior.

        Raises:
            UserError: The file is no prior of this version.
        """
        try:
            with path.open("rb") as file:
                # One byte more than allowed is enough to refuse a huge file without reading it whole.
                head, _, trees = file.read(MOST_BYTES + 1).partition(b"\n")
            if len(head) > MOST_HEAD or len(head) + len(trees) >= MOST_BYTES:
                raise ValueError(f"expected at most {MOST_BYTES} bytes, the first line at most {MOST_HEAD}, got more")
            fields = json.loads(head)
            form = fields["form"]
            if form == FORM:
                return Prior._read(fields, trees)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
            zlib.error,
        ) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"{path}: not a prior that `relax-tune model train` wrote: {printable(why):.200}") from None
        raise UserError(f"{path}: expected a prior of form {FORM}, got form {form!r:.20}; train one with this version")

    @staticmethod
    def _read(fields: Mapping[str, Any], trees: bytes) -> Prior:
        names = tuple(map(str, fields["names"]))
        if not 0 < len(names) <= MOST_NAMES:
            raise ValueError(f"expected 1 to {MOST_NAMES} columns, got {len(names)}")
        arrays = Trees.from_bytes(trees, fields["trees"], fields["nodes"], fields["base"], len(names))
        return Prior(str(fields["family"]), names, arrays, Coverage.from_json(fields["covers"]), dict(fields["about"]))


@cache
def packaged_prior(family: str) -> Prior | None:
    """Return the packaged prior for a family of machines; None without one, or without xgboost."""
    path = PACKAGED / f"{family}.prior"
    return Prior.read(path) if path.is_file() and find_spec("xgboost") is not None else None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Quality of a prior on groups that it was not trained on, as means over groups.

    Attributes:
        rank: Spearman's rank correlation.
        regret: By k, the time of the best of the first k candidates over the best of all, minus 1, as a geometric mean.
        worst: Largest regret of the first candidate.
    """

    groups: int
    rank: float
    regret: Mapping[int, float]
    worst: float


def evaluate(
    rows: PriorRows, train: Callable[[PriorRows], Prior], fold_key: Callable[[GroupKey], str], folds: int = 5
) -> Ranking:
    """Evaluate priors by cross-validation.

    Args:
        train: Trains a prior on some rows.
        fold_key: Text of a group's key; groups with equal texts are in one fold.
    """
    names = sorted({fold_key(k) for k in rows.keys})
    parts = [frozenset(names[n::folds]) for n in range(min(folds, len(names)))]
    if len(parts) < 2:
        raise UserError(f"expected records of at least two to leave one out, got {len(names)}; tune more")
    ranks, regrets = [], []
    for part in parts:
        out = [n for n, key in enumerate(rows.keys) if fold_key(key) in part]
        prior = train(rows.without(out))
        for rank, regret in _judged(rows, prior, out):
            ranks.append(rank)
            regrets.append(regret)
    if not ranks:
        raise UserError("expected shapes with at least eight candidates on record, got none; tune more")
    mean = {k: float(np.expm1(np.mean([r[k] for r in regrets]))) for k in regrets[0]}
    return Ranking(len(ranks), float(np.mean(ranks)), mean, float(np.expm1(max(r[1] for r in regrets))))


def _judged(rows: PriorRows, prior: Prior, groups: Sequence[int]) -> Iterator[tuple[float, dict[int, float]]]:
    """Yield the correlation of ranks and the log regrets of each group with enough rows."""
    for number in groups:
        at = np.flatnonzero(rows.groups == number)
        # A correlation of a few ranks is mostly chance.
        if len(at) < 8:
            continue
        true, predicted = rows.log_time[at], prior.log_time(rows.features[at])
        order = np.argsort(predicted, kind="stable")
        # The rank of each element; Pearson's correlation of ranks is Spearman's.
        places = [np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (true, predicted)]
        rank = float(np.corrcoef(places[0], places[1])[0, 1])
        yield rank, {k: float(true[order[:k]].min() - true.min()) for k in (1, 4, 16)}
