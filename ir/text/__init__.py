"""The text form of programs. From outside import `printer` and `parser`."""
