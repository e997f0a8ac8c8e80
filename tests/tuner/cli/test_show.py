"""`relax-tune show`: models, tasks, and what is said when there is nothing to show. Times are made up, the device is real."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tuner.cli.cli_model import LAYERS, make_bert
from typer.testing import CliRunner

from relax_tune.database.records import Measurement, VariantRecord, Workload
from relax_tune.database.store import MemoryStore, open_store
from relax_tune.errors import ScheduleError, UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.passes.pipeline import STANDARD, Level, lower, passes_for
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import instantiate, simplify_func
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.cli.report.model_view import program_after, stage_names
from relax_tune.tuner.cli.report.task_view import SECTIONS, TaskView, _legal, recorded_task
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.search.space import Parameter, SketchSpace
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.variants import TaskVariants

pytestmark = pytest.mark.ccompiler
RUNNER = CliRunner()
TASK = "fused_matmul_add_gelu"
BOUNDS = {"b": (1, 4), "n": (1, 32)}
CANDIDATES = 14
BRANCHING = """module(version=1)

@function
def callee(x: Tensor((n,), f32)) -> Tensor((n,), f32):
    with dataflow():
        y: Tensor((n,), f32) = op.exp(x)
    return y

@function
def main(c: Tensor((), bool), x: Tensor((m,), f32)) -> Tensor((m,), f32):
    y: Tensor((m,), f32)
    if c:
        with dataflow():
            a: Tensor((m,), f32) = call("callee", x)
        y = a
    else:
        y = x
    return y
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `bert`, and a database, `r.db`, with made-up times of one task on this machine's C device."""
    folder = tmp_path_factory.mktemp("show")
    make_bert(folder / "bert")
    with open_store(f"sqlite:///{folder / 'r.db'}") as store:
        fill(device_job(load_model(folder / "bert", BOUNDS), device_info("c"), store, Settings(target="c")), CANDIDATES)
    return folder


def fill(job: DeviceJob, count: int) -> None:
    """Records of TASK: the generic form, `count` tuned candidates whose times grow with their parameters, one failure."""
    task_variants = job.task_variants[TASK]
    task, target = task_variants.task, job.store.add_target(job.target)
    job.store.add_workload(Workload(task.key, task.text, 1, task.name))
    drawn = task_variants.sketch_set.space.sample(np.random.default_rng(1), 4 * count)
    drawn = drawn[drawn[:, 0] < len(task_variants.sketch_set.sketches) - 1]  # the last sketch is left untried
    *tuned, failed = [
        task_variants.sketch_set.record_of(c)
        for c in task_variants.sketch_set.space.candidates(drawn)[:: len(drawn) // (count + 1)][: count + 1]
    ]
    records = [Measurement("f", task.key, target, failed, status="failed", stage="compile", message="refused")]
    for variant in (*tuned, task_variants.sketch_set.generic()):
        for binding in task.bindings():
            secs = 1e-6 * (1 + binding["s0"]) * (made_up(variant.values) if variant.kind == "tuned" else 500)
            records.append(
                Measurement(
                    f"{variant.key}-{binding['s0']}",
                    task.key,
                    target,
                    variant,
                    symbols=binding,
                    samples_secs=(secs,),
                    checked=True,
                )
            )
    job.store.add_measurements(records)


def made_up(values: dict[str, int]) -> float:
    return 1.0 + sum(values[name] / (1 + place) for place, name in enumerate(sorted(values)))


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARGET", "DB", "EFFORT", "TRIALS", "SEED", "STRATEGY", "SCHEDULER"):
        monkeypatch.delenv(f"RELAX_TUNE_{name}", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(place / "data"))
    monkeypatch.chdir(place)


def ok(*arguments: str) -> str:
    done = RUNNER.invoke(app, ["show", *arguments])
    assert done.exit_code == 0, f"{done.stdout}{done.stderr}{done.exception!r}"
    return done.stdout


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ok(*arguments, "--json"))
    return found


def refused(*arguments: str) -> str:
    done = RUNNER.invoke(app, ["show", *arguments])
    assert done.exit_code == 2 and done.stdout == "", f"{done.exit_code}: {done.stdout}{done.stderr}{done.exception!r}"
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    return done.stderr


def of_task(*more: str) -> tuple[str, ...]:
    return ("bert", "--task", TASK, "--target", "c", "--db", "r.db", "--bound", "b=1:4", "--bound", "n=1:32", *more)


# -- models -------------------------------------------------------------------------------------------------------------


