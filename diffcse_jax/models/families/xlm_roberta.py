"""XLM-RoBERTa (Conneau et al. 2020): RoBERTa with a tokenizer of a hundred languages."""

import dataclasses

from diffcse_jax.models.families import roberta

FAMILY = dataclasses.replace(roberta.FAMILY, architecture="XLMRobertaModel")
