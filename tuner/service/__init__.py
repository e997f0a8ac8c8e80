"""Re-exports nothing; import the modules."""
