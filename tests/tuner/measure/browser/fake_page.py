"""A page without a browser: it speaks the protocol over a real WebSocket, and computes what the kernels of `measure_programs` say."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tornado.websocket
from numpy.typing import NDArray

LIMITS = {
    "maxComputeInvocationsPerWorkgroup": 256,
    "maxComputeWorkgroupStorageSize": 16384,
    "maxStorageBuffersPerShaderStage": 8,
    "maxComputeWorkgroupsPerDimension": 65535,
    "maxComputeWorkgroupSizeX": 256,
    "maxComputeWorkgroupSizeY": 256,
    "maxComputeWorkgroupSizeZ": 64,
    "maxStorageBufferBindingSize": 1 << 27,
}
AGENT = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36"
FACTS: dict[str, Any] = {
    "kind": "ready",
    "agent": AGENT,
    "adapter": {"vendor": "acme", "architecture": "road", "device": "", "description": "", "fallback": False},
    "limits": LIMITS,
    "timer": "timestamp-query",
}
HANG, CRASH, GONE = "hang", "crash", "gone"

Frame = str | bytes
Answering = Callable[[Mapping[str, Any], bytes, "FakePage"], Frame | None]


def frame(message: Mapping[str, Any], data: bytes = b"") -> Frame:
    text = json.dumps(message)
    return struct.pack("<I", len(text)) + text.encode() + data if data else text


def opened(text: Frame) -> tuple[dict[str, Any], bytes]:
    if isinstance(text, str):
        return json.loads(text), b""
    (length,) = struct.unpack_from("<I", text)
    return json.loads(text[4 : 4 + length]), text[4 + length :]


class FakePage:
    """A page in a thread of its own. `ended` becomes the sentence of the server that ended it, or the reason of the close.

    answering: gives another answer than the kernels' for an ask, None for the usual one
    """

    def __init__(
        self,
        address: str,
        facts: Mapping[str, Any] = FACTS,
        answering: Answering = lambda message, data, page: None,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parts = urlsplit(address)
        self.url = f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}/measure"
        self.token = parts.fragment if token is None else token
        self.facts, self._answering, self._headers = facts, answering, dict(headers or {})
        self.returning = ""
        self.asked: list[str] = []
        self.abandoned = 0
        self.welcome: Future[None] = Future()
        self.ended: Future[str] = Future()
        self._kernels: dict[int, tuple[str, str]] = {}
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._does: dict[str, Callable[[Mapping[str, Any], bytes], Frame | None]] = {
            "compile": self._compile,
            "alloc": self._alloc,
            "free": self._free,
            "fill": self._fill,
            "write": self._store,
            "again": self._again,
            "forget": lambda message, data: self._kept.pop(message["piece"]) and None,
            "copy": self._copy,
            "read": self._read,
            "run": self._launches,
        }
        self._kept: dict[int, bytes] = {}
        self._loop = asyncio.new_event_loop()
        self._socket: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self, code: int | None = 1000) -> None:
        """Close the tab, or cut the connection where there is no code."""

        def part() -> None:
            if code is None:
                self._socket.protocol._abort()
            else:
                self._socket.close(code)

        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(part)
            self._thread.join(20)

    def say(self, what: Frame) -> None:
        """Send anything."""
        self._loop.call_soon_threadsafe(lambda: self._write(what))

    def _write(self, what: Frame) -> None:
        self._socket.write_message(what, binary=isinstance(what, bytes))

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            for future in (self.welcome, self.ended):
                if not future.done():
                    future.set_exception(error)

    async def _serve(self) -> None:
        request = tornado.httpclient.HTTPRequest(self.url, headers=self._headers, validate_cert=False)
        self._socket = await tornado.websocket.websocket_connect(request, max_message_size=1 << 26)
        self._write(frame({"kind": "join", "protocol": 1, "token": self.token}))
        sentence = ""
        while (text := await self._socket.read_message()) is not None:
            message, data = opened(text)
            kind = message["kind"]
            if kind in ("refused", "over"):
                sentence = message["message"]
            elif kind == "welcome":
                self.returning = message["token"]
                self._write(frame(self.facts))
                self.welcome.set_result(None)
            elif kind == "abandon":
                self.abandoned += 1
                self._forget()
            else:
                self._answer(message, data)
        self.ended.set_result(sentence or self._socket.close_reason or "")

    def _forget(self) -> None:
        self._kernels.clear()
        self._memory.clear()
        self._write(frame(self.facts))

    def _answer(self, message: Mapping[str, Any], data: bytes) -> None:
        self.asked.append(message["kind"])
        answer = self._answering(message, data, self)
        if answer is not None:
            self._write(answer)
            return
        try:
            found = self._does[message["kind"]](message, data)
        except KeyError:  # an ask that the server sent before it abandoned the batch
            found = frame({"kind": "failed", "id": message["id"], "what": "run", "message": "no such memory"})
        if found == CRASH:
            self._write(frame({"kind": "lost", "message": "the driver fell over"}))
            self._forget()
        elif found == GONE:
            self._socket.protocol._abort()
        elif found != HANG:
            self._write(frame({"kind": "done", "id": message["id"]}) if found is None else found)

    def _compile(self, message: Mapping[str, Any], data: bytes) -> Frame | None:
        if "this is not a program" in message["source"]:
            return frame({"kind": "failed", "id": message["id"], "what": "compile", "message": "error: unknown words"})
        body = re.search(r"if \(i < n\) \{ (.*) \}", message["source"])
        self._kernels[message["kernel"]] = (message["name"], "" if body is None else body[1])
        return None

    def _alloc(self, message: Mapping[str, Any], data: bytes) -> None:
        self._memory[message["buffer"]] = np.zeros(message["bytes"] + 16, np.uint8)

    def _free(self, message: Mapping[str, Any], data: bytes) -> None:
        del self._memory[message["buffer"]]

    def _fill(self, message: Mapping[str, Any], data: bytes) -> None:
        self._memory[message["buffer"]][: message["bytes"]] = message["value"]

    def _store(self, message: Mapping[str, Any], data: bytes) -> None:
        self._memory[message["buffer"]][message["offset"] :][: len(data)] = np.frombuffer(data, np.uint8)

        if message["keep"]:
            self._kept[message["keep"]] = data

    def _again(self, message: Mapping[str, Any], data: bytes) -> None:
        self._store({**message, "keep": 0}, self._kept[message["piece"]])

    def _copy(self, message: Mapping[str, Any], data: bytes) -> None:
        n = message["bytes"]
        self._memory[message["target"]][:n] = self._memory[message["source"]][:n]

    def _read(self, message: Mapping[str, Any], data: bytes) -> Frame:
        found = self._memory[message["buffer"]][message["offset"] :][: message["bytes"]]
        return frame({"kind": "data", "id": message["id"]}, found.tobytes())

    def _launches(self, message: Mapping[str, Any], data: bytes) -> Frame | str | None:
        for launch in message["launches"]:
            name, body = self._kernels[launch["kernel"]]
            if name in ("relax_tune_flush", "relax_tune_reference"):
                continue
            outcome = self._launch(body, launch)
            if outcome is not None:
                return outcome
        if not message["timed"]:
            return None
        return frame({"kind": "times", "id": message["id"], "secs": [2e-6 * message["repeats"]]})

    def _launch(self, body: str, launch: Mapping[str, Any]) -> str | None:
        x, w, t, y = (self._memory[number].view(np.float32) for number in launch["buffers"])
        (n,) = launch["scalars"]
        if "while" in body:
            return HANG
        if "SPACE" in body:
            return CRASH
        if "closes" in body:
            return GONE
        weights = w[np.arange(n) % 4]
        if "t[i] = x[0]" in body:
            t[:n] = x[0]
        if "t[i] = w[i % 4]" in body:
            t[:n] = weights
            y[:n] = x[:n] * t[:n] + x[0]
        elif "- t[i]" in body:
            y[:n] = x[:n] * weights - t[:n]
        elif "y[i] =" in body:
            y[:n] = x[:n] * weights + t[:n]
        if "y[n] = 1.0" in body:
            y[n] = 1.0
        return None
