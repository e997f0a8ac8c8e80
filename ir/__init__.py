"""The compiler's program representation: operators, deduction, frontends, passes, code generation.

Import the modules, in the order in which a model passes through them: `frontend.load`, `passes.pipeline`, `codegen.generate`.
"""

if not __name__.startswith("relax_tune."):
    raise ImportError(
        f"expected the package relax_tune.ir, got it imported as {__name__!r} from the repository root; "
        "import relax_tune.ir instead (a second copy would intern its values a second time)"
    )
