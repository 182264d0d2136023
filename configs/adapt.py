"""A sentence encoder adapted to one's own text; what is exported is better on held-out text, or the start itself.

Command:  python train.py --config configs/adapt.py --config.data.train_file=documents.txt
Start:    MiniLM, 6 blocks of 384, as it is commonly used (mean pooling); any other with --config.model.name_or_path.
Pairs:    title or first sentence, and the rest of the document; a tenth of the documents is held out, and retrieval on
          them, from the first to the second, chooses. What other queries lose counts, too: where the halves of held-out
          sentences find each other less often, by more than chance, the start is exported.
Settings: those of configs/base/sentence_encoder.py; contrast alone, 20 steps of 256 pairs of 64 tokens, 64 pairs at a
          time in memory. Two texts tell a pair apart, so there is no dropout (single sentences need it: 0.1). The
          learning rate was chosen on MiniLM and queries that look like titles: for other queries a lower one is worth
          a try, with another encoder that of the base, 2e-5.
More:     docs/adapting.md
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("base/sentence_encoder")
    config.data.train_file = "documents.txt"
    config.data.pairs = "lead"
    config.data.held_out = 0.1
    config.data.max_length = 64
    config.model.hidden_dropout = (0.0,)
    config.model.attention_dropout = (0.0,)
    config.train.batch_size = 256
    config.train.chunk_size = 64
    config.train.steps = 20
    config.optim.learning_rate = 1e-4
    config.eval.every = 10
    config.eval.metric = "lead_retrieval"
    config.eval.hold = ("halves_retrieval",)
    return config
