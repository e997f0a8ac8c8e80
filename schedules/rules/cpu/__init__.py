"""Schedule rules for processors."""