def test_show_model_lists_tasks_and_program_after_every_stage() -> None:
    found = document("bert", "--bound", "b=1:4")
    tasks = {t["name"]: t for t in found["tasks"]}
    assert tasks[TASK]["calls"] == LAYERS == len(tasks[TASK]["sites"])
    assert tasks[TASK]["symbols"] == {"s0": "b*n"} and tasks[TASK]["shapes"][-1] == {"s0": 128}
    module = load_model("bert", {"b": (1, 4)})
    lowered = lower(module)
    assert found["after"] == "imported" and found["program"] == print_text(module)
    assert set(tasks) == set(lowered.prims)
    assert document("bert", "--bound", "b=1:4", "--after", "lowered")["program"] == print_text(lowered.module)
    step = module
    for number, (name, run) in enumerate(zip(stage_names()[1:], [p for p in STANDARD if not isinstance(p, Level)]), 1):
        step = run(step)
        assert print_text(program_after(module, name)) == print_text(step), (number, name)
    text = ok("bert", "--after", "fuseops")  # any case
    assert "call_tir" in text and TASK in text and "b*n=1:" in text
    assert "call_tir" not in ok("bert", "--what", "tasks")
    assert "Tasks" not in ok("bert", "--what", "program")


def test_show_merged_qkv_and_branching_programs() -> None:
    options = ("bert", "--bound", "b=1:4", "--qkv", "merged")
    passes = passes_for("merged")
    module = load_model("bert", {"b": (1, 4)})
    lowered = lower(module, passes)
    assert {t["name"] for t in document(*options)["tasks"]} == set(lowered.prims) != set(lower(module).prims)
    assert document(*options, "--after", "lowered")["program"] == print_text(lowered.module)
    counts = [
        document(*options, "--after", stage)["program"].count("op.matmul")
        for stage in ("DeadCode", "CombineParallelMatmuls")
    ]
    assert counts[1] < counts[0]
    assert "CombineParallelMatmuls" in refused(*options, "--after", "none")
    Path("side.relax").write_text(BRANCHING)
    assert document("side.relax", "--after", "lowered")["program"] == print_text(lower(load_model("side.relax")).module)
    assert "callee" not in ok("side.relax", "--after", "DeadCode")


