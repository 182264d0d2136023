"""Loading a model on a backend: this package's encoder, or PyTorch's as an independent computation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.encoder import SentenceEncoder, require_finite, warn_of_cut
from diffcse_jax.errors import CheckpointError
from diffcse_jax.evaluation import Encoder
from diffcse_jax.hosts import quiet_transformers
from diffcse_jax.io import expand_path, find_run
from diffcse_jax.models import hf, pooling_modules

_LAYERS = {"avg": [-1], "avg_top2": [-2, -1], "avg_first_last": [0, -1], "avg_first_block_last": [1, -1]}


def load_encoder(model: str, *, backend: str, pooler: str | None = None, truncate_dim: int | None = None) -> Encoder:
    """Load a model on the backend `jax` or `torch`. PyTorch reads the export of a run.

    Raises:
        CheckpointError: The model cannot be read, its pooler is unknown, torch is not installed, or the run has no
            export yet.
        ConfigError: `truncate_dim` is larger than the embedding size.
    """
    if backend == "jax":
        return SentenceEncoder.from_pretrained(model, pooler=pooler, truncate_dim=truncate_dim)
    path = expand_path(model)
    if find_run(path) is None:
        return TorchEncoder(model, pooler, truncate_dim)
    export = path / "export"
    if not export.is_dir():
        raise CheckpointError(
            f"the torch backend reads exported models, and {path} has no export. Run "
            f"`diffcse export --model {path} --output DIR` first, then evaluate DIR"
        )
    return TorchEncoder(str(export), pooler, truncate_dim)


class TorchEncoder:
    """Encodes with the model of `transformers`. It shares no computation with the JAX encoder.

    Args:
        path_or_id: A Hugging Face or sentence-transformers folder, or a hub id.
        pooler: Replaces the recorded pooler, with a warning. Needed if the model records none.
        truncate_dim: Cut embeddings to this size. None: the size that the folder records, if any.

    Raises:
        CheckpointError: torch is not installed, or the pooler is unknown or has no weights.
        ConfigError: `truncate_dim` is larger than the embedding size.
    """

    def __init__(self, path_or_id: str, pooler: str | None = None, truncate_dim: int | None = None):
        try:
            import torch
        except ImportError as error:
            raise CheckpointError("the torch backend needs torch. Install it: pip install torch") from error

        # The strict reader refuses what the JAX encoder refuses, before transformers reads the same files.
        checkpoint = hf.read(path_or_id)
        record = pooling_modules.recorded(checkpoint)
        self.pooler = pooling_modules.choose_pooler(pooler, record.pooler if record else None, path_or_id)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = load_tokenizer(checkpoint.folder)
        self._max_length = checkpoint.config.max_length
        recorded = record.truncate_dim if record else None
        size = checkpoint.config.hidden_size
        self.truncate_dim = pooling_modules.checked_truncation(recorded if truncate_dim is None else truncate_dim, size)
        model, missing = torch_model(checkpoint.folder, checkpoint.hf_config)
        self._model = model.to(self._device).eval()
        # If the folder records a head of its own, the pooler of transformers' model is a different one.
        head = record.head if record and self.pooler == "cls" else None
        self._head = torch_head(head).to(self._device) if head else None
        if self.pooler == "cls" and not head and (missing or getattr(model, "pooler", None) is None):
            lacking = ", ".join(missing) if missing else f"a pooler for {model.config.model_type} models"
            raise CheckpointError(
                f"{checkpoint.folder}: transformers does not find {lacking}. Use the jax backend or another pooler"
            )

    def encode(self, sentences: Sequence[str], batch_size: int = 64) -> Float32[np.ndarray, "sentences dim"]:
        """Return embeddings. Sentences longer than the model's positions are cut."""
        distinct = sorted(set(sentences), key=len)
        lengths = map(len, self._tokenizer(distinct, verbose=False)["input_ids"])
        warn_of_cut([length > self._max_length for length in lengths], self._max_length)
        batches = [distinct[start : start + batch_size] for start in range(0, len(distinct), batch_size)]
        embeddings = np.concatenate([self._encode_batch(batch) for batch in batches])
        rows = {sentence: row for row, sentence in enumerate(distinct)}
        return require_finite(embeddings[[rows[sentence] for sentence in sentences]])

    def _encode_batch(self, sentences: list[str]) -> np.ndarray:
        import torch

        inputs = self._tokenizer(
            sentences, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt"
        ).to(self._device)
        with torch.inference_mode():
            outputs = self._model(**inputs, output_hidden_states=True)
            if self._head is not None:
                embeddings = self._head(outputs.last_hidden_state[:, 0])
            else:
                embeddings = pooled(outputs, inputs["attention_mask"], self.pooler)
        return embeddings[:, : self.truncate_dim].cpu().numpy()


def torch_head(head: Mapping[str, Any]) -> Any:
    """Return a recorded dense + tanh head as a torch module."""
    import torch

    kernel, bias = (torch.tensor(np.asarray(head[f"dense.{part}"], np.float32)) for part in ("kernel", "bias"))
    dense = torch.nn.Linear(*kernel.shape)
    dense.weight.data, dense.bias.data = kernel.T.contiguous(), bias
    return torch.nn.Sequential(dense, torch.nn.Tanh()).eval()


def pooled(outputs: Any, attention_mask: Any, pooler: str) -> Any:
    """Pool the outputs of transformers' model, with hidden states, to a torch tensor of embeddings."""
    import torch

    if pooler == "cls":
        return outputs.pooler_output
    if pooler == "cls_before_pooler":
        return outputs.last_hidden_state[:, 0]
    states = torch.stack([outputs.hidden_states[layer] for layer in _LAYERS[pooler]]).mean(dim=0)
    mask = attention_mask.unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(dim=1) / mask.sum(dim=1)


def torch_model(folder: Path, hf_config: Mapping[str, Any], **options: Any) -> tuple[Any, list[str]]:
    """Load a folder's model with transformers, in float32. Code in the folder never runs.

    Args:
        folder: A Hugging Face folder.
        hf_config: Its `config.json`, already checked.
        options: Options of `from_pretrained`.

    Returns:
        The model, and the pooler's weights that the folder lacks; these are random.

    Raises:
        CheckpointError: transformers cannot read the model, or other weights are missing.
    """
    import torch
    import transformers

    try:
        config = transformers.CONFIG_MAPPING[hf_config["model_type"]].from_dict(dict(hf_config))
        with quiet_transformers():
            model, loaded = transformers.AutoModel.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # transformers raises a dozen types
        raise CheckpointError(f"{folder}: transformers cannot load the model: {error}") from error
    missing = sorted(loaded["missing_keys"])
    of_pooler = [name for name in missing if name.startswith("pooler.")]
    if missing != of_pooler:
        raise CheckpointError(f"{folder}: transformers does not find the weights {', '.join(missing)[:500]}")
    return model, of_pooler
