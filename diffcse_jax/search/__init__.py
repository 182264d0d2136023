"""Search for the sentences that are most similar to a query."""
