"""Supervised STS-B and SICK-R: a similarity model trained on frozen embeddings, in the two forms of SentEval.

A softmax layer on |u - v| and u * v predicts a distribution over the scores 1 to 5 (Tai, Socher and Manning 2015). The
predicted score is the mean of the distribution. A correlation on the dev split stops training early; the copies differ
in which one (`tools/relatedness.py`):

- `STSBenchmark-senteval`, `SICKRelatedness-senteval`: Pearson, in the original SentEval. It calls these tasks
  `STSBenchmark` and `SICKRelatedness`, which here, as in SimCSE, are the tasks without training.
- `STSBenchmark-finetune`, `SICKRelatedness-finetune`: Spearman, in SimCSE's copy, under these names.

The weights after the block of passes with the best correlation are scored.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Float64, Int32

from diffcse_jax.evaluation import DEFAULTS, Encoder, TaskOptions
from diffcse_jax.evaluation.classifier import NO_ROW, SEED, initial_weights, with_bias
from diffcse_jax.evaluation.senteval import difference_and_product
from diffcse_jax.evaluation.sts import SICKR, STSB, ScoredPairs, StsTask, correlations, encode_groups

LEVELS = np.arange(1, 6, dtype=np.float32)
BATCH_SIZE = 64
PASSES_PER_BLOCK = 50
LAST_PASS = 1000  # no block starts after this many passes
TENACITY = 3  # blocks without improvement that are forgiven; the next one ends training
OPTIMIZER = optax.adam(1e-3)

Weights = Float32[Array | np.ndarray, "levels dim_and_bias"]


@dataclasses.dataclass(frozen=True)
class SimilarityRegression:
    """Trains on the train split, stops early by the dev split, and scores the test split.

    Attributes:
        name: The task's name.
        data: The task whose files are read.
        stops_by: The correlation that stops training, one of `sts.COEFFICIENTS`.
    """

    name: str
    data: StsTask
    stops_by: str
    modes: ClassVar = ("test", "fasttest", "dev")

    def files(self, folder: Path, mode: str) -> list[Path]:
        return [folder / self.data.splits[split] for split in _splits(mode)]

    def load(self, folder: Path, split: str) -> ScoredPairs:
        """Read the pairs of a split in SentEval's order: by word counts, then by score."""
        pairs = self.data.load(folder, split)
        words = [np.array([len(text.split()) for text in side]) for side in (pairs.first, pairs.second)]
        order = np.lexsort((pairs.gold, words[1], words[0]))
        first, second = ([side[row] for row in order] for side in (pairs.first, pairs.second))
        return ScoredPairs(first, second, pairs.gold[order])

    def run(self, encoder: Encoder, folder: Path, mode: str, options: TaskOptions = DEFAULTS) -> dict[str, Any]:
        """Return the scores of the mode's split, x 100, and those of the dev split under `dev`."""
        splits = {split: self.load(folder, split) for split in _splits(mode)}
        sides = [side for pairs in splits.values() for side in (pairs.first, pairs.second)]
        parts = iter(encode_groups(encoder, sides, options.batch_size))
        features = {split: difference_and_product(next(parts), next(parts)) for split in splits}
        gold = {split: pairs.gold for split, pairs in splits.items()}
        weights = fit(features["train"], gold["train"], features["dev"], gold["dev"], self.stops_by)
        scores = {split: correlations(predict(weights, features[split]), gold[split]) for split in splits}
        return scores["dev" if mode == "dev" else "test"] | {"ntrain": len(gold["train"]), "dev": scores["dev"]}


REGRESSION_TASKS = tuple(SimilarityRegression(f"{data.name}-senteval", data, "pearson") for data in (STSB, SICKR))
FINETUNE_TASKS = tuple(SimilarityRegression(f"{data.name}-finetune", data, "spearman") for data in (STSB, SICKR))


def _splits(mode: str) -> tuple[str, ...]:
    return ("train", "dev") if mode == "dev" else ("train", "dev", "test")


def fit(
    features: Float32[np.ndarray, "train dim"],
    gold: Float[np.ndarray, " train"],
    dev_features: Float32[np.ndarray, "dev dim"],
    dev_gold: Float[np.ndarray, " dev"],
    stops_by: str,
) -> Float32[np.ndarray, "levels dim_and_bias"]:
    """Return the weights after the block with the best dev correlation (SentEval's `tools/relatedness.py`).

    Args:
        features: |u - v| and u * v of the training pairs.
        gold: Scores of the training pairs, 1 to 5.
        dev_features: Features of the dev pairs.
        dev_gold: Scores of the dev pairs.
        stops_by: `pearson` or `spearman`.
    """
    inputs, targets = jnp.asarray(with_bias(features)), jnp.asarray(level_weights(gold))
    weights = jnp.asarray(initial_weights(len(LEVELS), features.shape[1]))
    opt_state = OPTIMIZER.init(weights)
    generator = np.random.RandomState(SEED)
    padding = -len(features) % BATCH_SIZE
    best, best_weights, failures = -1.0, np.asarray(weights), 0
    for _ in range(0, LAST_PASS + 1, PASSES_PER_BLOCK):
        orders = np.stack([generator.permutation(len(features)) for _ in range(PASSES_PER_BLOCK)]).astype(np.int32)
        batches = np.pad(orders, ((0, 0), (0, padding)), constant_values=NO_ROW).reshape(-1, BATCH_SIZE)
        weights, opt_state = _train_block(weights, opt_state, inputs, targets, batches)
        score = correlations(predict(np.asarray(weights), dev_features), dev_gold)[stops_by]
        if score > best:
            best, best_weights = score, np.asarray(weights)
        elif failures >= TENACITY:
            break
        else:
            failures += 1
    return best_weights


def predict(
    weights: Float32[np.ndarray, "levels dim_and_bias"], features: Float32[np.ndarray, "rows dim"]
) -> Float64[np.ndarray, " rows"]:
    """Return the expected score of each row, summed in float64 as in SentEval."""
    return np.asarray(jax.nn.softmax(with_bias(features) @ weights.T)) @ LEVELS.astype(np.float64)


def level_weights(gold: Float[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows levels"]:
    """Return scores as distributions over the two nearest levels. Below 1, the distribution sums to the score."""
    return np.maximum(0, 1 - np.abs(gold[:, None] - LEVELS)).astype(np.float32)


@jax.jit
def _train_block(
    weights: Weights,
    opt_state: optax.OptState,
    inputs: Float32[Array, "rows dim_and_bias"],
    targets: Float32[Array, "rows levels"],
    batches: Int32[Array | np.ndarray, "batches batch_size"],
) -> tuple[Weights, optax.OptState]:
    def loss(weights: Weights, rows: Int32[Array, " batch_size"]) -> Float32[Array, ""]:
        predicted = jax.nn.softmax(jnp.dot(inputs[rows], weights.T, precision="highest"))
        squares = jnp.square(predicted - targets[rows]).mean(axis=1)
        real = (rows >= 0).astype(jnp.float32)
        return (squares * real).sum() / real.sum()

    def update(carry: tuple[Weights, optax.OptState], rows: Int32[Array, " batch_size"]) -> tuple[tuple, None]:
        weights, opt_state = carry
        updates, opt_state = OPTIMIZER.update(jax.grad(loss)(weights, rows), opt_state)
        return (optax.apply_updates(weights, updates), opt_state), None

    return jax.lax.scan(update, (weights, opt_state), jnp.asarray(batches))[0]
