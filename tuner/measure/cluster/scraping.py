"""A port that Prometheus scrapes, served by prometheus-client (extra `dashboard`).

Tests: `tests/tuner/service/test_service_metrics.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from relax_tune.errors import UserError


def check_scraping(address: str) -> tuple[str, int]:
    """Return host and port of `PORT` or `HOST:PORT`; the default host is 127.0.0.1.

    Raises:
        UserError: The text is malformed, or prometheus-client is not installed.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UserError(f"--metrics expects PORT or HOST:PORT, such as 9108, got {address!r:.80}")
    if find_spec("prometheus_client") is None:
        raise UserError(
            "--metrics needs prometheus-client, which is not installed; pip install 'relax-tune[dashboard]', or leave it out"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


@contextlib.contextmanager
def served(registry: Any, address: str) -> Iterator[str]:
    """Serve a registry at `PORT` or `HOST:PORT` inside the context, which gives the URL.

    Raises:
        UserError: As `check_scraping`, and for an address that cannot be listened on.
    """
    host, port = check_scraping(address)
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UserError(
            f"--metrics {address}: the port cannot be opened: {error.strerror}; give another port"
        ) from None
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
