"""A database made by a real small tuning job, with a submitted job, hostile names and failures beside it; and HTML looked at."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import relax_tune as rt
from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.memory_store import MemoryStore
from relax_tune.database.records import Measurement, Target, VariantRecord, Workload

HOSTILE = "<script>alert(1)</script>\x1b]0;title\x07 \u202egnp.exe</style>"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b]0;title\\x07 \\u202egnp.exe"
JOB = "0123456789ab"


def tune_small(folder: Path, module: rt.IRModule) -> Path:
    """Tune a model with two candidates a task, and return the path of its artifact; the database is `r.db`."""
    rt.tune(module, target="c", db=folder / "r.db", effort="quick", trials=2)
    return rt.build(module, target="c", db=folder / "r.db", effort="quick").save(folder / "small.rta")


def add_hostile(folder: Path) -> None:
    """Add a task and a job whose texts are markup and control characters, and a failure for each of two causes."""
    with open_queue(f"sqlite:///{folder / 'r.db'}") as queue:
        (target,) = queue.targets()
        queue.add_workload(Workload("hostile", "text", 1, HOSTILE))
        variants = [VariantRecord("tuned", HOSTILE, "[]", f'{{"T": {n}}}') for n in range(3)]
        timed = [
            Measurement(
                f"h{n}",
                "hostile",
                target.key,
                variants[0],
                {"s0": n},
                samples_secs=(1e-5 * n,),
                checked=True,
                worker=HOSTILE,
            )
            for n in (1, 4)
        ]
        failed = [
            Measurement(
                f"f{stage}", "hostile", target.key, v, status="failed", stage=stage, message=HOSTILE, measured_at=5.0
            )
            for v, stage in zip(variants[1:], ("compile", "timeout"))
        ]
        queue.add_measurements([*timed, *failed])
        settings = SubmittedJob.text({"target": "c"})
        queue.submit(SubmittedJob(JOB, "0" * 64, HOSTILE[:60], settings, "c", owner="ann", note=HOSTILE))
        taken = queue.take("holder", 60.0)
        assert taken is not None and taken.id == JOB
        queue.beat(taken, 60.0, 3.0, {"trials": 3, "of": 8, "failures": 1}, [(1, 0, f"line of {HOSTILE}\n")])


def two_devices() -> MemoryStore:
    """Return a store with two tasks, `fused_matmul_add` on two devices and `softmax` on the first, at 1, 8 and 64 rows."""
    store = MemoryStore()
    variants = {
        "tuned": VariantRecord("tuned", "tiles", "[]", '{"T": 8}'),
        "library": VariantRecord("library", "openblas.sgemm"),
        "generic": VariantRecord("generic", "fallback"),
    }
    for name in ("fused_matmul_add", "softmax"):
        store.add_workload(Workload(name, "text", 1, name))
    for number, device in enumerate(("paper", "stone")):
        key = store.add_target(Target("c", device))
        for name in ("fused_matmul_add", "softmax")[: 2 - number]:
            kinds = list(variants)[: 3 if name != "softmax" else 1]
            store.add_measurements(
                [
                    Measurement(
                        f"{device}{name}{kind}{rows}", name, key, variants[kind], {"s0": rows},
                        samples_secs=(1e-6 * (rows + place),), checked=True, measured_at=100.0 + place,
                    )
                    for place, kind in enumerate(kinds)
                    for rows in (1, 8, 64)
                ]
            )  # fmt: skip
    return store


@dataclass
class Looked(HTMLParser):
    """What a page holds: headings, ids, labels that point at ids, links, elements in the order of the text."""

    headings: list[tuple[int, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    pointed: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    handlers: list[str] = field(default_factory=list)
    images: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append((int(tag[1]), ""))
        self.ids += [values["id"]] if "id" in values else []
        for name in ("aria-labelledby", "aria-describedby"):
            self.pointed |= set(values.get(name, "").split())
        self.links += [values["href"]] if tag == "a" else []
        self.loaded += [
            values[name] for name in ("src", "href", "data", "action", "xlink:href") if name in values and tag != "a"
        ]
        self.handlers += [name for name in values if name.startswith("on") or name == "style"]
        self.images += values.get("role") == "img"

    def handle_data(self, data: str) -> None:
        if self.headings and not self.headings[-1][1] and data.strip():
            self.headings[-1] = (self.headings[-1][0], data.strip())


def look(page: str) -> Looked:
    """Parse a page."""
    found = Looked()
    with contextlib.closing(found):
        found.feed(page)
    return found


def check_accessible(page: str) -> Looked:
    """Assert what every page promises: one first heading, no skipped level, unique ids, labels that exist, links that lead somewhere."""
    found = look(page)
    levels = [level for level, _ in found.headings]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:]))
    assert all(text for _, text in found.headings)
    assert len(found.ids) == len(set(found.ids)), sorted(i for i in found.ids if found.ids.count(i) > 1)
    assert found.pointed <= set(found.ids)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert found.handlers == [], "no script and no style stands in an attribute"
    assert '<html lang="en">' in page and 'name="viewport"' in page
    return found
