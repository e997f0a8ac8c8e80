"""Decoders on the stored inputs of the fuzzer: each is read, or refused by an error of ours."""

from __future__ import annotations

import pytest
from tests.fuzz.decoders import CORPUS, DECODERS, decode

INPUTS = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.rglob("*") if path.is_file())


def test_every_decoder_has_a_corpus() -> None:
    assert {path.partition("/")[0] for path in INPUTS} == set(DECODERS)


@pytest.mark.parametrize("path", INPUTS)
def test_decoder_on_stored_input_reads_or_refuses(path: str) -> None:
    decode(path.partition("/")[0], (CORPUS / path).read_bytes())
