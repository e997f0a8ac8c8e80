"""See ARCHITECTURE.md for what lives in relax_tune.ir."""

if not __name__.startswith("relax_tune."):
    raise ImportError(
        f"wanted the package relax_tune.ir, found it imported as {__name__!r} from the repository root; "
        "import relax_tune.ir instead (a second copy would intern its values a second time)"
    )
