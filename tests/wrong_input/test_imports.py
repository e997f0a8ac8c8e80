"""Files to import that a stranger made: each line or result is taken or left out with a reason, and nothing else happens."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.database.exchange.t4_texts import t4_measurements, t4_text
from tests.database.records_made import MATMUL, ZEN, ZEN_OLD, filled, timing
from tests.wrong_input.storage_cases import files, inside, made_database, refused
from tests.wrong_input.test_artifacts import ODD

from relax_tune.database.exchange.jsonl import export_lines, import_lines
from relax_tune.database.memory_store import MemoryStore
from relax_tune.database.store import open_store
from relax_tune.errors import DatabaseError

COMMAND = "from relax_tune.tuner.cli.app import main; main()"
MORE_ODD: list[Any] = [*ODD, [[]] * 50, {"n": 1.5}, {"n": 2**70}, ["a", "b"], [["a", "b"]], "1e999", "[1]", '{"t":"x"}']


def _changed(document: Any, generator: random.Random) -> str:
    """JSON text with a few values, names or braces gone wrong."""
    document = copy.deepcopy(document)
    for _ in range(generator.choice([1, 1, 3])):
        inside_: Any = document
        while isinstance(inside_, (dict, list)) and inside_:
            keys = list(inside_) if isinstance(inside_, dict) else list(range(len(inside_)))
            key = generator.choice(keys)
            if not isinstance(inside_[key], (dict, list)) or generator.random() < 0.3:
                if generator.random() < 0.3:
                    del inside_[key]
                else:
                    inside_[key] = generator.choice(MORE_ODD)
                break
            inside_ = inside_[key]
    text = json.dumps(document).replace("Infinity", generator.choice(["1e999", "Infinity", "NaN"]))
    return text[: generator.randrange(len(text))] if generator.random() < 0.1 else text


def test_hostile_lines_are_left_out_with_a_reason(tmp_path: Path) -> None:
    with open_store(str(made_database(tmp_path / "x.db", 12))) as store:
        lines = list(export_lines(store))
    generator = random.Random(5)
    left_out = 0
    for _ in range(40):
        hostile = [_changed(json.loads(line), generator) if generator.random() < 0.2 else line for line in lines]
        with MemoryStore() as into:
            report = import_lines(into, hostile)
            assert into.check() == [] and report.lines == len(lines)
            left_out += report.left_out
            for problem in report.problems:
                assert 0 < problem.line <= len(lines) and len(problem.why) < 1000
    assert left_out > 100


def test_hostile_t4_is_one_error(tmp_path: Path) -> None:
    document = json.loads(t4_text(ZEN, [timing(f"m{i}", 1e-3 * (i + 1), tile=i + 1) for i in range(3)]))
    generator = random.Random(6)
    refusals = 0
    for _ in range(300):
        try:
            t4_measurements(_changed(document, generator), MATMUL.key, ZEN.key)
        except DatabaseError as error:
            assert len(str(error)) < 1500
            refusals += 1
    assert refusals > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ""),
        (b"\n\n", ""),
        (b"\x89PNG\r\n\x1a\n" + bytes(500), "none of the"),
        (b"hello\n" * 9, "none of the"),
        (b"[" * 100_000 + b"\n", "none of the"),
        (b'{"v": 99, "record": "target"}\n', "expected form 2"),
        (b'{"v": ' + b"9" * 6000 + b"}\n", "none of the"),
        (b'{"v": ' + b"9" * 4000 + b', "record": "target"}\n', "expected form 2"),
    ],
    ids=["empty", "blank", "png", "text", "deep", "newer", "many digits", "large form"],
)
def test_import_of_foreign_file_changes_nothing(tmp_path: Path, content: bytes, says: str) -> None:
    made_database(tmp_path / "x.db", 4)
    before = files(tmp_path)["x.db"]
    (tmp_path / "records.jsonl").write_bytes(content)
    if says:
        assert says in refused(tmp_path, "db", "import", "records.jsonl", "--db", "x.db")
    else:
        assert inside(tmp_path, "db", "import", "records.jsonl", "--db", "x.db").exit_code == 0
    assert files(tmp_path)["x.db"] == before
    t4 = ("db", "import", "records.jsonl", "--format", "t4", "--workload", MATMUL.key, "--on", ZEN.key, "--db", "x.db")
    assert "T4" in refused(tmp_path, *t4)


@pytest.mark.process
def test_two_imports_into_one_database_at_once(tmp_path: Path) -> None:
    """Into a file that neither finds: both make it, nothing is lost, nothing counted twice."""
    for name, count in (("a", 40), ("b", 60)):
        with open_store("memory://") as store:
            filled(store).add_measurements([timing(f"{name}{i}", 1.0 + i, tile=i % 7 + 1) for i in range(count)])
            store.add_measurements([timing("both", 9.0, target=ZEN_OLD)])
            (tmp_path / f"{name}.jsonl").write_text("\n".join(export_lines(store)) + "\n")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, "db", "import", f"{name}.jsonl", "--db", "new.db", "--json"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for name in ("a", "b")
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    with open_store(str(tmp_path / "new.db")) as store:
        assert store.check() == []
        assert store.count(ZEN.key) == 100 and store.count(ZEN_OLD.key) == 1


@pytest.mark.process
def test_export_to_fifo_keeps_fifo(tmp_path: Path) -> None:
    made_database(tmp_path / "x.db", 4)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert inside(tmp_path, "db", "export", "pipe", "--db", "x.db").exit_code == 0
    out, _ = reader.communicate(timeout=60)
    assert pipe.is_fifo() and json.loads(out.splitlines()[0])["record"] == "target"
