"""Which targets answer which queries, if texts occur more than once.

Texts are compared without their case, white space and encoding of letters. Copies of a text are one
target. If a query occurs with several targets, all of them are right. A query that is also a target
does not find itself.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse.csgraph
from jaxtyping import Bool, Float32, Int

from diffcse_jax.documents.sentences import canonical

_NONE = np.zeros(0, np.int64)


class Answers(NamedTuple):
    """The distinct targets of queries, and what each query should find among them."""

    first: Int[np.ndarray, " distinct"]  # the first of the targets that count as this one
    target: Int[np.ndarray, " queries"]  # the distinct target of each query
    aside: Sequence[Int[np.ndarray, " _"]]  # for each query, targets that do not compete

    def scores(
        self, scores: Float32[np.ndarray, "rows targets"], start: int = 0
    ) -> Float32[np.ndarray, "rows distinct"]:
        """Return the scores of distinct targets, given those of all targets.

        Rows are the queries `start`, `start` + 1, ... Each query scores its own copy of a target,
        and the first copy of all others.
        """
        rows = np.arange(len(scores))
        of_targets = scores[:, self.first]
        of_targets[rows, self.target[start : start + len(scores)]] = scores[rows, start + rows]
        return of_targets

    def ignored(self, start: int, rows: int) -> Bool[np.ndarray, "rows distinct"]:
        """Return the targets that do not compete with the own target of each query."""
        ignored = np.zeros((rows, len(self.first)), bool)
        for row in range(rows):
            ignored[row, self.aside[start + row]] = True
        ignored[np.arange(rows), self.target[start : start + rows]] = False
        return ignored


def answers_of(
    queries: Sequence[str],
    targets: Sequence[str],
    passages: Sequence[int] | None = None,
) -> Answers:
    """Return which targets answer which queries, given that target i answers query i.

    Args:
        queries: Texts that ask.
        targets: Texts that they should find.
        passages: The numbers of the passages from which the targets are taken. Targets of one
            passage are one target. None: no targets share a passage.
    """
    asked, texts = [canonical(text) for text in queries], [canonical(text) for text in targets]
    target = groups_of(texts) if passages is None else groups_of(texts, passages)
    columns: dict[str, set[int]] = {}
    for text, column in zip(asked, target.tolist(), strict=True):
        columns.setdefault(text, set()).add(column)
    for text, column in zip(texts, target.tolist(), strict=True):
        if text in columns:
            columns[text].add(column)
    aside = {
        text: np.array(sorted(answers)) if len(answers) > 1 else _NONE  # one is the own target
        for text, answers in columns.items()
    }
    return Answers(first_rows(target), target, [aside[text] for text in asked])


def groups_of(*columns: Sequence[Hashable]) -> Int[np.ndarray, " rows"]:
    """Return the number of each row's group. Groups are numbered in the order of their first rows.

    Rows with a value in common, in whichever columns, are in one group, and so are rows that other
    rows connect.
    """
    first: dict[Hashable, int] = {}
    numbered = [pair for column in columns for pair in enumerate(column)]
    links = [(row, first.setdefault(value, row)) for row, value in numbered]
    ends = np.array(links, np.int64).reshape(-1, 2).T
    shape = len(columns[0]), len(columns[0])
    graph = scipy.sparse.coo_array((np.ones(len(links), bool), (ends[0], ends[1])), shape=shape)
    _, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return labels.astype(np.int64)


def first_rows(groups: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " groups"]:
    """Return the first row of each group."""
    return np.unique(groups, return_index=True)[1]
