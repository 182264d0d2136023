"""Rows of csv and tsv files.

A csv file follows Python's rules: fields with quotes may contain separators and ends of lines. A
quote that nobody closed would take the rest of the file into one field, so that lines are read on
their own where the rules do not fit. In a tsv file, quotes are text and a field never spans lines,
unless all quotes of the first lines are those that a program such as pandas or R writes.
"""

import collections
import contextlib
import csv
import functools
import itertools
import re
import statistics
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.documents.ledger import (
    EMPTY,
    INVALID_CSV,
    LONGEST_TEXT,
    REPEATED_NAMES,
    WRONG_WIDTH,
    Ledger,
    Place,
)
from diffcse_jax.documents.tables.names import GRADES, ID_COLUMNS, NAMES, TEXT_COLUMNS, TITLE_COLUMN
from diffcse_jax.documents.tables.table import Table, table_of
from diffcse_jax.documents.tables.values import (
    LONGEST_ROW,
    NumberedRow,
    is_words,
    listed,
    sample_of,
    unique_names,
)
from diffcse_jax.documents.text.lines import extension, read_lines
from diffcse_jax.errors import DataError

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
TAB_EXTENSIONS = (".tsv", ".tab")
SAMPLE_LINES = 200
SAMPLE_CHARACTERS = 1 << 20
MOST = 0.6  # of some lines
MOST_LACKING = 100  # of the last fields of a row, or half of them
COST_OF_A_LINE = 64  # bytes of memory beside its characters
# Excel writes it on a line of its own.
NAMED_SEPARATOR = re.compile(r'"?sep=([,;|\t])"?\s*', re.IGNORECASE)

LETTER = re.compile(r"[^\W\d_]")
SENTENCE = re.compile("[.!\u2026\u3002\uff01]$")
SIX_WORDS = re.compile(r"(\S+\s+){5}\S")
WHOLE_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
YEAR = re.compile(r"(19|20)\d\d", re.ASCII)
KNOWN_COLUMNS = NAMES | GRADES | {*ID_COLUMNS, *TEXT_COLUMNS, TITLE_COLUMN}
ESCAPED = "\ufdd0"  # no character: stands for an escaped quote until the fields are found
# A quote after an odd number of backslashes, as Spark, MySQL and R write it inside a field.
ESCAPED_QUOTE = re.compile(r'(?<!\\)((?:\\\\)*)\\"')
# A field of a tsv file with quotes around it or without, and what ends it.
FIELD_OF_TABS = re.compile(r'("[^"]*(?:""[^"]*)*"|[^"\t\r\n]*)(\t|\r?\n|\r|\Z)')
NEEDS_QUOTES = re.compile(f'["\t\r\n{ESCAPED}]')

Line = tuple[int, str]  # its number, and the text with its end


class Form(NamedTuple):
    """How rows are written."""

    separator: str
    has_quotes: bool = True  # of Python's rules
    spans_lines: bool = True  # fields in quotes may contain ends of lines
    skips_spaces: bool = False  # before a quote: `1, "a, b"`
    has_escapes: bool = False  # a quote inside a field stands after a backslash, and not twice
    width: int = 0  # fields of a row; 0: not known yet
    shortest: int = 0  # fewer fields that a row may have, if its last ones are missing

    @property
    def is_lenient(self) -> bool:
        """Return whether a line that breaks the rules is read as Python does if it is not strict.

        Tabs separate text that often has quotes of its own, so that these stay.
        """
        return self.separator != "\t"


class ParsedRow(NamedTuple):
    """A row, or what could not be read as one."""

    first: int  # its first line
    last: int  # its last line
    fields: list[str]
    fault: str = ""


class Head(NamedTuple):
    """What stands before the rows."""

    columns: tuple[str, ...]
    last: int = 0  # the line where it ends
    shortest: int = 0  # see `Form`
    notes: tuple[str, ...] = ()


