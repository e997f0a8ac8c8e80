"""The models the tests build, as artifacts whose plans mix generic, tuned and library variants."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from tests.support.tuner_models import attention, feed_forward, job_dispatching, minilm_folder, row_scale
from tests.tuner.cli.cli_model import make_bert

from relax_tune.database.records import VariantRecord
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Var, const, load
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, seq
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.op.indexing.movement import Concat, Take
from relax_tune.ir.op.math.elementwise import Add, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax, Sum
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import evaluate
from relax_tune.tuner.task.variants import TaskVariants

Array = NDArray[Any]
Dims = Mapping[str, int]
DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Whole:
    """A model, the shapes it is run at (tiny ones in the simulator), and the values integer inputs stay below."""

    make: Callable[[], IRModule]
    shapes: tuple[Dims, ...]
    tiny: tuple[Dims, ...]
    below: int = 2
    tuned: int = 3  # candidates of a task, of different sketches while there are any


def contraction() -> IRModule:
    """relu(x y + x y), then sums over rows: everything symbolic, every dim may be 0."""
    g = GraphBuilder()
    n, k, m = (g.symbol(name, 0, 40) for name in "nkm")
    product = g.call(Matmul(), g.input("x", (n, k)), g.input("y", (k, m)))
    return g.finish(g.call(Sum((1,)), g.call(Relu(), g.call(Add(), product, product))))


def gather_concat() -> IRModule:
    """Rows of a table by index, beside another array, softmax over both: movement fused with a row function."""
    g = GraphBuilder()
    n, m = g.symbol("n", 1, 40), g.symbol("m", 1, 40)
    table = g.constant("table", np.random.default_rng(3).standard_normal((7, 9)).astype(np.float32))
    rows = g.call(Take(), table, g.input("ids", (n,), i64))
    return g.finish(g.call(Softmax(), g.call(Concat(0), rows, g.input("x", (m, 9)))))


def in_place() -> IRModule:
    """Rows put into a computed array, in its memory, then halved there; beside them what a softmax keeps while it runs."""
    g = GraphBuilder()
    n, m = g.symbol("n", 1, 40), g.symbol("m", 1, 8)
    info = TensorInfo((n, const(12)), f32)
    a, b, c = Var("n"), Var("m"), const(12)
    f = TensorBuilder("put_rows")
    at, new, x, z = f.input("at", (b,), i64), f.input("new", (b, c)), f.input("x", (a, c)), f.output("z", (a, c))
    f.compute(z, lambda i, j: x[i, j])
    copied = f.finish()
    p, q, i, j = Var("p"), Var("q"), Var("vi"), Var("vj")
    store = BufferStore(z.buffer, (load(at.buffer, (i,)), j), load(new.buffer, (i, j)))
    put = Block("put", (IterVar(i, b), IterVar(j, c)), (p, q), store)
    name = g.add(replace(copied, body=seq(copied.body, For(p, b, For(q, c, put)))))
    half = TensorBuilder("half")
    y, w = half.input("y", (a, c)), half.output("w", (a, c))
    half.compute(w, lambda i, j: y[i, j] * 0.5)
    table = g.call(Relu(), g.parameter("x", info))
    given = (g.parameter("at", TensorInfo((m,), i64)), g.parameter("new", TensorInfo((m, const(12)), f32)))
    whole = g.call_tir(name, (*given, table), info, inplace=(2,))
    return g.finish(g.call(Softmax(), g.call_tir(g.add(half.finish()), (whole,), info, inplace=(0,))))


def small_bert() -> IRModule:
    with tempfile.TemporaryDirectory() as folder:
        return load_hf(make_bert(Path(folder)), bounds={"b": (1, 4), "n": (1, 32)})


def cut_minilm() -> IRModule:
    """The real MiniLM's first layer, with the first words of its vocabulary."""
    source = minilm_folder()
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 1, "vocab_size": 61}
    weights = safetensors.numpy.load_file(source / "model.safetensors")
    kept = {k: v for k, v in weights.items() if "layer." not in k or "layer.0." in k}
    kept = {k: np.ascontiguousarray(v[:61]) if "word_embeddings" in k else v for k, v in kept.items()}
    with tempfile.TemporaryDirectory() as folder:
        safetensors.numpy.save_file(kept, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load_hf(folder, bounds={"b": (1, 4), "n": (1, 512)})


def dims(names: str, *rows: tuple[int, ...]) -> tuple[Dims, ...]:
    return tuple(dict(zip(names, row, strict=True)) for row in rows)


MODELS: dict[str, Whole] = {
    "feed forward": Whole(feed_forward, dims("n", (1,), (2,), (13,), (15,), (16,), (17,), (33,), (128,)), dims("n", (1,), (5,))),
    "attention": Whole(attention, dims("bn", (1, 1), (2, 13), (3, 17), (3, 40), (2, 2)), dims("bn", (1, 1), (2, 5))),
    "row softmax": Whole(row_scale, dims("n", (1,), (7,), (63,), (64,), (31,)), dims("n", (1,), (7,))),
    "contraction": Whole(
        contraction,
        dims("nkm", (0, 0, 0), (5, 0, 7), (0, 3, 7), (3, 5, 0), (1, 1, 1), (13, 17, 31), (33, 8, 16), (40, 40, 40)),
        dims("nkm", (0, 3, 2), (3, 0, 5), (1, 1, 1), (5, 3, 9)),
    ),
    "gather and concat": Whole(gather_concat, dims("nm", (1, 1), (13, 5), (40, 40)), dims("nm", (1, 1), (3, 5)), 7),
    "in place": Whole(in_place, dims("nm", (1, 1), (13, 5), (40, 8)), dims("nm", (1, 1), (3, 2)), 1),
    "BERT from a folder": Whole(small_bert, dims("bn", (1, 1), (2, 13), (4, 17), (1, 32)), dims("bn", (1, 1), (2, 3)), 8, 1),
    "BERT from ONNX": Whole(
        lambda: load_onnx(DATA / "tiny_bert.onnx", {"batch": (1, 4), "seq": (1, 48)}),
        ({"batch": 1, "seq": 1}, {"batch": 2, "seq": 13}, {"batch": 4, "seq": 31}, {"batch": 1, "seq": 48}),
        ({"batch": 1, "seq": 1}, {"batch": 2, "seq": 3}),
        61,
        1,
    ),
    "MiniLM, one layer": Whole(cut_minilm, dims("bn", (1, 1), (1, 13)), (), 61, 1),
}  # fmt: skip


def chosen(task_variants: TaskVariants, count: int, seed: int) -> list[VariantRecord]:
    """The generic variant, a library one, and `count` tuned ones of different sketches."""
    found = [task_variants.sketch_set.generic(), *task_variants.calling_libraries()[:1]]
    rng = np.random.default_rng([seed, len(task_variants.sketch_set.sketches)])
    candidates = task_variants.sketch_set.space.candidates(task_variants.sketch_set.space.sample(rng, 200))
    first: dict[int, Any] = {}
    for c in candidates:
        first.setdefault(c.sketch, c)
    order = rng.permutation(sorted(first))
    picked = [first[int(k)] for k in order[:count]]
    return found + [task_variants.sketch_set.record_of(c) for c in picked]


@dataclass(frozen=True)
class Built:
    """A program whose plans dispatch different variants over the range, and its constants."""

    module: IRModule
    program: Program
    constants: Mapping[str, Array]

    @property
    def variants(self) -> int:
        return max(len(c.variants) for c in self.program.calls)


def built(whole: Whole, device: DeviceInfo, seed: int = 0) -> Built:
    """Records that make every chosen variant the winner at some anchor, and what is built from them."""
    module = whole.make()
    job = job_dispatching(
        device, module, lambda task_variants, number: chosen(task_variants, whole.tuned, seed + number)
    )
    program = job.build().program
    names = {b.name for b in program.buffers if b.role == "const"}
    constants = {k: np.asarray(a, order="C") for k, a in job.lowered.module.constants.items() if k in names}
    return Built(module, program, constants)


def inputs_of(made: Built, at: Dims, below: int, seed: int) -> list[Array]:
    """Random arguments; integers (token ids, masks) in [0, below), a mask never all zero in a row."""
    program = made.program
    values = evaluate(program.scalars, [at[s.name] for s in program.symbols])
    rng = np.random.default_rng(seed)
    arrays: list[Array] = []
    for index in program.inputs:
        spec = program.buffers[index]
        shape = tuple(values[slot] for slot in spec.shape)
        if "mask" in spec.name:
            array = (rng.random(shape) < 0.7).astype(spec.dtype)
            array[..., :1] = 1
        elif np.dtype(spec.dtype).kind in "iu":
            array = rng.integers(0, below, shape).astype(spec.dtype)
        else:
            array = rng.standard_normal(shape).astype(spec.dtype)
        arrays.append(array)
    return arrays
