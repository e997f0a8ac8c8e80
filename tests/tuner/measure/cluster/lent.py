"""Workers with real devices for tests: on a busy machine, and beside those of other tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_tune.tuner.measure.cluster.address import TlsFiles, host_and_port
from relax_tune.tuner.measure.cluster.processes import ClusterProcess, start_worker
from relax_tune.tuner.measure.cluster.trust.loopback import loopback_folder


def lend(address: str, spec: str = "c", environment: Mapping[str, str] | None = None, **more: Any) -> ClusterProcess:
    """Start a worker whose reference times never count, and whose lock no other test sees."""
    own = {"TMPDIR": "{folder}", **(environment or {})}
    return start_worker(address, [spec], tolerance=1e6, environment=own, **more)


def loopback_files(address: str, role: str) -> TlsFiles:
    """The certificate of a role that a scheduler on loopback has made for this user."""
    folder = loopback_folder(host_and_port(address)[1])
    return TlsFiles(*(str(folder / name) for name in ("ca.pem", f"{role}.pem", f"{role}.key")))
