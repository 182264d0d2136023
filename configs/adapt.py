"""Adapt a sentence encoder to your own documents.

If training does not help, the starting checkpoint is exported.

Command:  python train.py --config configs/adapt.py --config.data.train_file=documents.txt
Start:    MiniLM (6 blocks of 384) with mean pooling, or any other encoder with
          --config.model.name_or_path.
Pairs:    the title or first sentence, and the rest of the document. Of text without either, a
          window of 5 to 25 words, new in each epoch, and the passage around it. A tenth of the
          documents is held out, and retrieval with queries of several forms selects the checkpoint.
          The starting checkpoint is exported if the halves of held-out sentences find each other
          significantly less often than before.
Weights:  halfway between the starting checkpoint and the best one (WiSE-FT, Wortsman et al. 2022).
          On people's own questions that is better than all trained weights
          (docs/records/search.md).
Settings: as in configs/base/sentence_encoder.py, with contrast alone: 20 steps of 256 pairs of 64
          tokens, in chunks of 64 pairs if memory is short. There is no dropout, because the two
          texts of a pair differ (single sentences need 0.1). The learning rate was chosen on
          MiniLM. For another encoder, start with 2e-5.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("base/sentence_encoder")
    config.data.train_file = "documents.txt"
    config.data.pairs = "lead"
    config.data.cloze = 1.0
    config.data.held_out = 0.1
    config.data.max_length = 64
    config.model.hidden_dropout = (0.0,)
    config.model.attention_dropout = (0.0,)
    config.train.batch_size = 256
    config.train.chunking = "auto"
    config.train.steps = 20
    config.optim.learning_rate = 1e-4
    config.eval.every = 10
    config.eval.metric = "mixed_retrieval"
    config.eval.interpolate = (0.5,)
    config.eval.hold = ("halves_retrieval",)
    return config
