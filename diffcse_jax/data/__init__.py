"""From text to batches: sources of sentences, the token store, and what feeds the train step."""
