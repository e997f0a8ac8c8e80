"""Devices: the `Device` contract, its implementations and their quirks.

Import `registry` to open devices by name, and `base` for the contract.
"""
