"""Write the pictures of the pages, from recorded results: `python -m docs.pictures`.

Each is drawn by the functions of `relax-tune report`, in colours that follow the reader's system. Tests: `tests/docs/test_pictures.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_tune.database.exchange.jsonl import import_file
from relax_tune.database.store import MemoryStore
from relax_tune.tuner.report.charts import drawn, lines
from relax_tune.tuner.report.collect import of_device
from relax_tune.tuner.report.page import style
from relax_tune.tuner.report.pictures import time_over_shape
from relax_tune.tuner.report.subject import Figure

FOLDER = Path(__file__).parent
PICTURES = FOLDER / "pictures"
RESULTS = FOLDER.parent / "experiments" / "results" / "e2e.json"
CONTENDERS: Mapping[str, str] = {
    "ours-c-model": "relax-tune, c", "ours-opencl-measured": "relax-tune, opencl", "onnxruntime": "ONNX Runtime",
    "torch-compile": "torch.compile", "torch-eager": "torch eager",
}  # fmt: skip
"""Contenders of the README's table by their names in the results."""


def pictures() -> dict[str, str]:
    """Return the SVG of each picture by its name."""
    store = MemoryStore()
    import_file(store, FOLDER / "worked-example.jsonl")
    (target,) = store.targets()
    (task,) = of_device(store, target).tasks
    figures = {"latency": latency(), "time-over-shape": time_over_shape(replace(task, labels=("n",)), "task")}
    return {name: standalone(figure) for name, figure in figures.items()}


def latency() -> Figure:
    """Make the figure of the README's table."""
    times: Mapping[str, Any] = json.loads(RESULTS.read_text())["minilm"]["times"]
    rows = [
        {"x": int(size), "y": each[key]["median_us"] / 1e3, "series": name}
        for key, name in CONTENDERS.items()
        for size, each in sorted(times.items(), key=lambda item: int(item[0]))
    ]
    chart = lines(
        rows,
        x="n, tokens (log scale)",
        y="time of a call (ms, log scale)",
        series=list(CONTENDERS.values()),
        log_x=True,
        log_y=True,
    )
    return Figure("latency", "Latency of MiniLM", "", chart)


def standalone(figure: Figure) -> str:
    """Return the wide picture of a figure as a file: with the colours of reports, a background and a name."""
    svg = drawn(figure)[0]
    (box,) = re.findall(r'viewBox="([^"]+)"', svg)
    colours = "".join(
        re.findall(r"^:root \{.*?^\}|^@media \(prefers-color-scheme: dark\) \{.*?^\}", style(), re.M | re.S)
    )
    fonts = "text { font-family: Arial, Helvetica, sans-serif; }"
    background = f'<rect width="{box.split()[2]}" height="{box.split()[3]}" fill="var(--paper)"/>'
    inside = re.sub(r' data-\w+="[^"]*"', "", svg[svg.index(">") + 1 : svg.rindex("</svg>")])  # for filters of reports
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-label="{figure.title}">'
    return f"{head}<style>{colours}{fonts}</style>{background}{inside}</svg>\n"


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (PICTURES / f"{name}.svg").write_text(svg)
