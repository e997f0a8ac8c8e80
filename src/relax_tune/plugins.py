"""Plug-ins: objects that installed distributions add to a registry through an entry-point group.

Every registry that distributions may extend loads its group here, so that all of them keep the same promises:

* Order: plug-ins come after the built-in entries, sorted by distribution and entry-point name. It does not depend on the order of
  installation or of `sys.path`.
* Names: a name that a registry has already is an error (`extended`), whether it is built in or another plug-in's. Nothing is replaced.
* Failures: a plug-in that cannot be imported is skipped with a `PluginWarning` that names its distribution and entry point. With
  `strict` it raises `BuildError` instead, for registries that must not run with a part missing. A plug-in that is imported
  but is not what its group expects raises `BuildError` in both cases (`Plugin.refusal`).
* Time: importing a registry's module loads no plug-in. Each call of `load_plugins` reads the installed metadata again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from relax_tune.errors import BuildError, RelaxTuneWarning, warn

T = TypeVar("T")


class PluginWarning(RelaxTuneWarning):
    """A plug-in of an installed distribution that cannot be imported and is skipped."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An imported object of an entry-point group.

    Attributes:
        name: Name of the entry point.
        value: The object that the entry point refers to.
        origin: Distribution, group and entry point, for messages.
    """

    name: str
    value: Any
    origin: str

    def refusal(self, expected: str, got: object) -> BuildError:
        """Return the error for a plug-in that is not what its group expects."""
        return BuildError(f"{self.origin}: expected {expected}, got {got!s:.200}; correct or remove it")


def load_plugins(group: str, strict: bool = False) -> list[Plugin]:
    """Import the entry points of a group, sorted by distribution and name.

    Args:
        group: Entry-point group, such as `relax_tune.libraries`.
        strict: Raise for a plug-in that cannot be imported instead of skipping it with a `PluginWarning`.

    Raises:
        BuildError: With `strict`, a plug-in cannot be imported.
    """
    points = entry_points(group=group)
    plugins = []
    for point in sorted(points, key=lambda p: (p.dist.name if p.dist else "", p.name)):
        origin = _origin(point)
        try:
            plugins.append(Plugin(point.name, point.load(), origin))
        except Exception as error:  # an import runs the distribution's code, which may raise anything
            problem = f"{origin}: {point.value} cannot be imported: {type(error).__name__}: {error}"
            if strict:
                raise BuildError(f"{problem}; correct or remove the package") from error
            warn(f"{problem}. It is skipped; correct or remove the package", PluginWarning)
    return plugins


def extended(
    built_in: Mapping[str, T], group: str, check: Callable[[Any], bool], expected: str, strict: bool = False
) -> dict[str, T]:
    """Return a registry by name with the plug-ins of a group, each under the name of its entry point.

    Args:
        built_in: The registry without plug-ins; it is not changed.
        group: Entry-point group.
        check: Whether an imported object is what the registry holds, such as `callable`.
        expected: What that is, for the message, such as "a function".
        strict: As for `load_plugins`.

    Raises:
        BuildError: A plug-in has a name that is in use, or `check` rejects it.
    """
    registry = dict(built_in)
    for plugin in load_plugins(group, strict):
        if not check(plugin.value):
            raise plugin.refusal(expected, repr(plugin.value))
        if plugin.name in registry:
            raise plugin.refusal(f"a name that is not in use ({', '.join(sorted(registry))})", repr(plugin.name))
        registry[plugin.name] = plugin.value
    return registry


def _origin(point: EntryPoint) -> str:
    return f"package {point.dist.name if point.dist else '?'}, entry point {point.group} {point.name!r}"
