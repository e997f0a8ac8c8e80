"""The command line. Other packages import nothing of it."""