def open_delimited(path: Path, name: str, wanted: Sequence[str] = ()) -> Table:
    """Open a file whose first line names the columns.

    Args:
        path: The file. Its extension says which separator and which rules are usual.
        name: The file as the user named it.
        wanted: Columns that the user named. If the first line has them, it holds names.
    """
    lines = functools.partial(read_lines, path, name, longest=LONGEST_ROW, keep_ends=True)
    ledger = Ledger(name)
    stream = lines(ledger)
    start = _first(stream)
    form, skipped, about_form = _form(start, path, name)
    head = _head(start[skipped:], form, name, wanted)
    notes = (*ledger.notes, *about_form, *head.notes)
    form = form._replace(width=len(head.columns), shortest=head.shortest)

    def read(columns: Sequence[str], ledger: Ledger) -> Iterator[NumberedRow]:
        known = set(head.columns)
        if missing := [column for column in columns if column not in known]:
            raise DataError(f"{name}: no column {missing[0]!r}. It has: {listed(head.columns)}")
        rows = (line for line in lines(ledger) if line[0] > head.last)
        return _rows(records(rows, form), head.columns, columns, name, ledger)

    below = (line for line in itertools.chain(start, stream) if line[0] > head.last)
    rows = _rows(records(below, form), head.columns, head.columns, name, Ledger(name))
    return table_of(name, head.columns, read, sample_of(rows), notes)


def _rows(
    parsed: Iterable[ParsedRow],
    columns: Sequence[str],
    wanted: Sequence[str],
    name: str,
    ledger: Ledger,
) -> Iterator[NumberedRow]:
    """Yield some columns of the rows. What is not a row is entered in the ledger."""
    place_of = {column: place for place, column in enumerate(columns)}
    places = {column: place_of[column] for column in wanted}
    for first, _, fields, fault in parsed:
        if not any(map(str.strip, fields)):
            ledger.leave_out(EMPTY, Place(name, first))
        elif fault:
            ledger.leave_out(fault, Place(name, first))
        elif len(fields) > 1 and _repeats(fields, columns):
            ledger.leave_out(REPEATED_NAMES, Place(name, first))
        else:
            yield first, {column: fields[place] or None for column, place in places.items()}


def _repeats(fields: Sequence[str], columns: Sequence[str]) -> bool:
    """Return whether a row has the names of the columns, as in files that were joined."""
    if fields[0].strip().removeprefix("\ufeff") != columns[0]:
        return False
    return [field.strip() for field in fields[1:]] == [*columns[1:]]


def _first(lines: Iterable[Line]) -> list[Line]:
    """Return the first lines that are not blank and those after them: they show the form."""
    sample = []
    size = 0
    filled = itertools.dropwhile(lambda line: not line[1].strip(), lines)
    for number, line in itertools.islice(filled, SAMPLE_LINES):
        sample.append((number, line))
        size += len(line)
        if size > SAMPLE_CHARACTERS:
            break
    return sample


# The form and the head


def _form(sample: Sequence[Line], path: Path, name: str) -> tuple[Form, int, tuple[str, ...]]:
    """Return the form, the number of lines that say it, and notes."""
    usual = "\t" if extension(path) in TAB_EXTENSIONS else ","
    if sample and (said := NAMED_SEPARATOR.fullmatch(sample[0][1])):
        return Form(said[1]), 1, ()
    forms = [Form(separator) for separator in sorted(SEPARATORS, key=lambda each: each != usual)]
    if usual == "\t":
        forms[0] = _form_of_tabs(sample)
    spaced = [form._replace(skips_spaces=True) for form in forms if _has_spaces(sample, form)]
    fits = {form: _fit(sample, form) for form in [*forms, *spaced]}
    form = max(fits, key=lambda each: fits[each])  # the first of several, that of the extension
    if form.separator != "\t" and _has_escapes(sample, form):
        form = form._replace(has_escapes=True)
    return form, 0, tuple(_about_form(form, usual, name))


def _about_form(form: Form, usual: str, name: str) -> Iterator[str]:
    """Yield notes about a form. `usual` is the separator that the extension of the file says."""
    if form.separator != usual:
        yield f"{name}: separated by {SEPARATORS[form.separator]}"
    elif form.separator == "\t" and form.has_quotes:
        yield f"{name}: quotes around fields are removed"
    if form.has_escapes:
        yield f'{name}: \\" is read as a quote'


def _has_spaces(sample: Sequence[Line], form: Form) -> bool:
    return form.has_quotes and any(f'{form.separator} "' in line for _, line in sample)


def _fit(sample: Sequence[Line], form: Form) -> float:
    """Return how many of the rows have as many fields as the first one, if it has several."""
    rows = [record for record in records(sample, form) if any(record.fields)]
    widths = [len(record.fields) for record in rows[_preamble(rows) :]]
    if not widths or widths[0] < 2:
        return 0
    return statistics.fmean(width == widths[0] for width in widths[1:] or widths)


