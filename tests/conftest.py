"""Options shared by all tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"

# Tests share modules such as tests.support.zoo; --import-mode=importlib leaves sys.path alone.
sys.path.insert(0, str(Path(__file__).parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/* with what the code gives now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text must be what `tests/golden/<name>` holds; `--update-golden` writes it instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
            return
        assert path.exists(), (
            f"wanted the golden file {path}; make it with: pytest {request.node.nodeid} --update-golden"
        )
        assert text + "\n" == path.read_text(), f"{name} changed; if that is meant, run pytest with --update-golden"

    return check


@pytest.fixture(autouse=True)
def verified_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify the module before and after every pass that a test runs."""
    pipeline = sys.modules.get("relax_tune.ir.passes.pipeline")
    if pipeline is not None:
        monkeypatch.setattr(pipeline.PassManager, "always_verify", True)
