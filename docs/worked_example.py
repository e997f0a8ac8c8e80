"""Makes `worked-example.md` from the code as it is: one dense layer with symbolic n, at every stage.

python docs/worked_example.py             write the page
python docs/worked_example.py --measure   tune the layer on this machine, and write the records that the page's plan is chosen from

The page is the same on every machine: properties of the hardware are fixed here, and times come from the records beside it.
"""

import argparse
import inspect
import json
import textwrap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import relax_tune as rt
from relax_tune.database.exchange.jsonl import export_lines, import_file
from relax_tune.database.records import Measurement, canonical_json
from relax_tune.database.store import MemoryStore
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Add, Gelu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.library.library_forms import ALTERNATIVES
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.printer import print_text
from relax_tune.schedules.cost.features import Feature, sketch_features
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.plan.plans import plan_task, times_of
from relax_tune.tuner.plan.task_rows import dispatch_ranges, symbol_labels, variant_text
from relax_tune.tuner.search.space import Candidate
from relax_tune.tuner.task.extract import extract_tasks
from relax_tune.tuner.task.variants import TaskVariants

FOLDER = Path(__file__).parent
PAGE, RECORDS = FOLDER / "worked-example.md", FOLDER / "worked-example.jsonl"
# One thread of a processor with AVX2, like the one that the records are from.
HARDWARE = HardwareInfo("c", workers=1, lanes=8, registers=16, l1_bytes=32 << 10, l2_bytes=512 << 10, l3_bytes=32 << 20)
SKETCH = "matmul.serial.direct"
CANDIDATE = {"NR": 8, "MR": 2}
FEATURES = ("flops", "padding", "loads_per_point", "register_use", "tile_l1")
SIZES = (1, 7, 100, 512)


def dense_layer(weight: NDArray[np.float32], bias: NDArray[np.float32]) -> rt.IRModule:
    """Build gelu(x weight + bias) for n rows; n is a symbol."""
    graph = rt.GraphBuilder()
    n = graph.symbol("n", lower=1, upper=512)
    x = graph.input("x", (n, 256))
    product = graph.call(Matmul(), x, graph.constant("weight", weight))
    return graph.finish(graph.call(Gelu(), graph.call(Add(), product, graph.constant("bias", bias))))


def numbers(*shape: int) -> NDArray[np.float32]:
    """Return numbers between -0.5 and 0.5 that are the same everywhere."""
    flat = np.arange(int(np.prod(shape)), dtype=np.int64)
    return ((flat * 37 % 101 - 50) / 100).astype(np.float32).reshape(shape)


def model() -> IRModule:
    """Return the layer with its weights."""
    return dense_layer(numbers(256, 256) / np.float32(8), numbers(256))


def task_variants(module: IRModule) -> TaskVariants:
    """Return what can be tried for the layer's one task."""
    (task,) = extract_tasks(lower(module), 6)
    libraries = tuple(a for a in ALTERNATIVES if a.library == "openblas")
    return TaskVariants(task, HARDWARE, CodeTarget("c", HARDWARE.lanes), libraries)


def records() -> tuple[str, list[Measurement]]:
    """Return the device's name and the measurements on record."""
    store = MemoryStore()
    report = import_file(store, RECORDS)
    assert not report.problems, report.problems
    (target,) = store.targets()
    return target.name, store.query(target.key)


def page() -> str:
    """Return the text of the page."""
    return "\n\n".join(part if part.startswith(("```", "#")) else textwrap.fill(part, 130) for part in parts()) + "\n"


def parts() -> list[str]:
    """Return the headings, paragraphs and blocks of the page, in order."""
    module = model()
    lowered = lower(module).module
    tried = task_variants(module)
    (func,) = (f for f in lowered.functions.values() if isinstance(f, PrimFunc))
    graph = print_text(module)
    fused = print_text(func)
    call = next(line.strip() for line in print_text(lowered).splitlines() if "call_tir" in line)
    device, measured = records()
    return [
        HEAD,
        block("python", f"{IMPORTS}\n\n\n{inspect.getsource(dense_layer)}"),
        "## The program",
        "`print_text(module)`, as `relax-tune show` prints it. Every value has a deduced annotation; `n` is one symbol of all of them.",
        block("text", graph),
        "## The fused tensor function",
        "`lower(module)` turns the operators into loops and fuses them. The graph function now makes one call:",
        block("text", call),
        "The called function is a *task*. Its key is the hash of this text with all names replaced, so another model with the "
        "same layer shares its records.",
        block("text", fused),
        *sketch_part(tried),
        *plan_part(tried, measured, device),
        *run_part(lowered, tried, measured),
    ]


