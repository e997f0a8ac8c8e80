"""The errors of relax-tune: each says what was expected, what it got, where, and what to do."""

from __future__ import annotations

import errno
import logging
import sqlite3
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

from relax_tune.printable import printable

_LOG = logging.getLogger("relax_tune")
_TRANSPARENT = ("relax_tune", "contextlib")
"""Packages whose calls a warning is not attributed to."""


class RelaxTuneError(Exception):
    """Base of every error a user of relax-tune can meet. Its text is one self-contained paragraph."""


class TryAgainLater(RelaxTuneError):
    """A server, cluster or device that is away or busy: the same command may succeed later (`is_temporary`)."""


_TEMPORARY = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE),  # a resource is used up
        *(errno.EAGAIN, errno.EBUSY, errno.ETXTBSY),  # somebody else uses it
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT),  # a server is away
        *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ESTALE),
    )
)
_PERMANENT = frozenset(
    (
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),  # a person has to change rights or hardware
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
        *(errno.EFBIG, errno.ENXIO, errno.ENODEV),
    )
)
_SQLITE = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS, sqlite3.SQLITE_PERM: errno.EACCES}
_SQL_STATES = {"53100": errno.ENOSPC, "53200": errno.ENOMEM, "42501": errno.EACCES, "25006": errno.EROFS}


def is_temporary(error: BaseException) -> bool:
    """Return True if the same command may succeed later without a change of its input or settings.

    The failed system call that caused the error decides, where there is one: a full disk or a lost connection is temporary, missing
    rights or a read-only file system are not. Otherwise a `TryAgainLater` is temporary.
    """
    number = _system_error(error)
    return number in _TEMPORARY or (isinstance(error, TryAgainLater) and number not in _PERMANENT)


def _system_error(error: BaseException) -> int | None:
    """Return the number of the failed system call at the root of an error; None if there is none."""
    cause: BaseException | None = error
    for _ in range(8):  # bounded: a chain of causes may be a cycle
        if cause is None:
            return None
        if isinstance(cause, OSError) and cause.errno is not None and type(cause).__module__ != "ssl":
            return cause.errno  # not of TLS errors, whose numbers are OpenSSL's
        if isinstance(cause, sqlite3.Error) and (code := getattr(cause, "sqlite_errorcode", 0) & 0xFF) in _SQLITE:
            return _SQLITE[code]
        if (state := getattr(cause, "sqlstate", None)) in _SQL_STATES:
            return _SQL_STATES[state]
        cause = getattr(cause, "orig", None) or cause.__cause__ or cause.__context__
    return None


def system_reason(error: BaseException) -> str:
    """Return the reason of a failed system call without its number and path; the text of any other error."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class ParseError(RelaxTuneError):
    """Text (a program, a model file, a setting) that cannot be read."""


class VerifyError(RelaxTuneError):
    """A program that breaks a rule of the IR."""


class DeduceError(RelaxTuneError):
    """Shapes, dtypes or arity that cannot fit together (paper section 3.3 on deduction)."""


class ScheduleError(RelaxTuneError):
    """A schedule primitive that would change meaning, or does not apply."""


class BuildError(RelaxTuneError):
    """Source that a compiler refuses, or a module that cannot be lowered."""


class MeasureError(RelaxTuneError):
    """A runner or device that cannot measure at all (a failing candidate is a value instead)."""


class MemoryLack(MeasureError):
    """A device or host without enough free memory for a request. The device itself is well."""


class FleetUnavailable(MeasureError, TryAgainLater):
    """A scheduler, or every worker for a target, does not answer or is not connected."""


class DatabaseError(RelaxTuneError):
    """A store that cannot be opened, read or written."""


class ArtifactError(RelaxTuneError):
    """A built artifact that is truncated, altered, foreign, or asked for what it cannot do."""


class UserError(RelaxTuneError):
    """Input, settings or arguments a user can correct."""


class ModelStateError(UserError, RuntimeError):
    """A call of a model that was closed, or one from inside a call of the same model."""


class RelaxTuneWarning(UserWarning):
    """A result that is usable but lacks something: untuned kernels, a busy machine, a missing library. Base of all warnings of relax-tune."""


class UnexpectedErrorWarning(RelaxTuneWarning):
    """A fault of relax-tune in one candidate, rule or check, which is left out while everything else goes on."""


def warn(text: str, category: type[RelaxTuneWarning] = RelaxTuneWarning) -> None:
    """Warn at the line of the program that called relax-tune, and write the text to the logger `relax_tune` if logs are read.

    Python shows a repeated warning once. A program without handlers of logs sees the warning only.
    """
    text = printable(text)
    if _LOG.hasHandlers():
        _LOG.warning("%s", text)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _TRANSPARENT:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


@contextmanager
def left_out(part: str, function: str, *expected: type[Exception]) -> Iterator[None]:
    """Suppress an error of `part`, and warn of it unless its class is `expected`.

    Args:
        part: The part that may raise it, such as `rule windows`.
        function: Name of the tensor function.
        expected: Classes of errors to suppress without a warning.

    Raises:
        UnexpectedErrorWarning: Warnings are errors, as in the tests.
    """
    try:
        yield
    except expected:
        return
    except UnexpectedErrorWarning:
        raise
    except Exception as error:  # the boundary of one part of many: any error of it is limited to that part
        warn_unexpected(part, function, error)


def warn_unexpected(part: str, function: str, error: Exception) -> None:
    """Warn of an error that costs `part` of a function's kernels."""
    frames = extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    warn(
        f"{part} failed for function {function!r} and is left out: {type(error).__name__}{where}: {error}. This is a fault of "
        "relax-tune, and the rest goes on without it. Report it with the function, which `relax-tune show` prints",
        UnexpectedErrorWarning,
    )
