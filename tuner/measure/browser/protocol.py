"""The protocol of a measuring page: frames over a WebSocket, their limits, and the validation of a page's messages.

A frame is JSON text, or binary: the length of the JSON as 4 little-endian bytes, the JSON, then the bytes of an array.

The page begins with `join` (a token). The server answers `welcome` (a token for reconnecting) or `refused`. The page opens its device
and sends `ready` (adapter, limits, timer). Then the server sends one numbered request at a time: `compile`, `alloc`, `free`, `fill`,
`write`, `again`, `forget`, `copy`, `read`, `run`. The page answers `done`, `data`, `times` or `failed`. At `abandon` the page destroys
its device, opens another and sends `ready` again. `over` ends the job. A page sends `lost` when its device was lost, and `unable` when
it has none.

Pages are not trusted: they can only answer requests with data. A message that violates the protocol closes the connection.

Tests: `tests/tuner/measure/browser/test_runner.py`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_tune.printable import printable
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.quirks import with_quirks
from relax_tune.runtime.device.webgpu.device import LIMITS

PROTOCOL = 1
CHUNK = 1 << 20
"""Most bytes of an array in one frame."""
MOST_JSON = 64 << 10
MOST_FRAME = 4 + MOST_JSON + CHUNK
"""Largest frame of a page, in bytes."""
MOST_MESSAGE = 8000
"""Most characters of a page's message that are used."""
TIMERS = ("timestamp-query", "clock")
_LENGTH = struct.Struct("<I")
_TEXT, _LONG_TEXT = 200, 600
_MOST_LIMIT = 1 << 62
_SOFTWARE = re.compile(r"swiftshader|llvmpipe|lavapipe|software|basic render", re.IGNORECASE)
_BROWSERS = (
    ("Firefox", re.compile(r"Firefox/(\d+)")),
    ("Edge", re.compile(r"Edg(?:A|iOS)?/(\d+)")),
    ("Chrome", re.compile(r"(?:Headless)?(?:Chrome|Chromium|CriOS)/(\d+)")),
    ("Safari", re.compile(r"Version/(\d+)[\d.]* (?:Mobile/\S+ )?Safari")),
)

# names of our limits to names of `GPUSupportedLimits`
PAGE_LIMITS = {name: re.sub(r"-(\w)", lambda m: m[1].upper(), key) for name, key in LIMITS.items()}
_ADAPTER = ("vendor", "architecture", "device", "description")


class Refusal(Exception):
    """The reason why a page is disconnected, as one sentence that is sent to it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A page's answer to one request.

    Attributes:
        kind: `done`, `data`, `times` or `failed`.
        data: bytes of `data`.
        secs: seconds of `times`.
        what: kind of the failure: `compile`, `memory` or `device`.
        message: reason of a failure.
    """

    kind: str
    data: bytes = b""
    secs: tuple[float, ...] = ()
    what: str = ""
    message: str = ""


def write_message(message: Mapping[str, Any], data: bytes | memoryview | None = None) -> str | bytes:
    """Return the frame of a message, binary if it carries an array."""
    text = json.dumps(message, separators=(",", ":"))
    if data is None:
        return text
    head = text.encode()
    return b"".join((_LENGTH.pack(len(head)), head, data))


def read_message(frame: str | bytes) -> tuple[dict[str, Any], bytes]:
    """Return a page's message and the bytes of its array. Raises Refusal for a malformed frame."""
    data = b""
    if isinstance(frame, bytes):
        length = _LENGTH.unpack_from(frame)[0] if len(frame) >= _LENGTH.size else -1
        if not 0 <= length <= min(MOST_JSON, len(frame) - _LENGTH.size):
            raise _violation("a length before the JSON of a binary frame", length)
        head, data = frame[_LENGTH.size : _LENGTH.size + length], frame[_LENGTH.size + length :]
    else:
        head = frame.encode("utf-8", "replace")
        if len(head) > MOST_JSON:
            raise _violation(f"at most {MOST_JSON} bytes of JSON", f"{len(head)} bytes")
    if len(data) > CHUNK:
        raise _violation(f"at most {CHUNK} bytes of an array", f"{len(data)} bytes")
    try:
        message = json.loads(head)
    except (ValueError, RecursionError):
        # Deeply nested lists exhaust the stack of the parser.
        raise _violation("JSON", head[:40]) from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise _violation("an object with a kind", message)
    return message, data


