"""A throw-away PostgreSQL server; PostgreSQL refuses to run as root, so root steps down to the user postgres."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def _tool(name: str) -> str | None:
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(installed[-1]) if installed else shutil.which(name)


def missing() -> str | None:
    """What a server needs and is not here; None if nothing."""
    if _tool("initdb") is None or _tool("pg_ctl") is None:
        return "PostgreSQL's initdb and pg_ctl are not installed"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed"
    if os.getuid() == 0 and (
        shutil.which("setpriv") is None or subprocess.run(["id", "postgres"], capture_output=True).returncode
    ):
        return "PostgreSQL does not run as root, and there is no setpriv or no user postgres to step down to"
    return None


@contextmanager
def server(*settings: str) -> Iterator[str]:
    """Run a server; its URL up to the database name. settings: `name=value`"""
    as_user: Sequence[str] = ()
    if os.getuid() == 0:
        as_user = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
    folder = Path(tempfile.mkdtemp(prefix="relax-tune-pg-"))
    folder.chmod(0o777)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"

    def run(tool: str, *arguments: str) -> None:
        command = [*as_user, str(_tool(tool)), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{tool}: {done.stdout}{done.stderr}"

    try:
        run("initdb", "-D", str(data), "-A", "trust", "-U", "relax", "--no-sync", "--locale=C.UTF-8")
        named = ("listen_addresses=127.0.0.1", "fsync=off", *settings)
        options = f"-p {port} -k {folder} " + " ".join(f"-c {setting}" for setting in named)
        run("pg_ctl", "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://relax@127.0.0.1:{port}/"
        finally:
            run("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
