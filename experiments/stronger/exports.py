"""Write the files from which the peers of `peers.py` are served. For a Python that has the peers.

    python -m experiments.stronger.exports MODEL FILE

MODEL is minilm, prefill or decode; FILE is in the model's folder, and its name says its kind (`cases.SERVED`, and past.npz for the
caches that decode begins with). A file appears only when it is complete.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.decoder_folder import decoder_weights
from experiments.stronger.cases import BATCH, CASES, DECODER, LENGTH, POSITIONS, THREADS, given

BLOCK = 32
IREE_FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-opt-level=O3",
    "--iree-llvmcpu-stack-allocation-limit=262144",
)
TORCH_NAMES = {
    "input_layernorm": "norm", "post_attention_layernorm": "norm2", "self_attn.q_proj": "q", "self_attn.k_proj": "k",
    "self_attn.v_proj": "v", "self_attn.o_proj": "o", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip


def torch_model(model: str, folder: Path) -> Any:
    """Return the model as a module of torch. folder: of the model; of MiniLM, its file `minilm` says where the weights are"""
    import torch

    from experiments.end_to_end.peers import Encoder, Llama

    if model == "minilm":
        return Encoder((folder / "minilm").read_text()).eval()
    made, state = Llama(DECODER, model == "decode", POSITIONS), {}
    for name, array in decoder_weights(DECODER).items():
        own = name.removeprefix("model.").replace("embed_tokens", "embed").replace("lm_head", "logits")
        for theirs, ours in TORCH_NAMES.items():
            own = own.replace(f".{theirs}.", f".{ours}.")
        state[own] = torch.from_numpy(array)
    missing = made.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"cos", "sin"}, missing
    return made.eval()


def write_onnx(model: str, file: Path) -> None:
    """Export the module with dynamic dims."""
    import torch

    dim = torch.export.Dim
    both = {0: dim("b", min=1, max=BATCH), 1: dim("n", min=1, max=LENGTH)}
    past = {2: dim("past", min=1, max=POSITIONS - 1)}
    ids = torch.arange(32).reshape(2, 16)
    shape = (1, DECODER.groups, 16, DECODER.head_size)
    caches = [
        torch.ones(shape) for _ in range(2 * DECODER.layers)
    ]  # apart: torch takes one tensor given twice for one input
    args, dims = {
        "minilm": ((ids, torch.ones_like(ids)), (both, both)),
        "prefill": ((ids[:1],), ({1: both[1]},)),
        "decode": ((ids[:1, :1], *caches), (None, (past,) * len(caches))),
    }[model]
    with torch.no_grad():
        program = torch.export.export(
            torch_model(model, file.parent),
            args,
            dynamic_shapes=dims,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        torch.onnx.export(program, dynamo=True, verbose=False).save(str(file))


def write_dynamic_int8(_: str, file: Path) -> None:
    """Quantise weights ahead and activations in the call, by ONNX Runtime."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(file.parent / "model.onnx", file, per_channel=True, weight_type=QuantType.QInt8)


def write_bits(bits: int) -> Callable[[str, Path], None]:
    """Return a writer of weights in so many bits for ONNX Runtime's MatMulNBits."""

    def write(_: str, file: Path) -> None:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        made = MatMulNBitsQuantizer(
            str(file.parent / "model.onnx"), bits=bits, block_size=BLOCK, is_symmetric=True, accuracy_level=4
        )
        made.process()
        made.model.save_model_to_file(str(file))

    return write


def write_openvino(kind: str) -> Callable[[str, Path], None]:
    """Return a writer of OpenVINO's own format, with weights in fewer bits."""

    def write(model: str, file: Path) -> None:
        import openvino as ov

        made = ov.Core().read_model(file.parent / "model.onnx")
        if kind == "f16":
            ov.save_model(made, file, compress_to_fp16=True)
            return
        import nncf

        mode = nncf.CompressWeightsMode
        if kind == "int8":
            made = nncf.compress_weights(made, mode=mode.INT8_SYM)
        elif kind == "int4":
            made = nncf.compress_weights(made, mode=mode.INT4_SYM, group_size=BLOCK, ratio=1.0, all_layers=True)
        else:
            samples = [given(model, case, file.parent) for case in CASES[model]]
            made = nncf.quantize(made, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)
        ov.save_model(made, file, compress_to_fp16=False)

    return write


def write_iree(_: str, file: Path) -> None:
    """Compile the ONNX model with IREE."""
    scripts, text = Path(sys.executable).parent, file.with_suffix(".mlir")
    imported = [scripts / "iree-import-onnx", file.parent / "model.onnx", "-o", text]
    for command in (imported, [scripts / "iree-compile", text, *IREE_FLAGS, "-o", file]):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            found = [x for x in done.stderr.splitlines() if "error:" in x] or done.stderr.splitlines() or [""]
            raise SystemExit(found[0].replace(str(file.parent), "FOLDER")[:300])
    text.unlink()


def write_past(_: str, file: Path) -> None:
    """Write the caches that each case of decode begins with, of a prefill by torch in float32."""
    import torch

    torch.set_num_threads(THREADS)
    made = torch_model("prefill", file.parent)
    for case in CASES["decode"]:
        (ids,) = given("prefill", case, file.parent)
        with torch.no_grad():
            caches = made(torch.from_numpy(ids))[1:]
        rng = np.random.default_rng(int(case))
        held = {f"cache_{k}": c.numpy() for k, c in enumerate(caches)}
        np.savez(file.parent / f"past-{case}.npz", id=rng.integers(0, DECODER.vocabulary, (1, 1)), past_ids=ids, **held)
    file.write_bytes(b"")


def write_gguf(kind: str) -> Callable[[str, Path], None]:
    """Return a writer of the weights for llama.cpp."""

    def write(model: str, file: Path) -> None:
        from experiments.stronger.llama import write_decoder, write_encoder

        if model == "minilm":
            write_encoder(file, Path((file.parent / "minilm").read_text()), kind)
        else:
            write_decoder(file, kind)

    return write


WRITERS: Mapping[str, Callable[[str, Path], None]] = {
    "past.npz": write_past,
    "model.onnx": write_onnx,
    "model.int8.onnx": write_dynamic_int8,
    "model.bits8.onnx": write_bits(8),
    "model.bits4.onnx": write_bits(4),
    "model.vmfb": write_iree,
    **{f"{kind}.xml": write_openvino(kind) for kind in ("f16", "int8", "quantized", "int4")},
    **{f"{kind}.gguf": write_gguf(kind) for kind in ("f32", "f16", "bf16", "q8_0", "q4_0")},
}


def main() -> None:
    model, file = sys.argv[1], Path(sys.argv[2])
    part = file.parent / f"part-{file.name}"
    WRITERS[file.name](model, part)
    if part.with_suffix(".bin").exists():  # OpenVINO's weights lie beside
        os.replace(part.with_suffix(".bin"), file.with_suffix(".bin"))
    os.replace(part, file)


if __name__ == "__main__":
    main()
