"""The protocol of a measuring page: frames over a WebSocket, their limits, and the checks of what a page says.

A frame is JSON text, or binary: a little-endian length of 4 bytes, so much JSON, then the bytes of an array.

The page begins with `join` (a token) and is answered `welcome` (the token to come back with) or `refused`. It opens its device and says
`ready` (adapter, limits, timer). Then the server asks one thing at a time, by number: `compile`, `alloc`, `free`, `fill`, `write`, `again`,
`forget`, `copy`, `read`, `run`. The page answers `done`, `data`, `times` or `failed`. At `abandon` the page destroys its device, opens
another and says `ready` again. `over` ends the job. `lost` and `unable` tell that the page's device was lost, or that there is none.

A page is a stranger: all it can do is to answer numbers. Whatever breaks these rules cuts it off.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.quirks import with_quirks
from relax_tune.runtime.device.webgpu.device import LIMITS
from relax_tune.tuner.printable import printable

PROTOCOL = 1
CHUNK = 1 << 20
"""Bytes of an array in one frame."""
MOST_JSON = 64 << 10
MOST_FRAME = 4 + MOST_JSON + CHUNK
"""Bytes of a frame of a page."""
MOST_MESSAGE = 8000
"""Characters of a page's words that are kept."""
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

# name of a limit: WebGPU's in a page
PAGE_LIMITS = {name: re.sub(r"-(\w)", lambda m: m[1].upper(), key) for name, key in LIMITS.items()}
_ADAPTER = ("vendor", "architecture", "device", "description")


class Refusal(Exception):
    """Why a page is cut off, as one sentence that it is told."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A page's answer to one ask. kind: `done`, `data`, `times` or `failed`; message: why it failed; secs: of `times`"""

    kind: str
    data: bytes = b""
    secs: tuple[float, ...] = ()
    what: str = ""
    message: str = ""


def write_message(message: Mapping[str, Any], data: bytes | memoryview | None = None) -> str | bytes:
    """Return the frame of a message, binary where it carries an array."""
    text = json.dumps(message, separators=(",", ":"))
    if data is None:
        return text
    head = text.encode()
    return b"".join((_LENGTH.pack(len(head)), head, data))


def read_message(frame: str | bytes) -> tuple[dict[str, Any], bytes]:
    """Return a page's message and its bytes. Raises Refusal for a frame that is none."""
    data = b""
    if isinstance(frame, bytes):
        length = _LENGTH.unpack_from(frame)[0] if len(frame) >= _LENGTH.size else -1
        if not 0 <= length <= min(MOST_JSON, len(frame) - _LENGTH.size):
            raise _foreign("a length before the JSON of a binary frame", length)
        head, data = frame[_LENGTH.size : _LENGTH.size + length], frame[_LENGTH.size + length :]
    else:
        head = frame.encode("utf-8", "replace")
        if len(head) > MOST_JSON:
            raise _foreign(f"at most {MOST_JSON} bytes of JSON", f"{len(head)} bytes")
    if len(data) > CHUNK:
        raise _foreign(f"at most {CHUNK} bytes of an array", f"{len(data)} bytes")
    try:
        message = json.loads(head)
    except (ValueError, RecursionError):
        raise _foreign("JSON", head[:40]) from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise _foreign("an object with a kind", message)
    return message, data


def read_join(message: Mapping[str, Any]) -> str:
    """Return the token of the first message. Raises Refusal for another message, and for a page of another version."""
    if message["kind"] != "join":
        raise _foreign("join as the first message", message["kind"])
    if message.get("protocol") != PROTOCOL:
        raise Refusal(
            f"wanted a page of protocol {PROTOCOL}, found {str(message.get('protocol'))[:20]!r}; load the page again"
        )
    return _text(message, "token", _TEXT)


def read_ready(message: Mapping[str, Any]) -> DeviceInfo:
    """Return the device that a page describes, named by its adapter and its browser. Raises Refusal for a malformed description."""
    adapter, told = message.get("adapter"), message.get("limits")
    if not isinstance(adapter, dict) or not isinstance(told, dict) or len(told) > 100:
        raise _foreign("an adapter and its limits", adapter)
    timer = _text(message, "timer", _TEXT)
    if timer not in TIMERS:
        raise _foreign(f"a timer {' or '.join(TIMERS)}", timer)
    limits = {name: _whole(told, key, _MOST_LIMIT, least=1) for name, key in PAGE_LIMITS.items()}
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
    numbers = tuple(sorted(with_quirks("webgpu", fingerprint, limits).items()))
    return DeviceInfo(
        "webgpu", f"{label} in {_browser(agent)}", tuple(sorted(fingerprint.items())), numbers, libraries=()
    )


def read_answer(message: Mapping[str, Any], data: bytes, number: int, wanted: str, size: int) -> Answer:
    """Return the answer to the ask of this number. Raises Refusal for any other message.

    wanted: its kind unless it `failed`; size: of `data` the bytes, of `times` the number of samples
    """
    if message.get("id") != number or isinstance(message.get("id"), bool):
        raise _foreign(f"the answer to {number}", message.get("id"))
    kind = message["kind"]
    if kind == "failed":
        what = _text(message, "what", _TEXT)
        return Answer("failed", what=what, message=printable(_text(message, "message", MOST_JSON))[:MOST_MESSAGE])
    if kind != wanted:
        raise _foreign(f"{wanted} or failed", kind)
    if kind == "data" and len(data) != size:
        raise _foreign(f"{size} bytes", f"{len(data)} bytes")
    if kind != "times":
        return Answer(kind, data)
    secs = message.get("secs")
    if not isinstance(secs, list) or len(secs) != size or not all(map(_is_seconds, secs)):
        raise _foreign(f"{size} numbers of seconds", secs)
    return Answer(kind, secs=tuple(float(value) for value in secs))


def words_of(message: Mapping[str, Any]) -> str:
    """Return the words of a message `lost` or `unable`."""
    return printable(_text(message, "message", MOST_JSON))[:MOST_MESSAGE]


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _text(message: Mapping[str, Any], name: str, most: int, empty: bool = False) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > most or not (value or empty):
        raise _foreign(f"text of at most {most} characters as {name}", value)
    return value if most == MOST_JSON else printable(value.encode("utf-8", "replace").decode())


def _whole(message: Mapping[str, Any], name: str, most: int, least: int = 0) -> int:
    value = message.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < least:
        raise _foreign(f"a whole number of at least {least} as {name}", value)
    return min(value, most)


def _browser(agent: str) -> str:
    for name, pattern in _BROWSERS:
        found = pattern.search(agent)
        if found is not None:
            return f"{name} {found[1]}"
    return "a browser"


def _foreign(wanted: str, found: object) -> Refusal:
    return Refusal(f"wanted {wanted} from the page, found {printable(str(found)[:80])!r}; open the job's new address")
