"""The service of submitted jobs with the file-system restrictions of its unit: it may write where the guide says, and nowhere else."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tuner.job.job_processes import small_model

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "systemd" / "relax-tune-jobs@.service").read_text()
GUIDE = (ROOT / "docs" / "guides" / "systemd.md").read_text()
NAMESPACE = ("unshare", "--mount", "--propagation", "private", "bash", "-ec")


def missing() -> str | None:
    """Why no file system can be restricted here."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare"
    done = subprocess.run([*NAMESPACE, "mount -o remount,bind,ro /"], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else None


def writable() -> list[str]:
    """The folders that the unit lets its service write."""
    (paths,) = re.findall(r"^ReadWritePaths=(.*)$", UNIT, re.M)
    state, cache = (re.findall(rf"^{name}Directory=(.*)$", UNIT, re.M) for name in ("State", "Cache"))
    return [
        *(f"/var/lib/{d}" for d in state),
        *(f"/var/cache/{d}" for d in cache),
        *(p.lstrip("-") for p in paths.split()),
    ]


def restricted(script: str) -> str:
    """A script in a mount namespace as `ProtectSystem=strict` makes it, with empty /var/lib, /var/cache and /srv."""
    lines = [f"mount -t tmpfs tmpfs {parent}" for parent in ("/var/lib", "/var/cache", "/srv")]
    lines += [f"mkdir -p {path}" for path in writable()]
    lines += [f"mount --bind {path} {path}" for path in writable()]
    lines += [f"mount -o remount,bind,ro {parent}" for parent in ("/var/lib", "/var/cache", "/srv", "/")]
    return "\n".join([*lines, script])


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=f"file systems cannot be restricted here: {missing()}")
def test_job_service_writes_only_to_paths_allowed_by_unit(tmp_path: Path) -> None:
    assert "ProtectSystem=strict" in UNIT
    (files,) = re.findall(r"RELAX_TUNE_FILES=(/\S+?),?$", GUIDE, re.M)
    (command,) = re.findall(r"^ExecStart=/opt/relax-tune/bin/relax-tune (.*)$", UNIT, re.M)
    variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", UNIT, re.M))
    variables |= {"RELAX_TUNE_FILES": files, "RELAX_TUNE_DB": "sqlite:////var/lib/relax-tune/records.db"}
    model = small_model(tmp_path)
    tool = shlex.join([sys.executable, "-m", "relax_tune"])
    submitted = f"{tool} jobs submit {model} --target c --bound n=1:8 --trials 1 --effort quick"
    script = restricted(
        f"""cd /
        {submitted}
        {tool} {command.replace("%i", "c")} --until-empty
        {tool} jobs list --json
        if touch /etc/relax-tune-written {ROOT}/written; then exit 9; fi"""
    )
    environment = {
        **os.environ,
        **variables,
        "HOME": "/var/lib/relax-tune",
        "TMPDIR": "/tmp",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run([*NAMESPACE, script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and '"done"' in done.stdout, done.stdout + done.stderr
    assert "Read-only file system" in done.stderr
