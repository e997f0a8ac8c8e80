"""Write into a prior which rows it was trained on. `PACKAGED` was trained before priors recorded this themselves.

    python -m experiments.search.prior_coverage --work FOLDER --peer-python PYTHON [--prior FILE]

Its records no longer exist. Element types and instructions are those of the functions that the eight models of `predicted.py` are
lowered to, from which the records came. The vector width is that of a machine that its trees agree with: a split on `register_use`,
registers over those of the machine, is a whole number of them, and a split on `lane_use` is a fraction of whole vectors. A prior that
`predicted.py --prior` or `model train` writes needs none of this.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import xgboost as xgb

from experiments.search import predicted
from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.learn.prior import FORM, PACKAGED, Coverage, Prior
from relax_tune.tuner.processors import PROCESSORS
from relax_tune.tuner.settings import Settings

MODELS = ("minilm", "prefill", "decode", "cnn", "unet", "speech", "experts", "recommender")
LONGEST = 64
"""Elements of the longest vectorised loop."""


def splits(booster: xgb.Booster, column: int) -> set[float]:
    """Return the values that trees split a column at."""

    def of(node: Mapping[str, Any]) -> Iterator[float]:
        if node.get("split") in (f"f{column}", column):
            yield float(node["split_condition"])
        for child in node.get("children", ()):
            yield from of(child)

    return {x for tree in booster.get_dump(dump_format="json") for x in of(json.loads(tree))}


def lanes_of(booster: xgb.Booster, names: Sequence[str]) -> int:
    """Return the f32 elements of vectors of the one x86-64 processor that all rows are of. Raises SystemExit without one."""
    if any(splits(booster, n) for n, name in enumerate(names) if name.startswith("machine ")):
        raise SystemExit("Expected rows of one machine, got trees that split machines")
    used = {math.exp2(x) - 1 for x in splits(booster, names.index("register_use"))}
    parts = {Fraction(x).limit_denominator(256) for x in splits(booster, names.index("lane_use"))}
    if not all(math.isclose(16 * x, round(16 * x), abs_tol=1e-3) for x in used):
        return 16  # AVX-512 alone has 32 registers
    for lanes in (4, 8):
        if parts <= {Fraction(n, -(-n // lanes) * lanes) for n in range(1, LONGEST + 1)}:
            return lanes
    raise SystemExit(f"Expected parts of whole vectors, got {sorted(map(str, parts))}")


def of_models(work: Path, python: str, lanes: int) -> Coverage:
    """Return the coverage of the functions of the models and their sketches, on a processor without instructions for dot products."""
    limits = dict(PROCESSORS["x86-64-v3"][1]) | {"vector_bits": 32 * lanes, "max_vector_lanes": lanes}
    device = DeviceInfo("c", "described", (("kind", "c"),), tuple(sorted(limits.items())), libraries=())
    found = []
    for model in MODELS:
        job = device_job(predicted.prepared(model, work, python), device, MemoryStore(), Settings(target="c"))
        own = [
            Coverage.of(c.task.func, (s.func for s in c.sketch_set.sketches), job.hardware)
            for c in job.task_variants.values()
        ]
        found.append(reduce(or_, own))
        predicted.say(f"{model}: {len(own)} functions, {json.dumps(found[-1].to_json())}")
    return reduce(or_, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--prior", type=Path, default=PACKAGED / "processor.prior")
    args = parser.parse_args()
    prior = Prior.read(args.prior)
    lanes = lanes_of(prior.trees.booster(len(prior.names)), prior.names)
    args.work.mkdir(parents=True, exist_ok=True)
    covers = of_models(args.work, args.peer_python, lanes)
    about = {**prior.about, "models": list(MODELS), "coverage": "derived by experiments/search/prior_coverage.py"}
    replace(prior, covers=replace(covers, lanes=lanes), about=about).save(args.prior)
    predicted.say(f"{args.prior}: form {FORM}, {json.dumps(covers.to_json())}")
    if Prior.read(args.prior).covers != covers:
        raise UserError(f"{args.prior}: Expected what was written")


if __name__ == "__main__":
    main()
