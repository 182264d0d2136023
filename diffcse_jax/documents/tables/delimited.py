"""Tables of csv and tsv files: how their rows are written, and what their columns are called.

Both are judged by the first lines. `records.py` then reads the rows.
"""

import collections
import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.tables.names import GRADES, ID_COLUMNS, NAMES, TEXT_COLUMNS, TITLE_COLUMN
from diffcse_jax.documents.tables.records import (
    ESCAPED,
    MOST,
    Body,
    Dialect,
    Line,
    ParsedRow,
    all_records,
    parsed,
    parses,
    without_escapes,
)
from diffcse_jax.documents.tables.table import Table, table_of
from diffcse_jax.documents.tables.values import (
    ADDRESS,
    LONGEST_ROW,
    is_words,
    listed,
    sample_of,
    unique_names,
)
from diffcse_jax.documents.text.lines import extension, read_lines

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
TAB_EXTENSIONS = (".tsv", ".tab")
SAMPLE_LINES = 200
SAMPLE_CHARACTERS = 1 << 20
MOST_LACKING = 100  # of the last fields of a row, or half of them
# Excel writes it on a line of its own.
NAMED_SEPARATOR = re.compile(r'"?sep=([,;|\t])"?\s*', re.IGNORECASE)

LETTER = re.compile(r"[^\W\d_]")
SENTENCE = re.compile("[.!\u2026\u3002\uff01]$")
SIX_WORDS = re.compile(r"(\S+\s+){5}\S")
WHOLE_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
CODE = re.compile(r"(?=.*\d)(?=.*[^\d.,])[\w./:-]+", re.ASCII)  # has a digit and something else
YEAR = re.compile(r"(19|20)\d\d", re.ASCII)
KNOWN_COLUMNS = NAMES | GRADES | {*ID_COLUMNS, *TEXT_COLUMNS, TITLE_COLUMN}
# A field of a tsv file with quotes around it or without, and what ends it.
FIELD_OF_TABS = re.compile(r'("[^"]*(?:""[^"]*)*"|[^"\t\r\n]*)(\t|\r?\n|\r|\Z)')
NEEDS_QUOTES = re.compile(f'["\t\r\n{ESCAPED}]')


class Head(NamedTuple):
    """What stands before the rows."""

    columns: tuple[str, ...]
    last: int = 0  # the line where it ends
    shortest: int = 0  # see `Dialect`
    notes: tuple[str, ...] = ()


def open_delimited(path: Path, name: str, named: Sequence[str] = ()) -> Table:
    """Open a file whose first line names the columns.

    Args:
        path: The file. Its extension says which separator and which rules are usual.
        name: The file as the user named it.
        named: Columns that the user named. If the first line has them, it holds names.
    """
    ledger = Ledger(name)
    lines = read_lines(path, name, ledger, longest=LONGEST_ROW, keep_ends=True)
    start = _first(lines)
    dialect, skipped, about_dialect = _dialect(start, path, name)
    head = _head(start[skipped:], dialect, name, named)
    notes = (*ledger.notes, *about_dialect, *head.notes)
    dialect = dialect._replace(width=len(head.columns), shortest=head.shortest)
    body = Body(path, name, head.columns, head.last, dialect)
    sample = sample_of(body.rows(itertools.chain(start, lines), head.columns, Ledger(name)))
    return table_of(name, head.columns, body.read, sample, notes)


def _first(lines: Iterable[Line]) -> list[Line]:
    """Return the first lines that are not blank and those after them: they show the dialect."""
    sample = []
    size = 0
    filled = itertools.dropwhile(lambda line: not line[1].strip(), lines)
    for number, line in itertools.islice(filled, SAMPLE_LINES):
        sample.append((number, line))
        size += len(line)
        if size > SAMPLE_CHARACTERS:
            break
    return sample


# The dialect and the head


