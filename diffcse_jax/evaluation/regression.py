"""Supervised STS-B and SICK-R: a similarity model trained on frozen sentence vectors, in the two forms of SentEval.

A softmax layer on |u - v| and u * v predicts a distribution over the scores 1 to 5 (Tai, Socher and Manning 2015); the
predicted score is its mean. Training is stopped early by a coefficient on the dev split, of which SentEval's copies
differ in one point (`tools/relatedness.py`):

- `STSBenchmark-senteval`, `SICKRelatedness-senteval`: Pearson's, in the original SentEval, whose tasks are named
  `STSBenchmark` and `SICKRelatedness` (here, as in SimCSE, the names of the unsupervised tasks);
- `STSBenchmark-finetune`, `SICKRelatedness-finetune`: Spearman's, in SimCSE's copy, under these names.

The weights after the block of passes with the best coefficient are scored, so that the two may take different ones.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Float64, Int32

from diffcse_jax.evaluation.classifier import SEED, initial_weights
from diffcse_jax.evaluation.protocols import Encoder
from diffcse_jax.evaluation.sts import SCALE, ScoredPairs, SICKRelatedness, STSBenchmark, correlations, read_pairs

LEVELS = np.arange(1, 6, dtype=np.float32)
BATCH_SIZE = 64
PASSES_PER_BLOCK = 50
LAST_PASS = 1000  # No block starts after this many passes.
TENACITY = 3  # So many blocks without improvement are forgiven, the next one ends the training.

OPTIMIZER = optax.adam(1e-3)
Weights = Float32[Array | np.ndarray, "levels dimension_and_bias"]


@dataclasses.dataclass(frozen=True)
class SimilarityRegression:
    """Trained on the train split, stopped early by a coefficient on the dev split, scored on the test split.

    Attributes:
        folder: SentEval's `downstream` folder.
    """

    folder: Path

    name: ClassVar[str]
    modes: ClassVar = ("test", "fasttest", "dev")
    splits: ClassVar[dict[str, str]]  # split to file below the folder
    columns: ClassVar[tuple[int, int, int]]
    header: ClassVar[bool]
    stops_by: ClassVar[str]  # one of `sts.COEFFICIENTS`

    def files(self, mode: str) -> list[Path]:
        """The files that `run` reads in this mode."""
        return [self.folder / self.splits[split] for split in self._splits_of_mode(mode)]

    def load(self, split: str) -> ScoredPairs:
        """The pairs of a split, in the order in which SentEval numbers them: by word counts, then by score.

        Raises:
            DataError: a row that cannot be read, with its file and line.
        """
        pairs = read_pairs(self.folder / self.splits[split], self.columns, skip_header=self.header, scale=SCALE)
        rows = sorted(
            zip(pairs.first, pairs.second, pairs.gold, strict=True),
            key=lambda row: (len(row[0].split()), len(row[1].split()), row[2]),
        )
        first, second, gold = zip(*rows, strict=True)
        return ScoredPairs(list(first), list(second), np.array(gold))

    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> dict[str, Any]:
        """Scores of the mode's split, x 100, with those of the dev split under `dev`."""
        splits = {split: self.load(split) for split in self._splits_of_mode(mode)}
        features = _features(encoder, splits, batch_size)
        targets = {split: pairs.gold for split, pairs in splits.items()}
        weights = fit(features["train"], targets["train"], features["dev"], targets["dev"], self.stops_by)
        scores = {
            split: correlations(predict(weights, features[split]), targets[split])
            for split in splits
            if split != "train"
        }
        counts = {"ntrain": len(targets["train"])}
        return scores["dev" if mode == "dev" else "test"] | counts | {"dev": scores["dev"]}

    def _splits_of_mode(self, mode: str) -> list[str]:
        return ["train", "dev"] if mode == "dev" else ["train", "dev", "test"]


class STSBenchmarkFinetune(SimilarityRegression):
    """STS-B in SimCSE's copy."""

    name = "STSBenchmark-finetune"
    stops_by = "spearman"
    splits: ClassVar = {"train": "STS/STSBenchmark/sts-train.csv"} | STSBenchmark.splits
    columns = STSBenchmark.columns
    header = STSBenchmark.header


