"""One-time tokens: each admits one page, once, before it expires.

Tests: `tests/tuner/measure/browser/test_runner.py`.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable

from relax_tune.tuner.measure.browser.protocol import Refusal

TOKEN_SECS = 600.0
"""How long an unused address is valid."""
_REMEMBERED = 1000

_ANOTHER = "open the address that the job prints now"


class Tokens:
    """The tokens of one server, stored as hashes only. Any thread may use them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._expiry: dict[bytes, float | None] = {}
        self._ended: dict[bytes, str] = {}

    def issue(self, secs: float | None = TOKEN_SECS) -> str:
        """Return a new token of 256 random bits.

        Args:
            secs: how long it is valid; None: until `expire` is called.
        """
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._expiry[_hash(token)] = None if secs is None else self._clock() + secs
        return token

    def expire(self, token: str, secs: float) -> None:
        """Limit the validity of an unused token to the next `secs` seconds, or to what an earlier call left."""
        key, until = _hash(token), self._clock() + secs
        with self._lock:
            if key in self._expiry:
                before = self._expiry[key]
                self._expiry[key] = until if before is None else min(before, until)

    def good(self, token: str) -> bool:
        """Return True if the token is valid now."""
        with self._lock:
            self._sweep()
            return _hash(token) in self._expiry

    def redeem(self, token: str) -> None:
        """Accept a valid token, which becomes invalid. Raises Refusal for any other text."""
        key = _hash(token)
        with self._lock:
            self._sweep()
            if key in self._expiry:
                del self._expiry[key]
                self._end(key, "used already")
                return
            why = self._ended.get(key, "unknown to this job")
        raise Refusal(f"expected the token of a new address, got one that is {why}; {_ANOTHER}")

    def _sweep(self) -> None:
        now = self._clock()
        for key in [key for key, until in self._expiry.items() if until is not None and until <= now]:
            del self._expiry[key]
            self._end(key, "expired")

    def _end(self, key: bytes, why: str) -> None:
        self._ended[key] = why
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]


def _hash(token: str) -> bytes:
    # Tokens are compared by their hashes, so the time of a look-up tells nothing about the valid ones.
    return hashlib.sha256(token.encode()).digest()
