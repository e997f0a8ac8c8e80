"""Further calls of a model than `run`: over fixed arrays, with state on the device, in streams.

Import `stream.Stream`; a `Model` opens the others.
"""
