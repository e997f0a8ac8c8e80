"""The command line without measuring: help, errors, the database commands."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from tests.database.records_made import MATMUL, SOFTMAX, ZEN, ZEN_OLD, failure, filled, timing
from tests.support.tuner_models import row_scale
from tests.tuner.cli.cli_model import make_bert
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.database.records import JobRecord, Target
from relax_tune.database.store import open_store
from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import f8e5m2
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.text import save_text
from relax_tune.ir.op.indexing.movement import Concat
from relax_tune.tuner.array_files import read_arrays
from relax_tune.tuner.cli.app import COMMANDS, app, load_command
from relax_tune.tuner.cli.commands.run import run, write_arrays
from relax_tune.tuner.cli.destination import artifact_path
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.measure.cluster import client

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder, without settings from outside."""
    for name in ("TARGET", "DB", "EFFORT", "TRIALS", "SEED", "STRATEGY", "SCHEDULER"):
        monkeypatch.delenv(f"RELAX_TUNE_{name}", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.mark.ccompiler
@pytest.mark.process
def test_db_reference_shows_and_renews_the_times_of_a_target(elsewhere: Path) -> None:
    url = f"sqlite:///{elsewhere / 'units.db'}"
    info = device_info("c")
    with open_store(url) as store:
        filled(store).add_target(Target(info.kind, info.name, info.fingerprint, info.limits, (("compute", 9.0),)))
    key = Target(info.kind, info.name, info.fingerprint).key
    shown = json.loads(ok("db", "reference", "--on", key, "--db", url, "--json"))
    assert shown == {"target": key, "name": info.name, "reference": {"compute": 9.0}}
    assert "9.00 s" in ok("db", "reference", "--on", key, "--db", url)
    assert "not timed" in ok("db", "reference", "--on", ZEN.key, "--db", url)
    renewed = json.loads(ok("db", "reference", "--renew", "--target", "c", "--db", url, "--json"))
    assert 0 < renewed["reference"]["compute"] < 9.0 and "stream spread" in renewed["reference"]
    with open_store(url) as store:
        (target,) = (t for t in store.targets() if t.key == key)
        assert dict(target.reference) == renewed["reference"]


@pytest.mark.ccompiler
@pytest.mark.process
def test_db_reference_of_a_device_without_records_is_refused(records: str) -> None:
    assert "no records of" in refused("db", "reference", "--renew", "--target", "c", "--db", records)


@pytest.fixture
def records(elsewhere: Path) -> str:
    """The URL of a database with a few records."""
    url = f"sqlite:///{elsewhere / 'records.db'}"
    with open_store(url) as store:
        filled(store).add_measurements(
            [
                timing("a", 2e-3, tile=1, n=8),
                timing("b", 1e-3, tile=2, n=8),
                timing("c", 5e-3, tile=1, n=64),
                timing("d", 7e-6, n=8, workload=SOFTMAX, kind="library"),
                timing("e", 9e-3, n=8, target=ZEN_OLD),
                failure("f", "compile", "it broke", tile=3),
            ]
        )
        store.put_job(JobRecord("job-1", '{"effort":"quick","seed":0}', "interrupted"))
    return url


CHOSEN = r"target \S+, chosen for auto; --target names another"
"""The note that may precede an error, where no target is named."""


def ok(*arguments: str) -> str:
    done = RUNNER.invoke(app, list(arguments))
    assert done.exit_code == 0, f"{done.stdout}{done.stderr}{done.exception!r}"
    return done.stdout


def refused(*arguments: str) -> str:
    """The one paragraph of a command that must end with exit code 2, without the note of the device that was chosen."""
    done = RUNNER.invoke(app, list(arguments))
    assert done.exit_code == 2, f"{done.exit_code}: {done.stdout}{done.stderr}{done.exception!r}"
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    *notes, error = done.stderr.strip().splitlines()
    assert len(notes) <= 1 and all(re.fullmatch(CHOSEN, note) for note in notes), done.stderr
    assert error.startswith("error: "), done.stderr
    return error


# -- the table of commands ------------------------------------------------------------------------------------------------


def test_help_lists_every_command_with_summary() -> None:
    text = " ".join(ok("--help").split())
    for name, entry in COMMANDS.items():
        assert name in text
        own = load_command(name).help
        assert " ".join(own.split("\n\n")[0].split()) == entry.summary, name


def test_every_command_has_help() -> None:
    for name in COMMANDS:
        assert "--help" in ok(name, "--help")


def test_version() -> None:
    assert ok("--version").strip() == f"relax-tune {version('relax-tune')}"


@pytest.mark.process
def test_help_and_version_import_nothing_heavy() -> None:
    script = (
        "import sys\nfrom relax_tune.tuner.cli.app import app\n"
        "for argument in ('--help', '--version'):\n    app([argument], standalone_mode=False)\n"
        "heavy = {'numpy', 'sqlalchemy', 'xgboost', 'optuna', 'pyopencl', 'rich.table'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_command_suggests_a_known_one() -> None:
    done = RUNNER.invoke(app, ["tnue"])
    assert done.exit_code == 2 and "tune" in done.stderr


# -- mistakes ---------------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named() -> None:
    assert "nowhere" in refused("tune", "nowhere", "--target", "c")
    assert "nowhere" in refused("build", "nowhere", "--target", "c")


def test_folder_without_model_is_refused(elsewhere: Path) -> None:
    assert "config.json" in refused("tune", str(elsewhere), "--target", "c")


@pytest.mark.parametrize("bound", ["n", "n=5", "n=9:3", "n=a:b", "=1:2", "n=-1:4"])
def test_bad_bounds(bert: Path, bound: str) -> None:
    assert "n=1:512" in refused("tune", str(bert), "--target", "c", "--bound", bound)


def test_bounds_the_model_cannot_have(bert: Path) -> None:
    assert "q" in refused("tune", str(bert), "--target", "c", "--bound", "q=1:2")
    assert "32" in refused("tune", str(bert), "--target", "c", "--bound", "n=1:64")


@pytest.mark.process
@pytest.mark.parametrize("command", ["tune", "build"])
def test_unknown_target_error_lists_targets(bert: Path, command: str) -> None:
    text = refused(command, str(bert), "--target", "abacus", "--db", "memory://")
    assert "abacus" in text and "expected a device" in text


@pytest.mark.process
@pytest.mark.parametrize(("url", "says"), [("mysql://x/y", "sqlite"), ("sqlite:///no/such/folder/x.db", "folder")])
def test_a_bad_database(bert: Path, url: str, says: str) -> None:
    assert says in refused("tune", str(bert), "--target", "c", "--db", url)


def test_bad_efforts_trials_and_strategies(bert: Path) -> None:
    assert "quick" in refused("tune", str(bert), "--effort", "heroic")
    assert "at least 0" in refused("tune", str(bert), "--trials", "-3")
    assert "evolution" in refused("tune", str(bert), "--strategy", "oracle")
    assert "--scheduler" in refused("tune", str(bert), "--compare", "--scheduler", "tcp://127.0.0.1:1")
    assert "measured, stored, predicted, library, generic" in refused(
        "build", str(bert), "--policy", "best", "--target", "c"
    )


def test_the_settings_file_counts(elsewhere: Path, bert: Path) -> None:
    (elsewhere / "relax-tune.toml").write_text('effort = "heroic"\n')
    assert "heroic" in refused("tune", str(bert))


@pytest.mark.parametrize("command", ["show", "tune", "build", "plan"])
def test_pt2_file_without_trust_is_refused(elsewhere: Path, command: str) -> None:
    (elsewhere / "model.pt2").write_bytes(b"PK")
    (elsewhere / "relax-tune.toml").write_text("target = 'c'\n")
    assert "give --trust-model" in refused(command, "model.pt2")
    (elsewhere / "relax-tune.toml").write_text("trust_model = true\n")
    assert "expected no trust_model in a file that you have not allowed" in refused(command, "model.pt2")


def test_allow_lets_a_settings_file_choose_the_database(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(elsewhere / "config"))
    monkeypatch.setattr("relax_tune.tuner.cli.commands.devices.examine", lambda db: [])
    assert "expected a settings file" in refused("allow")
    (elsewhere / "relax-tune.toml").write_text('db = "postgresql://me:secret@far/records"\nseed = 1\n')
    assert "expected no db in a file that you have not allowed" in refused("db", "stats")
    found = {f["name"]: f for f in json.loads(ok("doctor", "--json"))}
    assert found["db"]["state"] == "advice" and "relax-tune.toml, refused" in found["db"]["result"]
    assert "relax-tune.toml" in found["seed"]["result"] and found["others"]["result"] == "defaults"
    said = ok("allow")
    assert "allowed: db = postgresql://***@far/records" in said and "seed" not in said
    assert {f["name"]: f["state"] for f in json.loads(ok("doctor", "--json"))}["db"] == "ok"
    assert "1 allowed contents forgotten" in ok("allow", "--revoke")
    assert "expected no db" in refused("db", "stats")


def test_a_model_inside_a_package() -> None:
    assert "no_such_package_here" in refused("tune", "package:no_such_package_here/model")
    assert "no/such/folder" in refused("tune", "package:numpy/no/such/folder")
    assert "config.json" in refused("tune", "package:numpy/linalg", "--target", "c")


def test_artifacts_are_named_after_the_model_and_the_target() -> None:
    assert artifact_path("package:some_model/model", "c", None) == Path("some_model-c.rta")
    assert artifact_path("/models/mini/", "opencl:PoCL 3.0", None) == Path("mini-opencl-PoCL-3-0.rta")
    assert artifact_path("anything", "c", Path("given.rta")) == Path("given.rta")


def test_run_and_bench_refuse_unusable_artifacts(elsewhere: Path) -> None:
    assert "--text" in refused("run", "x.rta")
    assert "x.rta" in refused("run", "x.rta", "--text", "a")
    (elsewhere / "x.rta").write_text("not an artifact")
    assert "another kind of file" in refused("bench", "x.rta", "--shape", "n=1")
    assert "b=1,n=8" in refused("bench", "x.rta", "--shape", "n")
    assert "at least 1" in refused("bench", "x.rta", "--shape", "n=1", "--repeats", "0")


def test_a_worker_needs_a_device_and_a_safe_address() -> None:
    assert "--device" in refused("worker", "tcp://127.0.0.1:1")
    assert "TLS" in refused("worker", "tcp://192.0.2.1:8786", "--device", "c")
    assert "--key" in refused("worker", "tls://192.0.2.1:8786", "--device", "c", "--ca", "ca.pem")


# -- looking around -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_devices_as_json() -> None:
    found = json.loads(ok("devices", "--json"))
    assert found and all(set(d) >= {"target", "usable"} for d in found)
    assert all("reason" in d or d["fingerprint"]["kind"] == d["target"] for d in found)


@pytest.mark.process
def test_doctor_as_json_and_as_text(records: str) -> None:
    found = json.loads(ok("doctor", "--json", "--db", records))
    areas = {f["area"] for f in found}
    assert areas >= {"machine", "device", "compiler", "library", "database", "threads", "package"}
    database = next(f for f in found if f["area"] == "database")
    assert database["state"] == "ok" and "6 measurements on 2 targets" in database["result"]
    text = ok("doctor")
    assert "numpy" in text and not [line for line in text.splitlines() if line != line.rstrip()]
    advice, findings = text.find("\nAdvice\n"), text.index("python")
    assert advice < findings < text.find("Known faults"), "what needs to be done comes first"


# -- the database -------------------------------------------------------------------------------------------------------------


def test_stats(records: str) -> None:
    found = {s["target"]["key"]: s for s in json.loads(ok("db", "stats", "--db", records, "--json"))}
    assert found[ZEN.key]["measurements"] == 5 and found[ZEN.key]["failures"] == {"compile": 1}
    assert found[ZEN_OLD.key]["kinds"] == {"tuned": 1}
    assert ZEN.key[:12] in ok("db", "stats", "--db", records)


def test_top_is_by_target_and_best_first(records: str) -> None:
    assert "--on" in refused("db", "top", "--db", records)
    rows = json.loads(ok("db", "top", "--db", records, "--on", ZEN.key[:8], "--json"))
    assert [(r["name"], r["symbols"]["n"], r["median_secs"]) for r in rows] == [
        ("matmul", 8, 1e-3),
        ("matmul", 8, 2e-3),
        ("matmul", 64, 5e-3),
        ("softmax", 8, 7e-6),
    ]
    one = json.loads(ok("db", "top", "softmax", "--db", records, "--on", ZEN.key, "--json"))
    assert [r["kind"] for r in one] == ["library"]
    assert "1.00 ms" in ok("db", "top", "w-mat", "-n", "1", "--db", records, "--on", ZEN.key)
    assert "w-matmul" in refused("db", "top", "nothing", "--db", records, "--on", ZEN.key)


def test_show(records: str) -> None:
    assert MATMUL.text in ok("db", "show", "matmul", "--db", records)
    assert "avx512" in ok("db", "show", ZEN.key, "--db", records)
    assert json.loads(ok("db", "show", "job-1", "--db", records, "--json"))[0]["state"] == "interrupted"
    assert "nothing-here" in refused("db", "show", "nothing-here", "--db", records)


def test_runs_are_listed(records: str) -> None:
    assert json.loads(ok("jobs", "runs", "--db", records, "--json")) == [
        {"id": "job-1", "state": "interrupted", "settings": {"effort": "quick", "seed": 0}}
    ]
    assert "effort=quick" in ok("jobs", "runs", "--db", records)


@pytest.mark.slow
@pytest.mark.parametrize(
    "url", ["postgresql://me:hunter2@127.0.0.1:1/x", "postgresql://me@127.0.0.1:1/x?password=hunter2"]
)
def test_merge_from_url_with_password_is_refused(url: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["db", "merge", url, "--db", str(tmp_path / "own.db")])
    assert done.exit_code == 2 and "without a password" in done.stderr and "hunter2" not in done.output
    assert not (tmp_path / "own.db").exists()


def test_export_import_and_merge_carry_everything(records: str, elsewhere: Path) -> None:
    ok("db", "export", "all.jsonl", "--db", records)
    copy, merged = f"sqlite:///{elsewhere / 'copy.db'}", f"sqlite:///{elsewhere / 'merged.db'}"
    assert "6 new measurements" in ok("db", "import", "all.jsonl", "--db", copy)
    assert "0 new measurements" in ok("db", "import", "all.jsonl", "--db", copy)
    assert "6 new measurements" in ok("db", "merge", copy, "--db", merged)
    wanted = json.loads(ok("db", "stats", "--db", records, "--json"))
    assert json.loads(ok("db", "stats", "--db", merged, "--json")) == wanted
    ok("db", "export", "again.jsonl", "--db", copy, "--on", ZEN.key)
    assert "5 new measurements" in ok("db", "import", "again.jsonl", "--db", f"sqlite:///{elsewhere / 'zen.db'}")


@pytest.mark.slow
def test_lines_left_out_of_an_import_or_export_end_with_an_error(records: str, elsewhere: Path) -> None:
    ok("db", "export", "all.jsonl", "--db", records)
    lines = Path("all.jsonl").read_text().splitlines(keepends=True)
    Path("torn.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    done = RUNNER.invoke(app, ["db", "import", "torn.jsonl", "--db", f"sqlite:///{elsewhere / 'torn.db'}", "--json"])
    assert done.exit_code == 2 and json.loads(done.stdout)["left_out"] == 1, done.stderr
    assert json.loads(done.stdout)["measurements"] >= 5, "the other lines are stored"
    with sqlite3.connect(elsewhere / "records.db") as connection:
        connection.execute("UPDATE measurements SET samples = x'66ff' WHERE id = x'0161'")
    for form in ("jsonl", "t4"):
        arguments = ["db", "export", "rest", "--format", form, "--on", ZEN.key, "--db", records, "--json"]
        done = RUNNER.invoke(app, arguments)
        assert done.exit_code == 2 and json.loads(done.stdout)["left_out"] == 1, done.stdout + done.stderr
    done = RUNNER.invoke(app, ["db", "merge", records, "--db", f"sqlite:///{elsewhere / 'merged.db'}", "--json"])
    assert done.exit_code == 2 and json.loads(done.stdout)["measurements"] == 5, done.stdout + done.stderr


def test_t4_both_ways(records: str, elsewhere: Path) -> None:
    assert "5 measurements" in ok("db", "export", "t4.json", "--format", "t4", "--on", ZEN.key, "--db", records)
    assert json.loads((elsewhere / "t4.json").read_text())["metadata"]["autotuner"] == "relax-tune"
    assert "0 new measurements" in ok("db", "import", "t4.json", "--format", "t4", "--on", ZEN.key, "--db", records)
    assert "jsonl or t4" in refused("db", "import", "t4.json", "--format", "csv", "--db", records)
    other = f"sqlite:///{elsewhere / 'other.db'}"
    with open_store(other) as store:
        filled(store)
    source = ("db", "import", "t4.json", "--format", "t4", "--on", ZEN_OLD.key, "--db", other)
    assert "5 new measurements" in ok(*source, "--workload", "softmax")  # each result stays what it was measured for
    assert "0 new measurements" in ok(*source)
    with open_store(other, create=False) as store:
        assert {m.variant.kind for m in store.query(ZEN_OLD.key, SOFTMAX.key)} == {"library"}


def test_t4_of_another_device_does_not_count_for_the_only_one(records: str, elsewhere: Path) -> None:
    ok("db", "export", "t4.json", "--format", "t4", "--on", ZEN.key, "--db", records)
    other = f"sqlite:///{elsewhere / 'old.db'}"
    with open_store(other) as store:
        store.add_target(ZEN_OLD)
    assert "5 new measurements" in ok("db", "import", "t4.json", "--format", "t4", "--db", other)
    with open_store(other, create=False) as store:
        assert not store.query(ZEN_OLD.key) and len(store.query(ZEN.key)) == 5


def test_unavailable_server_or_fleet_exits_with_try_again_later(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 4, and 2 for a mistake in the same place."""
    monkeypatch.setattr(client, "ANSWER_SECS", 1.0)
    (elsewhere / "m.relax").write_text("")
    away = ("tune", "package:relax_tune/no-such", "--target", "c", "--wait-secs", "1")
    assert RUNNER.invoke(app, ["workers", "tcp://127.0.0.1:9"]).exit_code == 4
    for database, code in (("postgresql://x@127.0.0.1:9/x", 4), ("postgresql://x@no-such-host.invalid/x", 2)):
        assert RUNNER.invoke(app, ["db", "stats", "--db", database]).exit_code == code
    assert RUNNER.invoke(app, [*away]).exit_code == 2
    assert "at least 1" in refused("tune", "m.relax", "--wait-secs", "0")


def test_prune_needs_a_condition_and_can_be_tried(records: str) -> None:
    assert "--failed" in refused("db", "prune", "--on", ZEN.key, "--db", records)
    assert "1 measurements would" in ok("db", "prune", "--failed", "--dry-run", "--on", ZEN.key, "--db", records)
    assert "1 measurements removed" in ok("db", "prune", "--failed", "--on", ZEN.key, "--db", records)
    assert "0 measurements removed" in ok("db", "prune", "--failed", "--on", ZEN.key, "--db", records)


def test_prune_by_worker_job_and_moment_removes_no_others(elsewhere: Path) -> None:
    url = f"sqlite:///{elsewhere / 'units.db'}"
    told = {"worker": "gpu1/cuda:0", "host": "gpu1", "unit": "GPU-aa"}
    with open_store(url) as store:
        filled(store).put_job(JobRecord("f00d@gpu1", state="done"))
        late = timing("late", 1.0, tile=2, measured_at=2e9, job="f00d@gpu1", **told)
        store.add_measurements([timing("early", 1.0, measured_at=1e9, **told), late, timing("unknown", 1.0, tile=3)])
    here = ("--on", ZEN.key, "--db", url)
    assert "GPU-aa" in ok("db", "units", *here)
    for arguments, count in (
        (("--worker", "gpu1"), 2),
        (("--worker", "gpu1", "--since", "2030-01-01"), 1),
        (("--job", "f00"), 1),
        (("--job", "0bad"), 0),
    ):
        assert f"{count} measurements would" in ok("db", "prune", *arguments, "--dry-run", *here)
    assert "1 measurements removed" in ok("db", "prune", "--worker", "GPU-aa", "--since", "2030-01-01 00:00", *here)


@pytest.mark.parametrize("days", ["-5", "nan", "-inf"])
def test_prune_with_wrong_age_removes_nothing(records: str, days: str) -> None:
    said = refused("db", "prune", "--older-than", days, "--on", ZEN.key, "--db", records)
    assert "--older-than expects a number of days" in said
    assert "0 measurements removed" in ok("db", "prune", "--older-than", "1e9", "--on", ZEN.key, "--db", records)


def test_refused_command_makes_no_database(elsewhere: Path) -> None:
    (elsewhere / "there.jsonl").write_text("{}\n")
    for command in (
        ("prune", "--failed"),
        ("import", "missing.jsonl"),
        ("import", "there.jsonl", "--format", "csv"),
        ("import", "there.jsonl", "--format", "t4", "--workload", "softmax"),
    ):
        refused("db", *command, "--db", "new.db")
        assert not list(elsewhere.glob("new.db*"))


def test_database_without_targets_error_names_tune(elsewhere: Path) -> None:
    Path("new.db").touch()
    ok("db", "upgrade", "--db", "new.db")
    assert "`relax-tune tune` adds" in refused("db", "top", "--db", "new.db")


def test_check_and_upgrade(records: str) -> None:
    assert "nothing wrong" in ok("db", "check", "--db", records)
    assert "unchanged" in ok("db", "upgrade", "--db", records)
    for command in ("check", "upgrade"):
        assert "no file" in refused("db", command, "--db", "sqlite:///missing.db")
    assert not Path("missing.db").exists()


def test_wrong_npz_error_does_not_mention_pickle(elsewhere: Path) -> None:
    for content in (b"# a page of text\n", b"", b"\x80\x04K\x01."):
        (elsewhere / "x.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.npz: .*\.npz file of plain arrays") as caught:
            read_arrays(elsewhere / "x.npz")
        assert "unsafe" not in str(caught.value) and "numpy.savez" in str(caught.value)


READERS = (
    ("build", "m.relax", "--target", "c"), ("pack", "m.relax"), ("report", "m.relax", "--target", "c"), ("report",),
    ("plan", "m.relax", "--target", "c"), ("plan", "m.relax", "--target", "c", "--restore", "x"), ("dashboard",),
    ("model", "train", "--target", "c", "--out", "x.prior"), ("model", "evaluate", "--target", "c"), ("show", "softmax", "--target", "c"),
    ("jobs", "list"), ("jobs", "show", "x"), ("jobs", "logs", "x"), ("jobs", "cancel", "x"), ("jobs", "retry", "x"),
    ("jobs", "wait", "x"), ("jobs", "fetch", "x"), ("jobs", "runs"),
    ("db", "stats"), ("db", "top"), ("db", "units"), ("db", "show", "x"), ("db", "export", "x.jsonl"), ("db", "check"),
    ("db", "prune", "--failed"), ("db", "import", "x.json", "--format", "t4", "--on", "x"),
)  # fmt: skip
"""Commands that read a database and have nothing to do without one."""


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_reading_a_missing_database_names_a_similar_one(elsewhere: Path, arguments: tuple[str, ...]) -> None:
    open_store("sqlite:///records.db").close()
    save_text(row_scale(), elsewhere / "m.relax")
    (elsewhere / "x.json").write_text("{}")
    before = set(elsewhere.iterdir())
    said = refused(*arguments, "--db", "recrods.db")
    assert "recrods.db: no file exists at this path; did you mean records.db?" in said
    assert set(elsewhere.iterdir()) == before


def test_build_without_records_says_so_on_stderr(elsewhere: Path) -> None:
    open_store("sqlite:///records.db").close()
    save_text(row_scale(), elsewhere / "m.relax")
    given = ("build", "m.relax", "--target", "c", "--db", "records.db", "--no-self-test", "--out", "m.rta")
    done = CliRunner().invoke(app, given)
    said = " ".join(done.stderr.split())
    assert done.exit_code == 0 and (elsewhere / "m.rta").exists()
    for part in ("warning: 1 of 1 tasks have no usable record", "sqlite:///records.db", "softmax", "relax-tune tune"):
        assert part in said, said
    assert "warning" not in CliRunner().invoke(app, [*given, "--policy", "generic", "--overwrite"]).stderr
    (elsewhere / "m.rta").unlink()
    assert "softmax" in refused(*given, "--require-measured") and not (elsewhere / "m.rta").exists()
    assert "--require-measured expects the policy" in refused(*given, "--require-measured", "--policy", "library")


@pytest.mark.process
@pytest.mark.ccompiler
def test_run_arrays_of_small_types_are_bytes_in_files(tmp_path: Path) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"),), f8e5m2)
    artifact = rt.build(g.finish(g.call(Concat(0), x, x)), target="c", db="memory://")
    given, found = np.array([0.3, -np.inf, 5], np.float32).astype("float8_e5m2"), tmp_path / "out.npz"
    write_arrays(tmp_path / "in.npz", {"x": given})
    artifact.save(tmp_path / "m.rta")
    run(tmp_path / "m.rta", inputs=tmp_path / "in.npz", out=found)
    np.testing.assert_array_equal(read_arrays(found)["output0"], np.tile(given, 2).view(np.uint8))


def test_arrays_are_written_through_no_waiting_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in (f"x.npz.{os.getpid()}.part", ".x.npz.part", "x.npz.part"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    write_arrays(tmp_path / "x.npz", {"x": np.ones(3, np.float32)})
    assert (tmp_path / "precious").read_text() == "precious" and len(read_arrays(tmp_path / "x.npz")) == 1


def test_arrays_of_bfloat16_come_back_from_a_file(tmp_path: Path) -> None:
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3).astype("bfloat16"), "y": np.zeros((), np.float16)}
    write_arrays(tmp_path / "x.npz", arrays)
    found = read_arrays(tmp_path / "x.npz")
    assert {n: a.dtype for n, a in found.items()} == {n: a.dtype for n, a in arrays.items()}
    np.testing.assert_array_equal(found["x"].astype(int), [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("command", ["tune", "build", "plan", "report", "show --task x"])
def test_missing_model_is_refused_before_a_device_is_chosen(command: str) -> None:
    done = RUNNER.invoke(app, [*command.split(), "missing.onnx"])
    assert done.exit_code == 2 and done.stderr.startswith("error: missing.onnx: no such file"), done.stderr