def _dialect(sample: Sequence[Line], path: Path, name: str) -> tuple[Dialect, int, tuple[str, ...]]:
    """Return the dialect, the number of lines that say it, and notes."""
    usual = "\t" if extension(path) in TAB_EXTENSIONS else ","
    if sample and (said := NAMED_SEPARATOR.fullmatch(sample[0][1])):
        return Dialect(said[1]), 1, ()
    dialects = [Dialect(each) for each in sorted(SEPARATORS, key=lambda each: each != usual)]
    if usual == "\t":
        dialects[0] = _dialect_of_tabs(sample)
    spaced = [each._replace(skips_spaces=True) for each in dialects if _has_spaces(sample, each)]
    fits = {each: _fit(sample, each) for each in [*dialects, *spaced]}
    dialect = max(fits, key=lambda each: fits[each])  # the first of several, that of the extension
    if dialect.separator != "\t" and _has_escapes(sample, dialect):
        dialect = dialect._replace(has_escapes=True)
    return dialect, 0, tuple(_about_dialect(dialect, usual, name))


def _about_dialect(dialect: Dialect, usual: str, name: str) -> Iterator[str]:
    """Yield notes about a dialect. `usual` is the separator that the extension of the file says."""
    if dialect.separator != usual:
        yield f"{name}: separated by {SEPARATORS[dialect.separator]}"
    elif dialect.separator == "\t" and dialect.has_quotes:
        yield f"{name}: quotes around fields are removed"
    if dialect.has_escapes:
        yield f'{name}: \\" is read as a quote'


def _has_spaces(sample: Sequence[Line], dialect: Dialect) -> bool:
    return dialect.has_quotes and any(f'{dialect.separator} "' in line for _, line in sample)


def _fit(sample: Sequence[Line], dialect: Dialect) -> float:
    """Return how many of the rows have as many fields as the first one, if it has several."""
    rows = [record for record in all_records(sample, dialect) if any(record.fields)]
    widths = [len(record.fields) for record in rows[_preamble(rows) :]]
    if not widths or widths[0] < 2:
        return 0
    return statistics.fmean(width == widths[0] for width in widths[1:] or widths)


def _dialect_of_tabs(sample: Sequence[Line]) -> Dialect:
    """Return the dialect of a tsv file: with quotes as text, or as a program writes them."""
    text = "".join(line for _, line in sample)
    is_cut = len(sample) == SAMPLE_LINES or len(text) > SAMPLE_CHARACTERS
    if _has_quotes_of_a_program(text, is_cut):
        return Dialect("\t")
    if _has_quotes_of_a_program(without_escapes(text), is_cut):
        return Dialect("\t", has_escapes=True)
    return Dialect("\t", has_quotes=False, spans_lines=False)


def _has_quotes_of_a_program(text: str, is_cut: bool) -> bool:
    """Return whether all quotes in some lines are those that a program writes around fields.

    Programs put them around all fields, around all but numbers and missing values, or around those
    that contain a tab, a quote or the end of a line. Inside them, a quote is written twice.
    """
    quoted = []
    others = []
    has_columns = False
    place = 0
    while place < len(text):
        match = FIELD_OF_TABS.match(text, place)
        if match is None:
            may_go_on = is_cut and FIELD_OF_TABS.match(f'{text}"', place)
            if not may_go_on:
                return False
            break
        field = match[1]
        if field.startswith('"'):
            quoted.append(field[1:-1])
        else:
            others.append(field)
        has_columns |= match[2] == "\t"
        place = match.end()
    if not quoted:
        return False
    if all(map(_is_number, others)):
        return True
    # Two literal quotes may enclose whole rows: a quotation begins in one and ends in another.
    is_sure = any('""' in field or "\t" not in field or "\n" not in field for field in quoted)
    return has_columns and is_sure and all(map(NEEDS_QUOTES.search, quoted))


def _is_number(field: str) -> bool:
    """Return whether a field is a number, or stands for a missing one."""
    try:
        float(field)
    except ValueError:
        return field in ("", "NA")
    return True


