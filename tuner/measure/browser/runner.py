"""The runner on a page in a browser. When the page leaves, it continues on the next page that joins."""

from __future__ import annotations

import importlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_tune.errors import FleetUnavailable, UserError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.browser.address import parse_place, server_tls
from relax_tune.tuner.measure.browser.page import Page
from relax_tune.tuner.measure.browser.process import PageProcess
from relax_tune.tuner.measure.browser.tokens import TOKEN_SECS
from relax_tune.tuner.measure.process_transport import ProcessTransport
from relax_tune.tuner.measure.supervised import SupervisedRunner

_POLL_SECS = 0.1
# Timeout for a page to open its device.
_OPEN_SECS = 45.0


class BrowserRunner(SupervisedRunner):
    """A `Runner` on the WebGPU device of a page that the user opens.

    One tab is one worker. The first page determines the device; later pages must have the same adapter and browser. When a page is
    closed, hidden or disconnected, no request fails: the batch continues on the next page.

    Args:
        address: HOST:PORT to listen on, with TLS beyond loopback.
        certificate, key: see `address.server_tls`.
        wait_secs: how long to wait for a page, at the start and after a page has left.
        notice: receives the address to open, and sentences about pages that join and leave.

    Raises:
        UserError: the address cannot be used.
        FleetUnavailable: no page joined in time.
    """

    def __init__(
        self,
        address: str,
        *,
        certificate: str | None = None,
        key: str | None = None,
        wait_secs: float = 60.0,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        server = _server_module()
        place = parse_place(address)
        context, self._digest = server_tls(place, certificate, key)
        self._wait_secs, self._notice = wait_secs, notice
        self._known: DeviceInfo | None = None
        self._token = ""
        self._missed: Page | None = None
        self._announced: Page | None = None
        self._event = threading.Event()
        self._server = server.PageServer(place, context, self._event.set)
        worker = f"{socket.gethostname()}/browser"
        super().__init__(
            ProcessTransport("browser", worker, self._start, notice, lock=False, unit="browser", retries_single=True)
        )

    @property
    def url(self) -> str:
        """The address of the server, without a token."""
        return str(self._server.url)

    def close(self) -> None:
        """Close the runner and the server; see `Runner.close`."""
        super().close()
        page = self._server.page
        if page is not None and page.gone is None:
            page.end("The job has ended. This page can be closed.")
        self._server.close()

    def _start(self, _: Path, check_cancelled: Callable[[], None]) -> PageProcess:
        """Wait for a page with the device of the first page."""
        give_up = time.monotonic() + self._wait_secs
        opening: tuple[Page, float] | None = None
        while True:
            check_cancelled()
            self._event.clear()
            page = self._server.page
            if page is None or page.gone is not None:
                opening = None
                self._invite(page)
                if time.monotonic() > give_up:
                    raise FleetUnavailable(
                        f"expected a page opened at {self.url} within {self._wait_secs:g} s, got none; run the command again and open "
                        "the address that it prints, or give a longer --wait-secs"
                    )
            elif (info := page.ready) is not None:
                if self._known in (None, info):
                    self._known = info
                    self._server.tokens.expire(self._token, 0)
                    if page is not self._announced:
                        self._announced = page
                        self._notice(f"measuring on {info.name}")
                    return PageProcess(page, info)
                page.end(
                    "This job measures only on the device and browser that joined first; this one is different, or another "
                    "version. Open the new address in the first one."
                )
            else:
                if opening is None or opening[0] is not page:
                    opening = page, time.monotonic()
                    if page is self._announced:
                        self._notice(
                            "the page's device was closed after a kernel that failed or did not terminate; the page opens another"
                        )
                if time.monotonic() - opening[1] > _OPEN_SECS:
                    page.end(
                        "The browser did not provide a device in time. Close the browser, and open the job's new address."
                    )
                give_up = time.monotonic() + self._wait_secs
            self._event.wait(_POLL_SECS)

    def _invite(self, before: Page | None) -> None:
        """Print a new address when the last one has expired, and for every page that has left."""
        if self._missed is before and self._token and self._server.tokens.good(self._token):
            return
        self._server.tokens.expire(self._token, 0)
        self._missed, self._token = before, self._server.tokens.issue()
        why = "" if before is None else f"the page {before.gone}; the job waits for it, or for a new one: "
        trust = "" if not self._digest else f" The browser warns of its certificate, whose SHA-256 is {self._digest}."
        self._notice(
            f"{why}open {self.url}/#{self._token} in a browser (good once, for {TOKEN_SECS / 60:g} minutes).{trust}"
        )


def _server_module() -> Any:
    try:
        return importlib.import_module("relax_tune.tuner.measure.browser.server")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "tornado":
            raise
        raise UserError(
            "--browser needs the package tornado, which is not installed; pip install 'relax-tune[browser]'"
        ) from None
