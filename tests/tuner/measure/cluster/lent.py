"""Workers with real devices for tests: on a busy machine, and beside those of other tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_tune.tuner.measure.cluster.processes import ClusterProcess, start_worker


def lend(address: str, spec: str = "c", environment: Mapping[str, str] | None = None, **more: Any) -> ClusterProcess:
    """Start a worker whose reference times never count, and whose lock no other test sees."""
    own = {"TMPDIR": "{folder}", **(environment or {})}
    return start_worker(address, [spec], tolerance=1e6, environment=own, **more)
