"""Recipes of `deploy`: manifests fit Kubernetes' schema and each other, units and scripts parse, commands in all of these exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from relax_tune.tuner.cli.app import load_command
from relax_tune.tuner.option import variable_of
from relax_tune.tuner.settings import OPTIONS

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra cluster)")


def manifests() -> list[dict[str, Any]]:
    files = [f for f in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if f.name != "kustomization.yaml"]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def containers() -> Iterator[dict[str, Any]]:
    for manifest in manifests():
        if "template" in manifest.get("spec", ()):
            pod = manifest["spec"]["template"]["spec"]
            yield from (*pod.get("initContainers", ()), *pod["containers"])


def check_command(words: list[str]) -> None:
    """Parse the words of a `relax-tune` command as the command line would."""
    command, rest = load_command(words[0]), words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(" ".join(words), list(rest), resilient_parsing=False)


def test_manifests_fit_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed (extra dev)")
    found = manifests()
    assert [m["kind"] for m in found].count("Deployment") == 3 and len(found) == 9
    for manifest in found:
        validate.validate(manifest, "1.29", strict=True)
    broken = manifests()[0]
    broken["spec"]["ports"][0]["port"] = "none"
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.29", strict=True)


def test_manifests_refer_to_each_other() -> None:
    found = manifests()
    names = {m["metadata"]["name"] for m in found if m["kind"] == "Service"}
    for manifest in found:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Service":
            chosen = [
                m for m in found if "template" in m.get("spec", ()) and spec["selector"].items() <= labels(m).items()
            ]
            assert len(chosen) == 1, manifest["metadata"]["name"]
        elif "selector" in spec:
            assert spec["selector"]["matchLabels"].items() <= labels(manifest).items()
    text = "".join(f.read_text() for f in (DEPLOY / "kubernetes").glob("*.yaml"))
    assert set(re.findall(r"(?:tls|postgresql)://(?:\w+@)?([\w-]+)", text)) <= names
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(
        f.name for f in (DEPLOY / "kubernetes").glob("*.yaml") if f.name != "kustomization.yaml"
    )


def labels(manifest: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
    return found


def test_commands_and_variables_of_manifests_exist() -> None:
    variables, commands = {variable_of(name) for name in OPTIONS}, 0
    for container in containers():
        names = {entry["name"] for entry in container["env"]}
        assert {n for n in names if n.startswith("RELAX_TUNE_")} <= variables
        if "relax-tune" in container["image"]:
            check_command(container["args"])
            commands += 1
            assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= names
    assert commands == 5


def test_services_verify_database_without_owning_tables() -> None:
    """The owner's password is known to the database and to the job that creates the tables."""
    users: dict[str, set[str]] = {}
    for container in containers():
        known = users.setdefault(container["name"], set())
        for entry in container["env"]:
            if entry["name"] == "RELAX_TUNE_DB":
                url = make_url(entry["value"])
                assert url.query == {"sslrootcert": "/database-ca/ca.crt"}, "with it, the server is verified in full"
                assert "/database-ca" in {m["mountPath"] for m in container["volumeMounts"]}
                known.add(url.username)
            secret = entry.get("valueFrom", {}).get("secretKeyRef", {})
            known |= {secret["key"]} if secret.get("name") == "relax-tune-database" else set()
    owner, both = {"owner"}, {"owner", "jobs"}
    assert users == {
        "postgres": both, "upgrade": owner, "roles": owner, "jobs": {"jobs"}, "scheduler": set(), "worker": set(),
    }  # fmt: skip


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_command_of_unit_exists(unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=/opt/relax-tune/bin/relax-tune (.*)$", unit.read_text(), re.M)
    check_command(
        shlex.split(line.replace("%i", "c").replace("${HOST}", "10.0.0.1").replace("${SCHEDULER}", "tls://head:8786"))
    )


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_unit_is_accepted_by_systemd(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name.replace("@.", "@c.")
    copy.write_text(unit.read_text().replace("/opt/relax-tune/bin/relax-tune", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_command_of_batch_script_exists(script: Path) -> None:
    text = script.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^exec relax-tune (.*?)(?: \"\$@\")?$", text, re.M)
    check_command(shlex.split(re.sub(r"\$\{\w+:-(\w+)\}", r"\1", line).replace("$SCHEDULER", "tcp://127.0.0.1:1")))


@pytest.mark.process
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_batch_script_parses(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_fleet_beyond_loopback_wants_certificates() -> None:
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed (extra slurm)")
    command = [sys.executable, str(DEPLOY / "slurm" / "fleet.py"), "--device", "c"]
    for more, word in (([], "certificates beyond loopback"), (["--ca", "ca.pem"], "--worker-key together")):
        done = subprocess.run([*command, "--host", "10.0.0.1", *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and word in done.stderr


def test_locks_of_images_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    locks = re.findall(r"-r (requirements/[\w-]+\.txt)", text)
    assert len(locks) == 4 and all((DEPLOY.parent / lock).is_file() for lock in locks)
    assert set(re.findall(r"^FROM base AS (\w+)", text, re.M)) == {"cpu", "cuda"}
