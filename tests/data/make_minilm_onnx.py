"""Makes minilm.onnx: the graph of all-MiniLM-L6-v2 as torch exports it, with its weights left in model.safetensors.

Needs torch, transformers, onnx, onnxscript, safetensors and the folder of the model; the file says which versions made it:

    python tests/data/make_minilm_onnx.py FOLDER [OUT] [sdpa|eager]

Weights are external data: the byte ranges of model.safetensors that hold them. The exporter transposes the matrices of
linear layers; here a Transpose node does, so that the stored ones can be used. What is small stays in the file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from make_bert_onnx import exported

WEIGHTS = "model.safetensors"
SMALL = 1024  # elements


def stored_tensors(path: Path) -> dict[str, tuple[np.ndarray[Any, Any], int, int]]:
    """By name: values, offset and length in bytes within a safetensors file."""
    size = int.from_bytes(path.open("rb").read(8), "little")
    with path.open("rb") as file:
        file.seek(8)
        header = json.loads(file.read(size))
    kinds = {"F32": np.float32, "I64": np.int64}
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in kinds:
            begin, end = entry["data_offsets"]
            array = np.memmap(path, kinds[entry["dtype"]], "r", 8 + size + begin, tuple(entry["shape"]))
            found[name] = (array, 8 + size + begin, end - begin)
    return found


def main(folder: Path, out: Path, attention: str) -> None:
    from onnx import TensorProto, helper, numpy_helper, save

    model, _ = exported(str(folder), attention)
    stored = stored_tensors(folder / WEIGHTS)

    def external(name: str, source: str) -> TensorProto:
        array, offset, length = stored[source]
        t = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        t.data_location = TensorProto.EXTERNAL
        for key, value in (("location", WEIGHTS), ("offset", str(offset)), ("length", str(length))):
            t.external_data.add(key=key, value=value)
        return t

    def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)

    initializers, transposes = [], []
    for t in model.graph.initializer:
        array = numpy_helper.to_array(t)
        straight = [n for n, (a, _, _) in stored.items() if same(a, array)]
        turned = [n for n, (a, _, _) in stored.items() if array.ndim == 2 and same(a.T, array)]
        if array.size <= SMALL and not straight:
            initializers.append(t)
        elif straight:
            initializers.append(external(t.name, straight[0]))
        elif turned:
            initializers.append(external(turned[0], turned[0]))
            transposes.append(helper.make_node("Transpose", [turned[0]], [t.name], f"transpose_{t.name}", perm=[1, 0]))
        else:
            raise SystemExit(f"expected {t.name} {array.shape} among the tensors of {WEIGHTS}, got none")
    nodes = [*transposes, *model.graph.node]
    for field, values in (("initializer", initializers), ("node", nodes)):
        part = getattr(model.graph, field)
        copies = [type(v).FromString(v.SerializeToString()) for v in values]
        del part[:]
        part.extend(copies)
    del model.metadata_props[:]
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers", "onnx", "onnxscript"))
    about = {"made by": f"tests/data/make_minilm_onnx.py with {packages}", "attention": attention}
    for key, value in (about | {f"sha256 of {WEIGHTS}": digest}).items():
        model.metadata_props.add(key=key, value=value)
    save(model, out)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        raise SystemExit("usage: python make_minilm_onnx.py FOLDER [OUT] [sdpa|eager]")
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("minilm.onnx"),
        sys.argv[3] if len(sys.argv) > 3 else "sdpa",
    )
