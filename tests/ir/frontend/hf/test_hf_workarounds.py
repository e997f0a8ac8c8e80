"""What a refusal of a Hugging Face folder says to do is done here: the model then imports, and gives transformers' results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.interp_graph import run_function

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="needs torch and transformers: pip install torch transformers"
)
pytestmark = [pytest.mark.torch, pytest.mark.slow]
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 31,
    "max_position_embeddings": 32,
}  # fmt: skip
IDS, MASK = np.arange(5)[None] % 31, np.ones((1, 5), np.int64)


def bert(folder: Path) -> Any:
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    model.save_pretrained(folder)
    return model


def refusal(folder: Path, *parts: str) -> None:
    with pytest.raises(ParseError) as caught:
        load_model(folder)
    assert all(p in str(caught.value) for p in parts), str(caught.value)


def check(model: Any, folder: Path) -> None:
    with torch.no_grad():
        hidden = model(torch.from_numpy(IDS), torch.from_numpy(MASK)).last_hidden_state.numpy()
    mean = hidden.mean(1)
    got = run_function(load_model(folder), "main", [IDS, MASK])
    np.testing.assert_allclose(got, mean / np.linalg.norm(mean, axis=1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_model_of_an_unknown_type_is_exported(tmp_path: Path) -> None:
    class Hidden(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids, attention_mask).last_hidden_state

    config = transformers.SplinterConfig(**SIZES)
    model = transformers.SplinterModel(config).eval()
    model.save_pretrained(tmp_path)
    refusal(tmp_path, "config.json", "got 'splinter'", "torch.export (a .pt2 file)")
    length = torch.export.Dim("length", min=1, max=16)
    args = torch.from_numpy(IDS), torch.from_numpy(MASK)
    program = torch.export.export(Hidden(model), args, dynamic_shapes=({1: length}, {1: length}), strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    with torch.no_grad():
        expected = Hidden(model)(*args).numpy()
    got = run_function(load_model(tmp_path / "model.pt2"), "main", [IDS, MASK])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_pickled_weights_are_saved_as_safetensors(tmp_path: Path) -> None:
    model = bert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    refusal(tmp_path, "model.safetensors", "pytorch_model.bin", "save_pretrained")
    transformers.AutoModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
    check(model, tmp_path)


def test_weights_of_an_unreadable_type_are_saved_in_float32(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, path = bert(tmp_path), tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "embeddings.LayerNorm.bias"
    save_file({**weights, name: weights[name].to(torch.complex64)}, path, {"format": "pt"})
    refusal(tmp_path, name, "save the model in float32")
    save_file({k: v.float() for k, v in load_file(path).items()}, path, {"format": "pt"})
    check(model, tmp_path)


def test_model_with_an_unreadable_field_is_exported(tmp_path: Path) -> None:
    bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "mish"}))
    refusal(tmp_path, "config.json", "hidden_act")
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    args = torch.from_numpy(IDS), torch.from_numpy(MASK)
    program = torch.export.export(model, args, strict=False)
    got, *_ = run_function(load_model(program), "main", [IDS, MASK])
    with torch.no_grad():
        np.testing.assert_allclose(got, model(*args).last_hidden_state.numpy(), rtol=1e-4, atol=1e-5)


def sentence_model(folder: Path) -> Any:
    """Save a model of sentence-transformers whose second module is not imported, and return it."""
    sentences = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    bert(folder / "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123))]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    parts = [modules.Transformer(str(folder / "bert")), modules.CNN(16, 8, [1, 3]), modules.Pooling(16, "mean")]
    model = sentences.SentenceTransformer(modules=parts, device="cpu").eval()
    model.save(str(folder / "whole"))
    return model


def test_unknown_module_behind_an_encoder_is_applied_later(tmp_path: Path) -> None:
    model = sentence_model(tmp_path)
    refusal(tmp_path / "whole", "module 1, '1_CNN'", "got 'CNN'", 'pooling="none"')
    ids, mask = torch.from_numpy(IDS), torch.from_numpy(MASK)
    hidden = run_function(load_model(tmp_path / "whole", pooling="none"), "main", [IDS, MASK])
    features = {"token_embeddings": torch.from_numpy(hidden), "attention_mask": mask}
    with torch.no_grad():
        got = model[2](model[1](features))["sentence_embedding"]
        expected = model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_sentence_model_with_an_unknown_module_is_exported(tmp_path: Path) -> None:
    class Whole(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model({"input_ids": input_ids, "attention_mask": attention_mask})["sentence_embedding"]

    model = sentence_model(tmp_path)
    refusal(tmp_path / "whole", "torch.nn.Module that takes input_ids and attention_mask")
    args = torch.from_numpy(IDS), torch.from_numpy(MASK)
    program = torch.export.export(Whole(model), args, strict=False)
    torch.export.save(program, tmp_path / "whole.pt2")
    got = run_function(load_model(tmp_path / "whole.pt2"), "main", [IDS, MASK])
    with torch.no_grad():
        np.testing.assert_allclose(got, Whole(model)(*args).numpy(), rtol=1e-4, atol=1e-5)


def test_first_module_of_images_loads_from_a_folder(tmp_path: Path) -> None:
    sizes = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
    text = {**SIZES, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}, projection_dim=6
    )
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path / "0_CLIPModel")
    listed = [
        {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    refusal(tmp_path, "module 0", "CLIPModel", f"load {tmp_path / '0_CLIPModel'}")
    got = run_function(load_model(tmp_path / "0_CLIPModel"), "text", [IDS, MASK])
    with torch.no_grad():
        output = model.get_text_features(input_ids=torch.from_numpy(IDS), attention_mask=torch.from_numpy(MASK))
    wanted = (output if isinstance(output, torch.Tensor) else output.pooler_output).numpy()
    np.testing.assert_allclose(got, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_model_of_time_series_is_exported(tmp_path: Path) -> None:
    class Forecast(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, values: Any) -> Any:
            return self.model(values).prediction_outputs

    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=32, patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2, num_hidden_layers=1,
        ffn_dim=24, prediction_length=5, loss="mse",
    )  # fmt: skip
    model = transformers.PatchTSTForPrediction(config).eval()
    model.save_pretrained(tmp_path)
    refusal(tmp_path, "got 'patchtst'", "torch.export (a .pt2 file)")
    batch, rng = torch.export.Dim("batch", min=1, max=8), np.random.default_rng(0)
    example = torch.from_numpy(rng.standard_normal((2, 32, 2)).astype(np.float32))
    program = torch.export.export(Forecast(model), (example,), dynamic_shapes=({0: batch},), strict=False)
    module = load_model(program)
    for b in (1, 3):
        given = rng.standard_normal((b, 32, 2)).astype(np.float32)
        with torch.no_grad():
            expected = Forecast(model)(torch.from_numpy(given)).numpy()
        np.testing.assert_allclose(run_function(module, "main", [given]), expected, rtol=1e-4, atol=1e-5)


def test_forecaster_folder_equals_exported_program(tmp_path: Path) -> None:
    class Forecast(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, values: Any, padding: Any, freq: Any) -> Any:
            output = self.model(values, padding, freq)
            return output.last_hidden_state, output.loc, output.scale

    config = transformers.TimesFmConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=16, patch_length=8
    )
    model = transformers.TimesFmModel(config).eval()
    model.save_pretrained(tmp_path)
    batch, rng = torch.export.Dim("batch", min=1, max=8), np.random.default_rng(0)

    def inputs(b: int) -> list[Any]:
        padding = np.zeros((b, 64), np.float32)
        padding[0, :9] = 1
        return [rng.standard_normal((b, 64)).astype(np.float32), padding, np.zeros((b, 1), np.int64)]

    example = tuple(map(torch.from_numpy, inputs(2)))
    program = torch.export.export(Forecast(model), example, dynamic_shapes=({0: batch},) * 3, strict=False)
    module, folder = load_model(program), load_model(tmp_path)
    for b in (1, 3):
        given = inputs(b)
        with torch.no_grad():
            expected = Forecast(model)(*map(torch.from_numpy, given))
        whole = [given[0], given[1].astype(np.int64), given[2]]
        for results in (run_function(module, "main", given), run_function(folder, "main", whole)):
            for part, want in zip(results, expected, strict=True):
                np.testing.assert_allclose(part, want.numpy(), rtol=1e-4, atol=1e-5)
