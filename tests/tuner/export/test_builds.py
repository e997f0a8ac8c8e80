"""Exports under strict compilers and sanitizers, by CMake and pkg-config, and the programs that embed a sentence."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import attention, feed_forward, minilm_folder
from tests.tuner.export.c_exports import TEAM, build, called, same_bits
from tests.tuner.export.test_c_export import built, floats, looked_up
from tests.tuner.export.test_cross import needs

from relax_tune.ir.frontend.load import load_model
from relax_tune.tuner.export.c_export import export_c

pytestmark = [pytest.mark.ccompiler, pytest.mark.process]
EMBED = Path(__file__).parents[3] / "examples" / "embed"
SENTENCES = ("How does a compiler work?", "An unbelievably long word: Donaudampfschiff, 42!")


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("compiler", ["gcc", pytest.param("clang", marks=pytest.mark.cross)])
@pytest.mark.parametrize(
    "model", [looked_up, *(pytest.param(m, marks=pytest.mark.heavy) for m in (feed_forward, attention))]
)
def test_export_is_clean_under_compilers_and_sanitizers(tmp_path: Path, compiler: str, model: Any) -> None:
    needs(compiler)
    artifact = built(model(), tmp_path)
    export_c(artifact, tmp_path, "net")
    checks = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    for flags in (
        (("-march=native", *TEAM, *checks), ("-march=native", *TEAM), ()) if model is feed_forward else [checks]
    ):
        build(tmp_path, tmp_path / "net", compiler, *flags, main=True)
        if model is looked_up:
            given = {"n": 3}, [np.array([2, 15, 0])]
        elif model is attention:
            given = {"b": 2, "n": 13}, [floats(2, 13, 16) for _ in range(3)]
        else:
            given = {"n": 31}, [floats(31, 24)]
        found = called(artifact.program, [str(tmp_path / "net")], tmp_path, *given)
        with artifact.open("c") as opened:
            wanted = opened.run(given[1])
        for f, w in zip(found, wanted, strict=True):
            np.testing.assert_allclose(f.reshape(w.shape), w, rtol=1e-4, atol=1e-5)


def test_cmake_installs_library_with_linked_weights(tmp_path: Path) -> None:
    needs("cmake", "pkg-config", "g++")
    artifact = built(looked_up(), tmp_path)
    export_c(artifact, tmp_path / "c", "net")
    options = ("-Dnet_LINK_WEIGHTS=ON", "-Dnet_THREADS=none", "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror")
    run("cmake", "-S", "c", "-B", "b", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'i'}", *options, folder=tmp_path)
    run("cmake", "--build", "b", folder=tmp_path)
    run("cmake", "--install", "b", folder=tmp_path)
    (tmp_path / "use.cpp").write_text(
        "#include <net.h>\n#include <cstdio>\nint main() { net *m; int64_t ids[] = {3, 1}; float a[10], b[10];\n"
        "  if (net_create(&m, nullptr) || net_call_main(m, 2, ids, a, b)) return std::puts(net_error(m)), 1;\n"
        '  for (float x : a) std::printf("%.9g\\n", x);\n  net_destroy(m); }\n'
    )
    found = next((tmp_path / "i").rglob("net.pc")).parent
    flags = run("pkg-config", "--cflags", "--libs", "net", folder=tmp_path, PKG_CONFIG_PATH=str(found)).split()
    run("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "use.cpp", *flags, "-o", "use", folder=tmp_path)
    rows = np.array(run(tmp_path / "use", folder=Path("/")).split(), np.float32).reshape(2, 5)
    with artifact.open("c") as model:
        same_bits([rows], model.run([np.array([3, 1])])[:1])


@pytest.mark.minilm
@pytest.mark.heavy
def test_programs_in_cpp_and_rust_embed_sentences(tmp_path: Path) -> None:
    needs("cmake", "pkg-config", "g++", "rustc")
    tokenizers = pytest.importorskip("tokenizers")
    folder = minilm_folder()
    artifact = built(load_model(folder, {"b": (1, 1), "n": (1, 32)}), tmp_path)
    export_c(artifact, tmp_path / "c", "encoder")
    prefix = tmp_path / "i"
    run("cmake", "-S", "c", "-B", "b", f"-DCMAKE_INSTALL_PREFIX={prefix}", "-DCMAKE_C_FLAGS=-O1", folder=tmp_path)
    run("cmake", "--build", "b", folder=tmp_path)
    run("cmake", "--install", "b", folder=tmp_path)
    found = next(prefix.rglob("encoder.pc")).parent
    flags = run("pkg-config", "--cflags", "--libs", "encoder", folder=tmp_path, PKG_CONFIG_PATH=str(found)).split()
    strict = ("-std=c++17", "-Wall", "-Wextra", "-Werror")
    run("g++", *strict, EMBED / "embed.cpp", *flags, "-o", "in_cpp", folder=tmp_path)
    libraries = ("-L", found.parent, "-l", "static=encoder")
    run("rustc", "-O", "-D", "warnings", EMBED / "embed.rs", *libraries, "-o", "in_rust", folder=tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    with artifact.open("c") as model:
        for sentence in SENTENCES:
            ids = np.array([tokenizer.encode(sentence).ids], np.int64)
            (row,) = model.run({"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
            wanted = row / np.linalg.norm(row)
            for program in ("in_cpp", "in_rust"):
                said = run(tmp_path / program, "c/encoder.weights", folder / "vocab.txt", sentence, folder=tmp_path)
                np.testing.assert_allclose(np.array(said.split(), np.float64), wanted, rtol=1e-5, atol=1e-7)
    for program in ("in_cpp", "in_rust"):
        done = subprocess.run(
            [tmp_path / program, "c/encoder.weights", folder / "vocab.txt", "word " * 31],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "main: expected n <= 32, got 33; give a smaller input" in done.stderr
