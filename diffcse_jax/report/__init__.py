"""The report of runs: one HTML page that says what was run and what came of it. `page.py` puts it together."""
