"""Search: rank the passages of an index for queries, and make hits of the documents."""

import collections
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from diffcse_jax.errors import ConfigError
from diffcse_jax.search.contents import Contents
from diffcse_jax.search.embeddings import Queries
from diffcse_jax.search.fusion import CANDIDATES, combine
from diffcse_jax.search.hits import Hit, Hits, matches, plain_words, snippet
from diffcse_jax.search.lexical import best_rows, found_by_words
from diffcse_jax.search.settings import is_number

# The closeness of a query to its best passage below which a note says so (docs/records/search.md).
CLOSE = 0.35
FEWEST_DOCUMENTS = 20  # of an index whose similarities say what is usual
FEWEST_SHARED = 0.25  # of a query's words in the best hit by words; below, a note says so


class Request(NamedTuple):
    """Queries, and what to find for each."""

    texts: Sequence[str]
    vectors: Queries | None  # of length 1; None if mode is `lexical`
    mode: str
    top_k: int
    threshold: float | None = None
    # Queries whose words the encoder does not know. A hybrid search counts their words only.
    unknown: frozenset[str] = frozenset()


class Ranking(NamedTuple):
    """The passages that a query finds, best first."""

    scores: Float32[np.ndarray, " k"]
    rows: Int[np.ndarray, " k"]
    best_cosine: float | None = None
    by_mode: Mapping[str, Int[np.ndarray, " mode"]] = {}  # in a hybrid search, what each mode finds


def rank(contents: Contents, request: Request, weight: float) -> list[Hits]:
    """Return the hits of each query. `weight` is that of BM25 in a hybrid search."""
    _check_threshold(request)
    total = len(contents.passages)
    if not total:
        return [Hits(note="The index is empty.") for _ in request.texts]
    count = min(request.top_k, total)
    while True:
        rankings = [*_rankings(contents, request, count, weight)]
        places = [contents.firsts(each.rows)[: request.top_k] for each in rankings]
        pairs = zip(places, rankings, strict=True)
        # If passages share documents, there may be too few: find more.
        is_short = any(
            len(best) < request.top_k and len(each.rows) == count for best, each in pairs
        )
        if not is_short or count == total:
            break
        count = min(4 * count, total)
    hits = zip(request.texts, rankings, places, strict=True)
    return [_hits(contents, request, text, each, best) for text, each, best in hits]


def _check_threshold(request: Request) -> None:
    threshold = request.threshold
    if threshold is None:
        return
    if not is_number(threshold):
        raise ConfigError(f"threshold={threshold!r}: expected a number, or None for any score")
    if request.mode == "hybrid":
        raise ConfigError(
            f"threshold={threshold}: the scores of a hybrid search only compare the texts that one "
            "query finds. Leave the threshold out, or search in the mode 'dense'"
        )


# Passages


def _rankings(contents: Contents, request: Request, count: int, weight: float) -> Iterator[Ranking]:
    """Yield the best `count` passages for each query."""
    if request.mode == "lexical":
        yield from (_by_words(contents, text, count) for text in request.texts)
        return
    assert contents.embeddings
    assert request.vectors is not None
    if request.mode == "dense":
        for scores, rows in zip(*contents.embeddings.nearest(request.vectors, count), strict=True):
            yield Ranking(scores, rows, float(scores[0]))
        return
    depth = min(max(CANDIDATES, count), len(contents.passages))
    nearest = contents.embeddings.nearest(request.vectors, depth)
    for text, vector, cosines, near in zip(request.texts, request.vectors, *nearest, strict=True):
        if text in request.unknown:
            by_words = _by_words(contents, text, count)
            yield by_words._replace(by_mode={"lexical": by_words.rows})
            continue
        both = _by_both(contents, text, vector, near, weight)
        yield Ranking(both.scores[:count], both.rows[:count], float(cosines[0]), both.by_mode)


def _by_words(contents: Contents, text: str, count: int) -> Ranking:
    scores = contents.word_scores(text)
    rows = found_by_words(scores, count)
    return Ranking(scores[rows], rows)


