"""torch.compile with this package, Inductor and OpenVINO as backends, over small models of many kinds.

    python -m experiments.families.torch_compile                    (results of all backends, writes results/torch_compile.{json,md})
    python -m experiments.families.torch_compile --time             (times of the models that are right, into the same files)
    python -m experiments.families.torch_compile --only 'bert.*'    (some models, printed)

It needs torch, transformers and openvino besides this package.

Each model is compiled with `dynamic=True` by each backend and called at the shapes of its family, batch 1 and length 1 and prime
sizes among them, under `torch.no_grad()`. Results must agree with torch's at the same weights: floats within 1e-3 of the value plus
1e-4 of the largest of the tensor, integers and truth values equal, shapes and types alike. With this backend a model runs `whole` if
torch finds no graph break and every graph is compiled, `partly` if some graphs are, `eager` if none is. For other backends, whose
fallbacks are not visible, the status is `right`. `wrong` and `failed` (an exception) are counted for all. Seconds of the first
call are at the first shape; graphs count the compilations at all shapes.

Times are medians at the first shape, each backend in a process of its own, called in turns (`experiments/harness/contenders.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from experiments.families.model_families import CASE_SEED, as_tuple, difference, families, first_line
from experiments.harness.contenders import Contender, in_rounds, serve
from experiments.harness.pages import RESULTS, environment, write_page

BACKENDS = ("relax_tune", "inductor", "openvino")
NAME = "torch_compile"
# Of `model_families`: one of each kind of model.
FAMILIES = (
    "bert", "sentence_mean", "distilbert", "albert", "deberta_v3", "modernbert", "fnet", "xlnet", "llama31", "mistral", "phi3",
    "gemma2", "qwen3", "mixtral", "gpt2", "gpt_neox", "falcon", "bloom", "opt", "llama_step", "t5_encoder", "t5_full", "bart",
    "whisper_encoder", "wav2vec2", "clip_text", "vit", "swin", "convnext", "segformer", "resnet50", "mobilenetv3", "unet_bilinear",
    "ssm_cumsum", "dlrm_bags", "gnn_scatter_add", "lstm", "yolo_topk", "patchtst",
)  # fmt: skip
Report = dict[str, Any]


def modules() -> dict[str, tuple[Callable[[], Any], Sequence[tuple[int, ...]]]]:
    """Modules of torch.nn and the shapes of their input."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.inner(x, x, x, need_weights=False)[0]

    class Prints(nn.Module):
        """A graph break between two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: Any) -> Any:
            x = torch.relu(self.first(x))
            torch._dynamo.graph_break()
            return self.second(x)

    class Draws(nn.Module):
        """Random numbers, which no backend may fix."""

        def forward(self, x: Any) -> Any:
            return x + 0 * torch.rand_like(x)

    rows: Sequence[tuple[int, ...]] = ((2, 16, 32), (1, 16, 32), (3, 13, 32), (4, 1, 32))
    pixels: Sequence[tuple[int, ...]] = ((2, 3, 32, 48), (1, 3, 32, 32), (3, 3, 37, 53))
    return {
        "nn.Linear, GELU": (lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), rows),
        "nn.LayerNorm": (lambda: nn.LayerNorm(32), rows),
        "nn.MultiheadAttention": (Attention, rows),
        "nn.TransformerEncoder": (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
            rows,
        ),
        "nn.Conv2d, BatchNorm2d": (
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            pixels,
        ),
        "nn.ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 8, 4, 2, 1), pixels),
        "a graph break": (Prints, rows),
        "random numbers": (Draws, rows),
    }


def names() -> tuple[str, ...]:
    return (*modules(), *FAMILIES)


def model_of(name: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """A model with its weights, and its inputs at each shape."""
    import torch

    from experiments.families.models import draw

    torch.manual_seed(0)
    if name in modules():
        make, shapes = modules()[name]
        generator = torch.Generator().manual_seed(CASE_SEED)
        return draw(make()), [(torch.randn(shape, generator=generator),) for shape in shapes]
    family = families()[name]
    inputs = [family.inputs(torch.Generator().manual_seed(CASE_SEED), shape) for shape in family.shapes]
    return draw(family.make()), inputs


def compiler(backend: str) -> Any:
    """The function of a backend, which works in a checkout too."""
    from torch._dynamo.backends.registry import lookup_backend

    import relax_tune as rt

    if backend == "openvino":
        import openvino.torch  # noqa: F401  (registers the backend)
    return rt.torch_backend if backend == "relax_tune" else lookup_backend(backend)


class Counted:
    """A backend that counts the graphs it is given, and those that fall back."""

    def __init__(self, backend: str, options: dict[str, Any]) -> None:
        self.inner = compiler(backend)
        self.given, self.graphs, self.reasons = ({"options": options} if options else {}), 0, list[str]()

    def __call__(self, graph: Any, arguments: Any) -> Any:
        import relax_tune as rt

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled = self.inner(graph, arguments, **self.given)
        self.graphs += 1
        self.reasons += [str(w.message) for w in caught if issubclass(w.category, rt.FallbackWarning)]
        return compiled


def attempt(name: str, backend: str, options: dict[str, Any]) -> Report:
    """The report of a model: its status, the graphs, the seconds of the first call."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, inputs = model_of(name)
    counted = Counted(backend, options)
    compiled = torch.compile(model, backend=counted, dynamic=True)
    report: Report = {"model": name, "backend": backend}
    with torch.no_grad():
        for position, given in enumerate(inputs):
            expected = as_tuple(model(*given))
            started = time.perf_counter()
            try:
                results = as_tuple(compiled(*given))
            except Exception as error:
                return report | {"status": "failed", "why": first_line(error)}
            if not position:
                report["secs"] = round(time.perf_counter() - started, 2)
            for place, (got, reference) in enumerate(zip(results, expected, strict=True)):
                why = difference(got.numpy(), reference.numpy())
                if why:
                    return report | {"status": "wrong", "why": f"shape {position}, output {place}: {why}"}
    breaks, fallbacks = sum(counters["graph_break"].values()), len(counted.reasons)
    report |= {"graphs": counted.graphs, "fallbacks": fallbacks, "breaks": breaks}
    if backend != "relax_tune":
        return report | {"status": "right"}
    status = "eager" if fallbacks == counted.graphs else "partly" if fallbacks or breaks else "whole"
    return report | {"status": status, "why": "; ".join(dict.fromkeys(counted.reasons))[:400]}


