"""The prior: a cost model trained on the records of many workloads, for candidates of functions that nobody measured.

It predicts log(seconds / roofline) from the features that all sketches share (`schedules/cost/features`) and from the machine's
limits, so that it applies to any function on any machine of its family: processors or GPUs. `Prior.train` makes one from a
database.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from relax_tune.database.records import Regime
from relax_tune.database.store import Store
from relax_tune.errors import UserError
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.runtime.atomic_write import reason, write_whole
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.schedules.cost.features import sketch_features
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.learn.recorded_rows import RecordedRows
from relax_tune.tuner.search.space import FeatureArray, FloatArray, IntArray

FORM = 2
"""Version of the file's form. Another form is another tool's."""
PACKAGED = Path(__file__).parent / "priors"
ROWS = 4096
"""Most rows of a workload on a target and in a regime."""
SKETCHES = 16
TREES, DEPTH, ETA = 400, 7, 0.08
REGIMES: tuple[Regime, ...] = ("warm", "flushed")
LANGUAGES = ("c", "opencl", "cuda")
RELATED = {"webgpu": "opencl"}
"""The language whose kernels those of another, for which no prior was trained, resemble most."""
GroupKey = tuple[str, str, str, int]
"""Target, workload, regime, number of the shape."""


@dataclass(frozen=True, eq=False)
class PriorRows:
    """Rows of many workloads.

    features: (N, F) f32; log_time: (N,) log(seconds / roofline); groups: (N,) numbers into `keys`, one a workload, target,
        regime and shape
    """

    features: FeatureArray
    log_time: FloatArray
    groups: IntArray
    keys: tuple[GroupKey, ...]

    def without(self, left_out: Collection[int]) -> PriorRows:
        """Return the rows of the other groups."""
        kept = ~np.isin(self.groups, sorted(left_out))
        return PriorRows(self.features[kept], self.log_time[kept], self.groups[kept], self.keys)


def family_of(hardware: HardwareInfo) -> str:
    """Return the family of machines whose sketches have the same features."""
    return "gpu" if hardware.is_gpu else "processor"


def recorded_rows(store: Store, device: DeviceInfo) -> PriorRows:
    """Return the rows of all records of machines of the device's family.

    A target without limits on record counts only if it is of the device's kind, whose limits it gets. Raises UserError when
    there are no records that apply.
    """
    here = HardwareInfo.from_limits(device.kind, dict(device.limits))
    features, times, groups, keys = [], [], [], list[GroupKey]()
    for target in store.targets():
        limits = target.limits or (device.limits if target.kind == device.kind else ())
        hardware = HardwareInfo.from_limits(target.kind, dict(limits))
        if not limits or family_of(hardware) != family_of(here):
            continue
        reader = RecordedRows(store, hardware)
        for workload in store.workloads(target.key):
            reader.know(workload.key, workload.text)
            for regime in REGIMES:
                found = reader.part(
                    regime, target.key, workload=workload.key, count=ROWS, sketches=SKETCHES, libraries=True
                )
                if found is None:
                    continue
                ok = np.isfinite(found.log_time)
                features.append(with_machine(found.features[ok], hardware))
                times.append(found.log_time[ok])
                groups.append(found.groups[ok] + len(keys))
                keys += [(target.key, workload.key, regime, n) for n in range(int(found.groups.max(initial=-1)) + 1)]
    if not features:
        raise UserError(
            f"wanted records of tuned kernels on a {family_of(here)}, found none in {store.where} that apply to this version's "
            "schedules; run `relax-tune tune` first"
        )
    return PriorRows(np.concatenate(features), np.concatenate(times), np.concatenate(groups), tuple(keys))


def with_machine(features: FeatureArray, hardware: HardwareInfo) -> FeatureArray:
    """Append the machine's columns to features (..., F): its limits on a log scale, and its language."""
    own = np.asarray(list(_machine(hardware).values()), np.float32)
    return np.concatenate([features, np.broadcast_to(own, (*features.shape[:-1], len(own)))], axis=-1)


def _machine(hardware: HardwareInfo) -> Mapping[str, float]:
    facts = asdict(hardware)
    kind = facts.pop("language")
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
    """Return the names of a prior's columns, in order: those of sketches, then those of the machine."""
    return (*sketch_names(hardware), *(f"machine {name}" for name in _machine(hardware)))


