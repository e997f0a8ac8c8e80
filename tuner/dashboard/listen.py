"""Listening for HTTP with uvicorn, for all servers of this package.

Tests: `tests/tuner/dashboard/test_listen.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from relax_tune.errors import UserError
from relax_tune.tuner.dashboard.guard import App

if TYPE_CHECKING:
    import uvicorn

EXTRA = "serving pages needs {}, which is not installed; pip install 'relax-tune[dashboard]'"


def serve(
    app: App,
    host: str,
    port: int,
    started: Callable[[str], None],
    make: Callable[[uvicorn.Config], uvicorn.Server] | None = None,
    **options: Any,
) -> None:
    """Serve until interrupted.

    Args:
        app: The application.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        started: Receives the URL once the port is open.
        make: Returns the server of a configuration; None: uvicorn's.
        options: Further options of `uvicorn.Config`.

    Raises:
        UserError: uvicorn is not installed, or the address cannot be used.
    """
    try:
        import uvicorn
    except ImportError:
        raise UserError(EXTRA.format("uvicorn")) from None
    # No log of requests, since it would contain tokens; no Server header, since it would tell the version to attackers.
    quiet = {"access_log": False, "log_config": None, "server_header": False, "lifespan": "off"}
    config = uvicorn.Config(app, host=host, port=port, **{**quiet, **options})
    try:
        opened = config.bind_socket()
    except SystemExit:
        raise UserError(f"--host {host} --port {port}: the address cannot be used; give another") from None
    # asyncio sets this on connections of sockets that name their protocol, which uvicorn's does not. Without it, the body of an answer
    # waits for the client's delayed acknowledgement of the head, 40 ms on Linux.
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.listen()  # before the address is printed, so that clients can connect at once
    name, bound = opened.getsockname()[:2]
    started(f"http://{f'[{name}]' if ':' in name else name}:{bound}/")
    try:
        (make or uvicorn.Server)(config).run(sockets=[opened])
    except KeyboardInterrupt:
        return
    finally:
        opened.close()
