"""Statements of `SqlStore` and `JobQueue`, for SQLite and PostgreSQL. Nothing else imports them."""
