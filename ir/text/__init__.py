"""The text form: printers and parsers of both levels."""
