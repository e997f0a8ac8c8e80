"""Measurement on remote workers over Dask: the runner of a job, the processes of schedulers and workers, and their TLS checks. From outside
import `runner`, `processes`, `client`, `address` and `fleet`.
"""
