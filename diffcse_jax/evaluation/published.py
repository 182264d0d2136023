"""Published scores to compare with, from the papers and the output of their authors' code.

They need bert-base-uncased or roberta-base and the original 10^6 Wikipedia sentences: expectations, not measurements.
"""

import dataclasses

from diffcse_jax.evaluation import GROUPS


@dataclasses.dataclass(frozen=True)
class Published:
    """A row of a published table: the model's description, and its scores by column of `comparison`."""

    label: str
    scores: dict[str, float]


def _group(group: str, label: str, *scores: float) -> Published:
    """The tasks of a group in order, then the average as published."""
    return Published(label, dict(zip((*GROUPS[group], f"average {group}"), scores, strict=True)))


ROWS = (
    _group("sts", "BERT-base first-last average", 39.70, 59.38, 49.67, 66.03, 66.19, 53.87, 62.06, 56.70),
    _group("sts", "BERT-base whitening (NLI)", 57.83, 66.90, 60.90, 75.08, 71.31, 68.24, 63.73, 66.28),
    _group("sts", "SimCSE-BERT-base", 68.40, 82.41, 74.38, 80.91, 78.56, 76.85, 72.23, 76.25),
    _group("sts", "SimCSE-RoBERTa-base", 70.16, 81.77, 73.24, 81.36, 80.65, 80.22, 68.56, 76.57),
    _group("sts", "SimCSE-BERT-large", 70.88, 84.16, 76.43, 84.50, 79.76, 79.26, 73.88, 78.41),
    _group("sts", "DiffCSE-BERT-base", 72.28, 84.43, 76.47, 83.90, 80.54, 80.59, 71.23, 78.49),
    _group("sts", "DiffCSE-RoBERTa-base", 70.05, 83.43, 75.49, 82.81, 82.12, 82.38, 71.19, 78.21),
    _group("sts", "off-dropout only, BERT-base", 69.39, 82.42, 75.91, 82.92, 78.82, 78.86, 71.62, 77.13),
    _group("sts", "DCL only, BERT-base", 70.15, 83.46, 74.91, 81.95, 79.83, 79.39, 72.14, 77.40),
    _group("sts", "SimCSE++-BERT-base", 73.66, 82.36, 75.86, 83.09, 79.76, 79.71, 71.91, 78.05),
    _group("sts", "SimCSE++-BERT-large", 72.37, 85.37, 78.68, 84.69, 79.57, 80.37, 74.05, 79.30),
    _group("sts", "DiffCSE + SimCSE++, BERT-base", 72.68, 83.40, 76.76, 83.66, 80.57, 80.94, 72.82, 78.69),
    _group("sts", "supervised SimCSE-BERT-base", 75.30, 84.67, 80.19, 85.40, 80.82, 84.25, 80.39, 81.57),
    _group("transfer", "SimCSE-BERT-base", 81.18, 86.46, 94.45, 88.88, 85.50, 89.80, 74.43, 85.81),
    _group("transfer", "SimCSE-BERT-base with MLM", 82.92, 87.23, 95.71, 88.73, 86.81, 87.01, 78.07, 86.64),
    _group("transfer", "DiffCSE-BERT-base", 82.69, 87.23, 95.23, 89.28, 86.60, 90.40, 76.58, 86.86),
    _group("transfer", "DiffCSE-RoBERTa-base", 82.82, 88.61, 94.32, 87.71, 88.63, 90.40, 76.81, 87.04),
    Published("BERT-base average", {"alignment": 0.172, "uniformity": -1.468}),
    Published(
        "SimCSE-BERT-base",
        {"alignment": 0.177, "uniformity": -2.313, "recall@1": 77.84, "recall@5": 92.78, "recall@10": 95.88},
    ),
    Published(
        "DiffCSE-BERT-base",
        {"alignment": 0.097, "uniformity": -1.438, "recall@1": 78.87, "recall@5": 95.36, "recall@10": 97.42},
    ),
)


def scores_of(label: str) -> dict[str, float]:
    """All published scores of a model, by column.

    Raises:
        KeyError: no row has this label.
    """
    scores = {column: score for row in ROWS if row.label == label for column, score in row.scores.items()}
    if not scores:
        raise KeyError(label)
    return scores
