"""Reports of tuning from records: `subject` reads them, `sections` makes figures and tables, `page` one HTML file.

`listings` and `texts` are for the terminal, too.
"""
