"""Sessions: results that replace arguments on the device, in place where they extend them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.decoder_families import HYBRIDS, MODELS, write_family
from tests.support.effort import thinned
from tests.support.tuner_models import QUICK

from relax_tune.database.store import MemoryStore
from relax_tune.errors import MeasureError, ModelStateError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import from_json
from relax_tune.ir.op.indexing.movement import Concat
from relax_tune.ir.op.math.elementwise import Add, MulScalar
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.bound_program import Launches
from relax_tune.runtime.calls.steady_steps import SteadySteps
from relax_tune.runtime.device.base import JoinsLaunches
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.generate import generate
from relax_tune.runtime.model import Model
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.ccompiler
DATA = Path(__file__).parents[2] / "data"
DEVICES = ["c", pytest.param("opencl", marks=pytest.mark.process)]
PROMPT = np.array([[3, 1, 4], [1, 5, 9]], np.int64)


def opened(module: IRModule, target: str) -> Model:
    device = open_device(target)
    job = device_job(module, device.info, MemoryStore(), QUICK)
    return job.artifact(job.build("generic")).open(device)


@pytest.fixture(scope="module", params=DEVICES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    if request.param == "opencl":
        pytest.importorskip("pyopencl")
    folder, _ = write_family(tmp_path_factory.mktemp("llama"), "llama_yarn")
    with opened(load_model(folder), request.param) as model:
        yield model


def test_session_gives_the_results_of_calls(decoder: Model) -> None:
    logits, *caches = decoder.run([PROMPT], "prefill")
    with decoder.session(caches, "decode") as session:
        for step in range(9):
            tokens = (PROMPT[:, :1] + step) % 37
            logits, *caches = decoder.run([tokens, *caches], "decode")
            (found,) = session.run([tokens])
            np.testing.assert_array_equal(found, logits)
        kept = session.arrays()
        program = decoder.executors["decode"].program
        assert list(kept) == [program.buffers[i].name for i in program.inputs[1:]]
        for array, cache in zip(kept.values(), caches, strict=True):
            np.testing.assert_array_equal(array, cache)
            assert array.shape == (2, 2, 12, 8)


def test_step_copies_no_cache(decoder: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *caches = decoder.run([PROMPT], "prefill")
    device = decoder.executors["decode"].device
    moved: list[int] = []
    with decoder.session(caches, "decode") as session:
        for name in ("copy", "upload", "download"):
            own = getattr(device, name)
            monkeypatch.setattr(device, name, lambda *a, own=own: (moved.append(size_of(a)), own(*a))[1])
        for _ in range(30):
            session.run([PROMPT[:, :1]])
    # 33 positions of two rows, two heads, 8 floats outgrow their memory four times; the logits are 2 x 37 floats
    caches_moved = [n for n in moved if n not in (2 * 37 * 4, 2 * 8)]
    assert len(caches_moved) <= 4 * len(caches) and sum(caches_moved) < 2 * len(caches) * 33 * 2 * 2 * 8 * 4


def test_step_binds_only_changed_kernels(decoder: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *caches = decoder.run([PROMPT], "prefill")
    executor, bound = decoder.executors["decode"], [0]
    joins = isinstance(executor.device, JoinsLaunches)
    name = "bind_numbers" if joins else "bind"
    own = getattr(executor.device, name)

    def counted(*args: Any) -> Any:
        bound[-1] += 1
        return own(*args)

    monkeypatch.setattr(executor.device, name, counted)
    with decoder.session(caches, "decode") as session:
        for _ in range(12):
            session.run([PROMPT[:, :1]])
            bound.append(0)
    steps = sum(len(call.variants[0].steps) for call in executor.program.calls)
    # where memory grew, all of them; else those that the length reaches, and none where these read it when they run
    assert bound[0] == steps and (min(bound[:-1]) == 0 if joins else 0 < min(bound[:-1]) < steps / 2)


def test_closed_session_keeps_no_memory(decoder: Model) -> None:
    _, *caches = decoder.run([PROMPT], "prefill")
    session = decoder.session(caches, "decode")
    for _ in range(3):
        session.run([PROMPT[:, :1]])
    arrays = [a.buffer.array for a in (session._state or {}).values()]
    held = [weakref.ref(a) for a in arrays if a is not None]  # memory of the host
    assert len(arrays) == len(caches)
    del arrays
    session.close()
    gc.collect()
    assert [h() for h in held] == [None] * len(held) and not session._launches.closures


def size_of(arguments: tuple[Any, ...]) -> int:
    last = arguments[-1]
    if isinstance(last, np.ndarray):
        return last.nbytes
    return int(np.prod(last)) * np.dtype(arguments[1]).itemsize if isinstance(last, tuple) else int(last)


def test_attention_reads_extended_caches_in_place(decoder: Model) -> None:
    program = decoder.executors["decode"].program
    views = [program.buffers[i] for i in program.outputs[1:]]
    assert [v.base for v in views] == list(program.inputs[1:]) and {v.outer for v in views} == {2}
    assert {program.buffers[i].outer for i in program.inputs[1:]} == {2}
    (logits_only,) = {len(c.variants[0].steps[0].buffers) for c in program.calls if "key_0" in c.name}
    assert logits_only == 2, "the new row, and the cache that it is written to"


def test_generation_keeps_caches_and_branches_copy(decoder: Model) -> None:
    rows = generate(decoder, PROMPT, max_new_tokens=6)
    logits, *caches = decoder.run([PROMPT], "prefill")
    found = [PROMPT]
    for _ in range(6):
        tokens = logits[:, -1:].argmax(-1)
        found.append(tokens)
        logits, *caches = decoder.run([tokens, *caches], "decode")
    np.testing.assert_array_equal(rows, np.concatenate(found, axis=1))
    with decoder.session(caches, "decode") as one, decoder.session(caches, "decode") as other:
        one.run([PROMPT[:, :1]])
        (first,) = other.run([PROMPT[:, 1:2]])
        np.testing.assert_array_equal(first, decoder.run([PROMPT[:, 1:2], *caches], "decode")[0])


@pytest.mark.parametrize("name", thinned([name for name in MODELS if name not in HYBRIDS], 6))
def test_decoders_of_all_families_extend_every_cache_in_place(name: str, tmp_path: Path) -> None:
    module = load_model(write_family(tmp_path, name)[0])
    found = lower(module, (), append=True).appended
    caches = [p for p in module.graphs["decode"].params if p.name.startswith(("past_key", "past_value"))]
    assert len(found["decode"]) == len(caches) > 0


def running_sum() -> IRModule:
    """A state that each call replaces by another of its dims: x + state / 2; and the new state doubled."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 64)
    x, state = g.input("x", (n, 4)), g.input("state", (n, 4))
    new = g.call(Add(), x, g.call(MulScalar(0.5), state))
    return g.finish((g.call(MulScalar(2.0), new), new))


