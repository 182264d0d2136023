"""Adapt the queries of a sentence encoder to your documents, which keep their embeddings.

Passages of the documents, which stand for queries, learn how a hybrid search ranks the others.

Command:  python train.py --config configs/adapt_queries.py --config.data.train_file=documents.txt
Start:    MiniLM (6 blocks of 384) with mean pooling, or any other sentence encoder with
          --config.model.name_or_path. Documents keep its embeddings, so that an index or a vector
          store stays valid. data.train_file may be an index, whose embeddings the run then takes.
Trained:  a linear map of the queries' embeddings, a Dense module after the starting checkpoint's.
Teacher:  BM25 with the weight 0.2 and the starting checkpoint, in all passages of the documents.
Queries:  at most 6,400 passages, which leave themselves out of the ranking. They are of nine tenths
          of the documents. Queries that are made of the others judge the result. The starting
          checkpoint is exported if BM25 alone finds clearly less than it, or if the result is
          clearly worse.
Settings: 4 passes in batches of 64, learning rate 1e-3 (docs/records/search.md).
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("base/sentence_encoder")
    config.contrast.weight = 0.0
    config.query_distillation.weight = 1.0
    config.data.train_file = "documents.txt"
    config.data.pairs = "dropout"
    config.data.held_out = 0.1
    config.data.max_length = 64  # of the passages that made queries find
    config.train.batch_size = 64
    config.train.epochs = 4
    config.optim.learning_rate = 1e-3
    config.eval.every = 0
    config.eval.metric = "mixed_retrieval"
    config.eval.guard = False
    return config
