"""CamemBERT (Martin et al. 2020): RoBERTa with a French tokenizer."""

import dataclasses

from diffcse_jax.models.families import roberta

FAMILY = dataclasses.replace(roberta.FAMILY, architecture="CamembertModel")
