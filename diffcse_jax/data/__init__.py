"""From text to batches: sources of sentences, the token store, and the feeding of the train step."""
