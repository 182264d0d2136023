"""Pre-train a masked LM on your own text (Devlin et al. 2019).

It starts from a checkpoint or from random weights.

Command:  diffcse train --config masked_lm --config.data.train_file=text.txt
Start:    MiniLM, or another checkpoint with --config.model.name_or_path, with its own masked-LM
          head if it has one. `diffcse init` writes random weights and a new vocabulary, or the
          first blocks of a checkpoint.
Text:     passages of whole sentences, at most about 64 tokens, from lines or documents. Each one is
          a single view. A hundredth of the documents is held out. The share of their masked tokens
          that the model recovers selects the checkpoint. It is logged beside what the most frequent
          token, alone or after the previous token, would get.
Settings: 15 % of the tokens are masked (80 % [MASK], 10 % random, 10 % unchanged). AdamW with
          weight decay 0.01, linear warm-up over 100 steps and linear decay, batches of 128. No
          dropout, because one pass over a text does not overfit (Geiping and Goldstein 2023).
Rates:    5e-5 continues a checkpoint. Small random weights (4 blocks of 256) need
          --config.optim.learning_rate=5e-4.
Result:   an ordinary Hugging Face folder with the head, for another run or as a generator. Its
          sentence embeddings are a start: train them with configs/base/from_masked_lm.py or a
          paper's configuration.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.name_or_path = "minilm"
    config.model.pooler = "avg"
    config.model.projector = "none"
    config.model.hidden_dropout = (0.0,)
    config.model.attention_dropout = (0.0,)
    config.contrast.weight = 0.0
    config.difference.weight = 0.0
    config.mlm.weight = 1.0
    config.mlm.tied = True
    config.data.pairs = "passages"
    config.data.held_out = 0.01
    config.data.max_length = 64
    config.train.batch_size = 128
    config.train.epochs = 1
    config.optim.learning_rate = 5e-5
    config.optim.weight_decay = 0.01
    config.optim.warmup_steps = 100
    config.eval.every = 500
    config.eval.metric = "masked_accuracy"
    return config
