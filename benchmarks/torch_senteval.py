"""SentEval's evaluation in PyTorch and scikit-learn, to compare ours with.

It trains one classifier after the other.
"""

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from sklearn.model_selection import StratifiedKFold

ENCODING_BATCH_SIZE = 128
REGULARIZATIONS = [10**exponent for exponent in range(-5, -1)]


@contextlib.contextmanager
def one_thread():
    """Use one thread, because PyTorch computes such small products faster on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Encoder:
    """Encode by the mean over real tokens.

    Batches are in the given order and padded to their longest sentence.
    """

    def __init__(self, folder: Path):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self.model = (
            transformers.AutoModel.from_pretrained(folder, trust_remote_code=False)
            .to(self.device)
            .eval()
        )

    @torch.inference_mode()
    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        """Return one embedding per sentence."""
        vectors = []
        for start in range(0, len(sentences), ENCODING_BATCH_SIZE):
            chunk = list(sentences[start : start + ENCODING_BATCH_SIZE])
            batch = self.tokenizer(chunk, padding=True, truncation=False, return_tensors="pt").to(
                self.device
            )
            states = self.model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            vectors.append(((states * mask).sum(dim=1) / mask.sum(dim=1)).cpu().numpy())
        return np.concatenate(vectors)


class Classifier:
    """Logistic regression with early stopping. All seeds are set before it is built."""

    def __init__(self, dimension, classes, regularization, optimizer, batch_size, tenacity, passes):
        np.random.seed(1111)
        torch.manual_seed(1111)
        self.model = torch.nn.Sequential(torch.nn.Linear(dimension, classes))
        update_rule, rate = {
            "adam": (torch.optim.Adam, 1e-3),
            "rmsprop": (torch.optim.RMSprop, 1e-2),
        }[optimizer]
        self.optimizer = update_rule(self.model.parameters(), lr=rate, weight_decay=regularization)
        self.batch_size, self.tenacity, self.passes = batch_size, tenacity, passes

    def fit(self, x, y, dev=None):
        if dev is None:
            order = np.random.permutation(len(x))
            size = int(0.05 * len(x))
            dev = x[order[:size]], y[order[:size]]
            x, y = x[order[size:]], y[order[size:]]
        x, y = torch.FloatTensor(x), torch.LongTensor(y)
        best, failures, passes = -1, 0, 0
        while passes <= 200:
            for _ in range(self.passes):
                self.train_pass(x, y)
            passes += self.passes
            accuracy = self.score(*dev)
            if accuracy > best:
                best, snapshot = accuracy, copy.deepcopy(self.model)
            else:
                if failures >= self.tenacity:
                    break
                failures += 1
        self.model = snapshot
        return best

    def train_pass(self, x, y):
        order = np.random.permutation(len(x))
        for start in range(0, len(x), self.batch_size):
            rows = torch.LongTensor(order[start : start + self.batch_size])
            loss = torch.nn.functional.cross_entropy(self.model(x[rows]), y[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def predict(self, x):
        with torch.no_grad():
            return self.model(torch.FloatTensor(x)).argmax(dim=1).numpy()

    def score(self, x, y):
        return float((self.predict(x) == y).sum()) / len(x)


def folds(x, y, k):
    """Return the rows of the training and the held-out part of each fold."""
    return StratifiedKFold(n_splits=k, shuffle=True, random_state=1111).split(x, y)


def best_regularization(x, y, k, build):
    """Return the best regularization by k-fold cross-validation, and its score."""
    scores = []
    for regularization in REGULARIZATIONS:
        accuracies = []
        for train, test in folds(x, y, k):
            classifier = build(regularization)
            classifier.fit(x[train], y[train], dev=(x[test], y[test]))
            accuracies.append(classifier.score(x[test], y[test]))
        scores.append(round(100 * np.mean(accuracies), 2))
    return np.max(scores), REGULARIZATIONS[np.argmax(scores)]


def nested_cross_validation(x, y, k, build):
    """Return `devacc`, `acc`, and the dev and test accuracies of each outer fold."""
    dev, test = [], []
    for train, held_out in folds(x, y, k):
        score, regularization = best_regularization(x[train], y[train], k, build)
        dev.append(score)
        classifier = build(regularization)
        classifier.fit(x[train], y[train])
        test.append(round(100 * classifier.score(x[held_out], y[held_out]), 2))
    return round(np.mean(dev), 2), round(np.mean(test), 2), dev, test


def cross_validation(x, y, test_x, test_y, k, build):
    """Return `devacc`, `acc` and the predictions for the test examples."""
    score, regularization = best_regularization(x, y, k, build)
    classifier = build(regularization)
    classifier.fit(x, y)
    return score, round(100 * classifier.score(test_x, test_y), 2), classifier.predict(test_x)


def fixed_splits(x, y, dev, test, build):
    """`devacc` and `acc`."""
    scores = []
    for regularization in REGULARIZATIONS:
        classifier = build(regularization)
        classifier.fit(x, y, dev=dev)
        scores.append(round(100 * classifier.score(*dev), 2))
    classifier = build(REGULARIZATIONS[np.argmax(scores)])
    classifier.fit(x, y, dev=dev)
    return np.max(scores), round(100 * classifier.score(*test), 2)
