"""The encoder as `mteb` wants it, for its tasks beside SentEval's. Needs the optional extra: pip install mteb.

    import mteb
    from diffcse_jax.evaluation.mteb_adapter import MtebEncoder

    mteb.evaluate(MtebEncoder("runs/diffcse_base"), mteb.get_tasks(tasks=["STSBenchmark"]))

MTEB's scores are not SentEval's: its data sets have a casing and tokenisation of their own. Report them apart.
"""

from typing import Any

import numpy as np
from jaxtyping import Float32
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ScoringFunction
from mteb.types import BatchedInput, PromptType
from torch.utils.data import DataLoader

from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.io import expand_path, find_run


class MtebEncoder(AbsEncoder):
    """A `SentenceEncoder` with mteb's encoder protocol; similarities are cosines, prompts are not used.

    mteb keeps scores by name and revision of a model, and takes them from there: both hold a hash of all that
    determines the vectors, so that no model gets the scores of another one that is in a folder of the same name.

    Args:
        model_name: as `SentenceEncoder.from_pretrained` takes it.
        revision: for mteb's records, in place of that hash.
        device: ignored; JAX takes the accelerator that it finds.
        pooler: overrides the recorded pooler, with a warning.
    """

    def __init__(
        self, model_name: str, revision: str | None = None, device: str | None = None, *, pooler: str | None = None
    ):
        self.encoder = SentenceEncoder.from_pretrained(model_name, pooler=pooler)
        fingerprint = self.encoder.fingerprint()
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": f"diffcse_jax/{_folder_name(model_name)}-{fingerprint[:8]}",
                "revision": revision or fingerprint,
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


def _folder_name(model_name: str) -> str:
    """The name of a model's folder; of a run's checkpoint or export, that of the run."""
    path = expand_path(model_name).resolve()
    return (find_run(path) or find_run(path.parent) or path).name
