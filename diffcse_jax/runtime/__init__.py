"""The machine: processes that run together, compiled programs kept on disk."""
