"""Checkpoints of the training code of SimCSE, SimCSE++ and DiffCSE, and how their authors pool those they published.

That code saves all that it trains as one model (`BertForCL`, `RobertaForCL`): the encoder, the head between sentence
vector and loss (`mlp`) and, of DiffCSE, the discriminator with its head and the generator. A head of one dense layer is
what Hugging Face calls the pooler, as SimCSE's own conversion has it; the other parts serve training alone.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from diffcse_jax.models.families import Family

TRAINING_PARTS = {
    "mlp": "the projector",
    "lm_head": "a masked-LM head",
    "aux_bert": "the discriminator",
    "electra_head": "its head",
    "generator": "the generator",
}
BATCHNORM_PROJECTOR = "mlp.net."  # of DiffCSE, which is dropped when encoding
DENSE_PROJECTOR = "mlp.dense."  # of SimCSE
EVALUATED_WITH = {  # the last part of a published name, and the pooler that the authors evaluate the checkpoint with
    r"unsup-simcse-(bert|roberta)-(base|large)(-uncased)?": "cls_before_pooler",
    r"sup-simcse-(bert|roberta)-(base|large)(-uncased)?": "cls",
    r"diffcse-(bert|roberta)-base(-uncased)?-(sts|trans)": "cls_before_pooler",
}


class EncodingPart(NamedTuple):
    """The tensors of a training model that encoding needs, and the parts that are left out."""

    tensors: dict[str, np.ndarray]
    left_out: tuple[str, ...]


def is_training_model(names: Iterable[str]) -> bool:
    """True of the tensors that the training code saves."""
    return any(name.startswith((BATCHNORM_PROJECTOR, DENSE_PROJECTOR, "aux_bert.")) for name in names)


def encoding_part(tensors: Mapping[str, np.ndarray], family: Family) -> EncodingPart:
    """The encoder and, as Hugging Face's pooler, a projector of one dense layer.

    Args:
        tensors: of a training model, by the names that the file has.
        family: of its encoder.
    """
    kept: dict[str, np.ndarray] = {}
    left_out = []
    own_names = tuple(family.mlm_head)
    for name, tensor in tensors.items():
        part = name.partition(".")[0]
        if name.startswith(DENSE_PROJECTOR) and family.pooler:
            kept[name.replace("mlp.dense", next(iter(family.pooler)))] = tensor
        elif part in TRAINING_PARTS and not name.startswith(own_names):
            left_out.append(part)
        else:
            kept[name] = tensor
    return EncodingPart(kept, tuple(part for part in TRAINING_PARTS if part in left_out))


def evaluated_with(name_or_path: str, names: Iterable[str]) -> str | None:
    """The pooler that a checkpoint's authors evaluate it with; None where neither name nor tensors tell.

    Args:
        name_or_path: of the checkpoint.
        names: of its tensors.
    """
    if any(name.startswith(BATCHNORM_PROJECTOR) for name in names):
        return "cls_before_pooler"
    name = name_or_path.rstrip("/").rpartition("/")[2]
    return next((pooler for pattern, pooler in EVALUATED_WITH.items() if re.fullmatch(pattern, name)), None)


def notice(name_or_path: str, left_out: Iterable[str], pooler: str | None) -> str:
    """A sentence on how a training model is read."""
    parts = ", ".join(f"{part} ({TRAINING_PARTS[part]})" for part in left_out)
    kept = "its encoder is" if "mlp" in left_out else "its encoder and its dense + tanh head are"
    how = f"Its authors evaluate it with the pooler {pooler}"
    if pooler is None:
        how = "They evaluate unsupervised models with the pooler cls_before_pooler, supervised ones with cls"
    return (
        f"notice: {name_or_path} was saved by the training code of SimCSE or DiffCSE, and {kept} read"
        f"{f'; left out: {parts}' if parts else ''}. {how}"
    )
