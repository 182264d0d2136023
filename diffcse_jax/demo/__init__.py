"""The search page: a text, one encoder or two, and a browser."""
