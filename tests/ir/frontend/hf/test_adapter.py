"""LoRA adapters: results of models with an adapter against peft's merged models, interpreted, and refusals."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import relax_tune as rt
from relax_tune.errors import ParseError, RelaxTuneWarning, UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.interp_graph import run_function

DATA = Path(__file__).parents[3] / "data"
MAKER = runpy.run_path(str(DATA / "make_adapters.py"))
IDS, CASES = MAKER["IDS"], MAKER["CASES"]
BOUNDS = {"bert": {"b": (1, 2), "n": (1, 8)}, "decoder": {"b": (1, 2), "n": (1, 8), "m": (0, 8)}}


def write(folder: Path, case: str, **changes: Any) -> tuple[Path, Path, np.ndarray[Any, Any]]:
    """The folders of a model and its adapter, and the result of peft's merged model. changes: fields of adapter_config.json"""
    base = MAKER["write_base"](folder / "base", *CASES[case][:2])
    adapter = folder / "adapter"
    adapter.mkdir()
    with np.load(DATA / "adapters.npz") as archive:
        config = json.loads(archive[f"{case}/config"].tobytes())
        start = f"{case}/tensors/"
        save_file(
            {n.removeprefix(start): archive[n] for n in archive.files if n.startswith(start)},
            adapter / "adapter_model.safetensors",
        )
        expected = archive[f"{case}/expected"]
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return base, adapter, expected


def result(base: Path, adapter: Path | None, kind: str) -> np.ndarray[Any, Any]:
    """The last hidden state or the logits of every position."""
    mask = np.ones_like(IDS)
    if kind == "bert":
        return run_function(load_model(base, pooling="none", adapter=adapter), "main", [IDS, mask])
    if kind == "head":
        return run_function(load_model(base, adapter=adapter), "main", [IDS, mask, 0 * mask])
    module = load_model(base, adapter=adapter)
    if kind == "pair":
        cross = run_function(module, "encode", [IDS, mask])
        return run_function(module, "prefill", [IDS[:, :3], mask, *cross])[0]
    return run_function(module, "prefill", [IDS])[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*pooler.dense.bias, which the model")
def test_model_with_adapter_has_the_results_of_peft(tmp_path: Path, case: str) -> None:
    base, adapter, expected = write(tmp_path, case)
    kind = CASES[case][0]
    with_adapter, without = result(base, adapter, kind), result(base, None, kind)
    if kind in ("decoder", "family", "pair"):
        expected = expected[:, -1:]
    np.testing.assert_allclose(with_adapter, expected, rtol=2e-4, atol=2e-4)
    assert np.abs(without - expected).max() > 1e-2


def test_head_of_the_adapter_alone_is_read(tmp_path: Path) -> None:
    base, adapter, expected = write(tmp_path, "classifier")
    weights = load_file(base / "model.safetensors")
    save_file({n: a for n, a in weights.items() if not n.startswith("classifier")}, base / "model.safetensors")
    np.testing.assert_allclose(result(base, adapter, "head"), expected, rtol=2e-4, atol=2e-4)


def test_names_of_another_class_of_the_model_are_found(tmp_path: Path) -> None:
    base, adapter, expected = write(tmp_path, "llama")
    file = adapter / "adapter_model.safetensors"
    save_file({n.replace("model.model.model.", "model.model."): a for n, a in load_file(file).items()}, file)
    np.testing.assert_allclose(result(base, adapter, "decoder"), expected[:, -1:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("changes, message", [
    ({"peft_type": "LOHA"}, "peft_type: expected LORA, got 'LOHA'"),
    ({"use_dora": True}, "use_dora: expected plain LoRA without it, got True"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"some_later_field": 3}, "some_later_field"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights: expected true, gaussian"),
    ({"r": 5}, r"expected shape \(32, 5\)"),
    ({"lora_alpha": "many"}, "lora_alpha: expected a number"),
    ({"alpha_pattern": {"query": -1}}, "alpha_pattern: expected numbers by module"),
    ({"rank_pattern": {"(a|aa)*": 2}}, "expected names of modules, got the expression"),
])  # fmt: skip
def test_other_adapters_are_refused_in_words(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    base, adapter, _ = write(tmp_path, "bert", **changes)
    with pytest.raises(ParseError, match=message):
        load_model(base, adapter=adapter)


def test_tensors_of_other_models_are_refused_by_name(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "bert")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(n for n in tensors if "query.lora_A" in n)
    changed = {
        "is the adapter of this model": {first.replace("layer.0", "layer.9"): tensors[first]},
        "got only lora_B": {n: a for n, a in tensors.items() if n != first},
        "expected matrices lora_A and lora_B": {
            **tensors,
            first.replace("lora_A", "lora_magnitude_vector"): tensors[first],
        },
    }
    for message, some in changed.items():
        more = {n.replace("layer.0", "layer.9"): a for n, a in tensors.items()} if "layer.9" in "".join(some) else some
        save_file(more, file)
        with pytest.raises(ParseError, match=message):
            load_model(base, adapter=adapter)


def test_adapter_of_no_folder_and_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "bert")
    with pytest.raises(UserError, match="one without adapter_config"):
        load_model(base, adapter=base)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ParseError, match="save_pretrained of peft"):
        load_model(base, adapter=adapter)
    with pytest.raises(ParseError, match="the folder of a LoRA adapter"):
        load_model(adapter)
    text = tmp_path / "model.relax"
    text.write_text("")
    with pytest.raises(UserError, match=r"adapter .* applies only to Hugging Face folders"):
        load_model(text, adapter=adapter)


def test_change_of_an_unread_part_causes_a_warning(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "classifier")
    with pytest.warns(RelaxTuneWarning, match=r"changes classifier\.bias, classifier\.weight, which"):
        load_model(base, pooling="mean", adapter=adapter)


def test_tune_and_build_take_an_adapter(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "bert")
    built = rt.build(
        base, target="c", db="memory://", bounds=BOUNDS["bert"], adapter=adapter, self_test=False, pack=False
    )
    merged = load_model(base, bounds=BOUNDS["bert"], adapter=adapter)
    name = "encoder.layer.0.attention.self.query.weight"
    np.testing.assert_array_equal(built.constants[name], merged.constants[name])
