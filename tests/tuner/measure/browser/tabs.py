"""Runners whose addresses are opened as soon as they are printed, by pages without a browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.tuner.measure.browser.fake_page import FakePage

from relax_tune.tuner.measure.browser.runner import BrowserRunner

ADDRESS = re.compile(r"open (https?://\S+#\S+) in a browser")
OPEN_SECS = 30.0


class Tabs:
    """What a runner printed, and the pages that were opened for it. opening: opens one; None: nobody does"""

    def __init__(self, opening: Callable[[str], FakePage] | None = FakePage) -> None:
        self.notices: list[str] = []
        self.addresses: list[str] = []
        self.pages: list[FakePage] = []
        self.opening = opening

    def notice(self, text: str) -> None:
        self.notices.append(text)
        found = ADDRESS.search(text)
        if found is not None:
            self.addresses.append(found[1])
            if self.opening is not None:
                self.pages.append(self.opening(found[1]))


@contextmanager
def runner_of(tabs: Tabs, address: str = "127.0.0.1:0", **more: Any) -> Iterator[BrowserRunner]:
    with BrowserRunner(address, notice=tabs.notice, **{"wait_secs": OPEN_SECS, **more}) as runner:
        yield runner
