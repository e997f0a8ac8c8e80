"""What is shown of a program, an artifact, a model and a result of tuning: a few lines, and a table in a notebook."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.tuner_models import feed_forward, row_scale

import relax_tune as rt
from relax_tune.database.records import Target
from relax_tune.summary import Summarised
from relax_tune.tuner.job.progress import TuningSummary


def short(shown: Summarised, *texts: str) -> None:
    """Check that the description is short and names these."""
    lines = repr(shown).splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 160
    for text in texts:
        assert text in repr(shown), repr(shown)
    html = shown._repr_html_()
    assert html.startswith("<table>") and html.count("<tr>") == len(lines) - 1 and "<b>" not in html


def test_program_repr_has_signature_bounds_and_size() -> None:
    module = feed_forward()
    short(module, "1 graph function", "x: Tensor((n, 24), f32)", "n from 1 to 128", "MB")
    graph = rt.GraphBuilder()
    module = graph.finish(graph.input("<b>\x1b[2J" * 100, (graph.symbol("n", 1), 4)))
    short(module, r"\x1b[2J", "n from 1\n", "...")


@pytest.mark.ccompiler
def test_artifact_and_model_repr_name_device_shapes_and_measured_tasks(tmp_path: Path) -> None:
    built = rt.build(row_scale(), target="c", db="memory://", self_test=False)
    artifact = rt.load_artifact(built.save(tmp_path / "m.rta"))
    count = artifact.manifest["extra"]["tasks"]
    facts = ("float32 (n, ", "n from ", f"0 of {count} measured; not ", "kernel", "MB")
    short(artifact, "m.rta for c, ", *facts)
    short(built, "not saved yet", *facts)
    with artifact.open() as model:
        short(model, "m.rta on c, ", *facts)
        shown = model
    short(shown, "closed", *facts)
    bare = rt.Artifact(built.programs, {}, {"device_kind": "c", "extra": {}})
    short(bare, "not saved yet for c\n", "0.0 MB")


def test_tune_result_repr_has_tasks_work_and_notes() -> None:
    work = TuningSummary(trials=1, measurements=12, failures=2, wall_secs=3.2)
    result = rt.TuneResult(Target("c", "a processor"), (), work, ("untuned <b>",))
    short(
        result,
        "on c, a processor",
        "0 of 0 measured",
        "12 new measurements of 1 candidate, 2 failed, in 3 s",
        "untuned <b>",
    )
    assert np.isfinite(result.secs or 0.0)