def _form_of_tabs(sample: Sequence[Line]) -> Form:
    """Return the form of a tsv file: with quotes as text, or as a program writes them."""
    text = "".join(line for _, line in sample)
    is_cut = len(sample) == SAMPLE_LINES or len(text) > SAMPLE_CHARACTERS
    if _has_quotes_of_a_program(text, is_cut):
        return Form("\t")
    if _has_quotes_of_a_program(_without_escapes(text), is_cut):
        return Form("\t", has_escapes=True)
    return Form("\t", has_quotes=False, spans_lines=False)


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


def _has_escapes(sample: Sequence[Line], form: Form) -> bool:
    """Return whether more lines follow the rules if backslashes escape the quotes in fields."""
    lines = [line for _, line in sample if '\\"' in line]
    if not lines or _parses(iter([line for _, line in sample]), form):
        return False
    plain = sum(bool(_parsed([line], form)) for line in lines)
    return sum(bool(_parsed([_without_escapes(line)], form)) for line in lines) > plain


def _parses(lines: Iterable[str], form: Form) -> bool:
    """Return whether all lines follow the rules."""
    try:
        collections.deque(_reader(lines, form, strict=True), maxlen=0)
    except csv.Error:
        return False
    return True


def _without_escapes(text: str) -> str:
    """Return text with `ESCAPED` in place of quotes that stand after a backslash."""
    return ESCAPED_QUOTE.sub(rf"\1{ESCAPED}", text)


def _head(sample: Sequence[Line], form: Form, name: str, wanted: Sequence[str]) -> Head:
    """Read the names of the columns, or make names if the first line is a row."""
    filled = [each for each in records(sample, form) if any(map(str.strip, each.fields))]
    if not filled:
        return Head(())
    has_names_first = bool(wanted) and set(wanted) <= set(map(str.strip, filled[0].fields))
    above = [] if has_names_first else filled[: _preamble(filled)]
    first, *below = filled[len(above) :]
    fields = _named([field.strip() for field in first.fields], below)
    rows = [record.fields for record in below]
    shortest, short = _shortest(rows, len(fields), name)
    notes = [*_about_preamble(above, name), *short]
    has_names = bool(wanted) and set(wanted) <= set(fields)
    if has_names or not _is_row(fields, rows):
        columns, repeated = unique_names(fields, name)
        notes = [*repeated, *notes, *_about_single_name(fields, rows, wanted, name)]
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
    fields: Sequence[str], rows: Sequence[Sequence[str]], wanted: Sequence[str], name: str
) -> Iterator[str]:
    """Yield a note about the name of the only column if it may be a text."""
    if len(fields) == 1 and rows and not {*fields} & {*KNOWN_COLUMNS, *wanted}:
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

    A row has a sentence and is like the lines below, or it has a number above numbers.
    """
    if KNOWN_COLUMNS.isdisjoint(fields) and _has_number(fields, rows):
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


# Records


class _Feed:
    """Lines, some of which may be put back."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = iter(lines)
        self.waiting: collections.deque[Line] = collections.deque()
        self.alone_until = 0  # the last line that was read in vain as a part of a field

    def __iter__(self) -> Iterator[Line]:
        return self

    def __next__(self) -> Line:
        return self.waiting.popleft() if self.waiting else next(self.lines)

    def put_back(self, lines: Sequence[Line]) -> None:
        """Return lines. All but the last are read on their own then, so that time stays linear."""
        self.waiting.extendleft(reversed(lines))
        if len(lines) > 1:
            self.alone_until = lines[-2][0]


def records(lines: Iterable[Line], form: Form) -> Iterator[ParsedRow]:
    """Yield the records of some lines. If the width is known, those of another one have a fault."""
    if not form.has_escapes:
        yield from _records(lines, form)
        return
    without = ((number, _without_escapes(line)) for number, line in lines)
    for record in _records(without, form):
        yield record._replace(fields=[field.replace(ESCAPED, '"') for field in record.fields])


def _records(lines: Iterable[Line], form: Form) -> Iterator[ParsedRow]:
    feed = _Feed(lines)
    for number, line in feed:
        if not form.has_quotes or '"' not in line:
            fields = _bare(line).split(form.separator)
        else:
            fields = _parsed([line], form) if len(line) <= csv.field_size_limit() else []
        if fields:
            yield _checked(ParsedRow(number, number, fields), line, form)
        elif form.spans_lines and number > feed.alone_until:
            yield _spanning((number, line), feed, form)
        else:
            yield _alone((number, line), form)


