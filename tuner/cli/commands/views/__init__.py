"""Commands that show what tuning did in pictures."""
