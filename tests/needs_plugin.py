"""Fails a run in which a test was skipped although the run promised what it needs.

`make test` loads this with `-p tests.needs_plugin` and names the markers it installs everything for in RELAX_TUNE_NEEDS.
With CI set, a skipped test with one of these markers, or a module skipped as a whole, counts as failed. A module whose reason is
"needs NAME", with one of EXCUSED, may be skipped.
"""

from __future__ import annotations

import os
import re

import pytest

# Needs that `make test` does not install: a test with one of these marks may be skipped, whatever other marks it has.
EXCUSED = frozenset(
    {"browser", "chromium", "clblast", "cross", "cuda", "drivers", "postgres", "tint", "torch", "webgpu"}
)


class Needs:
    """Turns the skips that should not have been into failures, before the reports are counted and printed."""

    def __init__(self, promised: frozenset[str]) -> None:
        self.promised = promised

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test skipped by a mark, a fixture or itself."""
        marks = self.promised & set(report.keywords)
        if report.skipped and marks and not hasattr(report, "wasxfail") and not EXCUSED & set(report.keywords):
            _fail(report, f"{report.nodeid} needs {', '.join(sorted(marks))}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module skipped before its tests were known."""
        need = re.match(r"(?:Skipped: )?needs (\w+)", _reason(report)) if report.skipped else None
        if report.skipped and not (need and need[1] in EXCUSED):
            _fail(report, report.nodeid)


def _fail(report: pytest.TestReport | pytest.CollectReport, what: str) -> None:
    report.longrepr = f"skipped although this run installs what it needs: {what}: {_reason(report)}"
    report.outcome = "failed"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_configure(config: pytest.Config) -> None:
    """Active only in CI, and only on the process that sees every report."""
    promised = frozenset(filter(None, os.environ.get("RELAX_TUNE_NEEDS", "").split(",")))
    if promised and os.environ.get("CI") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Needs(promised), "relax-tune-needs")
