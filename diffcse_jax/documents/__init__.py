"""From any file to documents and rows, with a ledger of what was read."""
