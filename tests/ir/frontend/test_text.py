"""Models as text: what a .relax file with weights beside it means, and what is said of one that is wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.ir.text.test_text_graph import feed_forward
from typer.testing import CliRunner

from relax_tune.errors import ParseError, RelaxTuneError, UserError
from relax_tune.ir.check.structural import first_difference
from relax_tune.ir.core.graph import CallTIR, Function
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.text import save_text
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Mul
from relax_tune.ir.text.printer import print_text
from relax_tune.tuner.cli.app import app

GATED = """
module(version=1)
n = symbol("n", lower=1, upper=64)

@prim_func
def gated(x: Buffer((n, 2 * k), f32), y: Buffer((n, k), f32)):
    for i in serial(n):
        for j in serial(k):
            with block("gated"):
                vi = spatial(n, i)
                vj = spatial(k, j)
                y[vi, vj] = x[vi, vj] / (1.0 + exp(0.0 - x[vi, vj])) * x[vi, vj + k]

@function
def main(x: Tensor((n, 6), f32)) -> Tensor((n, 4), f32):
    with dataflow():
        h: Tensor((n, 8), f32) = op.matmul(x, const("w", Tensor((6, 8), f32)))
        y: Tensor((n, 4), f32) = call_tir(gated, (h,), out=Tensor((n, 4), f32))
    return y
""".replace("@prim_func\n", "@prim_func(outputs=1)\n")
GATED_ALONE = GATED[: GATED.index("@function")]
TWO = GATED_ALONE + GATED_ALONE[GATED_ALONE.index("@prim") :].replace("gated", "other")
ALONE = GATED[GATED.index("@prim_func") : GATED.index("@function")]
W = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)


def written(folder: Path, text: str, **weights: np.ndarray) -> Path:
    path = folder / "model.relax"
    path.write_text(text)
    if weights:
        np.savez(folder / "model.npz", **weights)  # type: ignore[arg-type]
    return path


def silu(h: np.ndarray) -> np.ndarray:
    return h[:, :4] / (1 + np.exp(-h[:, :4])) * h[:, 4:]


def test_text_and_weights_are_a_model(tmp_path: Path) -> None:
    module = load_model(written(tmp_path, GATED, w=W), {"n": (1, 8)})
    assert [(b.lower, b.upper) for b in module.bounds] == [(1, 8)]
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    np.testing.assert_allclose(run_function(module, "main", [x]), silu(x @ W), rtol=1e-5, atol=1e-6)


def test_save_text_then_load_gives_equal_module(tmp_path: Path) -> None:
    path = save_text(feed_forward(), tmp_path / "ff.relax")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ff.relax", "ff.safetensors"]
    assert first_difference(load_model(path), feed_forward()) is None
    with pytest.raises(UserError, match=r"ends in \.relax, got \.txt"):
        save_text(feed_forward(), tmp_path / "ff.txt")


def test_save_text_of_scalar_constant_is_loaded(tmp_path: Path) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 8), 4))
    module = g.finish(g.call(Mul(), x, g.constant("c", np.full((), 2.5, np.float32))))
    assert first_difference(load_model(save_text(module, tmp_path / "s.relax")), module) is None


def test_load_text_single_tensor_function_gets_a_caller(tmp_path: Path) -> None:
    module = load_model(written(tmp_path, ALONE))
    main = module.functions["main"]
    assert isinstance(main, Function) and isinstance(main.bindings[0].value, CallTIR)
    fixed = re.sub(r"\b[nk]\b", "4", ALONE).replace("x: Buffer((4, 2 * 4)", "x: Const((4, 8)")
    path = written(tmp_path, fixed, x=W[:4])
    y = run_function(load_model(path), "main", [])
    np.testing.assert_allclose(y, silu(W[:4]), rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GATED.replace("op.matmul", "op.matmull"), r"model\.relax: line 17, column 34: unknown operator 'matmull'[\s\S]*\| +\^"),
        (GATED.replace("exp(0.0", "exp((0.0"), r"model\.relax: line 1[0-9], column \d+: not Python syntax"),
        (GATED.replace("serial(k)", "serial(q)"), r"line 8, column 25: nothing is called 'q'"),
        (GATED.replace("lower=1", "lower='1'"), r"line 3, column 23: expected an integer bound"),
        (GATED.replace('"w"', '"v"'), r"weight called 'v' .*model\.npz, got w"),
        (TWO, r"graph function, .*tensor function; got gated, other"),
        (GATED.replace("(6, 8)", "(6, 9)"), r"constant 'w' is not what its annotation says"),
        (GATED.replace("-> Tensor((n, 4)", "-> Tensor((n, 5)"), r"model\.relax: main: the result does not fit"),
        ("", r"model\.relax: line 1, column 1: expected one function"),
    ],
)  # fmt: skip
def test_load_text_invalid_file_names_path_and_place(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text, w=W)
    with pytest.raises(ParseError, match=message):
        load_model(path)
    done = CliRunner().invoke(app, ["show", str(path)])
    assert done.exit_code == 2 and str(path) in done.stderr and "Traceback" not in done.stderr


def test_show_command_prints_program_and_tasks(tmp_path: Path) -> None:
    path = written(tmp_path, GATED, w=W)
    done = CliRunner().invoke(app, ["show", str(path), "--what", "program,tasks"])
    assert done.exit_code == 0, done.stderr
    assert "def gated(" in done.stdout and "matmul" in done.stdout


@pytest.mark.ccompiler
def test_build_command_text_model_builds_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, GATED, w=W)
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    np.savez("x.npz", x=x)
    for arguments in (
        ["build", str(path), "--target", "c", "--policy", "generic", "--db", "memory://", "--out", "m.rta"],
        ["run", "m.rta", "--inputs", "x.npz", "--out", "y.npz"],
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.stderr
    with np.load("y.npz") as found:
        np.testing.assert_allclose(found[found.files[0]], silu(x @ W), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bounds", [{"n": (0, 8)}, {"n": (1, 65)}, {"k": (1, 2)}])
def test_bounds_stay_within_the_text(tmp_path: Path, bounds: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(UserError, match=r"bound of [nk]: expected"):
        load_model(written(tmp_path, GATED, w=W), bounds)


def test_damaged_and_doubled_weights(tmp_path: Path) -> None:
    path = written(tmp_path, GATED, w=W)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ParseError, match=r"got model\.safetensors and model\.npz; remove one"):
        load_model(path)
    (tmp_path / "model.npz").unlink()
    with pytest.raises(ParseError, match=r"model\.safetensors: the weights cannot be read"):
        load_model(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RelaxTuneError, match="text in UTF-8"):
        load_model(path)


def test_load_model_unbound_symbol_raises(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match=r"model\.relax: main: symbol k .*no parameter"):
        load_model(written(tmp_path, ALONE.replace("2 * k", "m")))


INDEXED = """
@prim_func(outputs=1)
def f(x: Buffer((n,), f32), k: Buffer((n,), i64), y: Buffer((n,), f32)):
    for i in serial(n):
        with block("f"):
            vi = spatial(n, i)
            y[STORED] = x[READ]
