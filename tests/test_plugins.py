"""Plug-ins of installed distributions: their order, their failures and their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_tune.errors import BuildError
from relax_tune.plugins import Plugin, PluginWarning, extended, load_plugins

GROUP = "relax_tune.test_group"


def install(folder: Path, distribution: str, **points: str) -> None:
    """Write the metadata that pip leaves of a distribution."""
    metadata = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{''.join(lines)}")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_plugins_are_sorted_by_distribution_and_name(site: Path) -> None:
    install(site, "b-package", z="math:sqrt", a="math:exp")
    install(site, "a-package", m="math:pi")
    assert [(p.name, type(p.value).__name__) for p in load_plugins(GROUP)] == [
        ("m", "float"),
        ("a", "builtin_function_or_method"),
        ("z", "builtin_function_or_method"),
    ]
    assert load_plugins("relax_tune.unused_group") == []


@pytest.mark.parametrize("value", ["no_such_module:x", "math:no_such_name", "raises_on_import:x"])
def test_broken_plugin_is_skipped_with_a_warning_or_refused(site: Path, value: str) -> None:
    (site / "raises_on_import.py").write_text("raise RuntimeError('no licence')\n")
    install(site, "broken", x=value)
    install(site, "sound", y="math:pi")
    with pytest.warns(PluginWarning, match=r"package broken, entry point relax_tune\.test_group 'x'"):
        assert [p.name for p in load_plugins(GROUP)] == ["y"]
    with pytest.raises(BuildError, match=r"package broken, entry point relax_tune\.test_group 'x'"):
        load_plugins(GROUP, strict=True)


def test_registry_is_extended_by_names_of_entry_points(site: Path) -> None:
    install(site, "more", root="math:sqrt")
    built_in = {"exp": len}
    assert list(extended(built_in, GROUP, callable, "a function")) == ["exp", "root"]
    assert list(built_in) == ["exp"]


@pytest.mark.parametrize(("taken", "value"), [({"x": len}, "math:sqrt"), ({}, "math:pi")])
def test_taken_name_and_wrong_object_are_refused(site: Path, taken: dict[str, object], value: str) -> None:
    install(site, "more", x=value)
    with pytest.raises(BuildError, match=r"package more, entry point .*'x'"):
        extended(taken, GROUP, callable, "a function")


def test_name_of_two_distributions_is_refused(site: Path) -> None:
    install(site, "first", x="math:sqrt")
    install(site, "second", x="math:exp")
    with pytest.raises(BuildError, match="package second"):
        extended({}, GROUP, callable, "a function")


def test_refusal_shortens_long_objects() -> None:
    assert len(str(Plugin("x", None, "origin").refusal("a class", "y" * 1000))) < 300
