"""Many workers, services and records: simulated and real fleets, SLURM, the database, and the costs of the sandbox."""
