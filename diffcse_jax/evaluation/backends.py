"""Encoders to evaluate: this package's, PyTorch's as an independent computation, and post-processed ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

from diffcse_jax.data.sources import open_text
from diffcse_jax.data.tokenizer import load_tokenizer, warn_of_cut
from diffcse_jax.encoder import SentenceEncoder, require_finite
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, require_extra
from diffcse_jax.evaluation import Embeddings, Encoder, Settings
from diffcse_jax.hosts import quiet_transformers
from diffcse_jax.io import expand_path, find_run
from diffcse_jax.losses.decorrelation import dimension_contrast
from diffcse_jax.models import hf, parameters, pooling_modules
from diffcse_jax.models.pooling import AVERAGED_LAYERS, CLS_POOLERS

DCL_TEMPERATURE, DCL_BATCH_SIZE, DCL_STEPS = 0.05, 512, 1000
SMALLEST_VARIANCE = 1e-9  # of a kept direction, relative to the largest
BLOCK = 8192  # embeddings held in float64 at once
OPTIMIZER = optax.adam(1e-3)


def load_encoder(model: str, settings: Settings) -> Encoder:
    """Load a model on the backend `jax` or `torch`, and post-process its embeddings if the settings say so.

    PyTorch reads the export of a run.
    """
    path = expand_path(model)
    options: dict[str, Any] = {"pooler": settings.pooler, "truncate_dim": settings.truncate_dim}
    encoder: Encoder
    if settings.backend == "jax":
        encoder = SentenceEncoder.from_pretrained(model, **options)
    elif find_run(path) is None:
        encoder = TorchEncoder(model, **options)
    elif (path / "export").is_dir():
        encoder = TorchEncoder(str(path / "export"), **options)
    else:
        raise CheckpointError(
            f"the torch backend reads exported models, and {path} has no export. Run "
            f"`diffcse export --model {path} --output DIR` first, then evaluate DIR"
        )
    return encoder if settings.post is None else post_process(encoder, settings.post, settings.post_dimension)


# PyTorch


class TorchEncoder:
    """Encodes with the model of `transformers`. It shares no computation with the JAX encoder.

    Arguments and errors are those of `SentenceEncoder.from_pretrained`. The pooler `cls` must have weights.
    """

    def __init__(self, path_or_id: str, pooler: str | None = None, truncate_dim: int | None = None):
        torch = require_extra("torch", "torch")
        # The strict reader refuses what the JAX encoder refuses, before transformers reads the same files.
        checkpoint = hf.read(path_or_id)
        record = pooling_modules.recorded(checkpoint)
        self.pooler = pooling_modules.choose_pooler(pooler, record.pooler, path_or_id)
        self.prompts = record.prompts
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = load_tokenizer(checkpoint.folder)
        self._max_length = pooling_modules.max_length_of(checkpoint.folder, checkpoint.config.max_length)
        head = record.sentence_head.of(self.pooler)
        # If the folder records a head of its own (dense + tanh), the pooler of transformers' model is a different one.
        if record.head and self.pooler == "cls":
            head = pooling_modules.head_of_cls(record.head)
        size = head.embedding_size(self.pooler, checkpoint.config.hidden_size)
        truncate_dim = record.truncate_dim if truncate_dim is None else truncate_dim
        self.truncate_dim = pooling_modules.checked_truncation(truncate_dim, size)
        model, missing = _torch_model(checkpoint.folder, checkpoint.hf_config)
        self._model = model.to(self._device).eval()
        self._layers = head.layers
        self._weights = {name: torch.tensor(array, device=self._device) for name, array in head.params.items()}
        if self.pooler == "cls" and not head.layers and (missing or getattr(model, "pooler", None) is None):
            lacking = ", ".join(missing) if missing else f"a pooler for {model.config.model_type} models"
            raise CheckpointError(
                f"{checkpoint.folder}: transformers does not find {lacking}. Use the jax backend or another pooler"
            )

    def encode(self, sentences: Sequence[str], batch_size: int = 64, *, prompt: str | None = None) -> Embeddings:
        """Return embeddings. Sentences longer than the model's positions are cut."""
        prompt = self.prompts.choose(prompt)
        self._unpooled = len(self._tokenizer(prompt)["input_ids"]) - 1 if prompt and not self.prompts.pooled else 0
        texts = [prompt + sentence for sentence in sentences]
        lengths = np.array([*map(len, self._tokenizer(texts, verbose=False)["input_ids"])])
        warn_of_cut(int((lengths > self._max_length).sum()), len(texts), self._max_length)
        order = np.argsort(lengths)
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        embeddings = np.concatenate([self._encode_batch([texts[row] for row in batch]) for batch in batches])
        return require_finite(embeddings[np.argsort(order)])

    def _encode_batch(self, sentences: list[str]) -> np.ndarray:
        import torch

        cut = {"padding": True, "truncation": True, "max_length": self._max_length, "return_tensors": "pt"}
        inputs = self._tokenizer(sentences, **cut).to(self._device)
        with torch.inference_mode():
            outputs = self._model(**inputs, output_hidden_states=True)
            pooled = [self._pool(outputs, inputs["attention_mask"], each) for each in self.pooler.split("+")]
            embeddings = self._apply_head(torch.cat(pooled, dim=-1))
        return embeddings[:, : self.truncate_dim].cpu().numpy()

    def _apply_head(self, embeddings: Any) -> Any:
        """Apply the modules after the pooling, as sentence-transformers does."""
        import torch
        from torch.nn import functional

        for index, layer in enumerate(self._layers):
            weights = parameters.subset(self._weights, f"layers.{index}")
            if layer.kind == "LayerNorm":
                size = (layer.dimension,)
                embeddings = functional.layer_norm(embeddings, size, weights["norm.scale"], weights["norm.bias"])
            elif layer.kind == "Normalize":
                embeddings = functional.normalize(embeddings, dim=-1)
            elif layer.kind == "Dense":
                product = embeddings @ weights["linear.kernel"] + weights.get("linear.bias", 0)
                residual = embeddings @ weights["residual.kernel"] if "residual.kernel" in weights else embeddings
                activated = getattr(torch.nn, layer.activation_function.rpartition(".")[2])()(product)
                embeddings = activated + residual if layer.use_residual else activated
        return embeddings

    def _pool(self, outputs: Any, attention_mask: Any, pooler: str) -> Any:
        import torch

        if pooler == "cls" and not self._layers:
            return outputs.pooler_output
        if pooler in CLS_POOLERS:
            return outputs.last_hidden_state[:, self._unpooled]
        attention_mask[:, : self._unpooled] = 0
        layers = AVERAGED_LAYERS.get(pooler, (-1,))
        states = torch.stack([outputs.hidden_states[layer] for layer in layers]).mean(dim=0)
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        if pooler == "max":
            return states.masked_fill(mask == 0, -torch.inf).amax(dim=1)
        if pooler == "lasttoken":
            return states[torch.arange(len(states)), (mask[:, :, 0] * torch.arange(mask.shape[1])).argmax(dim=1)]
        if pooler == "weightedmean":
            mask = mask.cumsum(dim=1) * mask
        total = mask.sum(dim=1)
        return (states * mask).sum(dim=1) / (total.sqrt() if pooler == "mean_sqrt_len_tokens" else total)


