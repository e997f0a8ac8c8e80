"""Settings from flags, environment, file and defaults."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

import relax_tune as rt
from relax_tune.errors import RelaxTuneWarning, UserError
from relax_tune.tuner.allowed_files import allow, is_allowed, revoke
from relax_tune.tuner.option import variable_of, with_arguments
from relax_tune.tuner.settings import (
    EFFORTS,
    FILE,
    OPTIONS,
    Settings,
    describe,
    find_sources,
    load_settings,
    merge_settings,
)

SOURCES: dict[str, st.SearchStrategy[Any]] = {
    "target": st.sampled_from(["c", "opencl", "opencl:part"]),
    "effort": st.sampled_from(sorted(EFFORTS)),
    "trials": st.integers(0, 1000),
    "seed": st.integers(-5, 2**40),
    "strategy": st.sampled_from(["evolution", "random"]),
    "scheduler": st.sampled_from(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]),
    "qkv": st.sampled_from(["separate", "merged"]),
    "precision": st.sampled_from(["f32", "f16", "bf16"]),
    "cache_dtype": st.sampled_from(["f32", "f16", "bf16"]),
    "shapes": st.sampled_from(["uniform", "profile"]),
    "memory": st.sampled_from(["symbolic", "constant-inplace"]),
    "checks": st.booleans(),
    "db": st.sampled_from(["a.db", "sqlite:///b.db"]),
}
SOME = st.fixed_dictionaries({}, optional=SOURCES)


@settings(max_examples=examples(60), deadline=None)
@given(flags=SOME, environment=SOME, file=SOME)
def test_flags_win_over_the_environment_over_the_file_over_defaults(
    tmp_path_factory: pytest.TempPathFactory, flags: dict[str, Any], environment: dict[str, Any], file: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("settings")
    text = "".join(f'{k} = "{v}"\n' if isinstance(v, str) else f"{k} = {str(v).lower()}\n" for k, v in file.items())
    (folder / "relax-tune.toml").write_text(text)
    variables = {f"RELAX_TUNE_{k.upper()}": str(v) for k, v in environment.items()}
    unset = {k: None for k in SOURCES if k not in flags}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        allow(folder / FILE, text.encode())
        found = load_settings({**unset, **flags}, variables, folder)
    for name in SOURCES:
        wanted = next((s[name] for s in (flags, environment, file) if name in s), getattr(Settings(), name))
        assert getattr(found, name) == wanted, name


def test_trials_override_candidates_of_effort() -> None:
    for effort, (candidates, batch, anchors, secs) in EFFORTS.items():
        found = load_settings({"effort": effort}, {})
        assert (found.candidates, found.batch, found.anchors, found.timing_secs) == (candidates, batch, anchors, secs)
    assert load_settings({"effort": "full", "trials": 3}, {}).candidates == 3
    assert load_settings({"trials": 0}, {}).candidates == 0


@pytest.mark.parametrize(
    ("flags", "environment", "file", "says"),
    [
        ({"checks": "yes"}, {}, "", "--checks expects true or false, got 'yes'"),
        ({}, {"RELAX_TUNE_CHECKS": "maybe"}, "", "RELAX_TUNE_CHECKS expects true or false, got 'maybe'"),
        ({}, {}, "checks = 1", "relax-tune.toml: checks expects true or false, got 1"),
        ({"precision": "int8"}, {}, "", "--precision expects one of f32, f16, bf16; got 'int8'"),
        ({"cache_dtype": "int8"}, {}, "", "--cache-dtype expects one of f32, f16, bf16; got 'int8'"),
        ({"effort": "huge"}, {}, "", "quick, normal, full"),
        ({"trials": -1}, {}, "", "at least 0"),
        ({"qkv": "joined"}, {}, "", "separate, merged"),
        ({"attention": "split"}, {}, "", "fused, unfused; got 'split'"),
        ({}, {}, 'attention = "whole"', "relax-tune.toml: attention expects one of fused, unfused; got 'whole'"),
        ({}, {"RELAX_TUNE_TRIALS": "many"}, "", "RELAX_TUNE_TRIALS"),
        ({}, {"RELAX_TUNE_EFFORT": "slow"}, "", "slow"),
        ({}, {}, "trials = ", "relax-tune.toml"),
        ({}, {}, "tries = 3", "tries"),
        ({}, {}, "[tune]\ntrials = 3", "tune"),
    ],
)
def test_load_settings_wrong_value_is_named(
    tmp_path: Path, flags: dict[str, Any], environment: dict[str, str], file: str, says: str
) -> None:
    (tmp_path / "relax-tune.toml").write_text(file)
    with pytest.raises(UserError) as caught:
        load_settings(flags, environment, tmp_path)
    assert says in str(caught.value)


def test_load_settings_ignores_other_variables(tmp_path: Path) -> None:
    assert load_settings({}, {"RELAX_TUNE_CACHE": "x", "TARGET": "c"}, tmp_path) == Settings()


@pytest.mark.parametrize("seed", [None, 1.0, True, "1"])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(UserError, match="--seed expects a whole number"):
        Settings(seed=seed)


def test_load_settings_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "relax-tune.toml").write_text("seed = 1")

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"relax-tune.toml cannot be read: Permission denied"):
        load_settings({}, {}, tmp_path)


def test_load_settings_error_names_the_source(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^RELAX_TUNE_EFFORT expects one of auto, quick"):
        load_settings({}, {"RELAX_TUNE_EFFORT": "no"}, tmp_path)
    with pytest.raises(UserError, match=r"^--effort expects one of auto, quick"):
        load_settings({"effort": "no"}, {"RELAX_TUNE_EFFORT": "full"}, tmp_path)
    (tmp_path / "relax-tune.toml").write_text("trials = -1")
    with pytest.raises(UserError, match=r"^relax-tune\.toml: trials expects a number"):
        load_settings({}, {}, tmp_path)


def test_load_settings_wrong_cache_dtype_in_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "relax-tune.toml").write_text('cache_dtype = "int8"')
    with pytest.raises(UserError, match=r"^relax-tune\.toml: cache_dtype expects one of f32"):
        load_settings({}, {}, tmp_path)


def test_merge_settings_overrides_win_over_settings() -> None:
    base = Settings(target="c", trials=3)
    assert merge_settings("tune", base, {"trials": 5}) == Settings(target="c", trials=5)
    assert merge_settings("build", base, {}) == base


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"efort": "quick"}, "got efort; did you mean effort?"),
        ({"trials": 3}, "rt.build takes the settings target, "),
        ({"attention": "whole"}, "fused, unfused; got 'whole'"),
    ],
)
def test_merge_settings_wrong_override_is_refused(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        merge_settings("build", None, overrides)
    assert says in str(caught.value)


def test_describe_has_a_row_per_setting() -> None:
    rows = describe().splitlines()
    assert len(rows) == len(OPTIONS) + 2
    for name, row in zip(OPTIONS, rows[2:], strict=True):
        assert row.startswith(f"| `{name}` | `--{name.replace('_', '-')}` | `RELAX_TUNE_{name.upper()}` |")


REACHING = {name: "x" for name, declared in OPTIONS.items() if declared.reaches_out and declared.kind is str}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder in which nothing is allowed."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def test_settings_reaching_out_name_files_hosts_or_databases() -> None:
    of_files = {"db", "files", "ca", "certificate", "key", "profile", "prior", "samples", "adapter"}
    assert set(REACHING) == of_files | {"scheduler", "browser"}
    assert OPTIONS["trust_model"].reaches_out
    plain = [n for n, o in OPTIONS.items() if not o.reaches_out]
    assert not [n for n in plain if "FILE" in OPTIONS[n].metavar or OPTIONS[n].metavar in ("URL", "ADDRESS")]


@pytest.mark.parametrize("name", REACHING)
def test_settings_file_not_allowed_chooses_nothing_outside(tmp_path: Path, config: Path, name: str) -> None:
    (tmp_path / FILE).write_text(f'seed = 7\n{name} = "x"\n')
    with pytest.raises(UserError, match=rf"relax-tune.toml: expected no {name} .*`relax-tune allow`"):
        load_settings({}, {}, tmp_path)
    assert getattr(load_settings({name: "y"}, {}, tmp_path), name) == "y"  # the file's value is not used
    (tmp_path / FILE).write_text("seed = 7\n")
    assert load_settings({}, {}, tmp_path).seed == 7


def test_settings_file_allowed_counts_until_changed_or_moved(tmp_path: Path, config: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    text = 'db = "postgresql://head/records"\n'
    for folder in (here, there):
        folder.mkdir()
        (folder / FILE).write_text(text)
    allow(here / FILE, text.encode())
    assert load_settings({}, {}, here).db == "postgresql://head/records"
    with pytest.raises(UserError, match="expected no db"):
        load_settings({}, {}, there)
    (there / FILE).unlink()
    (there / FILE).symlink_to(here / FILE)  # its relative paths would mean others here
    with pytest.raises(UserError, match="expected no db"):
        load_settings({}, {}, there)
    (here / FILE).write_text(text + "seed = 1\n")
    with pytest.raises(UserError, match="expected no db"):
        load_settings({}, {}, here)
    assert revoke(here / FILE) == 1 and not is_allowed(here / FILE, text.encode())


def test_find_sources_says_the_place_of_each_setting(tmp_path: Path, config: Path) -> None:
    (tmp_path / FILE).write_text('seed = 7\ndb = "a.db"\neffort = "full"\n')
    found = find_sources({"effort": "quick", "trials": None}, {"RELAX_TUNE_TARGET": "c"}, tmp_path)
    assert {n: s.name for n, s in found.items()} == {
        "seed": "relax-tune.toml: seed",
        "db": "relax-tune.toml: db",
        "effort": "--effort",
        "target": "RELAX_TUNE_TARGET",
    }
    assert [n for n, s in found.items() if s.refused] == ["db"]


def test_settings_file_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("#" * (1 << 20) + "\n")
    with pytest.raises(UserError, match="at most 1048576 bytes"):
        load_settings({}, {}, tmp_path)


def test_variable_of_no_setting_is_warned_of_with_the_nearest(tmp_path: Path) -> None:
    with pytest.warns(RelaxTuneWarning, match="RELAX_TUNE_EFORT.*RELAX_TUNE_EFFORT") as caught:
        assert load_settings({}, {"RELAX_TUNE_EFORT": "full", "RELAX_TUNE_CACHE": "x"}, tmp_path) == Settings()
    assert len(caught) == 1
    with pytest.warns(RelaxTuneWarning, match="RELAX_TUNE_A_FINE_COLOUR .*settings are .*effort"):
        load_settings({}, {"RELAX_TUNE_A_FINE_COLOUR": "red"}, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = {variable_of(name): "1" for name in ("trials", "cache", "dashboard_token")}
        assert load_settings({}, {**known, "RELAX_TUNER": "x"}, tmp_path).trials == 1


@pytest.mark.ccompiler
def test_search_and_kernels_name_arguments_in_errors() -> None:
    with pytest.raises(UserError, match=r"^strategy= expects one of"):
        rt.Search(rt.SearchSpace({"t": [1, 2]}), strategy="gird")
    text = """
@prim_func(outputs=1)
def f(a: Buffer((n,), f32), c: Buffer((n,), f32)):
    for i in serial(n):
        with block("f"):
            vi = spatial(n, i)
            c[vi] = a[vi]
"""
    kernel = rt.kernel(rt.parse_prim_func(text), "c")
    with pytest.raises(UserError, match=r"^trials= expects a whole number, got '4'"):
        kernel.tune(db="memory://", trials="4", bounds={"n": (1, 4)})  # type: ignore[arg-type]


def test_message_of_python_names_arguments_but_commands_keep_flags() -> None:
    said = "--wait-secs expects 1; build with --bound n=1:64 (`relax-tune tune --target c`), or pip install --no-deps x; not --bound"
    assert with_arguments(said) == (
        "wait_secs= expects 1; build with bounds={'n': (1, 64)} (`relax-tune tune --target c`), or pip install --no-deps x; not bounds="
    )
    assert with_arguments("a--b -- c ---d --1 -x") == "a--b -- c ---d --1 -x"
