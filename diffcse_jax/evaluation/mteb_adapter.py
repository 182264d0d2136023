"""An encoder for `mteb`. Needs the extra `mteb`.

    import mteb
    from diffcse_jax.evaluation.mteb_adapter import MtebEncoder

    mteb.evaluate(MtebEncoder("runs/diffcse_base"), mteb.get_tasks(tasks=["STSBenchmark"]))

MTEB's data differs from SentEval's in casing and tokenisation. Report the two kinds of scores
separately.
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
from diffcse_jax.io import expand_path
from diffcse_jax.models.routes import DOCUMENT, QUERY
from diffcse_jax.run_folder.finding import find_run


class MtebEncoder(AbsEncoder):
    """A `SentenceEncoder` for mteb. Similarity is the cosine. The device is ignored.

    Queries and documents get the model's prompts; texts of other tasks get its default prompt, if
    there is one.

    mteb caches scores by a model's name and revision. Both contain a hash of all that determines an
    embedding, so that no model gets the cached scores of another. `revision` replaces the hash.
    """

    def __init__(
        self,
        model_name: str,
        revision: str | None = None,
        device: str | None = None,
        *,
        pooler: str | None = None,
    ):
        self.encoder = SentenceEncoder.from_pretrained(model_name, pooler=pooler)
        encoders = filter(None, (self.encoder, self.encoder.queries))
        fingerprint = "-".join(each.fingerprint() for each in encoders)
        path = expand_path(model_name).resolve()
        # Exports have the name of their run.
        folder = (find_run(path) or find_run(path.parent) or path).name
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": f"diffcse_jax/{folder}-{fingerprint[:8]}",
                "revision": revision or fingerprint,
                "embed_dim": self.encoder.dimension,
                "max_tokens": self.encoder.max_length,
                "similarity_fn_name": ScoringFunction.COSINE,
            }
        )

    def encode(
        self,
        inputs: DataLoader[BatchedInput],
        *,
        prompt_type: PromptType | None = None,
        **options: Any,
    ) -> Float32[np.ndarray, "sentences dim"]:
        sentences = [sentence for batch in inputs for sentence in batch["text"]]
        prompts = self.encoder.prompts
        prompt = task = None
        if prompt_type is not None:
            task = QUERY if prompt_type == PromptType.query else DOCUMENT
            prompt = prompts.query if task == QUERY else prompts.document
        return self.encoder.encode(
            sentences, batch_size=options.get("batch_size", 64), prompt=prompt, task=task
        )