def serve_results(models: Sequence[str], backend: str, options: dict[str, Any]) -> None:
    """Run models and print one JSON line for each, and its name in front of it."""
    import torch

    torch.set_num_threads(1)
    for name in models:
        print(json.dumps({"begin": name}), flush=True)
        print(json.dumps(attempt(name, backend, options)), flush=True)


def answer(backend: str, options: dict[str, Any]) -> Callable[[str], tuple[Callable[..., Any], ...]]:
    """The function of a contender that answers for a model."""

    def of(name: str) -> tuple[Callable[..., Any], ...]:
        import torch

        model, inputs = model_of(name)
        if backend != "eager":
            model = torch.compile(model, backend=Counted(backend, options), dynamic=True)

        def run() -> Any:
            with torch.no_grad():
                return as_tuple(model(*inputs[0]))

        return run, lambda: run()[0].flatten()[:8].tolist()

    return of


# In the parent


def command(backend: str, args: argparse.Namespace, *more: str) -> list[str]:
    options = ["--no-self-test"] * args.no_self_test + (["--tune", args.tune, "--db", args.db] if args.tune else [])
    return [sys.executable, "-m", "experiments.families.torch_compile", "--backends", backend, *options, *more]


def run_all(models: Sequence[str], backend: str, args: argparse.Namespace) -> Iterator[Report]:
    """The reports of models with a backend; after a child dies, another goes on with the next model."""
    left = list(models)
    while left:
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            command(backend, args, "--serve", *left),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables,
        )
        assert child.stdout is not None
        current = ""
        for line in child.stdout:
            message = json.loads(line) if line.startswith("{") else {}
            if "begin" in message:
                current = left.pop(0)
            elif message:
                current = ""
                yield message
        code = child.wait()
        if code and not current:
            raise SystemExit(f"expected the models to run, got exit status {code} of backend {backend}")
        if current:
            yield {"model": current, "backend": backend, "status": "failed", "why": f"exit status {code}"}