@dataclass(frozen=True, eq=False)
class Prior:
    """A trained model.

    family: of machines; names: of the columns, in order; about: what it was trained on, for people
    """

    family: str
    names: tuple[str, ...]
    booster: Any
    about: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def train(rows: PriorRows, hardware: HardwareInfo, about: Mapping[str, Any] | None = None) -> Prior:
        """Train a prior for the family of a machine. Every group counts alike, whatever its number of rows."""
        import xgboost as xgb

        counts = np.bincount(rows.groups, minlength=len(rows.keys))
        weights = 1.0 / np.maximum(counts[rows.groups], 1)
        data = xgb.DMatrix(rows.features, label=rows.log_time, weight=weights / weights.mean(), nthread=1)
        parameters = {
            "objective": "reg:squarederror", "tree_method": "hist", "max_depth": DEPTH, "eta": ETA, "subsample": 0.7,
            "colsample_bytree": 0.7, "min_child_weight": 4, "nthread": 1, "seed": 0, "verbosity": 0,
        }  # fmt: skip
        return Prior(
            family_of(hardware), feature_names(hardware), xgb.train(parameters, data, TREES), dict(about or {})
        )

    def log_time(self, features: FeatureArray) -> FloatArray:
        """Return log(seconds / roofline) (N,) of rows (N, F)."""
        return np.asarray(self.booster.inplace_predict(np.ascontiguousarray(features)), np.float64)

    def save(self, path: Path) -> None:
        """Write the prior: a line of JSON, then the trees, compressed. Raises UserError where it cannot be written."""
        head = {"form": FORM, "family": self.family, "names": list(self.names), "about": dict(self.about)}
        trees = zlib.compress(bytes(self.booster.save_raw("ubj")), 9)
        try:
            write_whole(path, memoryview(json.dumps(head, sort_keys=True).encode() + b"\n" + trees))
        except OSError as error:
            raise UserError(f"{path}: the prior could not be written: {reason(error)}") from None

    def check_fit(self, hardware: HardwareInfo, where: str) -> None:
        """Raise UserError for a prior of other machines, or of other features than this version's."""
        if self.family != family_of(hardware):
            raise UserError(
                f"{where}: wanted a prior for a {family_of(hardware)}, found one for a {self.family:.20}; train one for it"
            )
        if self.names != feature_names(hardware):
            raise UserError(
                f"{where}: wanted a prior of this version's features, found one of others; run `relax-tune model train` again"
            )

    @staticmethod
    def read(path: Path) -> Prior:
        """Read a prior. Raises UserError for a file that is none of this version's."""
        import xgboost as xgb

        try:
            head, _, trees = path.read_bytes().partition(b"\n")
            fields = json.loads(head)
            form = fields["form"]
            booster = xgb.Booster()
            if form == FORM:
                booster.load_model(bytearray(zlib.decompress(trees)))
                return Prior(str(fields["family"]), tuple(map(str, fields["names"])), booster, dict(fields["about"]))
        except (OSError, ValueError, KeyError, TypeError, zlib.error, xgb.core.XGBoostError) as error:
            raise UserError(
                f"{path}: wanted a prior that `relax-tune model train` wrote, found none: {str(error).splitlines()[0]:.200}"
            ) from None
        raise UserError(f"{path}: wanted a prior of form {FORM}, found form {form!r:.20}; train one with this version")


@cache
def packaged_prior(family: str) -> Prior | None:
    """Return the prior for a family of machines that comes with the package; None if there is none, or no xgboost to read it."""
    path = PACKAGED / f"{family}.prior"
    return Prior.read(path) if path.is_file() and find_spec("xgboost") is not None else None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Quality of a prior on groups that it was not trained on, as means over groups.

    rank: correlation of ranks (Spearman); regret: by k, the time of the best of the first k over the best of all, less 1, as a
    geometric mean; worst: the largest regret of the first one
    """

    groups: int
    rank: float
    regret: Mapping[int, float]
    worst: float


def evaluate(
    rows: PriorRows, train: Callable[[PriorRows], Prior], apart: Callable[[GroupKey], str], folds: int = 5
) -> Ranking:
    """Judge priors trained without some groups on these. `apart(key)`: groups of one text are left out together."""
    names = sorted({apart(k) for k in rows.keys})
    parts = [frozenset(names[n::folds]) for n in range(min(folds, len(names)))]
    if len(parts) < 2:
        raise UserError(f"wanted records of at least two to leave one out, found {len(names)}; tune more")
    ranks, regrets = [], []
    for part in parts:
        out = [n for n, key in enumerate(rows.keys) if apart(key) in part]
        prior = train(rows.without(out))
        for rank, regret in _judged(rows, prior, out):
            ranks.append(rank)
            regrets.append(regret)
    if not ranks:
        raise UserError("wanted shapes with at least eight candidates on record, found none; tune more")
    mean = {k: float(np.expm1(np.mean([r[k] for r in regrets]))) for k in regrets[0]}
    return Ranking(len(ranks), float(np.mean(ranks)), mean, float(np.expm1(max(r[1] for r in regrets))))


def _judged(rows: PriorRows, prior: Prior, groups: Sequence[int]) -> Iterator[tuple[float, dict[int, float]]]:
    """Yield the correlation of ranks and the log regrets of each group with enough rows."""
    for number in groups:
        at = np.flatnonzero(rows.groups == number)
        if len(at) < 8:
            continue
        true, said = rows.log_time[at], prior.log_time(rows.features[at])
        order = np.argsort(said, kind="stable")
        places = [np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (true, said)]
        rank = float(np.corrcoef(places[0], places[1])[0, 1])
        yield rank, {k: float(true[order[:k]].min() - true.min()) for k in (1, 4, 16)}