@pytest.mark.parametrize("target", DEVICES)
def test_arguments_without_a_result_serve_every_call(target: str) -> None:
    if target == "opencl":
        pytest.importorskip("pyopencl")
    with opened(running_sum(), target) as model:
        x, state = np.full((3, 4), 2.0, np.float32), np.ones((3, 4), np.float32)
        with model.session({"x": x, "state": state}, replaced_by={"state": 1}) as session:
            for _ in range(3):
                doubled, state = model.run([x, state])
                (found,) = session.run([])
                np.testing.assert_array_equal(found, doubled)
            assert list(session.arrays()) == ["state"]


@pytest.mark.parametrize("target", DEVICES)
def test_states_of_one_size_change_places(target: str) -> None:
    if target == "opencl":
        pytest.importorskip("pyopencl")
    with opened(running_sum(), target) as model:
        state = np.ones((3, 4), np.float32)
        with model.session({"state": state}, replaced_by={"state": 1}) as session:
            for step in range(5):
                x = np.full((3, 4), step, np.float32)
                doubled, state = model.run([x, state])
                (found,) = session.run({"x": x})
                np.testing.assert_array_equal(found, doubled)
            np.testing.assert_array_equal(session.arrays()["state"], state)


@pytest.mark.parametrize("target", DEVICES)
def test_session_of_a_torch_program_keeps_the_buffers_of_torch(target: str) -> None:
    if target == "opencl":
        pytest.importorskip("pyopencl")
    with np.load(DATA / "torch_state.npz") as file:
        arrays = dict(file)
    weights = {k.removeprefix("weight."): a for k, a in arrays.items() if k.startswith("weight.")}
    module = import_program(from_json((DATA / "torch_state.json").read_text(), weights))
    with opened(module, target) as model, model.session() as session:
        for _ in range(2):
            for call in range(3):
                x = arrays[f"x.{call}"]
                y, new_x = session.run([x])
                np.testing.assert_allclose(y, arrays[f"y.{call}"], rtol=1e-5, atol=1e-5)
                np.testing.assert_array_equal(new_x, 2 * x)
                for name, value in session.arrays().items():
                    expected = arrays[f"{name.removeprefix('b_')}.{call}"]
                    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
            session.reset()
        assert sorted(session.arrays()) == [
            "b_count", "b_last", "b_norm_num_batches_tracked", "b_norm_running_mean", "b_norm_running_var",
        ]  # fmt: skip


