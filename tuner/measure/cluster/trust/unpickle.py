"""Restricted unpickling of Dask's messages: only the classes and functions that a measurement needs.

Dask sends functions, graphs and errors as pickles, and reading a pickle calls the functions that it names. `Unpickler.find_class` is
overridden, as the documentation of `pickle` recommends, to permit only the names in `ALLOWED`. Dask has no setting for this, so its
function that reads pickles is replaced for the whole process.

Tests: `tests/tuner/measure/cluster/test_hostile.py`.
"""

from __future__ import annotations

import importlib
import io
import pickle
import threading
from typing import Any, ClassVar, NoReturn

_TASK = "relax_tune.tuner.measure.cluster.task"
ALLOWED = frozenset(
    {
        (_TASK, "measure_batch"),
        (_TASK, "describe_device"),
        # a graph of one call
        ("dask._expr", "LLGExpr"),
        ("dask._expr", "Expr._reconstruct"),
        ("dask._task_spec", "Task"),
        # the error of a task whose worker was lost
        ("distributed.scheduler", "KilledWorker"),
        ("distributed.scheduler", "WorkerState"),
        ("distributed.core", "Status"),
        ("collections", "deque"),
        ("collections", "defaultdict"),
        ("builtins", "int"),
        ("builtins", "bytes"),
    }
)
"""Pairs (module, name) that a pickle may name."""
STATEFUL = frozenset(
    {("dask._task_spec", "Task"), ("distributed.scheduler", "KilledWorker"), ("distributed.scheduler", "WorkerState")}
)
"""Classes whose instances a pickle may give a state."""
FAMILIES = frozenset({"pickle", "msgpack", "error", "dask"})
"""Dask's serializers that are accepted. The serializer `dask` names its class in a pickle, so only bytes pass."""

_lock = threading.Lock()
_users = 0
_original: Any = None


class UnreadPickleError(pickle.UnpicklingError, AttributeError):
    """A pickle that names anything else. Dask treats an AttributeError as a part of a message that it can ignore."""


class _Reader(pickle._Unpickler):  # the C implementation has no hook for BUILD, which alters objects
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _build(self) -> None:
        """Set the state of an instance. Named classes and functions are never altered, since the whole process uses them."""
        kind = type(self.stack[-2])  # type: ignore[attr-defined]  # an attribute of the Python implementation
        if (kind.__module__, kind.__qualname__) not in STATEFUL:
            raise UnreadPickleError(
                f"expected a message of a measurement, got one that alters a {kind.__qualname__:.80}"
            )
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = _build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise UnreadPickleError(
                f"expected a message of a measurement, got one that names {module}.{name:.80}; relax-tune reads no other names while it is "
                "connected to a scheduler, so use other Dask clients in a separate process"
            )
        return super().find_class(module, name)


def loads(data: Any, *, buffers: Any = ()) -> Any:
    """Read a pickle that names only members of `ALLOWED`. Raises UnreadPickleError for any other name."""
    return _Reader(io.BytesIO(data), buffers=buffers).load()


def _refuse(header: Any, frames: Any) -> NoReturn:
    raise TypeError(f"expected a message in {', '.join(sorted(FAMILIES))}, got {header.get('serializer')!r:.40}")


def _dask() -> tuple[Any, Any]:
    """Import Dask's modules that read messages by name: `distributed.protocol` has a function that shadows one of them."""
    return importlib.import_module("distributed.protocol.pickle"), importlib.import_module(
        "distributed.protocol.serialize"
    )


def restrict() -> None:
    """Restrict the unpickling of Dask's messages in this process. Calls nest; each needs a `release`."""
    global _users, _original
    dask_pickle, serialize = _dask()
    with _lock:
        _users += 1
        if _users > 1:
            return
        _original = dask_pickle.loads, dict(serialize.families)
        dask_pickle.loads = loads
        for name, (dumps, _, needs_context) in _original[1].items():
            if name not in FAMILIES:
                serialize.families[name] = (dumps, _refuse, needs_context)


def release() -> None:
    """End one restriction."""
    global _users
    dask_pickle, serialize = _dask()
    with _lock:
        _users -= 1
        if _users == 0:
            dask_pickle.loads = _original[0]
            serialize.families.update(_original[1])
