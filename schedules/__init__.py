"""Schedules of tensor functions: primitives, rules that generate sketches, and the cost features of sketches.

Other folders import `sketch`, `schedule`, `trace`, `target` and `cost`; primitives and rules are reached through these.
"""

if not __name__.startswith("relax_tune."):
    raise ImportError(
        f"expected the package relax_tune.schedules, got it imported as {__name__!r} from the repository root; "
        "import relax_tune.schedules instead (a second copy would intern its values a second time)"
    )
