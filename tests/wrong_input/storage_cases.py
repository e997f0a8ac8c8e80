"""Running commands that must refuse, as a stranger runs them, and databases to refuse."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.database.records_made import failure, filled, timing
from typer.testing import CliRunner, Result

from relax_tune.database.store import open_store
from relax_tune.tuner.cli.app import app

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2
RUNNER = CliRunner()


def inside(folder: Path, *arguments: str) -> Result:
    """`relax-tune` in this process, in another folder."""
    with contextlib.chdir(folder):
        return RUNNER.invoke(app, list(arguments))


def paragraph_of(code: int, stderr: str) -> str:
    """The one paragraph of a command that refused: exit code 2 or 4, no traceback, nothing else on stderr but notes."""
    lines = [line for line in stderr.splitlines() if line and not line.startswith("note: ")]
    assert code in (2, 4), f"exit code {code}: {stderr}"
    assert "Traceback" not in stderr and len(lines) == 1 and lines[0].startswith("error: "), stderr
    assert 40 < len(lines[0]) < 900, lines[0]
    return lines[0]


def refused(folder: Path, *arguments: str) -> str:
    """What a command that must refuse says."""
    done = inside(folder, *arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return paragraph_of(done.exit_code, done.stderr)


def _bound_by_modes() -> None:
    """Between fork and exec: root gives up the capabilities that let it pass by the modes of files."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "root cannot drop its capabilities here")


def commands(
    folder: Path, *lines: Sequence[object], unprivileged: bool = False, before: str = "", **variables: str
) -> list[tuple[int, str, str]]:
    """Several `relax-tune` command lines in one process of their own, `before` being Python to run first: exit code, stdout
    and stderr of each. `unprivileged`: the modes of files bind it, whoever runs the tests."""
    code = (
        "import json, sys\n"
        f"{before}\n"
        "from typer.testing import CliRunner\n"
        "from relax_tune.tuner.cli.app import app\n"
        "def ended(line):\n"
        "    done = CliRunner().invoke(app, line)\n"
        "    if done.exception is not None and not isinstance(done.exception, SystemExit): raise done.exception\n"
        "    return done.exit_code, done.stdout, done.stderr\n"
        f"print(json.dumps([ended(line) for line in {[[str(part) for part in line] for line in lines]!r}]))\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RELAX_TUNE_") and k != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=kept | {"OMP_NUM_THREADS": "1", "HOME": str(folder)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=_bound_by_modes if unprivileged and os.getuid() == 0 else None,
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout.splitlines()[-1])]


def made_database(path: Path, count: int = 60) -> Path:
    """A database with two targets and a few records."""
    with open_store(str(path)) as store:
        filled(store).add_measurements([timing(f"m{i}", 1e-3 * (i + 1), tile=i % 9 + 1, n=i % 5) for i in range(count)])
        store.add_measurements([failure(f"f{i}", "compile", tile=i + 100) for i in range(count // 4)])
    return path


def files(folder: Path) -> dict[str, bytes]:
    """Every regular file below a folder and what is in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
