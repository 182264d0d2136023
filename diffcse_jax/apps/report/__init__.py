"""The report: what was trained and what came of it, as one HTML page that needs no network."""
