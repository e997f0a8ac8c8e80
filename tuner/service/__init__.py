"""Submitted jobs: `submission.submit_model` queues a model, `service.Service` takes jobs from a database and runs them."""
