"""Certificates of a scheduler on loopback, which workers and jobs of the same user find by its port.

They lie in a folder that this user alone can read, below `$XDG_STATE_HOME` or `~/.local/state`. Another user of the machine finds none,
and is refused in the handshake. The authority outlives the scheduler, so that workers and jobs know the next one at this port.
"""

from __future__ import annotations

import os
import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import platformdirs

from relax_tune.errors import FleetAway, MeasureError, system_reason
from relax_tune.tuner.measure.cluster.address import TlsFiles, check_address, host_and_port
from relax_tune.tuner.measure.cluster.trust.authority import (
    AUTHORITY_DAYS,
    CA,
    CA_KEY,
    DAYS,
    ISSUED,
    ROLES,
    Role,
    issue,
    make_authority,
)
from relax_tune.tuner.measure.cluster.trust.expiry import end_of

_LEAST_DAYS = 30
"""An authority that ends sooner is made anew when a scheduler starts."""
_POLL_SECS = 0.1


def loopback_folder(port: int) -> Path:
    """Return the folder of the certificates of this user's scheduler at a port."""
    return Path(platformdirs.user_state_dir("relax-tune")) / "loopback" / str(port)


def make_loopback(port: int) -> TlsFiles:
    """Make what a scheduler on loopback needs, and give its workers and jobs theirs. Returns the scheduler's.

    Raises MeasureError where the folder cannot be this user's alone."""
    folder = loopback_folder(port)
    _check_private(folder)
    ends = end_of(folder / CA)
    if ends is None or ends < datetime.now(UTC) + timedelta(days=_LEAST_DAYS):
        for name in (CA, CA_KEY, ISSUED):
            (folder / name).unlink(missing_ok=True)
        make_authority(folder, AUTHORITY_DAYS)
    for role in ROLES:
        issue(folder, role, role, renew=True)
    return _files(folder, "scheduler")


def place_of(address: str, tls: TlsFiles | None, role: Role, within_secs: float) -> tuple[str, TlsFiles]:
    """Return where to connect, and with which certificate: the given one, or on loopback this user's own.

    Raises MeasureError for an address that wants certificates; FleetAway where no scheduler of this user has come within `within_secs`."""
    check_address(address, tls)
    if tls is not None:
        return address, tls
    port = host_and_port(address)[1]
    give_up = time.monotonic() + within_secs
    found = _files(loopback_folder(port), role)
    while not all(os.access(path, os.R_OK) for path in (found.ca, found.certificate, found.key)):
        if time.monotonic() > give_up:
            raise FleetAway(
                f"wanted a Dask scheduler at {address} within {within_secs:g} s, found none that this user has started; start one "
                "(`relax-tune scheduler`), or give --ca, --certificate and --key of another user's"
            )
        time.sleep(_POLL_SECS)
    ends = end_of(Path(found.certificate))
    if ends is None or ends < datetime.now(UTC) + timedelta(days=DAYS / 2):  # the scheduler renews its own alone
        issue(loopback_folder(port), role, role, renew=True)
    return address.replace("tcp:", "tls:", 1), found


def _files(folder: Path, role: Role) -> TlsFiles:
    return TlsFiles(str(folder / CA), str(folder / f"{role}.pem"), str(folder / f"{role}.key"))


def _check_private(folder: Path) -> None:
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for place in (folder.parent, folder):
            found = place.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise MeasureError(
                    f"{place}: wanted a folder of this user, found another's or a link; remove it, or set XDG_STATE_HOME"
                )
            if found.st_mode & 0o077:
                place.chmod(0o700)
    except OSError as error:
        raise MeasureError(
            f"{folder}: wanted a folder for the certificates of a scheduler, found: {system_reason(error)}; set XDG_STATE_HOME"
        ) from None