def timed(record: Report, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median seconds by model and backend, of the models that are right with this package."""
    right = {(r["model"], r["backend"]) for r in record["results"] if r["status"] in ("whole", "partly", "right")}
    models = [m for m in args.names if (m, "relax_tune") in right]
    contenders = [Contender("eager", command("eager", args, "--contend"))]
    contenders += [
        Contender(b, command(b, args, "--contend"), [m for m in models if (m, b) in right]) for b in args.backends
    ]
    try:
        samples = in_rounds(contenders, models, args.rounds, args.repeats)
    finally:
        for contender in contenders:
            contender.close()
    return {m: {b: statistics.median(s) for b, s in by.items() if s} for m, by in samples.items()}


def ratio(times: dict[str, float], other: str) -> str:
    known = "relax_tune" in times and other in times
    return f"{times[other] / times['relax_tune']:.2f}" if known else ""


def page(record: Report) -> list[str]:
    """The Markdown page."""
    parts = (__doc__ or "").split("\n\n")
    results = {(r["model"], r["backend"]): r for r in record["results"]}
    models = [m for m in names() if any(r["model"] == m for r in record["results"])]
    lines = ["# Models through torch.compile", "", " ".join(parts[3].split()), ""]
    if record["self_test"] is False:
        lines += ["This package built without its self-test of kernels (option `self_test`).", ""]
    lines += ["| backend | results |", "|---|---|"]
    for backend in BACKENDS:
        counts = Counter(r["status"] for r in record["results"] if r["backend"] == backend)
        lines.append(f"| {backend} | {', '.join(f'{n} {status}' for status, n in counts.most_common())} |")
    lines += [
        "",
        "| model | relax_tune | graphs | inductor | openvino | "
        + " | ".join(f"first call, {b}" for b in BACKENDS)
        + " |",
    ]
    lines += ["|---" * 8 + "|"]
    for m in models:
        by = [results.get((m, b), {}) for b in BACKENDS]
        statuses = [r.get("status", "") for r in by]
        seconds = " | ".join(f"{r['secs']:.1f} s" if "secs" in r else "" for r in by)
        lines.append(f"| {m} | {statuses[0]} | {by[0].get('graphs', '')} | {statuses[1]} | {statuses[2]} | {seconds} |")
    if record.get("times"):
        lines += ["", "## Speed", "", " ".join(parts[4].split()), "A ratio above 1: this package is faster.", ""]
        lines += ["| model | ms | torch eager | inductor | openvino |", "|---|---:|---:|---:|---:|"]
        for m, times in record["times"].items():
            others = " | ".join(ratio(times, other) for other in ("eager", "inductor", "openvino"))
            lines.append(f"| {m} | {1e3 * times.get('relax_tune', float('nan')):.3f} | {others} |")
    reasons = [r for r in record["results"] if r.get("why")]
    lines += ["", "## Reasons", ""] if reasons else []
    return [
        *lines,
        *(f"* {r['model']}, {r['backend']}, {r['status']}: `{r['why'].replace('`', chr(39))}`" for r in reasons),
    ]


def facts() -> dict[str, str]:
    return {**environment(), **{p: version(p) for p in ("torch", "transformers", "openvino", "numpy")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for whole model names")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=("eager", *BACKENDS))
    parser.add_argument("--update", action="store_true", help="put these results among those on file")
    parser.add_argument("--no-self-test", action="store_true", help="build without the self-test of kernels")
    parser.add_argument("--tune", default="", help="effort of this package's tuning; none by default")
    parser.add_argument("--db", default="torch_compile.db", help="database of --tune")
    parser.add_argument("--time", action="store_true", help="time the models that are right")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20, help="calls in a visit")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--contend", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    options: dict[str, Any] = {}
    if args.backends == ["relax_tune"]:
        options = {"tune": args.tune, "db": args.db} if args.tune else {"db": "memory://"}
        options["self_test"] = not args.no_self_test
    if args.serve:
        serve_results(args.serve, args.backends[0], options)
        return
    if args.contend:
        serve(answer(args.backends[0], options))
        return
    args.names = [n for n in names() if not args.only or re.fullmatch(args.only, n)]
    path = RESULTS / f"{NAME}.json"
    if args.time:
        record = json.loads(path.read_text())
        record["environment"]["times"] = facts()
        record["times"] = timed(record, args)
    else:
        record = {"environment": {"results": facts()}, "self_test": not args.no_self_test, "results": []}
        if args.update and path.exists():
            # every run states its own machine and commit
            record = json.loads(path.read_text())
            record["environment"][f"results of {args.only or 'all models'}, {', '.join(args.backends)}"] = facts()
        for backend in args.backends:
            for report in run_all(args.names, backend, args):
                key = report["model"], report["backend"]
                record["results"] = [r for r in record["results"] if (r["model"], r["backend"]) != key] + [report]
                print(*(report.get(k, "") for k in ("backend", "model", "status", "secs", "graphs", "why")), flush=True)
                if not args.only or args.update:  # a run that is cut short keeps its results
                    write_page(NAME, page(record), record, record["environment"], quiet=True)
    if args.time:
        write_page(NAME, page(record), record, record["environment"], quiet=True)
    sys.exit(
        1 if any(r["status"] in ("wrong", "failed") for r in record["results"] if r["backend"] == "relax_tune") else 0
    )


if __name__ == "__main__":
    main()
