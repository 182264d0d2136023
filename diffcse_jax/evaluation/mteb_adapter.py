"""The encoder as `mteb` wants it, for its tasks beside SentEval's. Needs the optional extra: pip install mteb.

    import mteb
    from diffcse_jax.evaluation.mteb_adapter import MtebEncoder

    mteb.evaluate(MtebEncoder("runs/diffcse_base"), mteb.get_tasks(tasks=["STSBenchmark"]))

MTEB's scores are not SentEval's: its data sets have a casing and tokenisation of their own. Report them apart.
"""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ScoringFunction
from mteb.types import BatchedInput, PromptType
from torch.utils.data import DataLoader

from diffcse_jax.encoder import SentenceEncoder


class MtebEncoder(AbsEncoder):
    """A `SentenceEncoder` with mteb's encoder protocol; similarities are cosines, prompts are not used.

    Args:
        model_name: as `SentenceEncoder.from_pretrained` takes it.
        revision: for mteb's records only.
        device: ignored; JAX takes the accelerator that it finds.
        pooler: overrides the recorded pooler, with a warning.
    """

    def __init__(
        self, model_name: str, revision: str | None = None, device: str | None = None, *, pooler: str | None = None
    ):
        self.encoder = SentenceEncoder.from_pretrained(model_name, pooler=pooler)
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": f"diffcse_jax/{Path(model_name).name}",
                "revision": revision,
                "embed_dim": self.encoder.dimension,
                "max_tokens": self.encoder.config.max_length,
                "similarity_fn_name": ScoringFunction.COSINE,
            }
        )

    def encode(
        self, inputs: DataLoader[BatchedInput], *, prompt_type: PromptType | None = None, **options: Any
    ) -> Float32[np.ndarray, "sentences dimension"]:
        """Vectors of all sentences of the batches; of mteb's options `batch_size` counts."""
        sentences = [sentence for batch in inputs for sentence in batch["text"]]
        return self.encoder.encode(sentences, batch_size=options.get("batch_size", 64))
