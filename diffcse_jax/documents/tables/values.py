"""Values of tables: missing, text for people, or something else; and the names of columns."""

import decimal
import itertools
import math
import numbers
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diffcse_jax.documents.text.encodings import decode
from diffcse_jax.errors import DataError, printable

LONGEST_ROW = 1 << 23  # characters of a line that holds a row, which may have many texts
MOST_VALUES = 1 << 20  # of a row; each may take a hundred bytes of memory
SAMPLE_ROWS = 1000  # from which columns are found and judged
SAMPLE_CHARACTERS = 1 << 24
COST_OF_A_VALUE = 50  # characters: judging a short value takes as long
CHOOSES = "To choose others, use --columns, or data.columns in training"

# The number of the line or row, from 1, and the values of some columns. A missing value is None. A
# key that a JSON object does not have is not there either.
NumberedRow = tuple[int, dict[str, Any]]
# The values of each column in some rows, without missing ones. Rows may have different columns.
Sample = Mapping[str, Sequence[Any]]


def sample_of(rows: Iterable[NumberedRow]) -> Sample:
    """Return the values of the first rows, fewer if they are long or wide, with long texts cut."""
    return by_column(_first_rows(rows))


def _first_rows(rows: Iterable[NumberedRow]) -> Iterator[dict[str, Any]]:
    size = 0
    for _, row in itertools.islice(rows, SAMPLE_ROWS):
        size += sum(len(value) for value in row.values() if isinstance(value, str | bytes | list))
        size += COST_OF_A_VALUE * len(row)
        yield {column: _cut(value) for column, value in row.items()}
        if size > SAMPLE_CHARACTERS:
            break


def by_column(rows: Iterable[Mapping[str, Any]]) -> Sample:
    """Return the values of each column that one of the rows has."""
    sample: dict[str, list[Any]] = {}
    for row in rows:
        for column, value in row.items():
            values = sample.setdefault(column, [])
            if value is not None:
                values.append(value)
    return sample


def _cut(value: Any) -> Any:
    """Return as much of a value as is judged. Of what is nested, only the kind is."""
    if isinstance(value, list):
        return [_cut(() if isinstance(part, list | tuple) else part) for part in value[:MOST_PARTS]]
    if isinstance(value, dict):
        return {}
    return value[:LONGEST_JUDGED] if isinstance(value, str | bytes) else value


def chosen_split(names: Sequence[str], name: str) -> tuple[str, str]:
    """Return which of the parts of a data set is read, and a note if there are others.

    It is `train`, or the only one. Raises `DataError` if neither exists.
    """
    if len(names) == 1:
        return names[0], ""
    if "train" not in names:
        raise DataError(
            f"{name} has several parts: {listed(names)}. Name a folder or file with one of them"
        )
    others = [each for each in names if each != "train"]
    return "train", f"{name}: read the part 'train', not {listed(others)}"


# Names


