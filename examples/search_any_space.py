"""Tune anything: relax-tune's search over a space of one's own, as one would use Kernel Tuner or Optuna. No model, no compiler.

    python examples/search_any_space.py

The "kernel" here is a blocked transpose in NumPy, with a tile of two sizes, two orders of the loops and a copy that may come
first. Parameters are lists of values, restrictions are texts in Python's syntax or functions, and whatever returns a real number
can be measured (less is better, or more with `direction="maximize"`); None says that a configuration failed.
"""

import argparse
import time

import numpy as np

import relax_tune as rt

SIZE = 1024
tune_params = {
    "tile_x": [8, 16, 32, 64, 128, 256, 512],
    "tile_y": [8, 16, 32, 64, 128, 256, 512],
    "order": ["rows", "columns"],
    "copy": [False, True],
}
restrictions = ["256 <= tile_x * tile_y <= 128 * 1024", lambda copy, tile_x: not copy or tile_x >= 32]


def transpose(source: np.ndarray, target: np.ndarray, tile_x: int, tile_y: int, order: str, copy: bool) -> None:
    """target = source.T, tile by tile."""
    corners = [(x, y) for x in range(0, SIZE, tile_x) for y in range(0, SIZE, tile_y)]
    for x, y in corners if order == "rows" else sorted(corners, key=lambda corner: corner[::-1]):
        tile = source[x : x + tile_x, y : y + tile_y]
        target[y : y + tile_y, x : x + tile_x] = (tile.copy() if copy else tile).T


def measure(configuration: dict) -> float | None:
    """Seconds of the best of five runs, or None where the result is wrong."""
    source = np.random.default_rng(0).random((SIZE, SIZE), dtype=np.float32)
    target = np.empty_like(source)
    runs = []
    for _ in range(5):
        start = time.perf_counter()
        transpose(source, target, **configuration)
        runs.append(time.perf_counter() - start)
    return min(runs) if np.array_equal(target, source.T) else None


def main(evaluations: int = 48) -> tuple[dict, float]:
    space = rt.SearchSpace(tune_params, restrictions)
    search = rt.Search(space, strategy="evolution", seed=0)
    done = 0
    while done < evaluations and (configurations := search.ask(8)):
        search.tell([(c, measure(c)) for c in configurations])
        done += len(configurations)
        best, seconds = search.best
        print(f"{done:3d} evaluations: best {seconds * 1e3:.2f} ms with {best}")
    return search.best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=48)
    main(parser.parse_args().evaluations)