def test_show_wrong_name_error_lists_known_names() -> None:
    assert "FuseOps" in refused("bert", "--after", "Fuse") and "DeadCode.2" in refused("bert", "--after", "Fuse")
    assert "program, tasks" in refused("bert", "--what", "source")
    assert "sketches" in refused(*of_task("--what", "programme"))
    assert TASK in refused("bert", "--task", "matmul", "--target", "c")
    assert "abacus" in refused("bert", "--task", TASK, "--target", "abacus")
    assert "such file" in refused("./nothing")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bert", "--target", "c"), "--target does not apply"),
        (("bert", "--db", "r.db"), "--db does not apply"),
        (("bert", "--of", "best"), "--of does not apply"),
        (("bert", "--after", "FuseOps", "--what", "tasks"), "--after does not apply"),
        (("bert", "--task", TASK, "--after", "FuseOps"), "--after does not apply"),
        ((TASK, "--bound", "n=1:2"), "--bound does not apply"),
        ((TASK, "--task", TASK), "--task does not apply"),
        ((TASK, "--effort", "full"), "--effort does not apply"),
        ((TASK, "--qkv", "merged"), "--qkv does not apply"),
        ((TASK, "--target", "c", "--db", "r.db", "--of", "best", "--what", "text"), "--of does not apply"),
    ],
)
def test_show_option_without_effect_is_refused(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(*arguments)


# -- tasks --------------------------------------------------------------------------------------------------------------


def test_show_trace_runs_as_python_and_gives_loops_and_source() -> None:
    found = document(*of_task())
    assert set(found) >= set(SECTIONS) and found["notes"] == []
    assert (found["candidates"], found["measurements"]) == (CANDIDATES + 1, 6 * (CANDIDATES + 1) + 1)
    tried = [row for row in found["sketches"] if row["tried"]]
    assert sum(row["tried"] for row in tried) == CANDIDATES + 1 and sum(row["failed"] for row in tried) == 1
    best = found["variant"]
    with open_store("sqlite:///r.db", read_only=True) as store:
        (workload,) = store.workloads(None)
        records = store.query(found["target"]["key"], workload.key, status="ok", kinds=["tuned"])
    assert made_up(best["parameters"]) == min(made_up(r.variant.values) for r in records)
    assert found["text"] == workload.text
    s = Schedule(parse_prim_func(found["text"]))
    exec(found["trace"]["python"], {"s": s})
    (loops,) = found["loops"]
    assert print_text(simplify_func(s.func)).replace("def main(", f"def {TASK}(") == loops
    assert all(k["language"] == "c" and k["name"] in k["source"] for k in found["source"])
    shapes = [row["shape"] for row in found["times"]]
    assert shapes[0] == {"b*n": 1} and shapes[-1] == {"b*n": 128}
    assert all(row["tuned"] < row["generic"] and row["dispatched"] == "tuned" for row in found["times"])


def test_show_text_agrees_with_json() -> None:
    text = ok(*of_task("--what", "all"))
    found = document(*of_task())
    for part in (
        found["text"],
        found["trace"]["python"],
        *found["loops"],
        *(k["source"].rstrip() for k in found["source"]),
    ):
        assert part in text
    for row in found["sketches"]:
        assert row["name"] in text
    assert "s0 = b*n" in text and "NR: 16" in text.replace("NR: 8, ", "NR: ")
    short = ok(*of_task())
    assert found["source"][0]["source"] not in short and found["trace"]["python"] in short


def test_a_task_on_record_needs_no_model() -> None:
    whole = document(*of_task())
    for subject in (TASK, whole["task"]["key"][:8]):
        found = document(subject, "--target", "c", "--db", "r.db")
        for section in ("text", "trace", "source"):
            assert found[section] == whole[section], section
        for here, there in zip(found["sketches"], whole["sketches"], strict=True):
            assert {**here, "best_secs": None} == {**there, "best_secs": None}  # the shapes weigh differently
        assert found["variant"]["parameters"] == whole["variant"]["parameters"]
        assert [s["s0"] for s in found["task"]["shapes"]] == [s["s0"] for s in whole["task"]["shapes"]]


def test_other_variants_can_be_looked_at() -> None:
    generic = document(*of_task("--of", "generic"))
    assert generic["variant"]["kind"] == "generic" and generic["variant"]["median_secs"][0] == pytest.approx(1e-3)
    rows = generic["sketches"]
    fresh = next(row["name"] for row in rows if not row["tried"])
    unmeasured = document(*of_task("--of", fresh))["variant"]
    assert unmeasured["sketch"] == fresh and unmeasured["why"].startswith("not measured")
    known = next(row["name"] for row in rows if row["tried"] > row["failed"])
    measured = document(*of_task("--of", known))["variant"]
    assert measured["sketch"] == known and None not in measured["median_secs"]
    assert document(*of_task("--of", measured["key"][:10]))["variant"] == {**measured, "why": "by its key"}
    assert known in refused(*of_task("--of", "nonsense"))


def test_show_without_records_names_the_tune_command() -> None:
    found = document("bert", "--task", TASK, "--target", "c", "--db", "none.db")
    assert "no database" in found["notes"][0] and "relax-tune tune bert --target c" in found["notes"][-1]
    assert found["variant"]["kind"] == "tuned" and found["candidates"] == 0
    assert found["dispatch"] and all(d["variant"].startswith("predicted, tuned ") for d in found["dispatch"])
    assert "got 0" in found["model"]["lacks"]
    assert not Path("none.db").exists()
    empty = document("bert", "--task", "layer_norm", "--target", "c", "--db", "r.db")
    assert "nothing is on record for c" in empty["notes"][0]
    assert "--of best" in refused("bert", "--task", "layer_norm", "--target", "c", "--db", "r.db", "--of", "best")
    assert "no such file" in refused(TASK, "--target", "c", "--db", "none.db")
    assert TASK in refused("layer_norm", "--target", "c", "--db", "r.db")


def test_records_of_another_device_are_mentioned_not_used() -> None:
    store = MemoryStore()
    info = DeviceInfo("c", "made up", (("kind", "c"),), (("max_vector_lanes", 8), ("registers", 16), ("workers", 2)))
    job = device_job(load_model("bert", BOUNDS), info, store, Settings(target="c"))
    fill(job, 4)
    with open_store("sqlite:///other.db") as other:
        other.add_target(job.target)
        for workload in store.workloads(None):
            other.add_workload(workload)
        other.add_measurements(store.query(job.target.key))
    found = document("bert", "--task", TASK, "--target", "c", "--db", "other.db", "--bound", "b=1:4")
    assert found["measurements"] == 0 and any(
        "31 measurements are on record for c, made up" in n for n in found["notes"]
    )


def test_an_altered_workload_is_not_shown_as_something_else(place: Path) -> None:
    job = device_job(load_model("bert", BOUNDS), device_info("c"), MemoryStore(), Settings(target="c"))
    task, other = job.task_variants[TASK].task, job.task_variants["layer_norm"].task
    with pytest.raises(UserError, match="altered"):
        recorded_task(Workload(task.key, other.text, 1, task.name), [])
    with pytest.raises(UserError, match="version"):
        recorded_task(Workload(task.key, "def main(", 1, task.name), [])
    again = recorded_task(Workload(task.key, task.text, 1, task.name), [])
    assert again.key == task.key and again.domain.points[0] == (1,) and again.domain.points[-1] == (512,)


# -- what the cost model thinks -----------------------------------------------------------------------------------------


def test_show_model_predicts_unseen_candidates() -> None:
    model = document(*of_task())["model"]
    assert model["candidates"] == CANDIDATES and model["failed"] == 1
    measured = [sum(map(math.log, row["measured_secs"])) for row in model["rows"]]
    assert measured == sorted(measured) and len(measured) == 4
    off = [
        abs(math.log(p / m))
        for row in model["rows"]
        for p, m in zip(row["predicted_secs"], row["measured_secs"], strict=True)
    ]
    assert 0 < np.median(off) < math.log(3)  # made-up times follow a law; 0 would mean it had seen them
    assert {"flops", "padding", "vector"} <= set(model["features"]) and all(
        len(v) == 6 for v in model["features"].values()
    )
    flops = model["features"]["flops"]
    assert flops == sorted(flops) and flops[0] < flops[-1]


def test_too_few_candidates_for_a_cost_model_and_some_of_another_version() -> None:
    job = device_job(load_model("bert", BOUNDS), device_info("c"), MemoryStore(), Settings(target="c"))
    fill(job, 5)
    task_variants = job.task_variants[TASK]
    view = TaskView(task_variants, job.store.query(job.target.key, task_variants.task.key))
    lacks = "expected at least 8 candidates with times to train on, got 5"
    assert view.model() == {"candidates": 5, "lacks": lacks}
    old = VariantRecord("tuned", "matmul.of.old", '{"steps":[],"tunables":{}}')
    first = task_variants.task.bindings()[0]
    record = Measurement("o", task_variants.task.key, job.target.key, old, first, samples_secs=(1e-3,), checked=True)
    found = TaskView(task_variants, [*view.records, record]).model()
    assert found == {"candidates": 5, "lacks": f"{lacks} (and 1 of sketches this version does not make)"}


# -- parts --------------------------------------------------------------------------------------------------------------


def test_every_sketch_s_trace_runs_as_python(place: Path) -> None:
    job = device_job(load_model("bert", BOUNDS), device_info("c"), MemoryStore(), Settings(target="c"))
    for task_variants in job.task_variants.values():
        for sketch in task_variants.sketch_set.sketches:
            values = {t.name: t.domain[len(t.domain) // 2] for t in sketch.tunables}
            s = Schedule(task_variants.task.func)
            exec(Trace.from_json(sketch.trace.to_json()).as_python(values), {"s": s})
            assert print_text(simplify_func(s.func)) == print_text(instantiate(sketch, values)), sketch.name
    sketch = next(s for s in job.task_variants[TASK].sketch_set.sketches if s.tunables)
    first, *others = sketch.tunables
    with pytest.raises(ScheduleError, match=first.name):
        sketch.trace.as_python({first.name: max(first.domain) + 1, **{t.name: t.domain[0] for t in others}})


def test_legal_points_are_counted_or_estimated() -> None:
    small = SketchSpace(
        "small", (Parameter("A", (1, 2, 3)), Parameter("B", (1, 2))), lambda rows: rows[:, 0] != rows[:, 1]
    )
    assert _legal(small) == (4, True)
    wide = tuple(Parameter(name, tuple(range(100))) for name in "ABC")
    legal, exact = _legal(SketchSpace("large", wide, lambda rows: rows[:, 0] < 25))
    assert not exact and 230_000 < legal < 270_000
    assert _legal(SketchSpace("free", wide)) == (1_000_000, True)


def test_choices_are_not_changed_by_looking(place: Path) -> None:
    job = device_job(load_model("bert", BOUNDS), device_info("c"), MemoryStore(), Settings(target="c"))
    fill(job, 4)
    task_variants: TaskVariants = job.task_variants[TASK]
    before = job.store.query(job.target.key, task_variants.task.key)
    for of in (None, "generic"):
        view = TaskView(task_variants, before, of)
        assert [type(view.variant[0])] == [VariantRecord] and all(SECTIONS[name](view) is not None for name in SECTIONS)
    assert job.store.query(job.target.key, task_variants.task.key) == before
