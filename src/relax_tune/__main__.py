"""`python -m relax_tune`: the same as the program `relax-tune`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, where the program looks for no modules either
    from relax_tune.tuner.cli.start import main

    main()
