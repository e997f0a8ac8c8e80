"""Servers of small models on free ports of loopback, and plain HTTP to them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.text_folders import write_decoder
from tests.support.tuner_models import feed_forward
from tests.tuner.cli.cli_model import make_bert

import relax_tune as rt
from relax_tune.database.store import open_store
from relax_tune.ir.core.dtype import DType, bf16, bool_, f16, f32, f64, i8, i32, i64, u8
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import Add, Cast, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Mean
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.runtime.model import Model

TEMPLATE = (
    "{{ bos_token }} {% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "    {%- if not loop.first %} {% endif %}{{ message['content'] | trim }} w9\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %} w7{% endif %}"
)
TYPES: dict[str, tuple[str, DType]] = {
    "flags": ("BOOL", bool_), "bytes": ("UINT8", u8), "small": ("INT8", i8), "ints": ("INT32", i32), "longs": ("INT64", i64),
    "halves": ("FP16", f16), "brains": ("BF16", bf16), "floats": ("FP32", f32), "doubles": ("FP64", f64),
}  # fmt: skip


def of_types() -> IRModule:
    """x + x of each type, and bools as integers, over (b, 2)."""
    g = GraphBuilder()
    b = g.symbol("b", 1, 4)
    inputs = {name: g.input(name, (b, 2), dtype) for name, (_, dtype) in TYPES.items()}
    double = [g.call(Add(), x, x, hint=f"{n}_twice") for n, x in inputs.items() if n != "flags"]
    return g.finish([g.call(Cast(i64), inputs["flags"], hint="flags_cast"), *double])


def mixing() -> IRModule:
    """x + mean of its rows: rows depend on each other."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("b", 1, 8), 4))
    return g.finish(g.call(Add(), x, g.call(Mean((0,), True), x)))


def picking() -> IRModule:
    """Rows of a table by a computed index, which is checked after the call."""
    g = GraphBuilder()
    ids = g.input("ids", (g.symbol("b", 1, 8),), i64)
    table = g.constant("table", np.arange(12, dtype=np.float32).reshape(6, 2))
    return g.finish(g.call(Take(), table, g.call(Add(), ids, ids)))


def slow() -> IRModule:
    """Products of (b, 512) by weights; a few seconds for a thousand rows of untuned loops."""
    g = GraphBuilder()
    value = g.input("x", (g.symbol("b", 1, 1 << 16), 512))
    weight = g.constant("w", np.full((512, 512), 1 / 512, np.float32))
    for _ in range(4):
        value = g.call(Relu(), g.call(Matmul(), value, weight))
    return g.finish(g.call(Mean((1,), False), value))


@dataclass
class Files:
    """A folder with artifacts and folders of models, each built when it is first asked for."""

    root: Path
    built: set[str] = field(default_factory=set)

    def artifact(self, name: str) -> Path:
        path = self.root / f"{name}.rta"
        if name not in self.built:
            records = self.root / "records.db"
            open_store(f"sqlite:///{records}", create=True).close()
            policy = "predicted" if name == "fast" else "generic"
            rt.build(self._model(name), target="c", db=records, policy=policy, checks=name == "picking").save(path)
            self.built.add(name)
        return path

    def folder(self, name: str) -> Path:
        """The folder of `encoder`, `other` (an encoder of other weights) or `decoder`."""
        folder = self.root / name
        if not folder.exists():
            if name == "decoder":
                write_decoder(folder)
                config = json.loads((folder / "tokenizer_config.json").read_text())
                config |= {"chat_template": TEMPLATE, "bos_token": {"__type": "AddedToken", "content": "w8"}}
                (folder / "tokenizer_config.json").write_text(json.dumps(config))
            else:
                make_bert(folder, seed=int(name == "other"))
        return folder

    def _model(self, name: str) -> Any:
        graphs: dict[str, Callable[[], IRModule]] = {
            "types": of_types, "mixing": mixing, "picking": picking, "slow": slow, "fast": slow, "dense": lambda: feed_forward(width=4),
        }  # fmt: skip
        if name in graphs:
            return graphs[name]()
        if name == "paged":
            few = {"t": (1, 12), "r": (1, 6), "p": (1, 10)}
            return rt.load_model(self.folder("decoder"), bounds=few, kv_cache="paged")
        bounds = {"b": (1, 4), "n": (1, 16), "m": (0, 32)} if name == "decoder" else {"b": (1, 8), "n": (1, 32)}
        return rt.load_model(self.folder(name), bounds=bounds)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A server in a thread. `serving` is its state."""

    port: int
    serving: Any
    models: dict[str, Model]
    token: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        body: Any = None,
        method: str | None = None,
        headers: Mapping[str, str] = {},
        timeout: float = 60,
    ) -> Answer:
        return ask(self.port, path, body, method, {**self._authorised(), **headers}, timeout)

    def _authorised(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def metric(self, name: str, **labels: str) -> float:
        value = self.serving.metrics.registry.get_sample_value(f"relax_tune_serve_{name}", labels)
        return 0.0 if value is None else float(value)


def ask(
    port: int,
    path: str,
    body: Any = None,
    method: str | None = None,
    headers: Mapping[str, str] = {},
    timeout: float = 60,
) -> Answer:
    """Ask a server; bodies that are no bytes are sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, sent, dict(headers))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def tensor(name: str, datatype: str, array: Any) -> dict[str, Any]:
    given = np.asarray(array)
    return {"name": name, "datatype": datatype, "shape": list(given.shape), "data": given.tolist()}


def infer_body(*tensors: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"inputs": list(tensors), **more}


def text_body(ids: Any) -> dict[str, Any]:
    array = np.asarray(ids, np.int64)
    return infer_body(tensor("input_ids", "INT64", array), tensor("attention_mask", "INT64", np.ones_like(array)))


@contextmanager
def running(
    artifacts: Sequence[str],
    folders: Sequence[str] = (),
    rows: Sequence[str] = (),
    token: str | None = None,
    bound_secs: float = 0.1,
    prepare: Callable[[Any], None] = lambda serving: None,
    **limits: Any,
) -> Iterator[Server]:
    """A server in a thread of this process. prepare: gets its state before it starts; limits: of `ServerLimits`"""
    for package in ("starlette", "uvicorn", "prometheus_client", "jinja2", "tokenizers"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra serve)")
    import uvicorn

    from relax_tune.tuner.serve.app import make_serve_app, open_serving
    from relax_tune.tuner.serve.connections import TimedConnection
    from relax_tune.tuner.serve.models import read_arguments
    from relax_tune.tuner.serve.requests import ServerLimits

    opened: dict[str, Model] = {}

    def load(path: Path, sizes: Any) -> tuple[Artifact, Model]:
        artifact = load_artifact(path)
        opened[path.name.removesuffix(".rta")] = model = artifact.open(shapes=sizes)
        return artifact, model

    try:
        serving = open_serving(read_arguments(artifacts, folders, rows), load, ServerLimits(**limits), bound_secs)
        prepare(serving)
        app = make_serve_app(serving, token)
        config = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=1,
            http=TimedConnection,
        )
        server = uvicorn.Server(config)
        socket = config.bind_socket()
        socket.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
        thread.start()
        try:
            yield Server(socket.getsockname()[1], serving, opened, token)
        finally:
            server.should_exit = True
            thread.join(60)
            socket.close()
            assert not thread.is_alive()
    finally:
        for model in opened.values():
            model.close()
