"""`python -m relax_tune`: the same as the program `relax-tune`."""

from relax_tune.tuner.cli.start import main

if __name__ == "__main__":
    main()
