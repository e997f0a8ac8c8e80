"""See ARCHITECTURE.md for what lives in relax_tune.schedules."""

if not __name__.startswith("relax_tune."):
    raise ImportError(
        f"wanted the package relax_tune.schedules, found it imported as {__name__!r} from the repository root; "
        "import relax_tune.schedules instead (a second copy would intern its values a second time)"
    )
