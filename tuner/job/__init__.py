"""A tuning job: the loop over tasks, leases, interruption, scheduling of trials."""
