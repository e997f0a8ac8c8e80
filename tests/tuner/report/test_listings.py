"""Tables of jobs, runs and units, which the terminal and the dashboard show alike."""

from __future__ import annotations

import pytest
from rich.console import Console
from tests.database.records_made import ZEN, filled, timing

from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import JobRecord
from relax_tune.database.store import MemoryStore
from relax_tune.tuner.cli.report.console import rich_table
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.report.listings import (
    job_facts,
    jobs_table,
    lent_table,
    progress_of,
    run_facts,
    runs_table,
    units_table,
)
from relax_tune.tuner.report.subject import Cell, PageLink, TrialCount


def job(**fields: object) -> SubmittedJob:
    return SubmittedJob("aa11", "file:00", "minilm", '{"target":"c:zen"}', "c", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        ('{"trials":3,"of":16}', TrialCount(3, 16)),
        ("{}", "-"),
        ('{"trials":"3","of":16}', "-"),
        ('{"trials":-1,"of":16}', "-"),
        ('{"trials":3,"of":0}', "-"),
    ],
)
def test_progress_of_untrusted_row_is_two_counts_or_unknown(progress: str, expected: Cell) -> None:
    assert progress_of(job(progress=progress)) == expected


def test_jobs_table_and_facts_agree() -> None:
    submitted = job(progress='{"trials":3,"of":16,"failures":2}', submitted_at=1e9, note="nightly", priority=4)
    table = jobs_table([submitted])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    facts = dict(job_facts(submitted))
    assert row["target"] == "c:zen" and row["note or message"] == facts["note"] == "nightly"
    for name in ("state", "progress", "failures", "priority", "submitted", "model"):
        assert row[name] == facts[name], name
    assert (
        str(facts["progress"]) == "3/16" and facts["submitted"] == "2001-09-09 01:46:40 UTC" and facts["ended"] == "-"
    )


def test_job_that_no_service_has_taken_says_what_it_waits_for() -> None:
    assert "a service for c" in str(dict(job_facts(job()))["message"])
    assert "a service for c" in str(jobs_table([job()]).rows[0][-1])
    for other in (job(runs=1), job(state="running", runs=1)):
        assert dict(job_facts(other))["message"] == "-"
    assert dict(job_facts(job(message="no space left")))["message"] == "no space left"


def test_runs_table_and_facts_agree() -> None:
    run = JobRecord("host:1@x", '{"target":"c","seed":7,"seen_at":1000000000}', "done")
    assert run_facts(run) == (
        ("run", PageLink("host:1@x", ("runs", "host:1@x"))),
        ("state", "done"),
        ("last active", "2001-09-09 01:46:40 UTC"),
        ("seed", "7"),
        ("target", "c"),
    )
    assert [str(cell) for cell in runs_table([run]).rows[0]] == [
        "host:1@x",
        "done",
        "2001-09-09 01:46:40 UTC",
        "seed=7, target=c",
    ]


def test_units_table_has_sensors_of_the_given_records() -> None:
    with MemoryStore() as store:
        store.add_target(ZEN)

        records = [timing(f"m{n}", 1.0, tile=n, unit="u", clock_mhz=1000.0 + n, celsius=50.0 + n) for n in range(3)]
        filled(store).add_measurements(records)
        units = store.units(ZEN.key)
    assert units_table(units).rows == (("-", "-", "u", "3", "0", "-"),)
    with_sensors = units_table(units, records)
    assert with_sensors.columns[-3:] == ("median clock (MHz)", "hottest (°C)", "last")
    assert with_sensors.rows == (("-", "-", "u", "3", "0", "1001", "52", "-"),)


def test_lent_table_names_silent_and_quarantined_units() -> None:
    devices = [
        LentDevice("a", "c", "w1", "h", "u1", "id", "zen |", {"add": 1e-3}, 1.5, "", 60.0),
        LentDevice("b", "c", "w2", "h", "u2", "id", "zen", {}, 1.5, "slow", 1.0),
        LentDevice("c", "c", "w3", "h", "u3", "id", "zen", {}, 1.5, "", 1.0, protocol=1),
    ]
    silent, quarantined, other = (str(row[-1]) for row in lent_table(devices, 20.0).rows)
    assert (silent, quarantined) == ("silent for 60 s", "quarantined: slow")
    assert "another version of relax-tune" in other and "got 1" in other
    assert [row[-2:] for row in lent_table(devices[:2]).rows] == [("lent", "60"), ("quarantined: slow", "1")]


def test_printed_table_has_every_cell() -> None:
    console = Console(width=200, record=True)
    table = jobs_table([job(owner="tina")])
    console.print(rich_table(table))
    text = console.export_text()
    assert all(str(cell) in text for cell in (*table.columns, *table.rows[0]))
