"""Improving a served model: sizes of its calls, tuning for them in a child process, a check, the swap, and the watch over it."""