def test_session_without_a_state_is_refused() -> None:
    with opened(running_sum(), "c") as model, pytest.raises(UserError, match="without; give the arrays of `start`"):
        model.session()


def test_arrays_not_fit_for_a_session_are_refused() -> None:
    with opened(running_sum(), "c") as model:
        state = np.ones((3, 4), np.float32)
        for start, replaced_by, text in (
            ({"y": state}, {"y": 1}, "the parameters are x, state"),
            ({"x": state}, {"state": 1}, "array to start with .*parameter"),
            ({"state": state}, {"state": 2}, "one of 2 results, got number 2"),
            ({"state": state.astype(np.float64)}, {"state": 1}, "parameter state: expected dtype float32, got float64"),
            ([state, state, state], None, "got 3 for 2 parameters"),
        ):
            with pytest.raises(UserError, match=text):
                model.session(start, replaced_by=replaced_by)
        session = model.session([state])
        with pytest.raises(UserError, match="expected 2 in dim 0, got 3"):
            session.run([state[:2]])
        (found,) = session.run([state])
        np.testing.assert_array_equal(found, np.full((3, 4), 3.0, np.float32))
        session.close()
        session.close()
        with pytest.raises(ModelStateError, match="an open session"):
            session.run([state])
        left = model.session([state])
    with pytest.raises(ModelStateError, match="an open model"):
        left.run([state])


def cached(window: int | None = None, returned: bool = True, read: bool = False) -> IRModule:
    """Attention over a cache and one more position."""
    g = GraphBuilder()
    m = g.symbol("m", 0, 40)
    q, past, new = g.input("q", (2, 1, 8)), g.input("past", (2, m, 8)), g.input("new", (2, 1, 8))
    key = g.call(Concat(1), past, new)
    y = g.call(Attention(0.5, causal=True, offset=m, window=window), q, key, key)
    more = (g.call(MulScalar(2.0), past),) if read else ()
    return g.finish((y, key, *more) if returned else y)


@pytest.mark.parametrize(
    ("module", "found"),
    [(cached(), 1), (cached(3), 1), (cached(returned=False), 0), (cached(read=True), 0)],
    ids=["cache", "window", "not returned", "read elsewhere"],
)
def test_extended_parameters_are_found(module: IRModule, found: int) -> None:
    job = device_job(module, open_device("c").info, MemoryStore(), QUICK)
    assert sum(map(len, job.lowered.appended.values())) == found


def test_calls_with_extended_parameters_give_fresh_arrays() -> None:
    rng = np.random.default_rng(0)
    with opened(cached(), "c") as model:
        past = rng.standard_normal((2, 5, 8)).astype(np.float32)
        q, new = (rng.standard_normal((2, 1, 8)).astype(np.float32) for _ in range(2))
        before = past.copy()
        y, key = model.run({"q": q, "past": past, "new": new})
        np.testing.assert_array_equal(past, before)
        np.testing.assert_array_equal(key, np.concatenate([past, new], axis=1))
        again, _ = model.run([q, np.asfortranarray(past), new])
        np.testing.assert_array_equal(again, y)
        empty, first = model.run([q, past[:, :0], new])
        np.testing.assert_allclose(empty, new, rtol=1e-6)
        np.testing.assert_array_equal(first, new)


