"""`relax-tune web` without a browser: what is served, what is refused, and that the built scripts are current."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.tuner.dashboard.asking import ask

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import save_artifact
from relax_tune.runtime.program.program import BufferSpec, Program, Symbol
from relax_tune.runtime.program.scalars import ARITY, Opcode, evaluate
from relax_tune.tuner.web.server import ServedModel, make_web_app, served_model

WEB = Path(__file__).parents[3] / "tuner" / "web"
SCRIPTS = ("relax-tune.js", "search.js", "generate.js")
MOST_BYTES = 60_000
pytest.importorskip("starlette", reason="starlette is not installed (extra dashboard)")


def program(name: str, ids: str = "input_ids", dims: int = 2) -> Program:
    """A program that gives its argument back."""
    spec = BufferSpec(ids, "int64", (0,) * dims, "input")
    return Program((Symbol("n", 1, 8),), (1, 0, 0, 0), (), (spec,), (), (), (), (), (0,), (0,), name)


def artifact(folder: Path, *programs: Program, kind: str = "webgpu") -> Path:
    return save_artifact(folder / "model.rta", programs, {}, kind=kind)


def current_hash() -> str:
    """The hash of the sources that a built script names."""
    root, found = WEB / "browser", hashlib.sha256()
    names = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"]
    for name in sorted([*names, *(f"src/{path.name}" for path in (root / "src").glob("*.ts"))]):
        found.update(f"{name}\0".encode() + (root / name).read_bytes())
    return found.hexdigest()


@pytest.mark.parametrize("name", SCRIPTS)
def test_built_script_is_current(name: str) -> None:
    first = (WEB / "static" / name).read_text().splitlines()[0]
    assert first.endswith(f"sources sha256:{current_hash()}"), "the sources changed: `make web` builds the scripts anew"


def test_runtime_fits_the_bound_of_bytes() -> None:
    assert sum(len(gzip.compress((WEB / "static" / name).read_bytes(), 9)) for name in SCRIPTS) < MOST_BYTES


def test_lock_names_no_host() -> None:
    assert "http" not in re.sub(r'"(url|funding)": "[^"]*"', "", (WEB / "browser" / "package-lock.json").read_text())


def test_page_follows_the_functions(tmp_path: Path) -> None:
    assert served_model(artifact(tmp_path, program("main"))).page == "search"
    assert served_model(artifact(tmp_path, program("decode"), program("prefill"))).page == "generate"


@pytest.mark.parametrize(
    "programs, kind, message",
    [
        (
            [program("main")],
            "opencl",
            "webgpu or c:wasm32, .*got one for opencl",
        ),
        (
            [program("main", "x")],
            "webgpu",
            "encoder of input_ids .* prefill and decode, got main",
        ),
        ([program("main", dims=3)], "webgpu", "encoder of input_ids .*one row a text"),
    ],
)
def test_artifact_without_a_page_is_refused(
    tmp_path: Path, programs: Sequence[Program], kind: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        served_model(artifact(tmp_path, *programs, kind=kind))


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.json, got none; leave --model out"):
        served_model(artifact(tmp_path, program("main")), tmp_path)


def test_server_gives_page_artifact_and_facts(tmp_path: Path) -> None:
    path = artifact(tmp_path, program("main"))
    app = make_web_app(served_model(path), None)
    page = ask(app, "/")
    assert page.status == 200 and "<h1>Sentence search</h1>" in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    facts = json.loads(ask(app, "/model.json").text)
    assert facts["bytes"] == path.stat().st_size and facts["digest"].encode() == path.read_bytes()[-64:]
    assert facts["tokenizer"] is False and ask(app, f"/{facts['url']}").status == 200
    for name in SCRIPTS:
        assert ask(app, f"/static/{name}").headers["content-type"].startswith("text/javascript")
    path.unlink()
    assert ask(app, "/model.rta").status == ask(app, "/model.json").status == 503


def test_server_with_token_gives_nothing_without(tmp_path: Path) -> None:
    app = make_web_app(served_model(artifact(tmp_path, program("main"))), "t" * 20)
    cookie = ask(app, "/?token=" + "t" * 20).headers["set-cookie"].partition(";")[0]
    for path in ("/", "/model.json", "/model.rta", "/static/relax-tune.js"):
        assert ask(app, path).status == 401 and ask(app, path, cookie=cookie).status == 200, path


def test_server_gives_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "secret.json").write_text("secret")
    app = make_web_app(ServedModel(artifact(tmp_path, program("main")), "search", tmp_path), None)
    assert ask(app, "/tokenizer.json").text == "{}" == ask(app, "/tokenizer_config.json").text
    for path in (
        "/secret.json",
        "/static/secret.json",
        "/static/..%2fserver.py",
        "/..%2fsecret.json",
        "/static/server.py",
    ):
        assert ask(app, path).status == 404, path
    assert ask(app, "/model.json", method="POST").status == 405
    assert ask(app, "/", host="evil.example").status == 421


def random_list(rng: random.Random) -> list[int]:
    """A scalar list over two symbols, with numbers that 53 bits do not hold."""
    code = [1, 0, 0, 0, 1, 1, 0, 0]
    for value in (rng.choice([0, 1, -3, 2**31, 2**53 + 1, -(2**63), 2**63 - 1]), rng.randrange(-50, 50)):
        code += [0, value, 0, 0]
    for _ in range(rng.randrange(1, 8)):
        op = Opcode(rng.randrange(2, 17))
        operands = [rng.randrange(len(code) // 4) for _ in range(ARITY[op])]
        code += [int(op), *operands, *[0] * (3 - len(operands))]
    return code


def python_answer(code: Sequence[int], symbols: Sequence[int]) -> list[str]:
    try:
        return [str(value) for value in evaluate(code, symbols)]
    except UserError:
        return ["error"]


EVALUATE = """
const { ScalarList, parseExact } = await import(process.argv[1]);
let text = "";
for await (const piece of process.stdin) text += piece;
const answers = parseExact(text).map(([code, symbols]) => {
  try { return new ScalarList(code).evaluate(symbols.map(BigInt)).map(String); } catch { return ["error"]; }
});
console.log(JSON.stringify(answers));
"""


@pytest.mark.process
def test_browser_evaluates_scalar_lists_as_python() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    rng = random.Random(7)
    cases = [(random_list(rng), [rng.randrange(-20, 20), rng.choice([0, 1, 7, 2**40])]) for _ in range(400)]
    done = subprocess.run(
        [node, "--input-type=module", "-e", EVALUATE, (WEB / "static" / "relax-tune.js").as_uri()],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wanted = [python_answer(*case) for case in cases]
    assert json.loads(done.stdout) == wanted
    assert 0.2 < np.mean([w == ["error"] for w in wanted]) < 0.8 or len({tuple(w) for w in wanted}) > 100