def unique_names(names: Iterable[str], name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names of columns that are all different, as pandas makes them, and notes about them.

    Without a name, a column is called `column 3`. A second column `text` is called `text.1`.
    """
    named = [" ".join(each.split()) or f"column {number}" for number, each in enumerate(names, 1)]
    taken = set(named)
    copies: dict[str, Iterator[int]] = {}  # by name: the numbers that are not tried yet
    columns = []
    repeated = []
    for column in named:
        unique = column
        if column in copies:
            numbered = (f"{column}.{number}" for number in copies[column])
            unique = next(each for each in numbered if each not in taken)
            taken.add(unique)
            repeated.append(f"the column {column!r} is there again; it is called {unique!r}")
        copies.setdefault(column, itertools.count(1))
        columns.append(unique)
    return tuple(columns), (f"{name}: {listed(repeated)}",) if repeated else ()


def listed(names: Iterable[str]) -> str:
    """Join names for a message, and cut a long list."""
    text = ", ".join(map(printable, names))
    return text if len(text) <= 500 else f"{text[:500]}..."


# Values


def without_missing(value: Any) -> Any:
    """Return a value, or None if it is missing.

    Missing are also NaN (of a number or time), pandas' NA and the empty string. Readers apply this
    to what they give, so that nothing else asks whether a value is missing.
    """
    if isinstance(value, str | bytes):
        return value or None
    if value is None or hasattr(value, "__len__"):  # a list, a dict, an array
        return value
    try:
        return None if value != value else value
    except TypeError:  # pandas' NA equals nothing
        return None


# Floats of these types, by NumPy's and Arrow's names, leave out whole numbers from here on.
FIRST_INEXACT = {"float16": 2.0**11, "halffloat": 2.0**11, "float32": 2.0**24, "float": 2.0**24}


class RoundedFloat(float):
    """A float that may have lost digits of a whole number: it was kept in few bits."""


def first_inexact(kind: str) -> float | None:
    """Return from where on a type of short floats leaves out whole numbers; None for other types.

    The name may be that of pandas or polars, such as `Float32` and `float[pyarrow]`.
    """
    return FIRST_INEXACT.get(kind.partition("[")[0].lower())


def as_stored(value: Any, kind: str) -> Any:
    """Return a value of a column of this type, or number of this type, that says if it is rounded.

    All other values are returned as they are.
    """
    first = first_inexact(kind)
    if first and isinstance(value, float) and abs(value) >= first:
        return RoundedFloat(value)
    return value


def text_of(value: Any) -> str | None:
    """Return a value as text, or None if it is missing or is not text.

    Numbers, dates and truth values are text as Python writes them, unless it refuses a number of
    thousands of digits. The strings of a list are paragraphs. Other lists and objects are not text.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return decode(value).text
    if isinstance(value, list | tuple):
        parts = [each for each in value if each is not None]
        is_text = all(isinstance(each, str) for each in parts)
        return "\n".join(parts) if is_text else None
    if isinstance(value, dict | set):
        return None
    try:
        return str(value)
    except (RecursionError, ValueError):
        return None


# Scales

TRUTH = {"true": 1.0, "yes": 1.0, "t": 1.0, "y": 1.0, "false": 0.0, "no": 0.0, "f": 0.0, "n": 0.0}
MOST_STEPS = 11  # of a scale of whole numbers: 0 to 10
MOST_FINE_STEPS = 101  # of a scale with decimals: 0 to 10 by tenths
HIGHEST_STEP = 100  # years and counts are higher
# Of a CSV file: 0.1 + 0.2 with all its digits, 1e-05, .5 and 5. (Stata, SPSS), 0,5 and 50%.
DECIMAL = re.compile(
    r"([+-]?(?:\d{1,9}(?:[.,]\d{0,20})?|[.,]\d{1,20})(?:[eE][+-]?\d{1,2})?)\s?%?", re.ASCII
)


class Scale:
    """The numbers of a column that may grade its rows.

    A scale is few numbers or truth values that repeat, or decimals between -1 and 1, which are
    similarities or probabilities. Ids, years and counts are not scales.
    """

    def __init__(self, column: str, values: Iterable[Any] = ()) -> None:
        self._steps: set[float] = set()
        self._count = 0
        self._has_decimals = False
        self.is_possible = not ID_NAME.search(column)
        for value in values:
            self.add(value)

    def add(self, value: Any) -> None:
        """Take a further value of the column into account."""
        if not self.is_possible:
            return
        number = number_of(value)
        if number is None:
            self.is_possible = False
            return
        self._count += 1
        if number not in self._steps:
            self._add_step(number)

    def _add_step(self, number: float) -> None:
        self._has_decimals |= math.isfinite(number) and number % 1 != 0
        if not abs(number) <= HIGHEST_STEP:
            self.is_possible = False
        elif len(self._steps) < MOST_FINE_STEPS:
            self._steps.add(number)
        elif not self._are_similarities or abs(number) > 1:
            self.is_possible = False

    @property
    def _are_similarities(self) -> bool:
        return self._has_decimals and max(map(abs, self._steps)) <= 1

    @property
    def _are_few(self) -> bool:
        most = MOST_FINE_STEPS if self._has_decimals else MOST_STEPS
        return self._are_similarities or len(self._steps) <= most

    @property
    def is_one(self) -> bool:
        """Whether the column is a scale by the values so far."""
        if not self.is_possible or len(self._steps) < 2:
            return False
        repeats = self._are_similarities or 2 * len(self._steps) <= self._count
        return self._are_few and repeats

    @property
    def is_undecided(self) -> bool:
        """Whether the column is no scale yet, but further values may make it one."""
        return self.is_possible and self._are_few and not self.is_one


def scale_columns(
    columns: Sequence[str], sample: Sample
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that are scales, and those that further rows may show to be scales."""
    scales = {column: Scale(column, sample.get(column, ())) for column in columns}
    return (
        tuple(column for column, scale in scales.items() if scale.is_one),
        tuple(column for column, scale in scales.items() if scale.is_undecided),
    )


def number_of(value: Any) -> float | None:
    """Return a number, a truth value or the text of one as a number; None for other values."""
    if isinstance(value, numbers.Real | decimal.Decimal):
        try:
            number = float(value)
        except (OverflowError, ValueError):  # a whole number of many digits, a signalling NaN
            return math.inf
        return number if math.isfinite(number) else math.inf
    text = value.strip().casefold() if isinstance(value, str) else ""
    if text in TRUTH:
        return TRUTH[text]
    written = DECIMAL.fullmatch(text)
    return float(written[1].replace(",", ".")) if written else None


# Text for people

ID_NAME = re.compile(r"(?i:^(.*[_\-. ])?(id|ids|uuid|guid)$)|[a-z](Id|ID|Uuid|UUID)$")
# That it has no white space is asked first: otherwise each `@` would be tried with each point.
ADDRESS = re.compile(
    r"([a-z][a-z0-9+.-]*://|www\.|mailto:)\S|(?=\S+$)\S[^@]*@\S+\.\S+$", re.IGNORECASE
)
SCRIPT_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff\uac00-\ud7af]"
)
LETTER = r"[^\W\d_]"
WORD = re.compile(f"{LETTER}+")
DIGIT = re.compile(r"\d")
THREE_LETTERS = re.compile(LETTER + "{3}")  # in contrast to `5 kg`
NOT_WORDS = {"true", "false", "yes", "no", "none", "null", "nan", "n/a"}
LONGEST_JUDGED = 2000  # characters of a value
MOST_PARTS = 100  # of a list that are judged
LETTERS_OF_A_WORD = 2  # in scripts without spaces, roughly
WORDS_OF_A_PHRASE = 4


class _Judged(NamedTuple):
    text: str
    is_words: bool
    words: float


def text_columns(columns: Sequence[str], sample: Sample) -> tuple[str, ...]:
    """Return the columns whose values are text for people.

    Text is phrases, even if they are repeated, and short values such as titles and names if most of
    them differ. A column of few short values that repeat (`open`, `closed`) is a category. Numbers,
    dates, truth values, ids, codes and addresses are not text. If no column is text, the categories
    are; without these, columns of letters: they are better read than left out.
    """
    judged = {column: _judge(sample.get(column, ())) for column in columns}
    letters = [column for column in columns if judged[column] and not ID_NAME.search(column)]
    words = [column for column in letters if _has_words(judged[column])]
    texts = [column for column in words if _has_phrases_or_names(judged[column])]
    return tuple(texts or words or letters)


def _judge(values: Sequence[Any]) -> list[_Judged]:
    """Return the texts of a column, or nothing if most of its values are not of letters."""
    judged = [_judged(value) for value in values if isinstance(value, str | bytes | list)]
    of_letters = sum(each.is_words or bool(WORD.fullmatch(each.text)) for each in judged)
    return judged if 2 * of_letters > len(values) else []


def _judged(value: Any) -> _Judged:
    text = (text_of(value) or "")[:LONGEST_JUDGED].strip()
    dense = len(SCRIPT_WITHOUT_SPACES.findall(text)) / LETTERS_OF_A_WORD
    return _Judged(text, is_words(text), max(dense, len(text.split())))


def _has_words(judged: Sequence[_Judged]) -> bool:
    return 2 * sum(each.is_words for each in judged) > len(judged)


def _has_phrases_or_names(judged: Sequence[_Judged]) -> bool:
    """Return whether words are phrases, or mostly different."""
    if statistics.fmean(each.words for each in judged) >= WORDS_OF_A_PHRASE:
        return True
    return 2 * len({each.text for each in judged}) >= len(judged)


def is_words(text: str) -> bool:
    """Return whether a text is made of words, and is not a number, date, code, address or data."""
    if text.casefold() in NOT_WORDS or ADDRESS.match(text) or text.startswith(("[{", '{"', "{'")):
        return False
    letters = sum(map(len, WORD.findall(text)))
    is_dense = bool(SCRIPT_WITHOUT_SPACES.search(text))
    has_word = THREE_LETTERS.search(text) if DIGIT.search(text) else letters >= 3 or is_dense
    if not has_word or 2 * letters < len("".join(text.split())):
        return False
    return " " in text or is_dense or not re.search(r"[\d_/\\@:]", text)
