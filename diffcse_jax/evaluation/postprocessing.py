"""Baselines that transform the vectors of a frozen encoder, fitted on sentences without labels.

Whitening (Su et al. 2021) and dimension-wise contrast (SimCSE++ Table 4). Each gives an encoder again.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

from diffcse_jax.data.entries import told
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation.protocols import Encoder
from diffcse_jax.groups import DataConfig
from diffcse_jax.objectives.dcl import dimension_contrast

DCL_TEMPERATURE = 0.05
DCL_BATCH_SIZE = 512
DCL_STEPS = 1000
BLOCK = 8192  # vectors held in float64 at once
SMALLEST_VARIANCE = 1e-9  # of a kept dimension, relative to the largest

_optimizer = optax.adam(1e-3)


@dataclasses.dataclass(frozen=True)
class PostProcessed:
    """An encoder whose vectors x become (x - mean) @ matrix.

    Attributes:
        encoder: the frozen encoder.
        mean: its mean vector over the text.
        matrix: the fitted map.
    """

    encoder: Encoder
    mean: Float32[np.ndarray, " dimension"]
    matrix: Float32[np.ndarray, "dimension target"]

    @property
    def pooler(self) -> str:
        """That of the encoder."""
        return self.encoder.pooler

    @property
    def truncate_dim(self) -> int | None:
        """That of the encoder."""
        return self.encoder.truncate_dim

    def encode(self, sentences: Sequence[str], batch_size: int = 64) -> Float32[np.ndarray, "sentences target"]:
        """Transformed vectors of sentences."""
        return (self.encoder.encode(sentences, batch_size=batch_size) - self.mean) @ self.matrix


def post_process(encoder: Encoder, specification: str, dimension: int | None) -> PostProcessed:
    """Fits what `whitening:FILE` or `dcl:FILE` names; the file is one that training reads, its first column counts.

    Args:
        encoder: the frozen encoder.
        specification: method and file.
        dimension: target dimension of whitening; None keeps all.

    Raises:
        ConfigError: an unknown method, or a dimension that it has no use for.
        DataError: a file that cannot be read, or too little text.
    """
    method, _, file = specification.partition(":")
    if method not in ("whitening", "dcl") or not file:
        raise ConfigError(f"--post: expected whitening:FILE or dcl:FILE, got {specification!r}")
    if method == "dcl" and dimension is not None:
        raise ConfigError("--post_dimension is a setting of whitening: dimension-wise contrast keeps all dimensions")
    alone = {"name one or more of its": "give the text alone, in a file of one column; it has", " in data.columns": ""}
    with told({"data.train_file": "--post", **alone}):
        sentences = list(dict.fromkeys(row[0] for row in open_corpus(DataConfig(train_file=file), "--post")))
    vectors = encoder.encode(sentences)
    try:
        mean, matrix = whitening(vectors, dimension) if method == "whitening" else decorrelation(vectors)
    except ValueError as error:
        raise DataError(f"--post {specification}: {error}") from error
    return PostProcessed(encoder, mean, matrix)


def whitening(
    vectors: Float32[np.ndarray, "sentences dimension"], dimension: int | None = None
) -> tuple[Float32[np.ndarray, " dimension"], Float32[np.ndarray, "dimension target"]]:
    """Mean, and the map to the `dimension` directions of largest variance, scaled to variance 1.

    Raises:
        ValueError: more dimensions asked for than there are, or than the vectors span.
    """
    target = vectors.shape[1] if dimension is None else dimension
    if not 1 <= target <= vectors.shape[1]:
        raise ValueError(f"{dimension} dimensions asked for, the encoder has {vectors.shape[1]}")
    mean = vectors.mean(axis=0, dtype=np.float64)
    # In float64, which small variances need, block by block: the text may be long.
    blocks = (vectors[start : start + BLOCK] - mean for start in range(0, len(vectors), BLOCK))
    variances, directions = np.linalg.eigh(sum(block.T @ block for block in blocks) / len(vectors))
    variances, directions = variances[::-1][:target], directions[:, ::-1][:, :target]
    if variances[-1] <= SMALLEST_VARIANCE * variances[0]:
        spanned = int((variances > SMALLEST_VARIANCE * variances[0]).sum())
        raise ValueError(
            f"{len(vectors)} different sentences span {spanned} dimensions, not {target}; give more text or a smaller "
            "--post_dimension"
        )
    return mean.astype(np.float32), (directions / np.sqrt(variances)).astype(np.float32)


def decorrelation(
    vectors: Float32[np.ndarray, "sentences dimension"],
) -> tuple[Float32[np.ndarray, " dimension"], Float32[np.ndarray, "dimension dimension"]]:
    """Mean, and a linear map trained so that each dimension resembles itself alone (SimCSE++ Eq. 5).

    A sentence is its own second view. The loss does not see the scale of a dimension, so that each gets variance 1.

    Raises:
        ValueError: fewer than two sentences, or a dimension that is constant.
    """
    mean, deviation = vectors.mean(axis=0), vectors.std(axis=0)
    if len(vectors) < 2 or not deviation.all():
        raise ValueError(f"{len(vectors)} different sentences leave dimensions constant; give more text")
    standardised = (vectors - mean) / deviation
    generator = np.random.default_rng(0)
    matrix = jnp.eye(vectors.shape[1])
    opt_state = _optimizer.init(matrix)
    for _ in range(DCL_STEPS):
        rows = generator.choice(len(vectors), min(DCL_BATCH_SIZE, len(vectors)), replace=False)
        matrix, opt_state = _dcl_step(matrix, opt_state, standardised[rows])
    trained = np.asarray(matrix)
    return mean, trained / deviation[:, None] / (standardised @ trained).std(axis=0)


@jax.jit
def _dcl_step(
    matrix: Float32[Array, "dimension dimension"],
    opt_state: optax.OptState,
    batch: Float32[Array | np.ndarray, "batch dimension"],
) -> tuple[Float32[Array, "dimension dimension"], optax.OptState]:
    def loss(matrix: Float32[Array, "dimension dimension"]) -> Float32[Array, ""]:
        mapped = jnp.dot(batch, matrix, precision="highest")
        return dimension_contrast(mapped, mapped, temperature=DCL_TEMPERATURE, form="code").mean()

    updates, opt_state = _optimizer.update(jax.grad(loss)(matrix), opt_state)
    return optax.apply_updates(matrix, updates), opt_state
