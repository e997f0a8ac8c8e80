"""The device whose memory is the host's, for the compiler and the runtime."""

HOME = "c"
"""Kind of the device whose memory is the host's: parameters come from there, and results go there."""
