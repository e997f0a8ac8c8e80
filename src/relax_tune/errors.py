"""The one family of errors: each says what was wanted, what was found, where, and what to do."""

from __future__ import annotations


class RelaxTuneError(Exception):
    """Base of every error a user of relax-tune can meet. Its text is one self-contained paragraph."""


class TryAgainLater(RelaxTuneError):
    """A server, cluster or device that is away or busy: the same command may succeed later."""


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


class FleetAway(MeasureError, TryAgainLater):
    """A scheduler or its workers are away."""


class DatabaseError(RelaxTuneError):
    """A store that cannot be opened, read or written."""


class ArtifactError(RelaxTuneError):
    """A built artifact that is truncated, altered, foreign, or asked for what it cannot do."""


class UserError(RelaxTuneError):
    """Input, settings or arguments a user can correct."""


class ModelStateError(UserError, RuntimeError):
    """A call of a model that was closed, or one from inside a call of the same model."""