def read_join(message: Mapping[str, Any]) -> str:
    """Return the token of `join`. Raises Refusal for another message, and for a page of another version."""
    if message["kind"] != "join":
        raise _violation("join as the first message", message["kind"])
    if message.get("protocol") != PROTOCOL:
        raise Refusal(
            f"expected a page of protocol {PROTOCOL}, got {str(message.get('protocol'))[:20]!r}; load the page again"
        )
    return _text(message, "token", _TEXT)


def read_ready(message: Mapping[str, Any]) -> DeviceInfo:
    """Return the device that a page describes, named by its adapter and its browser. Raises Refusal for a malformed description."""
    adapter, numbers = message.get("adapter"), message.get("limits")
    if not isinstance(adapter, dict) or not isinstance(numbers, dict) or len(numbers) > 100:
        raise _violation("an adapter and its limits", adapter)
    timer = _text(message, "timer", _TEXT)
    if timer not in TIMERS:
        raise _violation(f"a timer {' or '.join(TIMERS)}", timer)
    limits = {name: _whole(numbers, key, _MOST_LIMIT, least=1) for name, key in PAGE_LIMITS.items()}
    limits |= {"vector_bits": 128, "max_vector_lanes": 4, "registers": 255, "doubles": 0, "serial_launches": 0}
    limits |= {"l1_bytes": 0, "l2_bytes": 0, "l3_bytes": 0}
    about = {name: _text(adapter, name, _TEXT, empty=True) for name in _ADAPTER}
    label = (
        about["description"] or " ".join(filter(None, (about["vendor"], about["architecture"]))) or "unnamed adapter"
    )
    software = adapter.get("fallback") is True or _SOFTWARE.search(" ".join(about.values())) is not None
    agent = _text(message, "agent", _LONG_TEXT)
    fingerprint = {
        **about,
        "adapter": "CPU" if software else "GPU",
        "agent": agent,
        "kind": "webgpu",
        "platform": "browser",
        "timer": timer,
    }
    all_limits = tuple(sorted(with_quirks("webgpu", fingerprint, limits).items()))
    return DeviceInfo(
        "webgpu", f"{label} in {_browser(agent)}", tuple(sorted(fingerprint.items())), all_limits, libraries=()
    )


def read_answer(message: Mapping[str, Any], data: bytes, number: int, expected: str, size: int) -> Answer:
    """Return the answer to a request.

    Args:
        number: id of the request.
        expected: kind of the answer, unless it is `failed`.
        size: bytes of `data`, number of samples of `times`.

    Raises:
        Refusal: the message is not this answer.
    """
    # JSON's `true` equals the number 1.
    if message.get("id") != number or isinstance(message.get("id"), bool):
        raise _violation(f"the answer to {number}", message.get("id"))
    kind = message["kind"]
    if kind == "failed":
        what = _text(message, "what", _TEXT)
        return Answer("failed", what=what, message=printable(_text(message, "message", MOST_JSON))[:MOST_MESSAGE])
    if kind != expected:
        raise _violation(f"{expected} or failed", kind)
    if kind == "data" and len(data) != size:
        raise _violation(f"{size} bytes", f"{len(data)} bytes")
    if kind != "times":
        return Answer(kind, data)
    secs = message.get("secs")
    if not isinstance(secs, list) or len(secs) != size or not all(map(_is_seconds, secs)):
        raise _violation(f"{size} numbers of seconds", secs)
    return Answer(kind, secs=tuple(float(value) for value in secs))


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message `lost` or `unable`."""
    return printable(_text(message, "message", MOST_JSON))[:MOST_MESSAGE]


def _is_seconds(value: Any) -> bool:
    # Not by isinstance, for which JSON's `true` is an int.
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _text(message: Mapping[str, Any], name: str, most: int, empty: bool = False) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > most or not (value or empty):
        raise _violation(f"text of at most {most} characters as {name}", value)
    return value if most == MOST_JSON else printable(value.encode("utf-8", "replace").decode())


def _whole(message: Mapping[str, Any], name: str, most: int, least: int = 0) -> int:
    value = message.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < least:
        raise _violation(f"an integer of at least {least} as {name}", value)
    return min(value, most)


def _browser(agent: str) -> str:
    for name, pattern in _BROWSERS:
        match = pattern.search(agent)
        if match is not None:
            return f"{name} {match[1]}"
    return "a browser"


def _violation(expected: str, value: object) -> Refusal:
    return Refusal(f"expected {expected} from the page, got {printable(str(value)[:80])!r}; open the job's new address")
