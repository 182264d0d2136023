"""Families of encoders, by the `model_type` in a checkpoint's `config.json`.

A family's module holds all that is particular to it: how to read its sizes, the names of its tensors and, if they
differ, its embeddings, blocks and attention bias. To add a family, add a module and its name to `FAMILIES`.
"""

from diffcse_jax.models.families import bert, distilbert, electra, gte, modernbert, mpnet, nomic_bert, roberta
from diffcse_jax.models.families.base import Family

# What turns a configuration of other code into that of transformers, by its `model_type`.
CONVERTED = {"gte": gte.as_gte, "new": gte.as_gte, "nomic_bert": nomic_bert.as_nomic_bert}
FAMILIES: dict[str, Family] = {
    **bert.FAMILIES,
    **distilbert.FAMILIES,
    **electra.FAMILIES,
    **gte.FAMILIES,
    **modernbert.FAMILIES,
    **mpnet.FAMILIES,
    **nomic_bert.FAMILIES,
    **roberta.FAMILIES,
}
