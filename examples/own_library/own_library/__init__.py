"""A library of one routine for relax-tune."""