def _checked(record: ParsedRow, text: str, form: Form) -> ParsedRow:
    """Return a record with the right width, if nothing is lost by that, or with a fault.

    Empty fields at the end are dropped. In the only column of a table, separators are text.
    """
    fields = record.fields
    if not form.width or len(fields) == form.width:
        return record
    if form.width == 1:
        return record._replace(fields=[_bare(text)])
    if form.shortest <= len(fields) < form.width:
        return record._replace(fields=[*fields, *[""] * (form.width - len(fields))])
    if len(fields) > form.width and not any(map(str.strip, fields[form.width :])):
        return record._replace(fields=fields[: form.width])
    return record._replace(fault=WRONG_WIDTH)


def _spanning(first: Line, feed: _Feed, form: Form) -> ParsedRow:
    """Read a record whose fields may span lines."""
    taken = [first]
    with _long_fields():
        fields = _parsed(_taking(taken, feed), form)
    text = "".join(line for _, line in taken)
    record = _checked(ParsedRow(first[0], taken[-1][0], fields), text, form)
    is_short = max(map(len, fields), default=LONGEST_ROW) <= LONGEST_TEXT
    if is_short and not record.fault:
        return record
    # Either a row of several lines that breaks a rule, or rows with one quote too many.
    rows = _share_of_rows(taken, form)
    if fields and rows < (1 if is_short else MOST):
        return record
    if not fields and rows < MOST and form.is_lenient:
        record = _loosely(taken, form)
        if not record.fault:
            return record
    feed.put_back(taken[1:])
    return _alone(first, form)


def _taking(taken: list[Line], feed: _Feed) -> Iterator[str]:
    """Yield the text of lines that are taken, up to the size of a row."""
    yield taken[0][1]
    size = 0
    for line in feed:
        taken.append(line)
        yield line[1]
        size += len(line[1]) + COST_OF_A_LINE
        if size > LONGEST_ROW:
            return


def _share_of_rows(taken: list[Line], form: Form) -> float:
    """Return how many lines are rows if each is read on its own."""
    if not form.width:
        return 1
    free = form._replace(width=0)
    return statistics.fmean(len(_alone(line, free).fields) == form.width for line in taken)


def _alone(line: Line, form: Form) -> ParsedRow:
    """Read a line that breaks the rules, or with its quotes as they stand."""
    number, text = line
    if form.is_lenient:
        loose = _loosely([line], form)
        if loose.fault != INVALID_CSV:
            return loose
    fields = [] if form.is_lenient else _parsed([text], form)
    plain = ParsedRow(number, number, fields or _bare(text).split(form.separator))
    record = _checked(plain, text, form)
    return record._replace(fault=INVALID_CSV) if record.fault and form.spans_lines else record


def _parsed(texts: Iterable[str], form: Form) -> list[str]:
    """Return the fields of one record, or nothing if it does not follow the rules."""
    try:
        return next(_reader(texts, form, strict=True))
    except csv.Error:
        return []


def _loosely(lines: Sequence[Line], form: Form) -> ParsedRow:
    """Read lines as one record, as Python does if it is not strict."""
    text = "".join(line for _, line in lines)
    record = ParsedRow(lines[0][0], lines[-1][0], [])
    reader = _reader([*(line for _, line in lines), ""], form, strict=False)
    with _long_fields():
        try:
            record = record._replace(fields=next(reader))
        except csv.Error:
            return record._replace(fault=INVALID_CSV)
    if reader.line_num != len(lines):  # it asked for more, because a quote is open
        return record._replace(fault=INVALID_CSV)
    return _checked(record, text, form)


def _reader(texts: Iterable[str], form: Form, *, strict: bool) -> Any:
    return csv.reader(
        texts,
        delimiter=form.separator,
        skipinitialspace=form.skips_spaces,
        strict=strict,
    )


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """Read fields of any length for a moment. The limit of Python's csv is that of the process."""
    with _LIMIT:
        before = csv.field_size_limit(2 * LONGEST_ROW)
        try:
            yield
        finally:
            csv.field_size_limit(before)


_LIMIT = threading.Lock()


def _bare(line: str) -> str:
    """Return a line without its end."""
    return line.removesuffix("\n").removesuffix("\r")