class Counted:
    """How many steps of sessions were steady, and how many were bound as a whole."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steady, self.bound = 0, 0
        run, bind = SteadySteps.run, Executor.bind

        def counted_run(steps: SteadySteps, inputs: Any) -> Any:
            results = run(steps, inputs)
            self.steady += results is not None
            return results

        def counted_bind(executor: Executor, *args: Any, **options: Any) -> Any:
            self.bound += not options.get("cached", True)
            return bind(executor, *args, **options)

        monkeypatch.setattr(SteadySteps, "run", counted_run)
        monkeypatch.setattr(Executor, "bind", counted_bind)


def attention_step(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((2, 1, 8)).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def attention() -> Iterator[Model]:
    with opened(cached(), "c") as model:
        yield model


def test_decoder_steps_are_steady_while_memory_stays(decoder: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *caches = decoder.run([PROMPT], "prefill")
    counted = Counted(monkeypatch)
    joins = isinstance(decoder.executors["decode"].device, JoinsLaunches)
    with decoder.session(caches, "decode") as session:
        for step in range(30):
            tokens = (PROMPT[:, :1] + step) % 37
            logits, *caches = decoder.run([tokens, *caches], "decode")
            np.testing.assert_array_equal(session.run([tokens])[0], logits)
    assert counted.steady + counted.bound == 30
    assert counted.steady >= 15 if joins else counted.steady == 0


def test_steady_step_with_a_wrong_argument_is_refused_as_any(decoder: Model) -> None:
    _, *caches = decoder.run([PROMPT], "prefill")
    with decoder.session(caches, "decode") as session:
        for step in range(12):
            if step % 2:
                for wrong, text in (
                    ([[37], [1]], "expected values from 0 to 36"),
                    ([[1, 2], [1, 2]], "expected 1 in dim 1"),
                ):
                    with pytest.raises(UserError, match=text):
                        session.run([np.array(wrong)])
            tokens = PROMPT[:, :1] + step
            logits, *caches = decoder.run([tokens, *caches], "decode")
            np.testing.assert_array_equal(session.run({"input_ids": tokens})["logits"], logits)


@pytest.mark.parametrize(
    "given", [lambda a: a, lambda a: a.tolist(), np.asfortranarray], ids=["array", "list", "strides"]
)
def test_steady_steps_take_arguments_as_any(attention: Model, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, past = Counted(monkeypatch), np.zeros((2, 0, 8), np.float32)
    with attention.session({"past": past}, replaced_by={"past": 1}) as session:
        for step in range(20):
            q, new = attention_step(step)
            y, past = attention.run([q, past, new])
            np.testing.assert_array_equal(session.run([given(q), new])[0], y)
            if step % 7 == 3:
                np.testing.assert_array_equal(session.arrays()["past"], past)
    assert (counted.steady > 5) == isinstance(given(q), np.ndarray)


def test_steady_step_without_a_list_of_arguments_is_refused(attention: Model) -> None:
    with attention.session({"past": np.zeros((2, 16, 8), np.float32)}, replaced_by={"past": 1}) as session:
        for step in range(6):
            q, new = attention_step(step)
            session.run([q, new])
            for wrong in (5, "qn", np.stack([q, new]), [q], {"q": q}, {"q": q, "news": new}, [q, new, new], [q, None]):
                with pytest.raises(UserError):
                    session.run(wrong)  # type: ignore[arg-type]
        assert session.arrays()["past"].shape == (2, 22, 8)


def test_steady_steps_read_arguments_of_other_orders_in_memory(
    attention: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument that a result extends is stored with its positions outermost; here it does not stay on the device."""
    counted, rng, (q, _) = Counted(monkeypatch), np.random.default_rng(0), attention_step(0)
    with attention.session({"q": q}, replaced_by={}) as session:
        for step in range(6):
            past, (_, new) = rng.standard_normal((2, 5, 8)).astype(np.float32), attention_step(step)
            for found, expected in zip(session.run([past, new]), attention.run([q, past, new]), strict=True):
                np.testing.assert_array_equal(found, expected)
    assert counted.steady == 4


def test_steady_steps_end_at_the_bound_of_a_symbol(attention: Model) -> None:
    with attention.session({"past": np.zeros((2, 30, 8), np.float32)}, replaced_by={"past": 1}) as session:
        for step in range(11):
            session.run(attention_step(step))
        for _ in range(2):
            with pytest.raises(UserError, match=r"expected m <= 40, got 41 \(from dim 1 of parameter past\)"):
                session.run(attention_step(0))
        assert session.arrays()["past"].shape == (2, 41, 8)


