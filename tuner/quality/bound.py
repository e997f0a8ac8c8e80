"""Bounds on the quality of results: `cosine>=0.999`, `rmse<=0.01 and top1>=0.99`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError

Array = NDArray[Any]
Outputs = Sequence[Sequence[Array]]
"""The results of the model, by sample and by position."""

_COMPARISON = re.compile(r"\s*([A-Za-z_]\w*)\s*(>=|<=|==|!=|>|<|=)\s*(\S+)\s*")
_AND = re.compile(r"\s+and\s+")
EXAMPLE = "cosine>=0.999"


@dataclass(frozen=True, slots=True)
class Metric:
    """A measure of how near results are to the exact ones.

    Attributes:
        best: Value for equal results: 1 if larger values are better, 0 if smaller ones are.
        of: Value for the exact and other results of all samples, in float64.
    """

    best: float
    of: Callable[[Outputs, Outputs], float]

    @property
    def operator(self) -> str:
        """The comparison of a value that is good enough with its limit."""
        return ">=" if self.best == 1 else "<="


def _pairs(exact: Outputs, results: Outputs) -> list[tuple[Array, Array]]:
    return [(a, b) for e, f in zip(exact, results, strict=True) for a, b in zip(e, f, strict=True) if a.size]


def _cosine(exact: Outputs, results: Outputs) -> float:
    def one(a: Array, b: Array) -> float:
        # Two results of zeros have no angle, but are equal.
        if np.array_equal(a, b):
            return 1.0
        norms = float(np.linalg.norm(a) * np.linalg.norm(b))
        return float(np.vdot(a, b)) / norms if norms else 0.0

    return min((one(a, b) for a, b in _pairs(exact, results)), default=1.0)


def _rmse(exact: Outputs, results: Outputs) -> float:
    return max((float(np.sqrt(np.mean((a - b) ** 2))) for a, b in _pairs(exact, results)), default=0.0)


def _max_abs(exact: Outputs, results: Outputs) -> float:
    return max((float(np.max(np.abs(a - b))) for a, b in _pairs(exact, results)), default=0.0)


def _top1(exact: Outputs, results: Outputs) -> float:
    pairs = _pairs(exact, results)
    narrow = next((a for a, _ in pairs if a.ndim == 0 or a.shape[-1] < 2), None)
    if narrow is not None:
        raise UserError(
            f"--quality top1 expects results with at least 2 scores along the last dim, got one of shape {narrow.shape}; "
            f"choose another metric, such as {EXAMPLE}"
        )
    same = [np.argmax(a, axis=-1) == np.argmax(b, axis=-1) for a, b in pairs]
    rows = sum(s.size for s in same)
    return sum(int(s.sum()) for s in same) / rows if rows else 1.0


METRICS: Mapping[str, Metric] = {
    "cosine": Metric(1, _cosine),
    "rmse": Metric(0, _rmse),
    "max_abs": Metric(0, _max_abs),
    "top1": Metric(1, _top1),
}
"""`cosine`: the least cosine similarity of a result of a sample; `rmse`: the largest root mean square of the differences of one;
`max_abs`: the largest difference; `top1`: share of rows with the largest score at the same index."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Measured values by metric.

    Attributes:
        used: Share of the allowed loss that is lost; for errors, the share of the squares.
    """

    values: Mapping[str, float]
    used: float
    holds: bool


@dataclass(frozen=True, slots=True)
class QualityBound:
    """A limit for each of some metrics, which all have to hold.

    Attributes:
        text: The expression, normalised.
    """

    text: str
    limits: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> QualityBound:
        """Parse comparisons joined by `and`.

        Raises:
            UserError: The text has another form.
        """
        limits: dict[str, float] = {}
        for part in _AND.split(text.strip()):
            name, limit = _comparison(part, text)
            if name in limits:
                raise UserError(f"--quality expects a metric once, got {name} twice in {text!r:.80}; leave one out")
            limits[name] = limit
        shown = " and ".join(f"{n}{METRICS[n].operator}{repr(limit).removesuffix('.0')}" for n, limit in limits.items())
        return cls(shown, limits)

    def judge(self, exact: Outputs, results: Outputs) -> Quality:
        """Measure results against the exact ones. Results that are not finite exceed every bound."""
        exact, results = _wide(exact), _wide(results)
        # The metrics of such results are NaN or infinite, and one such value makes them useless.
        if not all(np.isfinite(a).all() for outputs in results for a in outputs):
            return Quality(dict.fromkeys(self.limits, math.nan), math.inf, False)
        values = {name: METRICS[name].of(exact, results) for name in self.limits}
        used = max(self._used(name, value) for name, value in values.items())
        return Quality(values, used, all(self._holds(name, value) for name, value in values.items()))

    def _holds(self, name: str, value: float) -> bool:
        return value >= self.limits[name] if METRICS[name].best == 1 else value <= self.limits[name]

    def _used(self, name: str, value: float) -> float:
        best = METRICS[name].best
        lost, allowed = abs(best - value), abs(best - self.limits[name])
        share = lost / allowed if allowed else math.inf if lost else 0.0
        return share if best == 1 else share**2  # squares of independent errors add


def _wide(outputs: Outputs) -> Outputs:
    return [[a.astype(np.float64) for a in sample] for sample in outputs]


def _comparison(part: str, text: str) -> tuple[str, float]:
    """Return the metric and the limit of one comparison.

    Raises:
        UserError: The text has another form.
    """
    match = _COMPARISON.fullmatch(part)
    if match is None:
        raise UserError(
            f"--quality expects METRIC>=NUMBER or METRIC<=NUMBER, joined by `and`, such as {EXAMPLE}; got {part.strip()!r:.80}"
            + (f" in {text!r:.80}" if part != text else "")
        )
    name, operator, number = match.groups()
    metric = METRICS.get(name)
    if metric is None:
        near = difflib.get_close_matches(name, METRICS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--quality expects a metric among {', '.join(METRICS)}; got {name!r:.40}{hint}")
    if operator != metric.operator:
        better = "larger" if metric.best == 1 else "smaller"
        raise UserError(
            f"--quality expects {name}{metric.operator}NUMBER, since a {better} {name} is better; got {part.strip()!r:.80}"
        )
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if metric.best == 1 and not 0 < limit <= 1:
        raise UserError(f"--quality expects {name}>=NUMBER with a number above 0, at most 1; got {number!r:.40}")
    if not 0 <= limit < math.inf:
        raise UserError(f"--quality expects {name}<=NUMBER with a number of at least 0; got {number!r:.40}")
    return name, limit
