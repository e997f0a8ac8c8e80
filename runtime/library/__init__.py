"""Libraries of tuned routines that join a device's launches.

Import `registry` to open the installed ones, and `base` for the contract.
"""
