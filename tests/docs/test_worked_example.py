"""The worked example is what today's code gives."""

from __future__ import annotations

import pytest
from docs import worked_example


@pytest.mark.slow
def test_worked_example_page_is_of_today(request: pytest.FixtureRequest) -> None:
    text = worked_example.page()
    if request.config.getoption("--update-golden"):
        worked_example.PAGE.write_text(text)
        return
    assert text == worked_example.PAGE.read_text(), "the page is not of today; run this test with --update-golden"
    assert len(text.splitlines()) <= 250


def test_worked_example_plan_uses_records_of_today() -> None:
    task_variants = worked_example.task_variants(worked_example.model())
    _, measured = worked_example.records()
    assert {r.workload for r in measured} == {task_variants.task.key}, (
        "the layer's text changed: measure it again (--measure)"
    )
    assert {r.variant.kind for r in measured} == {"tuned", "library", "generic"}
