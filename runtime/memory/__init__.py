"""Device memory of arrays that stay between launches: weights, values of host programs, states of sessions.

The executor, sessions and the virtual machine use it; nothing else needs to.
"""
