"""The virtual machine that executes host programs, on one device or several.

Import `machine.VirtualMachine` and `policy.PlacementOptions`; the other modules are its parts.
"""