def _has_escapes(sample: Sequence[Line], dialect: Dialect) -> bool:
    """Return whether more lines follow the rules if backslashes escape the quotes in fields."""
    lines = [line for _, line in sample if '\\"' in line]
    if not lines or parses(iter([line for _, line in sample]), dialect):
        return False
    plain = sum(bool(parsed([line], dialect)) for line in lines)
    return sum(bool(parsed([without_escapes(line)], dialect)) for line in lines) > plain


def _head(sample: Sequence[Line], dialect: Dialect, name: str, named: Sequence[str]) -> Head:
    """Read the names of the columns, or make names if the first line is a row."""
    filled = [each for each in all_records(sample, dialect) if any(map(str.strip, each.fields))]
    if not filled:
        return Head(())
    has_names_first = bool(named) and set(named) <= set(map(str.strip, filled[0].fields))
    above = [] if has_names_first else filled[: _preamble(filled)]
    first, *below = filled[len(above) :]
    fields = _named([field.strip() for field in first.fields], below)
    rows = [record.fields for record in below]
    shortest, short = _shortest(rows, len(fields), name)
    notes = [*_about_preamble(above, name), *short]
    has_names = bool(named) and set(named) <= set(fields)
    if has_names or not _is_row(fields, rows):
        columns, repeated = unique_names(fields, name)
        notes = [*repeated, *notes, *_about_single_name(fields, rows, named, name)]
        return Head(columns, first.last, shortest, tuple(notes))
    columns, _ = unique_names([""] * len(fields), name)
    note = (
        f"{name}: the first line holds no names of columns, so that it is read as a row; "
        f"the columns are called {listed(columns)}"
    )
    return Head(columns, first.first - 1, shortest, (note, *notes))


def _preamble(rows: Sequence[ParsedRow]) -> int:
    """Return how many rows stand above the names of the columns, as a title or a date does.

    Only their first field is filled. The names and the rows below have several, and equally many.
    A single column of texts with separators in them looks alike. So the first row must begin with
    `#`, stand above a blank line, or stand above a name that many tables have.
    """
    filled = [sum(bool(field.strip()) for field in row.fields) for row in rows]
    above = next((number for number, count in enumerate(filled) if count > 1), 0)
    if not above:
        return 0
    names = rows[above]
    below = rows[above + 1 :]
    title = rows[0].fields[0].strip()
    stands_apart = names.first - rows[above - 1].last > 1
    has_known = not KNOWN_COLUMNS.isdisjoint(map(str.strip, names.fields))
    is_title = stands_apart or has_known or title.startswith("#")
    has_gaps = any(not name.strip() or name.startswith(" ") for name in names.fields)
    if not title or title in KNOWN_COLUMNS or not is_title or has_gaps or len(below) < 2:
        return 0
    share = statistics.fmean(len(row.fields) == len(names.fields) for row in below)
    return above if share >= MOST else 0


def _about_preamble(above: Sequence[ParsedRow], name: str) -> Iterator[str]:
    """Yield a note about the lines above the names of the columns."""
    if above:
        titles = listed(repr("".join(row.fields).strip()) for row in above)
        yield f"{name}: not read, because the names of the columns stand below: {titles}"


def _about_single_name(
    fields: Sequence[str], rows: Sequence[Sequence[str]], named: Sequence[str], name: str
) -> Iterator[str]:
    """Yield a note about the name of the only column if it may be a text."""
    if len(fields) == 1 and rows and not {*fields} & {*KNOWN_COLUMNS, *named}:
        yield f"{name}: the first line, {fields[0]!r}, is read as the name of the column"


