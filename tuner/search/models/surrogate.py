"""A Gaussian process over parameter space: a model of a search's own space from a few dozen measurements.

The boosted trees of `cost_model` carry knowledge between tasks, shapes and devices, but need hundreds of rows to become
accurate. This model interpolates: nearby points have similar times. The length scale of each axis is learnt (automatic
relevance determination), and far from measurements the predicted deviation is large. One kernel serves all shapes; each
shape has its own mean, amplitude and set of measured rows.

Tests: `tests/tuner/search/test_replay.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from relax_tune.tuner.search.space import BoolArray, FloatArray

MAX_ROWS = 320
"""Most rows of the (cubic) fit: the fastest half and an even spread of the rest."""
LENGTH_BOUNDS = (0.15, 10.0)
NOISE_BOUNDS = (1e-6, 0.3)
LENGTH_PRIOR = (0.3, 0.5)  # centre of log length, and strength of the prior
FEASIBILITY_NOISE = 0.05
FEASIBILITY_FLOOR = 0.02


@dataclass(frozen=True, eq=False)
class Posterior:
    """The belief of the process about R points.

    Attributes:
        mean, std: Log seconds (R, S).
        works: (R,) probability that the candidate does not fail.
    """

    mean: FloatArray
    std: FloatArray
    works: FloatArray

    def rows(self, chosen: npt.NDArray[np.intp]) -> Posterior:
        """Return the belief about the chosen of the points."""
        return Posterior(self.mean[chosen], self.std[chosen], self.works[chosen])


@dataclass(eq=False)
class _Group:
    """Shapes measured at the same rows: one factorisation serves them."""

    rows: FloatArray  # (M, A)
    shapes: list[int]
    mean: FloatArray  # (G,)
    scale: FloatArray  # (G,)
    values: FloatArray  # (M, G) standardised log times
    whitener: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))  # inverse Cholesky factor (M, M)
    weights: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    amplitude: FloatArray = field(default_factory=lambda: np.ones(0))


class Surrogate:
    """A Gaussian process, fitted once on observations. Deterministic: coordinate search on the marginal likelihood from
    a fixed start.
    """

    def __init__(self, points: FloatArray, log_time: FloatArray, failed: BoolArray) -> None:
        """Fit to `points: (N, A)` in the unit cube.

        log_time: (N, S) log seconds, NaN without a time
        failed: (N, S)
        """
        keep = _thin(log_time)
        self._points, self._shape_count = points, log_time.shape[1]
        self._groups = _grouped(points[keep], log_time[keep])
        self._lengths = np.ones(points.shape[1])
        # The start of the coordinate search: a standard deviation of 3 % of the spread of the times.
        self._noise = 1e-3
        self._learn()
        for group in self._groups:
            self._factorise(group)
        measured = np.isfinite(log_time) | failed
        self._measured = measured.any(axis=1)
        share: FloatArray = np.isfinite(log_time).sum(axis=1) / np.maximum(measured.sum(axis=1), 1)
        self._works = share[self._measured]
        self._works_weights: FloatArray | None = None
        if self._measured.any() and (self._works < 1).any():
            tried = points[self._measured]
            # Regression on the share of shapes with a time, not classification: it needs no iterations, and only its
            # order and its floor matter for the acquisition.
            gram = _matern(_distances(tried, tried, self._lengths)) + FEASIBILITY_NOISE * np.eye(len(tried))
            self._works_weights = np.asarray(np.linalg.solve(gram, self._works - self._works.mean()))

    @property
    def shapes(self) -> list[int]:
        """The shapes about which anything is known."""
        return sorted(s for g in self._groups for s in g.shapes)

    # -- learning ------------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Learn lengths and noise by coordinate search, wide steps first."""
        if not self._groups:
            return
        # A step changes one length, so only that axis' share of the squared distances is recomputed: O(M^2) per trial
        # instead of O(A M^2).
        axes = [np.square(g.rows[:, None, :] - g.rows[None, :, :]).transpose(2, 0, 1) for g in self._groups]
        squares = [np.tensordot(self._lengths**-2.0, a, axes=1) for a in axes]
        best = self._loss(squares, self._lengths, self._noise)
        for step in (2.5, 1.6, 1.6):
            for axis in range(len(self._lengths)):
                for factor in (1.0 / step, step):
                    lengths = self._lengths.copy()
                    lengths[axis] = np.clip(lengths[axis] * factor, *LENGTH_BOUNDS)
                    change = lengths[axis] ** -2.0 - self._lengths[axis] ** -2.0
                    tried = [s + change * a[axis] for s, a in zip(squares, axes)]
                    loss = self._loss(tried, lengths, self._noise)
                    if loss < best:
                        best, squares, self._lengths = loss, tried, lengths
            for factor in (1.0 / step**3, step**3):
                noise = float(np.clip(self._noise * factor, *NOISE_BOUNDS))
                loss = self._loss(squares, self._lengths, noise)
                if loss < best:
                    best, self._noise = loss, noise

    def _loss(self, squares: list[FloatArray], lengths: FloatArray, noise: float) -> float:
        """Return the negative log marginal likelihood, with maximised amplitudes, plus the prior on lengths."""
        centre, pull = LENGTH_PRIOR
        loss = pull * float(np.square(np.log(lengths) - centre).sum())
        for group, square in zip(self._groups, squares):
            gram = _matern(square)
            gram[np.diag_indices_from(gram)] = 1.0 + noise
            try:
                factor = np.linalg.cholesky(gram)
            except np.linalg.LinAlgError:
                return float("inf")
            # The amplitude has a closed-form optimum given lengths and noise, so it is not searched: 0.5 M
            # log(mean(white^2)) is the likelihood at it.
            white = np.linalg.solve(factor, group.values)
            count = len(group.rows)
            loss += float(0.5 * count * np.log(np.square(white).mean(axis=0) + 1e-12).sum())
            loss += len(group.shapes) * float(np.log(np.diag(factor)).sum())
        return loss

    def _factorise(self, group: _Group) -> None:
        gram = _matern(_distances(group.rows, group.rows, self._lengths))
        # A jitter keeps the matrix positive definite where two candidates have equal coordinates.
        gram[np.diag_indices_from(gram)] = 1.0 + max(self._noise, 1e-6)
        group.whitener = np.tril(np.linalg.inv(np.linalg.cholesky(gram)))
        white = group.whitener @ group.values
        group.weights = group.whitener.T @ white
        group.amplitude = np.sqrt(np.square(white).mean(axis=0)) + 1e-9

    # -- believing -----------------------------------------------------------------------------------------------------

    def posterior(self, points: FloatArray) -> Posterior:
        """Return beliefs about points (R, A), which are standard normal at shapes without times."""
        mean = np.zeros((len(points), self._shape_count))
        std = np.ones((len(points), self._shape_count))
        for group in self._groups:
            cross = _matern(_distances(points, group.rows, self._lengths))
            explained = np.square(cross @ group.whitener.T).sum(axis=1)
            # Rounding can make the explained variance exceed 1 at observed points.
            left = np.sqrt(np.maximum(1.0 - explained, 1e-10))
            mean[:, group.shapes] = cross @ group.weights * group.scale + group.mean
            std[:, group.shapes] = left[:, None] * (group.amplitude * group.scale)
        return Posterior(mean, std, self._chance(points))

    def _chance(self, points: FloatArray) -> FloatArray:
        if self._works_weights is None:
            return np.ones(len(points))
        cross = _matern(_distances(points, self._points[self._measured], self._lengths))
        return np.asarray(np.clip(self._works.mean() + cross @ self._works_weights, FEASIBILITY_FLOOR, 1.0))

    def correlations(self, points: FloatArray) -> dict[int, FloatArray]:
        """Return the posterior covariance (R, R) of the points for each known shape, in units of its amplitude squared.

        Shapes of one group share it.
        """
        prior = _matern(_distances(points, points, self._lengths))
        out: dict[int, FloatArray] = {}
        for group in self._groups:
            white = group.whitener @ _matern(_distances(group.rows, points, self._lengths))
            covariance = prior - white.T @ white
            # The same array for all shapes of a group; `choose_batch` updates it once per group by its identity.
            out.update(dict.fromkeys(group.shapes, covariance))
        return out

    @property
    def noise(self) -> float:
        """Variance of a measurement in units of the amplitude squared."""
        return max(self._noise, 1e-6)


