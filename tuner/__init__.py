"""See ARCHITECTURE.md for what lives in relax_tune.tuner."""

if not __name__.startswith("relax_tune."):
    raise ImportError(
        f"expected the package relax_tune.tuner, got it imported as {__name__!r} from the repository root; "
        "import relax_tune.tuner instead (a second copy would intern its values a second time)"
    )
