"""The code itself: its size, the speed of generated loops, and the compiler's own time."""
