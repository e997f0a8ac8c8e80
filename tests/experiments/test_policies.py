"""The experiment on policies, on a small matrix made up for it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.dynamic.policies", "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_policy_scores_use_unseen_samples(tmp_path: Path) -> None:
    """One kernel is best below 100, one above; a third was lucky in the samples that choose, and is slow in those that score."""
    sizes = sorted({round(1.35**e) for e in range(28)})
    rng = np.random.default_rng(0)

    def row(secs: dict[int, float]) -> list[list[float]]:
        return [[secs[m] * rng.uniform(0.995, 1.005) for _ in range(8)] for m in sizes]

    lucky = [[3.0 * m if n % 2 == 0 else 2.9 * m for n in range(8)] for m in sizes]
    lucky[5] = [9.0 * sizes[5] if n % 2 == 0 else 0.1 for n in range(8)]
    found = {
        "environment": {"cpu": "of paper"},
        "libraries": [],
        "sizes": sizes,
        "tiles": {"small": 1, "large": 16, "lucky": 1},
        "samples": {
            "small": row({m: float(m) if m < 100 else 2.0 * m for m in sizes}),
            "large": row({m: 2.0 * m if m < 100 else float(m) for m in sizes}),
            "lucky": lucky,
        },
    }
    matrix = tmp_path / "policy_matrix_c.json.gz"
    matrix.write_bytes(gzip.compress(json.dumps(found).encode()))
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "policies.json").read_text())["c"]
    assert len(scores) == 8 and (tmp_path / "policies.md").read_text() in done.stdout + "\n"
    assert scores["oracle"]["timings"] == 3 * len(sizes)
    assert scores["oracle"]["p99"] > 1  # by the samples that score, luck is none
    assert scores["TensorRT-opt"]["timings"] == scores["one-timing adaption"]["timings"] == 3
    ours = scores["ours"]
    assert ours["timings"] < scores["oracle"]["timings"] and ours["mean"] < 0.05 < scores["TensorRT-opt"]["mean"]

    matrix.write_bytes(b"no matrix")
    refused = run(tmp_path)
    assert refused.returncode != 0 and "expected a matrix of times" in refused.stderr
