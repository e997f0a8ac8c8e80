"""The pages: every snippet runs, every path and module they name exists, and the two front pages stay short."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.ir.frontend.hf.test_adapter import write as write_adapter
from tests.ir.frontend.hf.test_images_and_sound import write as write_senses
from tests.ir.frontend.hf.test_series import write as write_series
from tests.ir.frontend.torch.test_importer import torch_python
from tests.support import gguf_files
from tests.support.encoder_decoders import write_encoder_decoder
from tests.support.text_folders import write_decoder, write_head
from tests.tuner.cli.cli_model import make_bert

import relax_tune as rt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOPS = ("ir", "schedules", "tuner", "runtime", "database")
# What makes this environment in the first place, or would call this test.
ELSEWHERE = ("pip install", "make ")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def snippets(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return ((m.group(1), m.group(2)) for m in FENCE.finditer(page.read_text()))


# Pages whose snippets are those of another.
REPEATED = ("docs/index.md",)
# Pages that tune or build several times: half a minute and more.
LONG = tuple(
    f"docs/guides/{name}.md"
    for name in (
        "tune",
        "share",
        "inside",
        "serve",
        "http",
        "images",
        "export",
        "jobs",
        "report",
        "pack",
        "encoder-decoders",
        "dashboard",
        "devices",
        "quality",
        "texts",
        "weights",
        "browser",
    )
)
RUN = [p for p in PAGES if any(language in ("python", "console") for language, _ in snippets(p))]


# Pages whose Python needs torch.
OF_TORCH = "docs/guides/torch.md"
# Pages whose snippets make the database.
OWN_RECORDS = (OF_TORCH, "docs/guides/kernels.md")
MARKS = {**{page: [pytest.mark.heavy] for page in REPEATED + LONG}, OF_TORCH: [pytest.mark.torch]}


def marked(page: Path) -> Any:
    return pytest.param(page, id=named(page), marks=MARKS.get(named(page), []))


def commands(text: str) -> Iterator[str]:
    """The commands of a console block, with continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ ") and not line[2:].startswith(ELSEWHERE):
            yield line[2:]


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database in which the encoder of the pages is tuned, one trial a task, so that no page measures it again."""
    folder = tmp_path_factory.mktemp("tuned")
    model = rt.load_model(make_bert(folder / "encoder"), bounds={"b": (1, 8), "n": (1, 32)})
    rt.tune(model, target="c", db=folder / "records.db", effort="quick", trials=1)
    return folder / "records.db"


@pytest.fixture
def folder(page: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the models that a page speaks of and records of the encoder, where each task gets one trial."""
    make_bert(tmp_path / "encoder")
    make_bert(tmp_path / "finetuned", seed=1)
    (tmp_path / "adapted").mkdir()
    write_adapter(tmp_path / "adapted", "bert")[1].rename(tmp_path / "lora")
    if (
        any("records.db" in text or "records.lan" in text for _, text in snippets(page))
        and named(page) not in OWN_RECORDS
    ):
        for name in ("records.db", "shared.db"):
            shutil.copy(request.getfixturevalue("records"), tmp_path / name)
    write_decoder(tmp_path / "decoder")
    write_head(tmp_path / "classifier", "SequenceClassification")
    (tmp_path / "translator").mkdir()
    write_encoder_decoder(tmp_path / "translator", "t5")
    (tmp_path / "pictures").mkdir()
    write_senses(tmp_path / "pictures", "clip")
    (tmp_path / "forecaster").mkdir()
    write_series(tmp_path / "forecaster", "timesfm")
    gguf_files.convert(tmp_path / "decoder", gguf_files.spec_of(tmp_path / "decoder"), tmp_path / "model.gguf")
    tools = tmp_path / "tools"
    tools.mkdir()
    tool = tools / "relax-tune"
    tool.write_text(f"#!{sys.executable}\nfrom relax_tune.tuner.cli.start import main\nmain()\n")
    tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("RELAX_TUNE_TRIALS", "1")
    monkeypatch.setattr(rt, "tune", partial(rt.tune, trials=1))
    tune = rt.Kernel.tune
    monkeypatch.setattr(
        rt.Kernel, "tune", lambda self, **given: tune(self, **{**given, "trials": 1, "libraries": False})
    )
    return tmp_path


def run_commands(folder: Path, lines: list[str]) -> None:
    """Run commands in one shell, as a reader would; what they leave running ends with it."""
    script = "\n".join(["set -e", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *lines])
    script = script.replace("postgresql://tuner@records.lan/tuning", f"sqlite:///{folder / 'shared.db'}")
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=600, start_new_session=True
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def write_entry_points(folder: Path) -> None:
    """Write what an installation says of the package, for Pythons that only import it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"relax_tune-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.parametrize("page", [*map(marked, RUN)])
def test_page_snippets_run(page: Path, folder: Path) -> None:
    if named(page) == OF_TORCH:
        text = "\n".join(text for language, text in snippets(page) if language == "python")
        python, environment = torch_python()
        write_entry_points(folder)
        subprocess.run([python, "-W", "ignore", "-c", text], check=True, cwd=folder, env=environment, timeout=600)
        return
    namespace: dict[str, Any] = {}
    for language, text in snippets(page):
        if language == "python":
            exec(compile(text, named(page), "exec"), namespace)
        elif language == "console" and (lines := list(commands(text))):
            run_commands(folder, lines)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_page_paths_exist(page: Path) -> None:
    wrong = []
    for path in re.findall(
        r"`((?:ir|schedules|tuner|runtime|database|tests|experiments|examples|docs)/[\w/.{},]*)`", page.read_text()
    ):
        if not exists(path.rstrip("/")):
            wrong.append(path)
    assert not wrong, f"{named(page)} names what is not there: {wrong}"


def exists(path: str) -> bool:
    """A file or folder, `folder/{a,b}`, or `folder/module.attribute`."""
    if found := re.fullmatch(r"(.*)\{([\w,]+)\}", path):
        return all(exists(found[1] + part) for part in found[2].split(","))
    if (ROOT / path).exists() or (ROOT / f"{path}.py").exists():
        return True
    stem, _, attribute = path.rpartition(".")
    if path.split("/")[0] in TOPS and (ROOT / f"{stem}.py").exists():
        return hasattr(importlib.import_module(f"relax_tune.{stem.replace('/', '.')}"), attribute)
    return False


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_page_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", FENCE.sub("", page.read_text()))
    assert [x for x in links if not (page.parent / x).exists()] == []


def test_front_pages_stay_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 120


def test_api_page_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M))
    assert listed == {f"{module}.{name}" for module, name in rt._public().values()}
