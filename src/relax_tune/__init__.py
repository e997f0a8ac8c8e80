"""relax-tune: compile models with symbolic shapes through measured kernel search."""
