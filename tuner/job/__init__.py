"""Tuning and building a model on its devices. Enter by `job` and `device_job`; `loop` is the search over all tasks."""