"""


@pytest.mark.parametrize("stored", ["vi + k[vi]", "vi + n // 5000 * k[0]"])
def test_text_storing_where_data_decide_is_refused(tmp_path: Path, stored: str) -> None:
    with pytest.raises(ParseError, match="stored index of y"):
        load_model(written(tmp_path, INDEXED.replace("STORED", stored).replace("READ", "vi")))


@pytest.mark.parametrize("read", ["k[vi]", "vi + (n // 50) * 100000000000"])
def test_text_reading_outside_takes_the_nearest_element(tmp_path: Path, read: str) -> None:
    """The interpreter refuses an index outside its dim."""
    module = load_model(written(tmp_path, INDEXED.replace("STORED", "vi").replace("READ", read)))
    x, k = np.arange(60, dtype=np.float32), np.full(60, 10**12, np.int64)
    assert (np.asarray(run_function(module, "main", [x, k])) == x[-1]).all()


def test_text_with_proved_indices_stays_as_written(tmp_path: Path) -> None:
    text = print_text(load_model(written(tmp_path, ALONE)))
    assert not re.search(r"\b(min|max|select|where)\b", text), text


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(("stored", "read"), [("vi + (n // 5000) * 100000000000", "vi"), ("vi", "k[vi]")])
def test_text_reaching_far_does_so_in_no_kernel(tmp_path: Path, stored: str, read: str) -> None:
    """In a process of its own, which dies of SIGSEGV where a kernel reaches there."""
    path = written(tmp_path, INDEXED.replace("STORED", stored).replace("READ", read))
    code = (
        "import sys, numpy as np, relax_tune as rt\n"
        "built = rt.build(rt.load_model(sys.argv[1]), target='c', db='memory://', policy='generic', self_test=False)\n"
        "with built.open() as model:\n"
        "    for n in (10, 6000):\n"
        "        model.run({'x': np.ones(n, np.float32), 'k': np.full(n, 10**12 * (n > 10), np.int64)})\n"
        "print('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
