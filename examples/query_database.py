"""What a database of measurements knows: the devices, the fastest variant of each task at each shape, and what failed.

    python examples/query_database.py [URL]

Without a URL a small model is tuned first, into a database that is not kept.
"""

import argparse

import numpy as np

import relax_tune as rt
from relax_tune.ir.op.reduction.reduce import Softmax


def softmax_rows() -> rt.IRModule:
    """Softmax over the rows of an (n, 128) array."""
    graph = rt.GraphBuilder()
    return graph.finish(graph.call(Softmax(), graph.input("x", (graph.symbol("n", 1, 64), 128))))


def report(records: rt.Store) -> None:
    """Print what is known, device by device."""
    for target in records.targets():
        print(f"{target.kind}, {target.name}: {records.count(target.key)} measurements")
        for workload in records.workloads(target.key):
            shapes = {tuple(m.symbols.items()) for m in records.query(target.key, workload.key, status="ok")}
            for shape in sorted(shapes):
                best = records.best(workload.key, target.key, dict(shape))
                if best is not None:
                    spread = np.ptp(best.samples_secs) / best.median_secs
                    where = ", ".join(f"{name}={value}" for name, value in shape)
                    print(
                        f"  {workload.hint} at {where}: {best.median_secs * 1e6:.1f} us (spread {spread:.0%}), "
                        f"{best.variant.kind} {best.variant.sketch} {best.variant.values}"
                    )
        for failure in records.query(target.key, status="failed"):
            print(f"  failed at {failure.stage}: {failure.message.splitlines()[0]}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("url", nargs="?", help="sqlite:///FILE, a file, or postgresql://USER@HOST/NAME")
    given = arguments.parse_args()
    if given.url is not None:
        with rt.open_database(given.url, create=False, read_only=True) as records:
            report(records)
        return
    with rt.open_database("memory://") as records:
        rt.tune(softmax_rows(), target="c", db=records, trials=6)
        report(records)


if __name__ == "__main__":
    main()
