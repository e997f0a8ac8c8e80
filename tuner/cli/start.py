"""The `relax-tune` program: at any point of its run, an interruption gives one sentence and an exit code.

Tests: `tests/tuner/cli/test_cli_pipes.py`.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from typing import Any

from relax_tune.runtime.child_process import clean_environment
from relax_tune.tuner.measure.interrupts import STOPPING

# After a first Ctrl-C, further ones are ignored this long while the first one's clean-up runs.
GRACE_SECS = 5.0
SENTENCE = "interrupted; all measurements so far are stored; run the same command again to continue"


class Interruptions:
    """A handler that turns Ctrl-C, termination and a closed terminal into one KeyboardInterrupt."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._raised = -math.inf

    def install(self) -> None:
        """Install handlers of signals that are not ignored on purpose (by `nohup`, or by a shell's background jobs)."""
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        sys.unraisablehook = self._unraisable

    def _handle(self, number: int, frame: object) -> None:
        if self.number is not None and time.monotonic() - self._raised < GRACE_SECS:
            return
        self._raise(number)

    def _raise(self, number: int) -> None:
        self.number = self.number or number
        self._raised = time.monotonic()
        raise KeyboardInterrupt

    def _unraisable(self, lost: Any) -> None:
        """Raise an interruption again that Python drops because it came inside a destructor."""
        if self.number is None or not issubclass(lost.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(lost)
            return
        signal.signal(signal.SIGALRM, lambda *_: self._raise(self.number or signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    def end(self) -> None:
        """Ignore interruptions from now on, so that none disturbs the interpreter's own end."""
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def leave_current_folder() -> None:
    """Take the current folder out of this process's search paths: drivers and libraries start programs too, such as PoCL's linker."""
    clean = clean_environment()
    for name in os.environ.keys() - clean.keys():
        del os.environ[name]
    os.environ.update(clean, PYTHONSAFEPATH="1")


def main() -> None:
    """Run the command line. Exits with its code, or after an interruption with 128 + the signal: 130 for Ctrl-C."""
    interruptions = Interruptions()
    interruptions.install()
    code: int | str | None = 0
    try:
        leave_current_folder()
        from relax_tune.tuner.cli.app import main as command  # here, so that its imports can be interrupted too

        command()
    except SystemExit as wish:
        code = wish.code
    except BaseException as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if interruptions.number is not None:
            code = 1
        elif missing not in ("", "relax_tune"):
            print(f"error: expected the package {missing}, got none; pip install 'relax-tune[tune]'", file=sys.stderr)
            code = 2
        else:
            raise
    finally:
        interruptions.end()
    if interruptions.number is not None and code != 0:
        print(SENTENCE, file=sys.stderr)
        code = 128 + interruptions.number
    sys.exit(code)
