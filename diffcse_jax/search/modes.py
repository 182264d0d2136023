"""The ways to search and to store embeddings, by the names that users give them."""

MODES = ("dense", "lexical", "hybrid")
STORAGES = ("float32", "float16", "int8", "bits")
# Weights of BM25 in a hybrid search; docs/records/search.md has the measurements.
DEFAULT_WEIGHT = 0.1
HIGHER_WEIGHT = 0.2  # where BM25 alone finds about as much as the encoder alone