def test_other_calls_between_steady_steps_change_nothing(attention: Model) -> None:
    """They use the same memory, and make it grow."""
    rng, past = np.random.default_rng(0), np.zeros((2, 3, 8), np.float32)
    start, replaced_by = {"past": past}, {"past": 1}
    with (
        attention.session(start, replaced_by=replaced_by) as one,
        attention.session(start, replaced_by=replaced_by) as other,
    ):
        for step in range(12):
            q, new = attention_step(step)
            y, past = attention.run([q, past, new])
            attention.run([q, rng.standard_normal((2, 3 * step, 8)).astype(np.float32), new])
            for session in (one, other):
                np.testing.assert_array_equal(session.run([q, new])[0], y)


def test_failing_steady_step_leaves_the_state(attention: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MeasureError("the device is lost")

    past = np.zeros((2, 16, 8), np.float32)
    with attention.session({"past": past}, replaced_by={"past": 1}) as session:
        for step in range(12):
            q, new = attention_step(step)
            if step > 5:
                with monkeypatch.context() as patch:
                    patch.setattr(Launches, "enqueue", fails)
                    with pytest.raises(MeasureError, match="lost"):
                        session.run([q, new])
            y, past = attention.run([q, past, new])
            np.testing.assert_array_equal(session.run([q, new])[0], y)
            if step > 8:
                np.testing.assert_array_equal(session.arrays()["past"], past)


def test_states_of_one_size_change_places_in_steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(running_sum(), "c") as model:
        state, counted = np.ones((3, 4), np.float32), Counted(monkeypatch)
        with model.session({"state": state}, replaced_by={"state": 1}) as session:
            for step in range(12):
                x = np.full((3, 4), step, np.float32)
                doubled, state = model.run([x, state])
                np.testing.assert_array_equal(session.run([x])[0], doubled)
                if step in (6, 9):
                    np.testing.assert_array_equal(session.arrays()["state"], state)
            assert counted.steady == 8, "after two steps, and after one behind each look at the state"
            session.reset()
            np.testing.assert_array_equal(session.run([x])[0], 2 * (x + 0.5))


def test_steady_session_of_a_forked_process_is_refused() -> None:
    """Another thread may have the device's turn at the fork, and never releases it in the new process."""
    with opened(cached(), "c") as model:
        device, held, release = model.executor.device, threading.Event(), threading.Event()
        session = model.session({"past": np.zeros((2, 16, 8), np.float32)}, replaced_by={"past": 1})
        for step in range(4):
            session.run(attention_step(step))

        def hold() -> None:
            with device.turn:
                held.set()
                release.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        model.after_fork()
        with pytest.raises(ModelStateError, match="opened before fork"):
            session.run(attention_step(4))
        assert thread.is_alive(), "it has not waited for the turn"
        release.set()
        thread.join()


def test_shapes_of_steady_steps_are_recorded(attention: Model) -> None:
    seen: list[Any] = []
    attention.executor.record = seen.append
    try:
        with attention.session({"past": np.zeros((2, 5, 8), np.float32)}, replaced_by={"past": 1}) as session:
            for step in range(10):
                session.run(attention_step(step))
    finally:
        attention.executor.record = None
    assert seen == [(5 + step,) for step in range(10)]


def test_sessions_of_several_threads_are_right(attention: Model) -> None:
    past = np.zeros((2, 2, 8), np.float32)
    steps = [attention_step(step) for step in range(25)]
    expected, state = [], past
    for q, new in steps:
        y, state = attention.run([q, state, new])
        expected.append(y)

    def work(_: int) -> None:
        with attention.session({"past": past}, replaced_by={"past": 1}) as session:
            for given, y in zip(steps, expected, strict=True):
                np.testing.assert_array_equal(session.run(given)[0], y)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize(
    "kept", [lambda y: y, lambda y: y[:, :, 2:5], memoryview, np.from_dlpack], ids=["array", "view", "memory", "dlpack"]
)
def test_results_still_referred_to_keep_values(attention: Model, kept: Any) -> None:
    """The memory of others is used again."""
    past, had, addresses = np.zeros((2, 2, 8), np.float32), [], set()
    with attention.session({"past": past}, replaced_by={"past": 1}) as session:
        for step in range(24):
            q, new = attention_step(step)
            y, past = attention.run([q, past, new])
            (found,) = session.run([q, new])
            addresses.add(found.ctypes.data)
            if step % 3 == 0:
                had.append((kept(found), np.array(kept(y))))
            del found
    assert len(addresses) < 15
    for found, y in had:
        np.testing.assert_array_equal(found, y)
