"""Files of SentEval's transfer tasks: labelled sentences and labelled sentence pairs.

Encodings and columns are those of SentEval; runs of white space become one space, as there.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.data.lines import text_lines
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation.sts import tab_separated

BINARY = {"0": 0, "1": 1}
SENTIMENT = {str(label): label for label in range(5)}
QUESTIONS = {"ABBR": 0, "DESC": 1, "ENTY": 2, "HUM": 3, "LOC": 4, "NUM": 5}
ENTAILMENT = {"CONTRADICTION": 0, "NEUTRAL": 1, "ENTAILMENT": 2}

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")  # those that are no white space


class Example(NamedTuple):
    """One sentence, or two, with the number of the class."""

    sentences: tuple[str, ...]
    label: int


def in_order(examples: list[Example]) -> list[Example]:
    """The order in which SentEval encodes, numbers and splits examples: by word counts, then by label."""
    return sorted(examples, key=lambda example: (*(len(text.split()) for text in example.sentences), example.label))


def read_class(path: Path, label: int) -> list[Example]:
    """A Latin-1 file with one sentence of this class on each line; empty ones count."""
    # Latin-1 reads any bytes; a file that is no text has control characters, which the data sets do not.
    lines = [part for _, line in _lines(path, "latin-1") for part in line.splitlines()]
    return _not_empty(path, [Example((_spaced(line),), label) for line in lines])


def read_sst(path: Path) -> list[Example]:
    """Binary sentiment: sentence, tab, label."""
    return _read_table(path, label_column=1, sentence_columns=(0,), labels=BINARY)


def read_sst_fine(path: Path) -> list[Example]:
    """Sentiment in five classes: label, space, sentence."""
    examples = []
    for number, line in _lines(path, "utf-8"):
        label, _, sentence = line.strip().partition(" ")
        examples.append(Example((_spaced(sentence),), _label(label, SENTIMENT, path, number)))
    return _not_empty(path, examples)


def read_trec(path: Path) -> list[Example]:
    """Questions by kind of answer, Latin-1: coarse label, colon, fine label, space, question."""
    examples = []
    for number, line in _lines(path, "latin-1"):
        label, _, rest = line.strip().partition(":")
        _, space, question = rest.partition(" ")
        if not space:
            raise DataError(f"{path}, line {number}: expected 'LABEL:label question', found {line.strip()[:60]!r}")
        examples.append(Example((_spaced(question),), _label(label, QUESTIONS, path, number)))
    return _not_empty(path, examples)


def read_mrpc(path: Path) -> list[Example]:
    """Sentence pairs, paraphrases or not, below a header."""
    return _read_table(path, label_column=0, sentence_columns=(3, 4), labels=BINARY, header=True)


def read_sick_entailment(path: Path) -> list[Example]:
    """Sentence pairs by logical relation, below a header."""
    return _read_table(path, label_column=4, sentence_columns=(1, 2), labels=ENTAILMENT, header=True)


def _read_table(
    path: Path, label_column: int, sentence_columns: tuple[int, ...], labels: Mapping[str, int], header: bool = False
) -> list[Example]:
    columns = 1 + max(label_column, *sentence_columns)
    examples = []
    rows = tab_separated(path, encoding="utf-8-sig")
    if header and rows and len(rows[0][1]) >= columns and rows[0][1][label_column] in labels:
        raise DataError(f"{path}, line 1: expected a header, found an example")
    for number, fields in rows[header:]:
        if len(fields) < columns:
            raise DataError(
                f"{path}, line {number}: expected at least {columns} tab-separated columns, found {len(fields)}"
            )
        sentences = tuple(_spaced(fields[column]) for column in sentence_columns)
        examples.append(Example(sentences, _label(fields[label_column], labels, path, number)))
    return _not_empty(path, examples)


def _lines(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    for number, line in text_lines(path, encoding):
        if control := _CONTROL.search(line):
            raise DataError(f"{path}, line {number}: holds the control character {control[0]!r}; is it text?")
        yield number, line


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _label(text: str, labels: Mapping[str, int], path: Path, number: int) -> int:
    if text not in labels:
        raise DataError(f"{path}, line {number}: expected one of {', '.join(labels)} as label, found {text[:60]!r}")
    return labels[text]


def _not_empty(path: Path, examples: list[Example]) -> list[Example]:
    if not examples:
        raise DataError(f"{path}: no sentences")
    return examples