def _by_both(
    contents: Contents,
    text: str,
    vector: Float32[np.ndarray, " dimension"],
    near: Int[np.ndarray, " depth"],
    weight: float,
) -> Ranking:
    """Rank the passages that are nearest to a query, and as many that share words with it."""
    assert contents.embeddings
    all_lexical = contents.word_scores(text)
    by_words = found_by_words(all_lexical, len(near))
    rows = np.union1d(near, by_words)
    # Not BLAS, which rounds equal rows differently, and whose threads would wait for others.
    dense = np.einsum("rd,d->r", contents.embeddings.rows(rows), vector)
    sampled = np.einsum("rd,d->r", contents.sample, vector)
    scores = combine(dense, all_lexical[rows], weight, sampled, all_lexical)
    best = best_rows(scores, len(rows))
    return Ranking(scores[best], rows[best], by_mode={"dense": near, "lexical": by_words})


# Hits


def _hits(
    contents: Contents,
    request: Request,
    text: str,
    ranking: Ranking,
    places: Int[np.ndarray, " hits"],
) -> Hits:
    """Return the hits of a query: the passages at these places."""
    ranks = _ranks(contents, ranking.by_mode)
    stems = contents.lexical.stems if contents.lexical else plain_words
    wanted = stems(text)
    hits: list[Hit] = []
    has: list[frozenset[str]] = []  # the words of the query that each hit has
    for place in places.tolist():
        score, row = float(ranking.scores[place]), int(ranking.rows[place])
        if request.threshold is not None and score < request.threshold:
            break
        passage, document = contents.row(row)
        shared = matches(passage["text"], wanted, stems)
        has.append((wanted & stems(passage["title"])).union(*(match.stems for match in shared)))
        hits.append(
            Hit(
                score,
                len(hits) + 1,
                id=document["id"],
                title=passage["title"],
                text=passage["text"],
                file=document["file"],
                line=document["row"] if document["file"] and document["row"] else None,
                start=passage["start"],
                columns=json.loads(document["columns"] or "{}"),
                snippet=snippet(passage["text"], shared),
                ranks=ranks.get(int(contents.document_of[row]), {}),
            )
        )
    closeness = None
    if ranking.best_cosine is not None and len(contents.documents) >= FEWEST_DOCUMENTS:
        closeness = contents.closeness(ranking.best_cosine)
    note = _nothing(request)
    if hits:
        note = _note(request, ranking, closeness, (len(has[0]), len(wanted)))
    return Hits(hits, " ".join(filter(None, [note, _ignored(contents, request, text)])), closeness)


def _ranks(
    contents: Contents, by_mode: Mapping[str, Int[np.ndarray, " mode"]]
) -> Mapping[int, Mapping[str, int]]:
    """Return the rank of each document by mode. Ranks count documents, as hits do."""
    ranks: dict[int, dict[str, int]] = collections.defaultdict(dict)
    for mode, rows in by_mode.items():
        best = rows[contents.firsts(rows)]
        for number, document in enumerate(contents.document_of[best].tolist(), 1):
            ranks[document][mode] = number
    return ranks


# Notes when nothing fits


def _nothing(request: Request) -> str:
    if request.threshold is not None:
        return f"Nothing has a score of {request.threshold:g} or more."
    return "No passage has a word of this query."


def _ignored(contents: Contents, request: Request, text: str) -> str:
    """Return which words of a query BM25 does not compare."""
    if request.mode == "dense" or not contents.lexical:
        return ""
    words = contents.lexical.words.ignored(text)
    return f"Ignored as common words: {', '.join(words)}." if words else ""


def _note(
    request: Request, ranking: Ranking, closeness: float | None, words: tuple[int, int]
) -> str:
    """Return what the scores do not say: that nothing is close, or that one search found nothing.

    `words` are the numbers of the query's words that the best hit has, and of all its words.
    """
    shared, asked = words
    if request.mode == "lexical":
        is_poor = shared < FEWEST_SHARED * asked
        return (
            f"The best hit has only {shared} of the {asked} words of this query." if is_poor else ""
        )
    if "dense" not in ranking.by_mode and request.mode == "hybrid":
        return "Found by words only: the model does not know many words of this query."
    has_words = request.mode == "hybrid" and len(ranking.by_mode["lexical"]) > 0
    if closeness is not None and closeness < CLOSE:
        by_words = ""
        if has_words:
            by_words = f" The best hit has {shared} of its {asked} words."
        elif request.mode == "hybrid":
            by_words = " No passage has a word of it."
        return (
            "Nothing is close to this query by meaning: the closeness of the best passage is "
            f"{closeness:.2f} (0: chance, 1: nearest neighbours).{by_words}"
        )
    if request.mode == "hybrid" and not has_words:
        return "Found by meaning only: no passage has a word of this query."
    return ""
