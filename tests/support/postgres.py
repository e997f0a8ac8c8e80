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


def tool(name: str) -> str | None:
    """The path of one of PostgreSQL's programs, or None."""
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(installed[-1]) if installed else shutil.which(name)


def missing() -> str | None:
    """What a server needs and is not here; None if nothing."""
    if tool("initdb") is None or tool("pg_ctl") is None:
        return "PostgreSQL's initdb and pg_ctl are not installed"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed"
    if os.getuid() == 0 and (
        shutil.which("setpriv") is None or subprocess.run(["id", "postgres"], capture_output=True).returncode
    ):
        return "PostgreSQL does not run as root, and there is no setpriv or no user postgres to step down to"
    return None


def user_prefix() -> Sequence[str]:
    """The start of a command that runs as the server's user."""
    return ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups") if os.getuid() == 0 else ()


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that the server's user may read and write. pytest closes its own folders to other users."""
    with tempfile.TemporaryDirectory(prefix="relax-tune-pg-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o777)
        yield Path(name)


@contextmanager
def server(*settings: str, superuser: str = "relax") -> Iterator[str]:
    """Run a server; its URL up to the database name. settings: `name=value`"""
    as_user = user_prefix()
    folder = Path(tempfile.mkdtemp(prefix="relax-tune-pg-"))
    folder.chmod(0o777)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"

    def run(program: str, *arguments: str) -> None:
        command = [*as_user, str(tool(program)), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        log = (folder / "log").read_text() if (folder / "log").exists() else ""
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}{log}"

    try:
        run("initdb", "-D", str(data), "-A", "trust", "-U", superuser, "--no-sync", "--locale=C.UTF-8")
        named = ("listen_addresses=127.0.0.1", "fsync=off", *settings)
        options = f"-p {port} -k {folder} " + " ".join(f"-c {setting}" for setting in named)
        run("pg_ctl", "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://{superuser}@127.0.0.1:{port}/"
        finally:
            run("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
