"""The registry of rules: rules of other packages, their order, and the cost of a broken one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import schedule_functions as make
from tests.support.candidates import MACHINES
from tests.support.meaning import assert_same_meaning
from tests.support.tuner_models import task_variants_of

from relax_tune.errors import BuildError
from relax_tune.plugins import PluginWarning
from relax_tune.schedules.sketch import RULES, generate_sketches, instantiate, plugin_rules, rules_for
from relax_tune.tuner.task.domain import Domain

RULE = """
from relax_tune.schedules.schedule import Schedule


def sketches(func, hardware):
    s = Schedule(func)
    loop = s.loops_of("squash")[0]
    outer, inner = s.split(loop, [None, s.tunable("T", (4, 8))])
    yield "strips", s


def failing(func, hardware):
    yield "failing.first", Schedule(func)
    raise ValueError("no more sketches")


def misnamed(func, hardware):
    yield "matmul.mine", Schedule(func)


def incomplete(func, hardware):
    s = Schedule(func)
    s.split(s.loops_of("squash")[0], [None, s.tunable("T", (4, 8))])
    s.guess({})
    yield "incomplete", s


VALUE = 3
"""

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package with the given entry points of rules."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strip_rules.py").write_text(textwrap.dedent(RULE))
    metadata = tmp_path / "strip_rules-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: strip-rules\nVersion: 1.0\n")

    def write(points: str) -> None:
        (metadata / "entry_points.txt").write_text(f"[relax_tune.rules]\n{points}\n")
        plugin_rules.cache_clear()

    yield write
    plugin_rules.cache_clear()


@pytest.mark.parametrize("kind", ["c", "gpu"])
def test_plugin_rule_follows_own_rules_and_precedes_fallback(install: Install, kind: str) -> None:
    install("strips = strip_rules:sketches")
    names = list(rules_for(MACHINES[kind]))
    assert names[-2] == "strips" and names[-1].endswith("fallback") and set(names[:-2]) < set(RULES)


def test_plugin_sketch_keeps_meaning(install: Install) -> None:
    install("strips = strip_rules:sketches")
    func = make.pointwise(1)
    (sketch,) = (s for s in generate_sketches(func, MACHINES["c"]) if s.name == "strips")
    assert_same_meaning(func, instantiate(sketch, {"T": 8}), {"n": 13})


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("matmul = strip_rules:sketches", r"strip-rules.*'matmul'.*not in use"),
        ("mma = strip_rules:sketches", r"strip-rules.*'mma'.*not in use|not in use.*'mma'"),
        ("strips = strip_rules:VALUE", r"strip-rules.*'strips'.*a function.*3"),
    ],
)
def test_plugin_of_used_name_or_other_type_is_refused(install: Install, points: str, message: str) -> None:
    install(points)
    with pytest.raises(BuildError, match=message):
        rules_for(MACHINES["c"])


@pytest.mark.parametrize(
    ("points", "names", "warning"),
    [
        ("strips = no_such_module:sketches", [], "strip-rules.*'strips'.*no_such_module"),
        ("failing = strip_rules:failing", ["failing.first"], "'failing' failed.*ValueError: no more sketches"),
        ("incomplete = strip_rules:incomplete", [], "'incomplete' failed.*without T"),
        ("misnamed = strip_rules:misnamed", [], "'misnamed' failed.*such as misnamed.form, got .'matmul.mine'"),
    ],
)
def test_broken_plugin_rule_loses_only_plugin_sketches(
    install: Install, points: str, names: list[str], warning: str
) -> None:
    func = make.pointwise(1)
    expected = [s.name for s in generate_sketches(func, MACHINES["c"])]
    install(points)
    with pytest.warns(PluginWarning, match=warning):
        sketches = generate_sketches(func, MACHINES["c"])
    assert [s.name for s in sketches if s.name not in names] == expected


def test_record_of_absent_plugin_rule_is_refused(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path / "cache"))
    install("strips = strip_rules:sketches")
    func, domain = make.pointwise(1), Domain(((1,), (40,)), (0.5, 0.5))
    task_variants = task_variants_of(func, domain)
    record = next(
        r for r in map(task_variants.sketch_set.record_of, task_variants.sketch_set.seeds()) if r.sketch == "strips"
    )
    assert task_variants.stages(record)
    install("")
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path / "other cache"))
    with pytest.raises(BuildError, match=r"does not apply.*'strips'"):
        task_variants_of(func, domain).stages(record)
