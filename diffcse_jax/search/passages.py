"""Passages: overlapping parts of the texts that are longer than an encoder reads."""

import bisect
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from diffcse_jax.data.sentences import END
from diffcse_jax.search.records import DOCUMENT, FILE, LINE, START, TEXT, TITLE, Record

OVERLAP = 0.125  # of the tokens of a passage, which the next passage repeats

Span = tuple[int, int]  # characters of a text, from and to
Split = Callable[[Sequence[str], Sequence[str]], list[list[Span]]]  # texts, and what stands in front of them


def split_text(text: str, tokens: Sequence[Span], limit: int) -> list[Span]:
    """Split a text into overlapping passages of at most `limit` tokens.

    A passage ends at the end of a sentence or else of a word, if its second half has one. The next passage begins where
    a sentence or else a word begins, at most an eighth of a passage earlier. `tokens` are the places of the tokens.
    """
    begins = [start for start, _ in tokens]
    words = [number for number in range(1, len(tokens)) if tokens[number - 1][1] < begins[number]]
    sentences = sorted({bisect.bisect_left(begins, gap.end()) for gap in END.finditer(text)})
    found: list[Span] = []
    start = 0
    while True:
        stop = start + limit
        if stop >= len(tokens):
            return [*found, (begins[start], tokens[-1][1])] if tokens else [(0, len(text))]
        stop = _last(sentences, start + limit // 2, stop) or _last(words, start + limit // 2, stop) or stop
        found.append((begins[start], tokens[stop - 1][1]))
        earliest = max(start + 1, stop - max(1, int(OVERLAP * limit)))
        places = (_first(sentences, earliest, stop - 1), _first(words, earliest, stop - 1))
        start = next(filter(None, places), earliest)


def _last(places: Sequence[int], after: int, upto: int) -> int | None:
    number = bisect.bisect_right(places, upto)
    return places[number - 1] if number and places[number - 1] > after else None


def _first(places: Sequence[int], start: int, upto: int) -> int | None:
    number = bisect.bisect_left(places, start)
    return places[number] if number < len(places) and places[number] <= upto else None


def as_passages(records: Sequence[Record], split: Split | None) -> Iterator[Record]:
    """Yield records with passages of the texts, and their places. Without `split`, texts are kept whole.

    Texts of the same place belong to one document.
    """
    texts, titles = [record[TEXT] for record in records], [title_of(record) for record in records]
    spans = split(texts, titles) if split else [[(0, len(text))] for text in texts]
    for number, (record, passages) in enumerate(zip(records, spans, strict=True)):
        place = {} if LINE in record or FILE in record else {DOCUMENT: number}
        yield from (place | dict(record) | {START: start, TEXT: record[TEXT][start:end]} for start, end in passages)


def title_of(record: Record) -> str:
    """Return the title with a space, or an empty string: what stands in front of a passage to be searched."""
    return f"{record[TITLE]} " if record.get(TITLE) else ""


def searched_texts(table: pa.Table) -> list[str]:
    """Return what is encoded and what BM25 reads: passages after their titles."""
    rows = table.select([name for name in (TITLE, TEXT) if name in table.column_names]).to_pylist()
    return [title_of(row) + row[TEXT] for row in rows]
