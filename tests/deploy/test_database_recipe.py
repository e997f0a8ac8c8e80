"""The database of the Kubernetes recipe: a server with its settings, logins and TLS, and the commands of its containers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from tests.support import postgres
from tests.tuner.job.job_processes import small_model

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra cluster)")
pytestmark = [pytest.mark.process, pytest.mark.postgres, pytest.mark.slow]
KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
SECRETS = {"owner": "owner's password", "jobs": 'jobs" password'}


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The documents of a manifest, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((KUBERNETES / name).read_text())}


def pod(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return dict(manifest["spec"]["template"]["spec"])


@dataclass(frozen=True)
class Place:
    """A running server, and the folder that stands for the mounts of its containers."""

    folder: Path
    port: int

    def mounted(self, value: str) -> str:
        return re.sub(r"(?<!\w)/(?=(?:tls|database-ca|config|files)\b)", f"{self.folder}/", value, count=1)

    def variables(self, container: Mapping[str, Any]) -> dict[str, str]:
        """The environment of a container, with secrets; the name of the service leads to this machine."""
        found = {"PGHOSTADDR": "127.0.0.1", "PGPORT": str(self.port)}
        for entry in container["env"]:
            secret = entry.get("valueFrom", {}).get("secretKeyRef")
            if secret is not None:
                assert secret["name"] == "relax-tune-database"
            found[entry["name"]] = SECRETS[secret["key"]] if secret else self.mounted(entry["value"])
        return found

    def run(self, arguments: list[str], container: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
        """Run a `relax-tune` command with the environment of a container."""
        given = self.variables(container)
        for unused in ("RELAX_TUNE_CA", "RELAX_TUNE_CERTIFICATE", "RELAX_TUNE_KEY"):
            given.pop(unused, None)
        return subprocess.run(
            [sys.executable, "-m", "relax_tune", *arguments],
            env={**os.environ, "RELAX_TUNE_CACHE": str(self.folder / "cache"), **given},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    if (why := postgres.missing()) is not None:
        pytest.skip(why)
    if shutil.which("psql") is None:
        pytest.skip("psql is not installed")
    with postgres.open_folder() as folder:
        yield from in_folder(folder)


def in_folder(folder: Path) -> Iterator[Place]:
    from relax_tune.tuner.measure.cluster.trust.authority import issue, make_authority

    for name in ("tls", "database-ca", "config", "files", "socket"):
        (folder / name).mkdir()
    (folder / "socket").chmod(0o777)
    make_authority(folder / "fleet")
    certificate, key = issue(folder / "fleet", "relax-tune-database", "database")
    shutil.copy(certificate, folder / "tls" / "tls.crt")
    shutil.copy(key, folder / "tls" / "tls.key")
    shutil.copy(folder / "fleet" / "ca.pem", folder / "database-ca" / "ca.crt")
    if os.getuid() == 0:
        shutil.chown(folder / "tls" / "tls.key", "root", "postgres")
        (folder / "tls" / "tls.key").chmod(0o440)  # as defaultMode 288 with fsGroup
    manifests = documents("database.yaml")
    for name, content in manifests["ConfigMap"]["data"].items():
        (folder / "config" / name).write_text(content)
    (container,) = pod(manifests["StatefulSet"])["containers"]
    place = Place(folder, 0)
    settings = [place.mounted(word) for word in container["args"] if word != "-c"]
    with postgres.server(*settings, f"unix_socket_directories={folder / 'socket'}", superuser="postgres") as url:
        port = int(url.rpartition(":")[2].strip("/"))
        place = Place(folder, port)
        environment = {**os.environ, **place.variables(container), "PGHOST": str(folder / "socket")}
        del environment["PGHOSTADDR"]
        for command in (["createdb", "-U", "postgres", "tuning"], ["bash", "-e", str(folder / "config" / "logins.sh")]):
            done = subprocess.run(
                [*postgres.user_prefix(), *command], env=environment, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
        yield place


def test_upgrade_creates_tables_and_a_service_runs_jobs_with_few_rights(place: Place) -> None:
    upgrade = pod(documents("database.yaml")["Job"])
    # again for a new version
    for container in (*upgrade["initContainers"], *upgrade["containers"], *upgrade["containers"]):
        done = place.run(container["args"], container)
        assert done.returncode == 0, done.stderr
    (service,) = pod(documents("jobs.yaml")["Deployment"])["containers"]
    small_model(place.folder)
    model = ["small.onnx", "--target", "c", "--bound", "n=1:8", "--trials", "1", "--effort", "quick"]
    assert (done := place.run(["jobs", "submit", *model], service)).returncode == 0, done.stderr
    arguments = [*service["args"][: service["args"].index("--scheduler")], "--device", "c", "--until-empty"]
    assert (done := place.run(arguments, service)).returncode == 0, done.stderr
    listed = place.run(["jobs", "list", "--json"], service)
    assert '"done"' in listed.stdout, listed.stdout + listed.stderr + done.stderr
    pruned = place.run(["db", "prune", "--failed", "--older-than", "0"], service)
    assert pruned.returncode == 2 and "permission denied" in pruned.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [("sslmode=disable", "no pg_hba.conf entry"), ("sslmode=require", "password authentication failed")],
)
def test_connection_without_tls_or_password_is_refused(place: Place, options: str, reason: str) -> None:
    engine = create_engine(f"postgresql+psycopg://jobs:wrong@127.0.0.1:{place.port}/tuning?{options}")
    with pytest.raises(OperationalError, match=reason), engine.connect() as connection:
        connection.execute(text("SELECT 1"))
    engine.dispose()
