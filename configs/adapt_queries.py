"""Adapt the query encoder to your documents, which keep their embeddings.

Queries that are made of the documents learn how a hybrid search ranks passages.

Command:  python train.py --config configs/adapt_queries.py --config.data.train_file=documents.txt
Start:    MiniLM (6 blocks of 384) with mean pooling, or any other sentence encoder with
          --config.model.name_or_path. Documents keep its embeddings, so that an index or a vector
          store stays valid. data.train_file may be an index, whose embeddings the run then takes.
Teacher:  BM25 with the weight 0.2 and the starting checkpoint, in all passages of the documents.
Queries:  windows, sentences and rare words of passages. Each leaves its own passage out of the
          ranking. A tenth of the documents makes no queries for training. Queries of these
          documents select the checkpoint. The starting checkpoint is exported if BM25 alone finds
          clearly less than it, or if no checkpoint is better.
Settings: 100 steps of 32 queries of at most 64 tokens, learning rate 3e-5, without dropout
          (docs/records/search.md).
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
    config.data.max_length = 64
    config.model.hidden_dropout = (0.0,)
    config.model.attention_dropout = (0.0,)
    config.train.batch_size = 32
    config.train.steps = 100
    config.train.recompute = "off"
    config.optim.learning_rate = 3e-5
    config.eval.every = 50
    config.eval.metric = "mixed_retrieval"
    config.eval.guard = False
    return config
