"""Reports and dashboards in headless Chromium: no horizontal scrolling, no errors, reachable by keyboard, refreshed in place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.tuner_models import row_scale
from tests.tuner.report.tuned_database import HOSTILE, JOB, add_hostile, tune_small, two_devices

from relax_tune.database.jobs.queue import open_queue
from relax_tune.tuner.report.collect import of_database
from relax_tune.tuner.report.page import report_page
from relax_tune.tuner.report.sections import Limits

pytestmark = [pytest.mark.chromium, pytest.mark.ccompiler, pytest.mark.process, pytest.mark.slow]
WIDTHS = (360, 1280)
# What a page may take from the keyboard, in the order of the text.
REACHED = """() => [...document.querySelectorAll('a[href], input, select, button, summary, [tabindex="0"]')]
  .filter(e => e.checkVisibility()).length"""
FOCUSED = """() => { const e = document.activeElement, r = e.getBoundingClientRect();
  return [e.tagName, e.textContent.trim().slice(0, 60), r.top + scrollY, getComputedStyle(e).outlineStyle]; }"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    for name in ("vl_convert", "starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name, reason=f"{name} is not installed (extra dashboard)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_TUNE_SELF_TEST", "false")
        tune_small(folder, row_scale())
    add_hostile(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Chromium is not installed (Debian's package chromium)")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=120_000)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    """The address of a dashboard over the database."""
    code = "from relax_tune.tuner.cli.start import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "dashboard", "--db", "r.db", "--port", "0", "--no-token"],
        cwd=place,
        env={name: value for name, value in os.environ.items() if name != "RELAX_TUNE_DASHBOARD_TOKEN"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    address = next(found for line in process.stderr if (found := re.search(r"http://\S+/", line)))
    yield address[0]
    process.terminate()
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def report(place: Path) -> str:
    with open_queue(f"sqlite:///{place / 'r.db'}", read_only=True) as store:
        page = report_page(of_database(store, Limits()), "written by a test")
    (place / "report.html").write_text(page)
    return (place / "report.html").as_uri()


def opened(browser: Any, url: str, width: int, scheme: str) -> tuple[Any, list[str]]:
    """Open a page; return it, and the list that its errors go to."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, errors = context.new_page(), []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(url)
    return page, errors


def check_page(page: Any, errors: list[str], width: int) -> None:
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1] == width, "no part of the page is wider than the window"
    assert page.locator("h1").count() == 1 and page.locator("main").count() == 1
    for picture in page.locator("[role=img]").all():
        if picture.is_visible():
            box = picture.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] > 40
    contrast = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    assert contrast[0] != contrast[1]
    assert errors == []


def check_keyboard(page: Any) -> None:
    """Assert that Tab reaches everything once, from the top to the bottom, first the link over the navigation, each with an outline."""
    count, tops = page.evaluate(REACHED), []
    for number in range(count):
        page.keyboard.press("Tab")
        tag, text, top, outline = page.evaluate(FOCUSED)
        if number == 0:
            assert (tag, text) == ("A", "Skip to the content")
        assert tag != "BODY" and outline != "none", (number, tag, text)
        tops.append(top)
    # fields of one line of a form differ in height
    assert all(after > before - 40 for before, after in zip(tops[1:], tops[2:])), "focus follows the order of the page"


@pytest.mark.parametrize("width", WIDTHS)
def test_report_fits_and_follows_the_keyboard(browser: Any, report: str, width: int, tmp_path: Path) -> None:
    for scheme in ("light", "dark"):
        page, errors = opened(browser, report, width, scheme)
        check_page(page, errors, width)
        page.screenshot(path=tmp_path / f"report-{width}-{scheme}.png", full_page=True)
        assert (tmp_path / f"report-{width}-{scheme}.png").stat().st_size > 10_000
        if scheme == "light":
            check_keyboard(page)
            summary = page.locator("summary").first
            summary.focus()
            page.keyboard.press("Enter")
            assert page.locator("details").first.evaluate("e => e.open") and page.locator("table").first.is_visible()
            check_page(page, errors, width)
        page.context.close()


def visible(page: Any, selector: str) -> list[str]:
    return [e.text_content().strip() for e in page.locator(selector).all() if e.is_visible()]


def test_report_filters_tables_and_pictures_alike(browser: Any, tmp_path: Path) -> None:
    with two_devices() as store:
        (tmp_path / "two.html").write_text(report_page(of_database(store, Limits()), "written by a test"))
    page, errors = opened(browser, (tmp_path / "two.html").as_uri(), 1280, "light")
    page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    marks = "#device1-task1 .wide path[data-sizes]"
    line = page.locator('#device1-task1 .wide path[data-series="best tuned"]:not([transform])').first
    every, whole = len(visible(page, marks)), line.get_attribute("d")

    # by task, with the keyboard alone
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "task":
            break
    page.keyboard.type("SoftM")
    assert visible(page, "#device1-time-rows tbody th") == ["softmax"]
    assert visible(page, "#device1-time .wide text[data-task]") == ["softmax"]
    assert [
        m.get_attribute("data-task") for m in page.locator("#device1-time .wide path[data-task]:not(.out)").all()
    ] == ["softmax"]
    assert [f for f in visible(page, "figure h3") if f.startswith("Time over")] == ["Time over shape: softmax"]
    assert "1 of 2 tasks" in page.locator("#filters-state").inner_text()
    assert "Filters do not apply" in page.locator("#device1-failures .filtered").inner_text()
    assert page.locator("#device1-time-values summary").inner_text().endswith("(1 of 2 rows)")
    page.keyboard.press("Enter")  # sends no form
    page.get_by_role("button", name="Show all").press("Enter")
    page.wait_for_function("document.getElementById('filters-state').textContent === ''")
    assert len(visible(page, marks)) == every and line.get_attribute("d") == whole

    # by size: points, rows and the line through them
    page.locator("[name=from]").fill("8")
    page.locator("[name=to]").fill("8")
    assert visible(page, "#device1-task1-rows tbody th") == ["s0=8"]
    assert len(visible(page, marks)) == every // 3
    assert line.get_attribute("d").count("L") == 0 != whole.count("L")
    page.locator("[name=from]").fill("")
    page.locator("[name=to]").fill("")
    assert line.get_attribute("d") == whole

    # by kind: columns, marks, variants
    page.get_by_label("library").uncheck()
    assert "best library" not in visible(page, "#device1-task1-rows thead th")
    assert visible(page, '#device1-task1 .wide path[data-groups="library"]') == []
    assert not any("library" in text for text in visible(page, "#device1-variants tbody th"))
    page.get_by_label("library").check()

    # by operator and device
    page.locator("[name=operator]").select_option("add")
    assert visible(page, "#device1-time-rows tbody th") == ["fused_matmul_add"]
    page.locator("[name=device]").select_option(index=2)
    assert [h for h in visible(page, "h2") if "paper" in h] == [] and "Device c: stone" in visible(page, "h2")
    check_page(page, errors, 1280)
    page.context.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_dashboard_fits_and_follows_the_keyboard(browser: Any, address: str, width: int, tmp_path: Path) -> None:
    for number, path in enumerate(("", f"jobs/{JOB}")):
        page, errors = opened(browser, address + path, width, "dark" if number else "light")
        check_page(page, errors, width)
        page.screenshot(path=tmp_path / f"dashboard{number}-{width}.png", full_page=True)
        check_keyboard(page)
        page.context.close()
    page, errors = opened(browser, address, width, "light")
    page.locator("#devices a").first.click()
    page.wait_for_url("**/devices/**")
    check_page(page, errors, width)
    page.context.close()


def test_dashboard_refresh_keeps_place_and_shows_news(browser: Any, address: str, place: Path) -> None:
    page, errors = opened(browser, f"{address}jobs/{JOB}", 360, "light")
    page.locator("#log-text").focus()
    before = page.evaluate("scrollY")
    assert before > 0 and "4 of 8" not in page.content()
    with open_queue(f"sqlite:///{place / 'r.db'}") as queue:
        (job,) = queue.find(JOB)
        queue.beat(job, 60.0, 4.0, {"trials": 4, "of": 8, "failures": 1}, [(1, 1, f"more of {HOSTILE}\n")])
    page.get_by_text("4 of 8").first.wait_for(timeout=30_000)
    assert "more of" in page.locator("#log-text").inner_text()
    assert page.evaluate("document.activeElement.id") == "log-text" and page.evaluate("scrollY") == before
    page.locator("#live").uncheck()
    assert page.locator("#refresh-state").inner_text() == "" and errors == []
    page.context.close()


def test_dashboard_switched_often_asks_once_at_a_time(browser: Any, address: str) -> None:
    page = browser.new_context().new_page()
    page.clock.install()
    page.goto(address)
    asked = list[str]()
    page.on(
        "request", lambda request: asked.append(request.resource_type) if request.resource_type == "fetch" else None
    )
    for _ in range(5):  # four of the five questions come while the first has no answer
        page.evaluate("() => { const box = document.getElementById('live'); box.click(); box.click(); }")
    page.wait_for_load_state("networkidle")
    before = len(asked)
    page.clock.run_for(5000)
    page.wait_for_load_state("networkidle")
    assert len(asked) == before + 1
    page.context.close()
