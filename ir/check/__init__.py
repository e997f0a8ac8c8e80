"""Well-formedness, structural equality and hash, trial runs."""
