"""The commands of a fleet: certificates, scheduler and workers, submitted jobs. `tuner/cli/app` imports them by name."""
