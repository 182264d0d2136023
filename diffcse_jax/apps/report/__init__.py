"""The report: an HTML page about one or more runs, which works offline."""
