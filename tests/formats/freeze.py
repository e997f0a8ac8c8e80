"""Write the frozen files of this release's formats: `python -m tests.formats.freeze`.

Run it only while no release has these versions of the formats. A released file never changes: a new version of a format adds a file.
`records.jsonl.xz` and `records.t4.json.xz` are exports of a tuning of `recorded_model` and are not written here.
"""

from __future__ import annotations

import lzma
import tempfile
from pathlib import Path

import numpy as np
from tests.database.records_made import MATMUL, SOFTMAX, ZEN, ZEN_OLD, failure, filled, timing
from tests.support.tuner_models import RecordedRunner, paper_job

import relax_tune as rt
from relax_tune.database import schema
from relax_tune.database.exchange.jsonl import export_lines
from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import STAGES, Environment, JobRecord, PlanRecord, ShapeHistogram
from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.op.math.elementwise import Add, Gelu, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm
from relax_tune.ir.text.printer import print_text
from relax_tune.tuner.pack.pack import make_pack
from relax_tune.tuner.settings import Settings

FROZEN = Path(__file__).parent / "frozen"
ORIGIN = "f" * 32


def model() -> rt.IRModule:
    """A branch over a feed-forward block and a normalisation, over `n` rows, 1 <= n <= 64."""
    rng = np.random.default_rng(11)
    g = rt.GraphBuilder()
    n = g.symbol("n", 1, 64)
    x, flag = g.input("x", (n, 12)), g.input("flag", (), bool_)
    wide = g.constant("wide", rng.standard_normal((12, 20), np.float32) / 4)
    narrow = g.constant("narrow", rng.standard_normal((20, 12), np.float32) / 4)
    scale, shift = (g.constant(name, rng.standard_normal(12, np.float32)) for name in ("scale", "shift"))
    hidden = g.branch(
        flag,
        lambda: g.call(Matmul(), g.call(Gelu(), g.call(Matmul(), x, wide)), narrow),
        lambda: g.call(Relu(), x),
    )
    return g.finish(g.call(LayerNorm(), g.call(Add(), x, hidden), scale, shift))


def fill(queue: JobQueue) -> None:
    """Add records of every table and of every enumerated value."""
    environment = queue.add_environment(Environment((("numpy", "2.0"), ("relax-tune", "0.2.0"))))
    filled(queue)
    queue.add_target(type(ZEN)(ZEN.kind, ZEN.name, ZEN.fingerprint, (("workers", 8),), (("compute", 1.5e-3),)))
    sensors = {"worker": "w", "host": "h", "unit": "u", "clock_mhz": 3100.5, "celsius": 61.0, "contention": 0.25}
    queue.add_measurements(
        [
            timing(
                "ok-8",
                2e-5,
                tile=8,
                environment=environment,
                job="job-1",
                build_secs=0.25,
                measured_at=1.7e9,
                **sensors,
            ),
            timing("0123456789abcdef0123456789abcdef.1", 1e-5, tile=16, samples_secs=(0.5, 0.25, 1.0)),
            timing("library", 1.5e-5, kind="library", regime="flushed"),
            timing("generic", 3e-5, kind="generic", checked=False),
            timing("other", 1e-6, target=ZEN_OLD, workload=SOFTMAX),
            *(failure(f"failed-{stage}", stage, f"it ended: {stage}", tile=3) for stage in STAGES),
        ]
    )
    for version in ("one", "two"):
        queue.put_plans(ZEN.key, {MATMUL.key: f'["{version}"]'})
    queue.add_plans([PlanRecord(MATMUL.key, ZEN.key, 3, '["from another"]', ORIGIN, 0)])
    queue.put_job(JobRecord("job-1", '{"seed":0}', "done"))
    queue.put_histogram(ShapeHistogram("minilm", "n", '{"128":3}'))
    queue.submit(SubmittedJob("aa11", "file:00", "minilm", '{"target":"c"}', "c", owner="tina", note="nightly"))
    job = queue.take("host:1", 60.0)
    assert job is not None
    queue.finish(job, "done", "tuned", 0, 12.5, {"trials": 4}, log=[(1, 0, "began\n"), (1, 1, "ended\n")])


def main() -> None:
    """Write all files that a script can write."""
    FROZEN.mkdir(exist_ok=True)
    name = f"database_{schema.versions()[-1]}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.db"
        with open_queue(str(path), create=True) as queue:
            fill(queue)
            (FROZEN / f"{name}.jsonl").write_text("".join(line + "\n" for line in export_lines(queue)))
        (FROZEN / f"{name}.db.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))
    settings = Settings(target="c", trials=4, effort="quick", self_test=False)
    store = MemoryStore()
    job = paper_job(model, store, settings)
    job.tune(RecordedRunner())
    job.store_plans(job.build())
    make_pack(model(), store, settings).save(FROZEN / "model.rtp")
    (FROZEN / "model.relax").write_text(print_text(model()) + "\n")
    artifact = rt.build(model(), target="c", policy="generic", db="memory://", self_test=False, libraries=False)
    artifact.save(FROZEN / "model.rta")
    rng = np.random.default_rng(3)
    arrays = {}
    with artifact.open() as built:
        for n, flag in ((1, True), (7, False), (64, True)):
            x = rng.standard_normal((n, 12), np.float32)
            arrays |= {f"x{n}": x, f"flag{n}": np.asarray(flag), f"y{n}": built.run([x, np.asarray(flag)])[0]}
    np.savez_compressed(FROZEN / "model.npz", **arrays)


if __name__ == "__main__":
    main()
