"""Baselines that transform the embeddings of a frozen encoder, fitted on unlabelled sentences.

Whitening (Su et al. 2021) and dimension-wise contrast (SimCSE++, table 4).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

from diffcse_jax.data.sources import open_text
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import Encoder
from diffcse_jax.losses.decorrelation import dimension_contrast

DCL_TEMPERATURE = 0.05
DCL_BATCH_SIZE = 512
DCL_STEPS = 1000
SMALLEST_VARIANCE = 1e-9  # of a kept direction, relative to the largest
BLOCK = 8192  # embeddings held in float64 at once
OPTIMIZER = optax.adam(1e-3)


@dataclasses.dataclass(frozen=True)
class PostProcessed:
    """An encoder whose embeddings x become (x - mean) @ matrix."""

    encoder: Encoder
    mean: Float32[np.ndarray, " dim"]
    matrix: Float32[np.ndarray, "dim target"]

    @property
    def pooler(self) -> str:
        return self.encoder.pooler

    @property
    def truncate_dim(self) -> int | None:
        return self.encoder.truncate_dim

    def encode(self, sentences: Sequence[str], batch_size: int = 64) -> Float32[np.ndarray, "sentences target"]:
        """Return transformed embeddings."""
        return (self.encoder.encode(sentences, batch_size=batch_size) - self.mean) @ self.matrix


def post_process(encoder: Encoder, specification: str, dimension: int | None) -> PostProcessed:
    """Fit `whitening:FILE` or `dcl:FILE` on the first column of a file that training can read.

    Args:
        encoder: The frozen encoder.
        specification: Method and file.
        dimension: Target size of whitening. None keeps the embedding size.

    Raises:
        ConfigError: The method is unknown, or does not use a dimension.
        DataError: The file cannot be read, or has too little text.
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
    embeddings: Float32[np.ndarray, "sentences dim"], dimension: int | None = None
) -> tuple[Float32[np.ndarray, " dim"], Float32[np.ndarray, "dim target"]]:
    """Return the mean, and the map to the directions of largest variance, each scaled to variance 1.

    Raises:
        ValueError: The embeddings do not span that many dimensions.
    """
    size = embeddings.shape[1]
    target = size if dimension is None else dimension
    if not 1 <= target <= size:
        raise ValueError(f"--post_dimension={dimension} is not between 1 and the embedding size, {size}")
    mean = embeddings.mean(axis=0, dtype=np.float64)
    blocks = (embeddings[start : start + BLOCK] - mean for start in range(0, len(embeddings), BLOCK))
    variances, directions = np.linalg.eigh(sum(block.T @ block for block in blocks) / len(embeddings))
    variances, directions = variances[::-1][:target], directions[:, ::-1][:, :target]
    if variances[-1] <= SMALLEST_VARIANCE * variances[0]:
        spanned = int((variances > SMALLEST_VARIANCE * variances[0]).sum())
        raise ValueError(
            f"{len(embeddings)} different sentences span {spanned} dimensions, not {target}. Give more text or a "
            "smaller --post_dimension"
        )
    return mean.astype(np.float32), (directions / np.sqrt(variances)).astype(np.float32)


def decorrelation(
    embeddings: Float32[np.ndarray, "sentences dim"],
) -> tuple[Float32[np.ndarray, " dim"], Float32[np.ndarray, "dim dim"]]:
    """Return the mean, and a linear map trained so that each dimension resembles only itself (SimCSE++, equation 5).

    A sentence is its own second view. Each dimension is scaled to variance 1, which the loss does not see.

    Raises:
        ValueError: A dimension is constant.
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