def _thin(log_time: FloatArray) -> npt.NDArray[np.intp]:
    """Select the rows that the fit keeps, in order, at most MAX_ROWS."""
    works = np.flatnonzero(np.isfinite(log_time).any(axis=1))
    if len(works) <= MAX_ROWS:
        return works
    centred = log_time[works] - np.nanmin(log_time[works], axis=0)
    order = works[np.argsort(np.nanmean(centred, axis=1), kind="stable")]
    half = MAX_ROWS // 2
    rest = order[half:]
    spread = rest[np.linspace(0, len(rest) - 1, MAX_ROWS - half).round().astype(np.intp)]
    return np.sort(np.concatenate([order[:half], spread]))


def _grouped(points: FloatArray, log_time: FloatArray) -> list[_Group]:
    """Return the shapes with two or more times, grouped by the rows that have them."""
    masks: dict[bytes, list[int]] = {}
    for shape in range(log_time.shape[1]):
        known = np.isfinite(log_time[:, shape])
        # Standardising needs a spread, and one time has none.
        if known.sum() >= 2:
            masks.setdefault(known.tobytes(), []).append(shape)
    groups = []
    for mask, shapes in masks.items():
        rows = np.frombuffer(mask, dtype=np.bool_)
        values = log_time[rows][:, shapes]
        mean, scale = values.mean(axis=0), values.std(axis=0) + 1e-9
        groups.append(_Group(points[rows], shapes, mean, scale, (values - mean) / scale))
    return groups


def _distances(a: FloatArray, b: FloatArray, lengths: FloatArray) -> FloatArray:
    """Return the squared scaled distances (R, M)."""
    a, b = a / lengths, b / lengths
    return np.asarray(
        # Rounding can make the difference of nearly equal points negative.
        np.maximum(np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1)[None, :] - 2.0 * (a @ b.T), 0.0)
    )


def _matern(squares: FloatArray) -> FloatArray:
    """Evaluate the Matern kernel of squared distances, smoothness 3/2.

    Times have kinks (occupancy steps), so once differentiable is enough.
    """
    distance = np.sqrt(3.0 * np.maximum(squares, 0.0))
    return np.asarray((1.0 + distance) * np.exp(-distance))