def _shortest(rows: Sequence[Sequence[str]], width: int, name: str) -> tuple[int, tuple[str, ...]]:
    """Return how few fields a row may have, and a note.

    It is the width of the head, unless many rows have fewer: some programs leave out what is
    missing at the end. A single short row is a part of a broken one. If rows lack most of many
    columns, reading them would take as long as if they were full.
    """
    counts = collections.Counter(len(fields) for fields in rows)
    enough = max(3, len(rows) / 10)
    fewest = max(2, min(width // 2, width - MOST_LACKING))
    usual = [each for each, count in counts.items() if fewest <= each < width and count >= enough]
    if not usual:
        return width, ()
    return min(usual), (f"{name}: rows lack up to {width - min(usual)} of the last columns",)


def _named(names: list[str], rows: Sequence[ParsedRow]) -> list[str]:
    """Return names without empty ones at the end, below which nothing stands."""
    width = max(map(_filled, [names, *(row.fields for row in rows)]))
    return names[:width]


def _filled(fields: Sequence[str]) -> int:
    """Return the number of fields up to the last one that is not blank."""
    return max((place for place, field in enumerate(fields, 1) if field.strip()), default=0)


def _is_row(fields: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first line is a row, and not the names of the columns.

    A row has a sentence and is like the lines below, or it has a number above numbers, or an id, a
    date or an address above others.
    """
    is_unknown = KNOWN_COLUMNS.isdisjoint(map(str.casefold, fields))
    if is_unknown and (_has_number(fields, rows) or _has_code(fields, rows)):
        return True
    kinds = [_kind(field, alone=len(fields) == 1) for field in fields]
    if not {"sentence", "question"} & set(kinds):
        return False
    for place, kind in enumerate(kinds):
        below = collections.Counter(_kind(row[place]) for row in rows if place < len(row))
        below["words"] += below.pop("sentence", 0)  # a title may be one
        expected = below.most_common(1)[0][0] if below.total() else "words"
        if ("words" if kind == "sentence" else kind) != expected and below.total():
            return False
    return True


def _has_code(fields: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a column has codes of one form, such as `q1` and `q2`, from the first line on.

    Dates and addresses are such codes. The lines below names have other forms.
    """
    for place, field in enumerate(fields):
        form = _form(field)
        if rows and form and all(place < len(row) and _form(row[place]) == form for row in rows):
            return True
    return False


def _form(field: str) -> str:
    """Return the form of an id with letters and digits, of a date or an address; else nothing."""
    if ADDRESS.match(field):
        return "address"
    is_code = CODE.fullmatch(field) and not WHOLE_NUMBER.fullmatch(field)
    return re.sub(r"\d+", "0", re.sub(r"[^\W\d_]+", "a", field)) if is_code else ""


def _has_number(fields: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a column has whole numbers in the first line and in all lines below.

    Then it may hold ids, and the first line is a row. But years, dates and numbers that count the
    columns may also be names.
    """
    places = [place for place, field in enumerate(fields) if WHOLE_NUMBER.fullmatch(field)]
    if not rows or len(places) in (0, len([*filter(None, fields)])):
        return False
    numbers = [int(fields[place]) for place in places]
    if len(numbers) > 1 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        return False
    if 0 not in places:  # the first name is a word, as in a table of counts by year
        rises = len(numbers) > 1 and all(low < high for low, high in itertools.pairwise(numbers))
        are_words = not any(" " in field for field in fields)
        if rises or are_words:
            return False
    return any(
        not YEAR.fullmatch(fields[place])
        and all(place < len(row) and WHOLE_NUMBER.fullmatch(row[place].strip()) for row in rows)
        for place in places
    )


def _kind(field: str, *, alone: bool = True) -> str:
    """Return what a field is. Beside others, a name may have many words, but no full stop."""
    text = field.strip()
    if text.endswith(("?", "\uff1f")):
        return "question"
    is_long = len(text) > (60 if alone else 80)
    if is_words(text) and (is_long or SENTENCE.search(text) or (alone and SIX_WORDS.match(text))):
        return "sentence"
    return "words" if LETTER.match(text) else "other"
