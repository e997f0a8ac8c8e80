"""Running built artifacts: devices, libraries, executors, the virtual machine, models and generation.

Import `artifact`, `model`, `generate`, `shapes` and `device.registry`; it needs neither the compiler nor the tuner.
"""

if not __name__.startswith("relax_tune."):
    raise ImportError(
        f"expected the package relax_tune.runtime, got it imported as {__name__!r} from the repository root; "
        "import relax_tune.runtime instead (a second copy would intern its values a second time)"
    )
