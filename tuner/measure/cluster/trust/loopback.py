"""Generated certificates for a scheduler on loopback and the workers and jobs of the same user, by the scheduler's port.

They are in a folder that only this user can read, below `$XDG_STATE_HOME` or `~/.local/state`. Another user of the machine has no such
certificate and is rejected in the handshake. The authority outlives the scheduler, so that workers and jobs accept the next scheduler
at this port.

Tests: `tests/tuner/cli/test_certificates.py`.
"""

from __future__ import annotations

import os
import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import platformdirs

from relax_tune.errors import FleetUnavailable, MeasureError, system_reason
from relax_tune.tuner.measure.cluster.address import TlsFiles, check_address, host_and_port
from relax_tune.tuner.measure.cluster.trust.authority import (
    AUTHORITY_DAYS,
    CA,
    CA_KEY,
    DAYS,
    FLEET_ROLES,
    ISSUED,
    Role,
    issue,
    make_authority,
)
from relax_tune.tuner.measure.cluster.trust.expiry import end_of

_LEAST_DAYS = 30
"""When a scheduler starts, an authority that expires sooner is replaced."""
_POLL_SECS = 0.1


def loopback_folder(port: int) -> Path:
    """Return the folder of the certificates of this user's scheduler at a port.

    Raises:
        MeasureError: XDG_STATE_HOME is a relative path.
    """
    folder = Path(platformdirs.user_state_dir("relax-tune"))
    if not folder.is_absolute():
        raise MeasureError(
            f"expected an absolute path in XDG_STATE_HOME, got one that leads to {str(folder)!r} in the current folder; "
            "a relative path would make this process trust the certificates of that folder"
        )
    return folder / "loopback" / str(port)


def make_loopback(port: int) -> TlsFiles:
    """Generate the certificates of a scheduler on loopback, its workers and its jobs. Returns the files of the scheduler.

    Raises:
        MeasureError: the folder cannot be restricted to this user.
    """
    folder = loopback_folder(port)
    _check_private(folder)
    ends = end_of(folder / CA)
    if ends is None or ends < datetime.now(UTC) + timedelta(days=_LEAST_DAYS):
        for name in (CA, CA_KEY, ISSUED):
            (folder / name).unlink(missing_ok=True)
        make_authority(folder, AUTHORITY_DAYS)
    for role in FLEET_ROLES:
        issue(folder, role, role, renew=True)
    return _files(folder, "scheduler")


def place_of(address: str, tls: TlsFiles | None, role: Role, within_secs: float) -> tuple[str, TlsFiles]:
    """Return the address to connect to, and the certificate: the given one, or on loopback the generated one of this user.

    Raises:
        MeasureError: the address requires certificates.
        FleetUnavailable: no scheduler of this user has started within `within_secs`.
    """
    check_address(address, tls)
    if tls is not None:
        return address, tls
    port = host_and_port(address)[1]
    give_up = time.monotonic() + within_secs
    files = _files(loopback_folder(port), role)
    while not all(os.access(path, os.R_OK) for path in (files.ca, files.certificate, files.key)):
        if time.monotonic() > give_up:
            raise FleetUnavailable(
                f"expected a Dask scheduler at {address} within {within_secs:g} s, got none that this user has started; start one "
                "(`relax-tune scheduler`), or give --ca, --certificate and --key of another user's"
            )
        time.sleep(_POLL_SECS)
    ends = end_of(Path(files.certificate))
    # The scheduler renews only its own certificate.
    if ends is None or ends < datetime.now(UTC) + timedelta(days=DAYS / 2):
        issue(loopback_folder(port), role, role, renew=True)
    return address.replace("tcp:", "tls:", 1), files


def _files(folder: Path, role: Role) -> TlsFiles:
    return TlsFiles(str(folder / CA), str(folder / f"{role}.pem"), str(folder / f"{role}.key"))


def _check_private(folder: Path) -> None:
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for place in (folder.parent, folder):
            status = place.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise MeasureError(
                    f"{place}: expected a folder of this user, got a link or the folder of another user; remove it, or set XDG_STATE_HOME"
                )
            if status.st_mode & 0o077:
                place.chmod(0o700)
    except OSError as error:
        raise MeasureError(
            f"{folder}: the folder for the certificates of a scheduler cannot be created: {system_reason(error)}; set XDG_STATE_HOME"
        ) from None
