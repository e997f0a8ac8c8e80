"""Tokenizer files of hostile authors: they are read or rejected with an error of this package; none ends the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra text)")

BASE = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"},
    "added_tokens": [
        {"id": 0, "special": True, "content": "[CLS]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    ],
    "post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [0], "tokens": ["[CLS]"]}},
    },
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": {"[CLS]": 0, "[UNK]": 1, "the": 2, "cat": 3, "##s": 4},
    },
}  # fmt: skip
WORDS = {
    "normalizer": [
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
        {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}, {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "x"},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"}, {"type": "Prepend", "prepend": ""},
        {"type": "Sequence", "normalizers": []},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"Regex": "(?=x)*"}, "behavior": "Removed", "invert": True},
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        {"type": "FixedLength", "length": 0}, {"type": "Metaspace", "replacement": "", "prepend_scheme": "always", "split": True},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, {"type": "Digits"},
    ],
    "model": [
        {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]], "dropout": 5.0},
        {"type": "BPE", "vocab": {"a": 0, "b": 9}, "merges": []},
        {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": ["a a a"]}, {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]},
        {"type": "Unigram", "unk_id": None, "vocab": [["", -1.0]], "byte_fallback": True}, {"type": "Unigram", "unk_id": 0, "vocab": []},
        {"type": "WordLevel", "vocab": {"the": 4294967295}, "unk_token": "nowhere"}, {"type": "WordLevel", "vocab": {}, "unk_token": ""},
        {"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "", "max_input_chars_per_word": 0, "vocab": {}},
    ],
    "truncation": [{"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}],
    "padding": [
        {"strategy": {"Fixed": 1 << 40}, "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": ""}
    ],
    "post_processor": [
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [], "special_tokens": {}},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [], "special_tokens": {}},
        {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {"x": {"id": "x", "ids": [1, 2], "tokens": []}}},
        {"type": "RobertaProcessing", "sep": ["", 7], "cls": ["", 8], "trim_offsets": True, "add_prefix_space": True},
    ],
    "added_tokens": [
        [{"id": 4294967295, "special": True, "content": "", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True}],
        [{"id": 9, "special": False, "content": "the", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True}] * 3,
    ],
}  # fmt: skip
READ = """
import json, random, sys
from pathlib import Path
from relax_tune.errors import UserError
from relax_tune.tuner.text.tokens import SizeLimit, open_tokenizer, tokenize
folder, base, parts, counts = Path(sys.argv[1]), *map(json.loads, sys.stdin.read().split("\\0")), {"read": 0, "refused": 0}
dice = random.Random(3)
values = (None, True, -1, 0, 1 << 40, 1e300, "", "\\u202e", [], {}, [[]], {"type": "x"}, "[CLS]")

def places(node, path=()):
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))

def altered(path, value):
    document = json.loads(json.dumps(base))
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return json.dumps(document)

texts = [json.dumps({**base, name: part}) for name, options in parts.items() for part in options]
texts += [altered(path, value) for path in places(base) if path for value in dice.sample(values, 3)]
whole = json.dumps(base)
texts += [whole[: dice.randrange(len(whole))] + chr(dice.randrange(0x250)) + whole[dice.randrange(len(whole)) :] for _ in range(60)]
texts += ["[" * 200_000, whole + whole, "\\0"]
for text in texts:
    (folder / "tokenizer.json").write_text(text)
    print(text[:400], file=sys.stderr, flush=True)
    try:
        ids = tokenize(open_tokenizer(folder), ["the cats", "", "xyz " * 50, "\\u202eabc"], SizeLimit(8), lambda text: None)
        assert all(len(row) <= 8 and all(0 <= n < 1 << 32 for n in row) for row in ids), ids
        counts["read"] += 1
    except UserError:
        counts["refused"] += 1
print(json.dumps(counts))
"""


@pytest.mark.process
def test_altered_tokenizers_are_read_or_refused(tmp_path: Path) -> None:
    given = "\0".join(map(json.dumps, (BASE, WORDS)))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], input=given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["read"] > 20 and counts["refused"] > 100, counts