def _torch_model(folder: Path, hf_config: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Load a folder's model in float32. Also return the pooler's weights that the folder lacks; these are random."""
    import torch
    import transformers

    options = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
    try:
        config = transformers.CONFIG_MAPPING[hf_config["model_type"]].from_dict(dict(hf_config))
        with quiet_transformers():
            model, loaded = transformers.AutoModel.from_pretrained(
                folder, config=config, trust_remote_code=False, **options
            )
    except Exception as error:  # transformers raises a dozen types
        raise CheckpointError(f"{folder}: transformers cannot load the model: {error}") from error
    missing = sorted(loaded["missing_keys"])
    if others := [name for name in missing if not name.startswith("pooler.")]:
        raise CheckpointError(f"{folder}: transformers does not find the weights {', '.join(others)[:500]}")
    return model, missing


# Post-processing: baselines that transform the embeddings of a frozen encoder, fitted on unlabelled sentences


class PostProcessed:
    """An encoder whose embeddings x become (x - mean) @ matrix."""

    def __init__(self, encoder: Encoder, mean: Float32[np.ndarray, " dim"], matrix: Float32[np.ndarray, "dim target"]):
        self.pooler, self.truncate_dim, self.prompts = encoder.pooler, encoder.truncate_dim, encoder.prompts
        self._encoder, self._mean, self._matrix = encoder, mean, matrix

    def encode(self, sentences: Sequence[str], batch_size: int = 64, *, prompt: str | None = None) -> Embeddings:
        """Return transformed embeddings."""
        return (self._encoder.encode(sentences, batch_size=batch_size, prompt=prompt) - self._mean) @ self._matrix


def post_process(encoder: Encoder, specification: str, dimension: int | None) -> PostProcessed:
    """Fit `whitening:FILE` or `dcl:FILE` on the first column of a file that training can read.

    `dimension` is the target size of whitening. None keeps the embedding size.
    """
    method, _, file = specification.partition(":")
    if method not in ("whitening", "dcl") or not file:
        raise ConfigError(f"--post: expected whitening:FILE or dcl:FILE, got {specification!r}")
    if method == "dcl" and dimension is not None:
        raise ConfigError("--post_dimension is an option of whitening. Dimension-wise contrast keeps all dimensions")
    sentences = list(dict.fromkeys(row[0] for row in open_text(file, "--post", columns_option="")))
    embeddings = encoder.encode(sentences)
    try:
        fitted = whitening(embeddings, dimension) if method == "whitening" else decorrelation(embeddings)
    except ValueError as error:
        raise DataError(f"--post {specification}: {error}") from error
    return PostProcessed(encoder, *fitted)


def whitening(
    embeddings: Embeddings, dimension: int | None = None
) -> tuple[Float32[np.ndarray, " dim"], Float32[np.ndarray, "dim target"]]:
    """Return the mean, and a map to the directions of largest variance, each scaled to variance 1 (Su et al. 2021)."""
    size = embeddings.shape[1]
    target = size if dimension is None else dimension
    if not 1 <= target <= size:
        raise ValueError(f"--post_dimension={dimension} is not between 1 and the embedding size, {size}")
    mean = embeddings.mean(axis=0, dtype=np.float64)
    blocks = (embeddings[start : start + BLOCK] - mean for start in range(0, len(embeddings), BLOCK))
    variances, directions = np.linalg.eigh(sum(block.T @ block for block in blocks) / len(embeddings))
    variances, directions = variances[::-1][:target], directions[:, ::-1][:, :target]
    spanned = int((variances > SMALLEST_VARIANCE * variances[0]).sum())
    if spanned < target:
        raise ValueError(
            f"{len(embeddings)} different sentences span {spanned} dimensions, not {target}. Give more text or a "
            "smaller --post_dimension"
        )
    return mean.astype(np.float32), (directions / np.sqrt(variances)).astype(np.float32)


def decorrelation(embeddings: Embeddings) -> tuple[Float32[np.ndarray, " dim"], Float32[np.ndarray, "dim dim"]]:
    """Return the mean, and a linear map trained so that each dimension resembles only itself (SimCSE++, equation 5).

    A sentence is its own second view. Each dimension is scaled to variance 1, which the loss does not see.
    """
    mean, std = embeddings.mean(axis=0), embeddings.std(axis=0)
    if len(embeddings) < 2 or not std.all():
        raise ValueError(f"{len(embeddings)} different sentences leave dimensions constant. Give more text")
    inputs = (embeddings - mean) / std
    generator = np.random.default_rng(0)
    matrix = jnp.eye(embeddings.shape[1])
    opt_state = OPTIMIZER.init(matrix)
    for _ in range(DCL_STEPS):
        rows = generator.choice(len(inputs), min(DCL_BATCH_SIZE, len(inputs)), replace=False)
        matrix, opt_state = _dcl_step(matrix, opt_state, inputs[rows])
    trained = np.asarray(matrix)
    return mean, trained / std[:, None] / (inputs @ trained).std(axis=0)


@jax.jit
def _dcl_step(
    matrix: Float32[Array, "dim dim"], opt_state: optax.OptState, batch: Float32[Array | np.ndarray, "batch dim"]
) -> tuple[Float32[Array, "dim dim"], optax.OptState]:
    def loss(matrix: Float32[Array, "dim dim"]) -> Float32[Array, ""]:
        mapped = jnp.dot(batch, matrix, precision="highest")
        return dimension_contrast(mapped, mapped, temperature=DCL_TEMPERATURE, form="code").mean()

    updates, opt_state = OPTIMIZER.update(jax.grad(loss)(matrix), opt_state)
    return optax.apply_updates(matrix, updates), opt_state
