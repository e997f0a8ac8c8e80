"""Spaces defined by formulas, unlike the recorded ones in structure: a check that a search is not fitted to a few GPU kernels.

* `labels`: only unordered choices, whose effects depend on one another; there is no direction to walk in.
* `narrow`: tile sizes under so many constraints that fewer than one point in a hundred of the box is legal.
* `basins`: eight parameters of twelve values, too many points to list, several basins of different depth.
* `noisy`: times with 15 % of noise; a fifth of the points fails, in a region that no constraint describes.

Every answer is a function of the configuration alone. Where the optimum cannot be computed it is the best of the whole space.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from relax_tune.tuner.search.base import Failure, Outcome
from relax_tune.tuner.search.named import Configuration, SearchSpace
from relax_tune.tuner.search.replay import RecordedSpace
from relax_tune.tuner.search.space import Candidate

Formula = Callable[[Configuration], Outcome]


@dataclass(frozen=True, eq=False)
class Computed(Mapping[Candidate, Outcome]):
    """Answers that are computed on demand."""

    space: SearchSpace
    formula: Formula

    def __getitem__(self, candidate: Candidate) -> Outcome:
        if not self.space.space.contains(candidate):
            raise KeyError(candidate)
        return self.formula(self.space.configuration(candidate))

    def __iter__(self) -> Iterator[Candidate]:
        listed = self.space.space.listed()
        return iter(() if listed is None else self.space.space.candidates(listed))

    def __len__(self) -> int:
        listed = self.space.space.listed()
        return 0 if listed is None else len(listed)


def _chance(*parts: object) -> float:
    """A number in 0..1 that is a function of its arguments."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64


def _listed(name: str, space: SearchSpace, formula: Formula) -> RecordedSpace:
    computed = Computed(space, formula)
    outcomes = dict(computed)
    return RecordedSpace(name, space, outcomes, min(o for o in outcomes.values() if isinstance(o, float)))


def labels() -> RecordedSpace:
    """Seven choices of two to six labels; a cost of each and of some pairs, drawn once."""
    sizes = {"layout": 4, "algorithm": 6, "cache": 3, "order": 6, "loads": 4, "swizzle": 3, "unroll": 2}
    space = SearchSpace(
        {name: [f"{name}{i}" for i in range(size)] for name, size in sizes.items()},
        ["not (cache == 'cache0' and loads == 'loads3')", "algorithm != 'algorithm5' or order in ['order0', 'order2']"],
    )
    pairs = [("layout", "algorithm"), ("algorithm", "order"), ("cache", "loads"), ("layout", "swizzle")]

    def formula(c: Configuration) -> Outcome:
        alone = sum(0.35 * _chance("one", n, c[n]) for n in sizes)
        together = sum(0.45 * _chance("two", a, b, c[a], c[b]) for a, b in pairs)
        return 1e-3 * float(np.exp(alone + together))

    return _listed("labels", space, formula)


def narrow() -> RecordedSpace:
    """A tiled kernel: shared memory, threads, divisibility; occupancy in steps, and a penalty for uneven work."""
    powers = [1, 2, 4, 8, 16, 32, 64, 128]
    space = SearchSpace(
        {"bm": powers, "bn": powers, "bk": [4, 8, 16, 32, 64], "tm": [1, 2, 4, 8, 16], "tn": [1, 2, 4, 8, 16],
         "stages": [1, 2, 3, 4], "vector": [1, 2, 4]},
        ["bm % tm == 0 and bn % tn == 0", "64 <= (bm // tm) * (bn // tn) <= 512", "bk % vector == 0 and tn % vector == 0",
         "4 * stages * bk * (bm + bn) <= 48 * 1024", "(bm * bk) % ((bm // tm) * (bn // tn) * vector) == 0",
         "tm * tn <= 96", "(bm // tm) * (bn // tn) % 32 == 0"],
    )  # fmt: skip

    def formula(c: Configuration) -> Outcome:
        bm, bn, bk, tm, tn, stages, vector = (int(c[n]) for n in ("bm", "bn", "bk", "tm", "tn", "stages", "vector"))
        threads = (bm // tm) * (bn // tn)
        resident = min(16, 64 * 1024 // (4 * stages * bk * (bm + bn) + 1024), 2048 // threads)
        registers = tm * tn + 2 * (tm + tn) * vector + 24
        resident = min(resident, 65536 // (registers * threads))
        if resident == 0:
            return Failure("launch", "too many resources")
        hiding = 1 - np.exp(-resident * threads * min(stages, 3) * min(tm * tn, 32) / 9000)
        intensity = tm * tn / (tm + tn) / (1 + tm * tn / (tm + tn))
        traffic = bm * bn / (bm + bn) / (24 + bm * bn / (bm + bn))
        spread = -(-1500 // bm) * bm * -(-1100 // bn) * bn / (1500 * 1100)
        return float(1e-3 * spread * (1 + 0.25 / vector) * (1 + 2.0 / bk) / (hiding * intensity * traffic))

    return _listed("narrow", space, formula)


def basins() -> RecordedSpace:
    """Five basins, two of them nearly as deep as the deepest, around legal points; the sum must be even."""
    space = SearchSpace(
        {f"p{i}": list(range(12)) for i in range(8)}, ["(" + "+".join(f"p{i}" for i in range(8)) + ") % 2 == 0"]
    )
    rng = np.random.default_rng(11)
    centres = rng.integers(0, 12, (5, 8))
    centres[:, 0] ^= centres.sum(axis=1) % 2
    depths = np.array([1.0, 1.06, 1.12, 1.4, 1.7])
    widths = np.array([0.006, 0.006, 0.01, 0.004, 0.003])

    def formula(c: Configuration) -> Outcome:
        away = np.square(np.array([int(c[f"p{i}"]) for i in range(8)]) - centres).sum(axis=1)
        return float(1e-3 * (depths * np.exp(widths * away)).min())

    return RecordedSpace("basins", space, Computed(space, formula), 1e-3)


def noisy() -> RecordedSpace:
    """A smooth time over five sizes and a flag, with noise that no model can learn, and failures."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16]
    space = SearchSpace(
        {**{n: sizes for n in ("x", "y", "z", "w")}, "unroll": [0, 2, 4, 8], "staged": [False, True]}, ["x * y <= 128"]
    )

    def formula(c: Configuration) -> Outcome:
        x, y, z, w, u = (float(np.log2(max(int(c[n]), 1))) for n in ("x", "y", "z", "w", "unroll"))
        if x + z + w > 8.2 and not c["staged"]:
            return Failure("runtime", "out of memory")
        smooth = 0.05 * (x - 3.1) ** 2 + 0.09 * (y - 1.8) ** 2 + 0.04 * (z + w - 4) ** 2 + 0.06 * (w - u) ** 2
        smooth += 0.1 * bool(c["staged"]) * (x > 2)
        noise = (
            0.15
            * np.sqrt(-2 * np.log(_chance("a", tuple(c.values())) + 1e-12))
            * np.cos(6.283 * _chance("b", tuple(c.values())))
        )
        return float(1e-3 * np.exp(smooth + noise))

    return _listed("noisy", space, formula)


SPACES: Mapping[str, Callable[[], RecordedSpace]] = {
    "labels": labels,
    "narrow": narrow,
    "basins": basins,
    "noisy": noisy,
}
