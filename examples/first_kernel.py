"""A first kernel: a function, its schedule with one parameter, and the value of it that is fastest on this machine.

python examples/first_kernel.py [--target opencl]
"""

import sys

import numpy as np

import relax_tune as rt

TARGET = sys.argv[2] if sys.argv[1:2] == ["--target"] else "c"
ADD = rt.parse_prim_func("""
@prim_func(outputs=1)
def add(a: Buffer((n,), f32), b: Buffer((n,), f32), c: Buffer((n,), f32)):
    for i in serial(n):
        with block("add"):
            vi = spatial(n, i)
            c[vi] = a[vi] + b[vi]
""")


def add_kernel(tile: int) -> rt.Kernel:
    schedule = rt.Schedule(ADD)
    tiles, inside = schedule.split("i", [None, tile])
    schedule.parallel(tiles)
    schedule.vectorize(inside)
    return rt.kernel(schedule, TARGET)


search = rt.Search(rt.SearchSpace({"tile": [16, 64, 256, 1024]}), strategy="grid")
search.tell([(c, add_kernel(**c).time(n=1_000_000).median) for c in search.ask(4)])
best, secs = search.best
print(f"best of {len(search.space.parameters['tile'])}: {best}, {secs * 1e6:.0f} us")
a = np.arange(1_000_000, dtype=np.float32)
print(add_kernel(**best)(a, a)[-3:])
