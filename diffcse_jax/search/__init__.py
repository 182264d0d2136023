"""Search among embeddings: an index, nearest neighbours, and Parquet files of embeddings."""
