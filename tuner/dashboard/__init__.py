"""The same pictures live, in a browser: a read-only server over a database of records and jobs."""
