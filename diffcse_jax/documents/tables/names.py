"""The names of columns by which their part is known: ids, titles, texts, pairs and grades."""

import re
from collections.abc import Iterable

ID_COLUMNS = ("_id", "id")
TITLE_COLUMN = "title"
TEXT_COLUMNS = ("text", "sentence")  # the known names of a text

# The names of the sentence, the positive and the hard negatives. A number may follow the last one.
PAIR_NAMES = (
    ("sentence", "positive", "hard_negative"),
    ("sent0", "sent1", "hard_neg"),  # SimCSE
    ("anchor", "positive", "negative"),  # sentence-transformers
    ("query", "positive", "negative"),
    ("question", "positive", "negative"),
    ("query", "answer", "negative"),
    ("question", "answer", "negative"),
    ("sentence1", "sentence2", ""),
)
LIST_NAMES = ("query", "pos", "neg")  # FlagEmbedding
NAMES = frozenset(name for names in (*PAIR_NAMES, LIST_NAMES) for name in names if name)
# Columns that grade a pair. Without a column that is called positive, such pairs are not positives.
GRADES = frozenset(("label", "labels", "gold", "gold_label", "target", "grade", "rating", "score"))
GRADES |= {"similarity", "similarity_score", "relatedness", "relatedness_score", "relevance"}
GRADES |= {"relevance_score", "relevant", "is_relevant", "correct", "is_correct", "duplicate"}
GRADES |= {
    "is_duplicate",
    "match",
    "is_match",
    "entailment",
    "sim",
    "judgment",
    "judgement",
    "stars",
}
_CAPITAL_IN_WORD = re.compile("(?<=[a-z])(?=[A-Z])")


def named(name: str, columns: Iterable[str]) -> str | None:
    """Return the column of this name, or else the only one that differs by its capitals."""
    others = [column for column in columns if column.casefold() == name]
    return name if name in others else others[0] if len(others) == 1 else None


def is_grade(name: str) -> bool:
    """Return whether a column grades pairs by its name, in any spelling: `isDuplicate`, `Score`.

    Its last word may also say so, before a number: `human_score`, `label 2`.
    """
    words = re.findall(r"[^\W\d_]+", _CAPITAL_IN_WORD.sub(" ", name))
    last = words[-1] if words else ""
    return any(_letters(each) in _GRADE_LETTERS for each in (name, last))


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


_GRADE_LETTERS = frozenset(map(_letters, GRADES | {f"{name}s" for name in GRADES}))