def sketch_part(tried: TaskVariants) -> list[str]:
    """Describe the sketches, and one of them with its features and the C of a candidate."""
    sketch = next(s for s in tried.sketch_set.sketches if s.name == SKETCH)
    names = ", ".join(f"`{s.name}`" for s in tried.sketch_set.sketches)
    features = {f.name: f for f in sketch_features(sketch.func, HARDWARE)}
    rows = [f"{name} = {ratio(features[name])}" for name in FEATURES]
    candidate = Candidate(tried.sketch_set.sketches.index(sketch), tuple(CANDIDATE[t.name] for t in sketch.tunables))
    (kernel,) = tried.program(tried.sketch_set.record_of(candidate)).kernels
    c = kernel.source.partition("/*end prelude*/\n")[2]
    values = ", ".join(f"{name}={value}" for name, value in CANDIDATE.items())
    return [
        "## A sketch",
        f"The rules find {len(tried.sketch_set.sketches)} "
        f"sketches for one thread of a processor with vectors of {HARDWARE.lanes} floats: {names}. "
        f"The trace of `{SKETCH}`, as Python over a schedule `s`:",
        block("py", sketch.trace.as_python()),
        "Applied once, with both tunables left free, it gives these loops. `s0` is `n`: a task knows its symbols by position.",
        block("text", print_text(sketch.func).partition("@prim_func(outputs=1)\n")[2]),
        "Its constraint keeps the tile of sums in registers. Cost features are ratios of closed forms over (`s0`, `NR`, `MR`). The search "
        "evaluates them for all candidates and shapes at once, and generates no program for them.",
        block("text", "\n".join(["constraints:", *map(str, sketch.constraints), "", "features:", *rows])),
        "## A candidate",
        f"A candidate gives each tunable a number. This is the C of a small one, {values}, without the prelude of vector types. The last "
        "part computes the row that a tile of two rows may leave over.",
        block("c", c),
    ]


def plan_part(tried: TaskVariants, measured: list[Measurement], device: str) -> list[str]:
    """Describe the plan that records ask for."""
    times, variants = times_of(tried, measured)
    plan = plan_task(tried, measured)
    points = [p[0] for p in tried.task.domain.points]
    dispatched = list(dict.fromkeys(e.variant for e in plan.plan.entries))
    shown = [*dispatched, *(k for k in times if k not in dispatched and variants[k].kind == "generic")]
    head = f"{'microseconds at n =':45}" + "".join(f"{p:>9}" for p in points)
    rows = [f"{variant_text(variants[k]):45}" + "".join(micros(t) for t in times[k]) for k in shown]
    names = {key: variant_text(v) for key, v in plan.variants.items()}
    ranges = dispatch_ranges(plan.plan.entries, symbol_labels(tried.task), names)
    return [
        "## The plan",
        f"The layer was tuned with 16 candidates on one thread of a virtual machine ({device}) with other work on it. The records beside "
        "this page keep the variants that are dispatched, and the generic one. Medians at the anchors:",
        block("text", "\n".join([head, *rows])),
        "The plan minimises the weighted loss of time plus a price for each guard. The first guard that holds decides, and the last entry "
        "has none, so every `n` has a variant. A library is one more variant:",
        block("text", "\n".join(f"{where:10} {what}" for where, what in ranges)),
    ]


def run_part(lowered: IRModule, tried: TaskVariants, measured: list[Measurement]) -> list[str]:
    """Describe a run at several n."""
    plan = plan_task(tried, measured)
    rows = []
    for n in SIZES:
        y = run_function(lowered, "main", [numbers(n, 256)])
        first = " ".join(f"{v + 0.0:7.3f}" for v in np.round(y[-1, :4].astype(np.float64), 3))
        rows.append(f"{n:>4}  {y.shape!s:10}  {first}   {variant_text(plan.variants[plan.plan.choose((n,))])}")
    return [
        "## A run",
        "One artifact serves all sizes. The NumPy interpreter runs the lowered module here, so that the numbers are the same "
        "everywhere; every compiled candidate was compared with a reference before it was timed. First elements of the last "
        "row, and the variant a build dispatches:",
        block("text", "\n".join(["   n  shape       y[-1, :4]                         variant", *rows])),
    ]


def ratio(feature: Feature) -> str:
    """Write a feature's closed form."""
    whole = str(feature.denominator) == "1"
    return str(feature.numerator) if whole else f"({feature.numerator}) / ({feature.denominator})"


def micros(secs: float | None) -> str:
    """Write a median in microseconds."""
    return f"{'-':>9}" if secs is None else f"{secs * 1e6:9.1f}"


def block(language: str, text: str) -> str:
    """Return a fenced block."""
    return f"```{language}\n{text.strip(chr(10))}\n```"


IMPORTS = """\
import numpy as np
from numpy.typing import NDArray

import relax_tune as rt
from relax_tune.ir.op.math.elementwise import Add, Gelu
from relax_tune.ir.op.reduction.linalg import Matmul"""

HEAD = """# A worked example

One dense layer, `gelu(x weight + bias)` for `n` rows, at every stage. This page is generated by `docs/worked_example.py`, and a test
compares it with what the code gives now. The [glossary](glossary.md) has the terms.

## The model"""


def measure() -> None:
    """Tune the layer here, and keep the records of the variants that are dispatched and of the generic one."""
    store = MemoryStore()
    rt.tune(model(), target="c", db=store, effort="quick")
    (target,) = store.targets()
    tried = task_variants(model())
    found = store.query(target.key)
    plan = plan_task(tried, found)
    kept = {*plan.plan.variants, tried.sketch_set.generic().key}
    lines = [json.loads(line) for line in export_lines(store)]
    shown = {"variant": "key", "measurement": "variant"}
    lines = [x for x in lines if x["record"] != "plan" and (x["record"] not in shown or x[shown[x["record"]]] in kept)]
    for x in lines:
        if x["record"] == "measurement":  # four digits of a time are more than it is good for
            x |= {"job": "worked-example", "samples": [float(f"{t:.4g}") for t in x["samples"]]}
    RECORDS.write_text("".join(f"{canonical_json(x)}\n" for x in lines))


def main() -> None:
    """Write the page, or its records first."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--measure", action="store_true", help="tune on this machine first")
    if arguments.parse_args().measure:
        measure()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
