"""Serve one peer of `peers.py`. For a Python that has the peers.

    python -m experiments.stronger.serve NAME MODEL FOLDER

NAME is a peer of `cases.CLASSES`. The peer's description of itself is written to FOLDER/NAME.note.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.contenders import Answer, serve
from experiments.harness.e2e_cases import Array
from experiments.stronger.cases import SERVED, THREADS, given, numbers

Run = Callable[[Sequence[Array]], Sequence[Any]]


def stateless(run: Run, model: str, folder: Path) -> Answer:
    """Return cases whose calls take and give everything, caches too."""

    def answer(case: str) -> tuple[Callable[..., Any], ...]:
        arrays = given(model, case, folder)
        return lambda: run(arrays), lambda: numbers(run(arrays)[0])

    return answer


def torch_run(kind: str, model: str, folder: Path) -> Run:
    """Return torch's module as it is, compiled, or in bfloat16."""
    import torch

    from experiments.stronger.exports import torch_model

    torch.set_num_threads(THREADS)
    made = torch_model(model, folder)
    if kind == "bf16":
        made = made.to(torch.bfloat16)
    call = torch.compile(made, dynamic=True) if kind == "compile" else made

    def tensor(array: Array) -> Any:
        found = torch.from_numpy(array)
        return found.to(torch.bfloat16) if kind == "bf16" and found.is_floating_point() else found

    def run(arrays: Sequence[Array]) -> Sequence[Any]:
        with torch.inference_mode():
            return [t.float().numpy() if t.dtype == torch.bfloat16 else t.numpy() for t in call(*map(tensor, arrays))]

    return run


def onnxruntime_run(file: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def iree_run(file: Path) -> Run:
    """Return the compiled module's only function, on its pool of tasks."""
    import iree.runtime as iree

    iree.flags.parse_flags(f"--task_topology_group_count={THREADS}")
    config = iree.Config("local-task")
    context = iree.SystemContext(
        vm_modules=[
            iree.create_hal_module(config.vm_instance, config.device),
            iree.VmModule.mmap(config.vm_instance, str(file)),
        ],
        config=config,
    )
    call = context.modules.module["main_graph"]

    def run(arrays: Sequence[Array]) -> Sequence[Any]:
        found = call(*arrays)
        return [r.to_host() for r in (found if isinstance(found, list | tuple) else (found,))]

    return run


def openvino_answers(file: Path, kind: str, model: str) -> tuple[Answer, str]:
    """Return the cases, and the precision that was chosen. Decode keeps its caches in the model's state."""
    import openvino as ov

    core, options = ov.Core(), {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
    if kind == "f32":
        options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    read = core.read_model(file)
    if model == "decode":
        from openvino._offline_transformations import apply_make_stateful_transformation

        pairs = zip(read.inputs[1:], read.outputs[1:], strict=True)
        apply_make_stateful_transformation(read, {i.any_name: o.any_name for i, o in pairs})
    compiled = core.compile_model(read, "CPU", options)
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    request, note = compiled.create_infer_request(), f"INFERENCE_PRECISION_HINT {precision}"

    def run(arrays: Sequence[Array]) -> Sequence[Any]:
        found = request.infer(list(arrays), share_inputs=True, share_outputs=True)
        return [found[0]]

    if model != "decode":
        return stateless(run, model, file.parent), note

    def answer(case: str) -> tuple[Callable[..., Any], ...]:
        token, *caches = given(model, case, file.parent)
        held = {f"cache_{k}": c for k, c in enumerate(caches)}

        def restore() -> None:
            for state in request.query_state():
                name = next(n for n in sorted(held, key=len, reverse=True) if state.name.startswith(n))
                state.state = ov.Tensor(held[name])

        return lambda: run([token]), lambda: numbers(run([token])[0]), restore

    return answer, note


def answers(name: str, model: str, folder: Path) -> tuple[Answer, str]:
    """Return a peer's cases, and its description of itself."""
    peer, _, kind = name.partition(".")
    if peer == "llama":
        from experiments.stronger.llama import answers as llama_answers

        return llama_answers(kind, model, folder)
    if peer == "openvino":
        return openvino_answers(folder / SERVED[name], kind, model)
    if peer == "torch":
        return stateless(torch_run(kind, model, folder), model, folder), ""
    run = onnxruntime_run if peer == "onnxruntime" else iree_run
    return stateless(run(folder / SERVED[name]), model, folder), ""


def main() -> None:
    name, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    answer, note = answers(name, model, folder)
    (folder / f"{name}.note").write_text(note)
    serve(answer)


if __name__ == "__main__":
    main()
