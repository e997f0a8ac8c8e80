"""Search over spaces of integer parameters. Enter by `space`, `base` (the contract of a strategy), `registry` and `named`."""
