"""Submitted jobs: `submitted.SubmittedJob` is a job, `queue.JobQueue` the queue in a database."""
