"""Placement on several devices: requested devices, transfers, and parts of a program that run on one device each.

From outside, import `device_requests`, `transfers.InsertTransfers` and `parts.cut`.
"""
