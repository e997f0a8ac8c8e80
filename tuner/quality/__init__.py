"""Types of weights, chosen by measured time under a bound on the quality of the results. Enter by `choose`."""
