"""The dashboard: a read-only web server over a database of records and jobs. `app.make_app` is for callers."""
