"""Restricted reading of Dask's messages: the few classes and functions that a measurement needs, and no others.

Dask puts functions, graphs and errors into messages as pickles, and a pickle calls what it names. Here it may name only what is in
`ALLOWED` (Python's own way to restrict pickles: `Unpickler.find_class`). Dask has no setting for it, so its one function that reads
pickles is replaced, for the whole process.
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
        # what a scheduler says of a task whose worker has left
        ("distributed.scheduler", "KilledWorker"),
        ("distributed.scheduler", "WorkerState"),
        ("distributed.core", "Status"),
        ("collections", "deque"),
        ("collections", "defaultdict"),
        ("builtins", "int"),
        ("builtins", "bytes"),
    }
)
"""Pairs of a module and a name in it."""
STATEFUL = frozenset(
    {("dask._task_spec", "Task"), ("distributed.scheduler", "KilledWorker"), ("distributed.scheduler", "WorkerState")}
)
"""Classes whose new instances get a state."""
FAMILIES = frozenset({"pickle", "msgpack", "error", "dask"})
"""Families of Dask's serializers that are read. Of `dask`, which names its class by a pickle, bytes are."""

_lock = threading.Lock()
_users = 0
_original: Any = None


class UnreadPickleError(pickle.UnpicklingError, AttributeError):
    """A pickle that names something else. Dask takes an AttributeError for a part of a message that it can do without."""


class _Reader(pickle._Unpickler):  # the one in C cannot refuse to alter what it names
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _build(self) -> None:
        """Set the state of an instance. What a message names is never altered: it serves the whole process."""
        kind = type(self.stack[-2])  # type: ignore[attr-defined]  # of the implementation in Python
        if (kind.__module__, kind.__qualname__) not in STATEFUL:
            raise UnreadPickleError(
                f"wanted a message of a measurement, found one that alters a {kind.__qualname__:.80}"
            )
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = _build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise UnreadPickleError(
                f"wanted a message of a measurement, found one that names {module}.{name:.80}; relax-tune reads no others while it is "
                "connected to a scheduler, so other Dask clients need a process of their own"
            )
        return super().find_class(module, name)


def loads(data: Any, *, buffers: Any = ()) -> Any:
    """Read a pickle that names nothing but what is allowed. Raises UnreadPickleError for another."""
    return _Reader(io.BytesIO(data), buffers=buffers).load()


def _refuse(header: Any, frames: Any) -> NoReturn:
    raise TypeError(f"wanted a message in {', '.join(sorted(FAMILIES))}, found {header.get('serializer')!r:.40}")


def _dask() -> tuple[Any, Any]:
    """Import Dask's modules that read messages; `distributed.protocol` has a function named as one of them."""
    return importlib.import_module("distributed.protocol.pickle"), importlib.import_module(
        "distributed.protocol.serialize"
    )


def restrict() -> None:
    """Restrict what this process reads of Dask's messages, until `release` has been called as often."""
    global _users, _original
    dask_pickle, serialize = _dask()
    with _lock:
        _users += 1
        if _users > 1:
            return
        _original = dask_pickle.loads, dict(serialize.families)
        dask_pickle.loads = loads
        for name, (dumps, _, wants_context) in _original[1].items():
            if name not in FAMILIES:
                serialize.families[name] = (dumps, _refuse, wants_context)


def release() -> None:
    """End one restriction."""
    global _users
    dask_pickle, serialize = _dask()
    with _lock:
        _users -= 1
        if _users == 0:
            dask_pickle.loads = _original[0]
            serialize.families.update(_original[1])
