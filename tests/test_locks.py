"""Locks: what `make` and the images install is pinned with hashes, fits pyproject.toml, and nothing else is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

packaging = pytest.importorskip("packaging.requirements", reason="packaging is not installed (extra dev)")

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
MAKEFILE = (ROOT / "Makefile").read_text()


def pins(lock: Path) -> dict[str, list[str]]:
    """Versions by name; some have one for each range of Pythons."""
    found: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock.read_text(), re.M):
        found.setdefault(plain(name), []).append(version)
    return found


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def extras_of(lock: str) -> list[str]:
    (words,) = re.findall(rf"^EXTRAS_{lock} := ?(.*)$", MAKEFILE, re.M)
    more = re.findall(r"\$\(EXTRAS_([\w-]+)\)", words)
    return [*(e for one in more for e in extras_of(one)), *re.sub(r"\$\(.*?\)", "", words).split()]


def wanted(extras: list[str]) -> Iterator[packaging.Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *(t for e in extras for t in project["optional-dependencies"][e])]:
        one = packaging.Requirement(text)
        if one.name == "relax-tune":
            yield from wanted(sorted(one.extras))
        else:
            yield one


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_lock_pins_by_hash_and_names_no_host(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert lines and not [line for line in lines if "://" in line or line.startswith("-")]
    for entry in re.split(r"\n(?=\S)", "\n".join(lines)):
        assert re.match(r"[\w.-]+==\S+( ;.*)? \\\n    --hash=sha256:[0-9a-f]{64}", entry), entry[:200]


@pytest.mark.parametrize("lock", ["test", "demo", "slurm", "webgpu", "image-cpu", "image-cuda", "image-serve"])
def test_lock_fits_the_extras_of_the_project(lock: str) -> None:
    found = pins(ROOT / "requirements" / f"{lock}.txt")
    if lock == "image-cuda":
        found |= pins(ROOT / "requirements" / "pycuda.txt")
    needs = list(wanted(extras_of(lock)))
    assert len(needs) > 10 or lock == "image-serve"
    for need in [*needs, packaging.Requirement("setuptools>=77")]:
        versions = found.get(plain(need.name), [])
        assert versions and all(v in need.specifier for v in versions), f"{need}: {versions}; run `make lock`"


def test_locks_agree_on_versions() -> None:
    test = pins(ROOT / "requirements" / "test.txt")
    for other in ("demo", "slurm", "webgpu"):
        for name, versions in pins(ROOT / "requirements" / f"{other}.txt").items():
            assert test.get(name, versions) == versions, (other, name)


@pytest.mark.process
@pytest.mark.parametrize("target", ["demo", "test", "test-slurm", "test-webgpu", "fuzz-decoders", "audit"])
def test_make_installs_only_locked_files(target: str, tmp_path: Path) -> None:
    folder = tmp_path.name
    command = ["make", "--dry-run", f"VENV={folder}", f"SUPPLY={folder}/supply", target]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert installs and all(_locked(line) for line in installs), installs
    assert not [line for line in lines if re.search(r"\bnpm (install|i|add)\b|\bnpx\b", line)]


def test_packages_of_node_are_pinned_by_hash_and_run_nothing_to_be_installed() -> None:
    lines = re.findall(r"^\tnpm (?!run )(.*)$", MAKEFILE, re.M)
    assert len(lines) == 2 and all(line.startswith("ci ") and "--ignore-scripts" in line for line in lines)
    for folder in ("requirements/tint", "tuner/web/browser"):
        lock = json.loads((ROOT / folder / "package-lock.json").read_text())["packages"]
        assert len(lock) > 1 and all(p["integrity"].startswith("sha512-") for name, p in lock.items() if name)
        assert not [name for name, p in lock.items() if "resolved" in p]


def test_images_install_only_locked_files() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    installs = [part for line in text.splitlines() for part in line.split("&&") if "pip install" in part]
    assert len(installs) == 7 and all(_locked(part) for part in installs), installs


def _locked(command: str) -> bool:
    ours = re.search(r"--no-deps --no-build-isolation (-e )?\.\s*$", command)
    return bool(ours) or (
        "--require-hashes" in command and ("--only-binary :all:" in command or "pycuda.txt" in command)
    )


@pytest.mark.process
def test_altered_file_of_a_locked_version_is_refused(tmp_path: Path) -> None:
    """With the options that `make` gives, and a wheel of the pinned version with another byte."""
    (options,) = re.findall(r"^LOCKED := -m pip install (.*)$", MAKEFILE, re.M)
    wheel = _wheel(tmp_path, "VALUE = 1\n")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"locked-thing==1.0 --hash=sha256:{sha256(wheel.read_bytes()).hexdigest()}\n")
    command = [sys.executable, "-m", "pip", "install", *options.split(), "--no-index", "--find-links", str(tmp_path)]
    command += ["--target", str(tmp_path / "site"), "-r", str(lock)]
    subprocess.run(command, check=True, capture_output=True)
    _wheel(tmp_path, "VALUE = 2\n")
    done = subprocess.run([*command, "--upgrade"], capture_output=True, text=True)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr, done.stderr


def _wheel(folder: Path, code: str) -> Path:
    metadata = "Metadata-Version: 2.1\nName: locked-thing\nVersion: 1.0\n"
    files = {
        "locked_thing.py": code,
        "locked_thing-1.0.dist-info/METADATA": metadata,
        "locked_thing-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [
        f"{n},sha256={urlsafe_b64encode(sha256(t.encode()).digest()).decode().rstrip('=')}," for n, t in files.items()
    ]
    path = folder / "locked_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (*files.items(), ("locked_thing-1.0.dist-info/RECORD", "\n".join(lines) + "\n")):
            archive.writestr(name, text)
    return path


AUDITS = {
    "fine": ([{"name": "a", "version": "1", "vulns": []}], 0, "1 packages, no known vulnerability"),
    "known": ([{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}], 1, "X-1, mended in 2"),
    "unknown to a mirror": ([{"name": "a", "skip_reason": "not found"}], 3, "1 of 1 packages not audited"),
    "unreachable": (None, 3, "not audited: expected an answer"),
}


@pytest.mark.process
@pytest.mark.parametrize("case", AUDITS)
def test_audit_calls_fine_only_the_packages_looked_up(case: str, tmp_path: Path) -> None:
    """pip-audit's answers by a package of its name, since its service need not be reached here."""
    pins, status, word = AUDITS[case]
    answer = (
        "import sys; sys.exit('no route to the service')"
        if pins is None
        else f"print({json.dumps({'dependencies': pins})!r})"
    )
    (tmp_path / "pip_audit.py").write_text(answer)
    command = [sys.executable, str(ROOT / ".ci" / "audit.py"), "some.txt"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == status and word in done.stdout, done