class STSBenchmarkSentEval(STSBenchmarkFinetune):
    """STS-B in the original SentEval."""

    name = "STSBenchmark-senteval"
    stops_by = "pearson"


class SICKRelatednessFinetune(SimilarityRegression):
    """SICK-R in SimCSE's copy."""

    name = "SICKRelatedness-finetune"
    stops_by = "spearman"
    splits: ClassVar = {"train": "SICK/SICK_train.txt"} | SICKRelatedness.splits
    columns = SICKRelatedness.columns
    header = SICKRelatedness.header


class SICKRelatednessSentEval(SICKRelatednessFinetune):
    """SICK-R in the original SentEval."""

    name = "SICKRelatedness-senteval"
    stops_by = "pearson"


def fit(
    features: Float32[np.ndarray, "train dimension"],
    gold: Float[np.ndarray, " train"],
    dev_features: Float32[np.ndarray, "dev dimension"],
    dev_gold: Float[np.ndarray, " dev"],
    stops_by: str,
) -> Float32[np.ndarray, "levels dimension_and_bias"]:
    """The weights after the block with the best dev coefficient (SentEval's `tools/relatedness.py`).

    Args:
        features: |u - v| and u * v of the training pairs, side by side.
        gold: their scores, 1 to 5.
        dev_features: those of the dev pairs.
        dev_gold: their scores.
        stops_by: `pearson` or `spearman`.
    """
    inputs, targets = jnp.asarray(_with_bias(features)), jnp.asarray(level_shares(gold))
    weights = jnp.asarray(initial_weights(len(LEVELS), features.shape[1]))
    opt_state = OPTIMIZER.init(weights)
    generator = np.random.RandomState(SEED)
    best, best_weights, failures = -1.0, np.asarray(weights), 0
    for _ in range(0, LAST_PASS + 1, PASSES_PER_BLOCK):
        batches = np.stack([_batches(generator.permutation(len(features))) for _ in range(PASSES_PER_BLOCK)])
        weights, opt_state = _train_block(weights, opt_state, inputs, targets, batches.reshape(-1, BATCH_SIZE))
        score = correlations(predict(np.asarray(weights), dev_features), dev_gold)[stops_by]
        if score > best:
            best, best_weights = score, np.asarray(weights)
        elif failures >= TENACITY:
            break
        else:
            failures += 1
    return best_weights


def predict(
    weights: Float32[np.ndarray, "levels dimension_and_bias"], features: Float32[np.ndarray, "rows dimension"]
) -> Float64[np.ndarray, " rows"]:
    """Expected score of each row, summed in float64 as in SentEval."""
    return np.asarray(jax.nn.softmax(_with_bias(features) @ weights.T)) @ LEVELS.astype(np.float64)


def level_shares(gold: Float[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows levels"]:
    """Scores as distributions over the two levels next to them; below 1, the share missing to 1 has no level."""
    return np.maximum(0, 1 - np.abs(gold[:, None] - LEVELS)).astype(np.float32)


def _features(encoder: Encoder, splits: dict[str, ScoredPairs], batch_size: int) -> dict[str, np.ndarray]:
    sides = [side for pairs in splits.values() for side in (pairs.first, pairs.second)]
    vectors = encoder.encode([sentence for side in sides for sentence in side], batch_size=batch_size)
    parts = iter(np.split(vectors, np.cumsum([len(side) for side in sides])[:-1]))
    pairs_of_parts = {split: (next(parts), next(parts)) for split in splits}
    return {split: np.concatenate([np.abs(u - v), u * v], axis=1) for split, (u, v) in pairs_of_parts.items()}


def _batches(order: np.ndarray) -> Int32[np.ndarray, "batches batch_size"]:
    """A permutation cut into batches; -1 fills the last one."""
    filled = np.full(-(-len(order) // BATCH_SIZE) * BATCH_SIZE, -1, np.int32)
    filled[: len(order)] = order
    return filled.reshape(-1, BATCH_SIZE)


def _with_bias(features: Float32[np.ndarray, "rows dimension"]) -> Float32[np.ndarray, "rows dimension_and_bias"]:
    return np.pad(features, ((0, 0), (0, 1)), constant_values=1)


@jax.jit
def _train_block(
    weights: Weights,
    opt_state: optax.OptState,
    inputs: Float32[Array, "rows dimension_and_bias"],
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
