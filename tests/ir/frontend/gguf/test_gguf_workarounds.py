"""What a refusal of a GGUF file says to do is done here: what transformers reads is exported, imports, and gives its logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.interp_graph import run_function

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="needs torch and transformers: pip install torch transformers"
)
pytest.importorskip("accelerate", reason="needs torch and accelerate: pip install torch accelerate")
gguf = pytest.importorskip("gguf", reason="needs the gguf package: pip install 'relax-tune[gguf]'")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
WIDTH, INNER, HEADS, LAYERS, WORDS = 32, 48, 4, 2, 37


def write_stablelm(path: Path) -> None:
    """Write a small model of an architecture that is not read from GGUF files."""
    rng = np.random.default_rng(3)
    w = gguf.GGUFWriter(str(path), "stablelm")
    w.add_context_length(64)
    w.add_embedding_length(WIDTH)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(INNER)
    w.add_head_count(HEADS)
    w.add_head_count_kv(HEADS)
    w.add_layer_norm_eps(1e-5)
    w.add_rope_dimension_count(WIDTH // HEADS // 4)
    w.add_vocab_size(WORDS)
    w.add_tokenizer_model("gpt2")
    w.add_token_list([f"t{k}" for k in range(WORDS)])

    def add(name: str, *shape: int) -> None:
        w.add_tensor(name, rng.uniform(-0.3, 0.3, shape).astype(np.float32) + np.float32(len(shape) == 1))

    add("token_embd.weight", WORDS, WIDTH)
    add("output.weight", WORDS, WIDTH)
    for norm in ("output_norm", *(f"blk.{k}.{n}" for k in range(LAYERS) for n in ("attn_norm", "ffn_norm"))):
        add(f"{norm}.weight", WIDTH)
        add(f"{norm}.bias", WIDTH)
    for k in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{k}.{part}.weight", WIDTH, WIDTH)
        for part, shape in (("ffn_gate", (INNER, WIDTH)), ("ffn_up", (INNER, WIDTH)), ("ffn_down", (WIDTH, INNER))):
            add(f"blk.{k}.{part}.weight", *shape)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def test_file_of_an_unknown_architecture_is_read_by_transformers(tmp_path: Path) -> None:
    write_stablelm(tmp_path / "m.gguf")
    with pytest.raises(ParseError) as caught:
        load_model(tmp_path / "m.gguf")
    for part in ("m.gguf", "got 'stablelm'", "from_pretrained(FOLDER, gguf_file=NAME)", "torch.export"):
        assert part in str(caught.value)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    model.config.use_cache = False
    ids = torch.arange(5)[None] + 3
    program = torch.export.export(model.eval(), (), {"input_ids": ids}, strict=False)
    logits = run_function(load_model(program), "main", [ids.numpy()])
    with torch.no_grad():
        expected = model(input_ids=ids).logits.numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
