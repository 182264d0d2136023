"""A tokenizer's vocabulary, as far as masking is concerned."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Numbers of tokens."""

    size: int  # tokens of the tokenizer; a model may have more embeddings
    mask_id: int | None
    special_ids: tuple[int, ...]  # never masked: [CLS], [SEP], [PAD], [UNK], [MASK]
