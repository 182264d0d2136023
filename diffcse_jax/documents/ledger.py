"""The ledger of a source: what was there, what was read, and what was not, with the reason.

Whatever reads text makes entries here, so that the numbers add up: each file that was found is
either read or listed with a reason, and each text in a file is either kept or counted with a
reason. What is kept with a change is also counted. A new pass over a source begins a new ledger.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diffcse_jax.errors import DataError, counted, printable

LONGEST_TEXT = 1 << 17  # characters of a line or of another text
NAMED = 5  # the files and places that a message names for each reason

# Why a text in a file is left out. Readers may add reasons of their own.
EMPTY = "empty"
TOO_LONG = f"longer than {LONGEST_TEXT:,} characters"
NUL_BYTE = "with NUL bytes"
WRONG_WIDTH = "with a wrong number of fields"
INVALID_CSV = "not valid CSV"
REPEATED_NAMES = "with the names of the columns once more"
NOT_OBJECT = "not a JSON object"
MISSING_KEY = "without the column"
NOT_STRING = "with a value that is not text"

# Why a file is not read.
NO_TEXT = "without text"


class Place(NamedTuple):
    """Where a text stands: its file, as the user named it, and the line or row, from 1."""

    file: str = ""  # empty: the text was given in memory
    row: int = 0  # 0: the whole file

    def __str__(self) -> str:
        row = f"line {self.row}" if self.row else ""
        return ", ".join(filter(None, [printable(self.file), row]))


NOWHERE = Place()


@dataclasses.dataclass
class Entry:
    """What a ledger holds for one reason."""

    count: int = 0
    first: list[Place] = dataclasses.field(default_factory=list)  # at most `NAMED`
    is_loss: bool = True

    def add(self, place: Place, number: int = 1) -> None:
        """Count something, and keep its place if it is one of the first."""
        self.count += number
        if place.file or place.row:
            self.first = [*self.first, place][:NAMED]

    def merge(self, other: "Entry") -> None:
        """Add the count and the places of another entry."""
        self.count += other.count
        self.first = [*self.first, *other.first][:NAMED]

    def describe(self, reason: str) -> str:
        """Return the number and the reason, as `counted` takes it; for a loss its first places."""
        return f"{counted(self.count, reason)}{self.places() if self.is_loss else ''}"

    def places(self) -> str:
        """Return the first places in brackets, after a blank; an empty string if none is known."""
        if not self.first:
            return ""
        by_file: dict[str, list[str]] = {}
        for place in self.first:
            by_file.setdefault(place.file, []).extend([str(place.row)] if place.row else [])
        names = [_named(file, rows) for file, rows in by_file.items()]
        more = ", ..." if self.count > len(self.first) else ""
        return f" ({'; '.join(names)}{more})"


def _named(file: str, rows: Sequence[str]) -> str:
    lines = f"line{'s' if len(rows) > 1 else ''} {', '.join(rows)}" if rows else ""
    return ", ".join(filter(None, [printable(file), lines]))


@dataclasses.dataclass
class Ledger:
    """The account of one pass over a source.

    Args:
        name: The source, as the user named it.
        strict: Raise `DataError` at the first loss: a file that is not read, or a text that is left
            out. Empty lines and empty files hold no text, so they are not a loss.
        refuse_empty: With `strict`, also raise for an empty line.
        may_skip_files: With `strict`, raise for texts alone.
        noun: What the source holds, for messages, as `counted` takes it.
    """

    name: str
    strict: bool = False
    refuse_empty: bool = False
    may_skip_files: bool = False
    noun: str = "text{s}"
    files: int = 0  # that were read
    unread: dict[str, Entry] = dataclasses.field(default_factory=dict)  # files, by reason
    texts: int = 0  # lines, rows or documents that were kept
    left_out: dict[str, Entry] = dataclasses.field(default_factory=dict)  # the others, by reason
    # By kind and outcome.
    changed: dict[tuple[str, str], Entry] = dataclasses.field(default_factory=dict)
    # The files that a limit of time or memory left out: another try may read them.
    beyond_limits: list[str] = dataclasses.field(default_factory=list)
    # The ids of rows whose text is empty: an index that is brought up to date removes these.
    emptied: set[str] = dataclasses.field(default_factory=set)
    made: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # What was assumed or changed, each note once.
    notes: dict[str, None] = dataclasses.field(default_factory=dict)

    def count_file(self) -> None:
        """Count a file whose texts are read."""
        self.files += 1

    def skip_file(self, name: str, reason: str, *, is_loss: bool = True) -> None:
        """List a file that is not read. It is not a loss if it holds no text, such as a picture."""
        self.unread.setdefault(reason, Entry(is_loss=is_loss)).add(Place(name))
        if self.strict and is_loss and not self.may_skip_files:
            raise DataError(
                f"{printable(name)} was not read: {reason}. Repair or remove it, or leave out "
                "--strict"
            )

    def keep(self, number: int = 1) -> None:
        """Count texts that are used."""
        self.texts += number

    def leave_out(
        self, reason: str, place: Place = NOWHERE, number: int = 1, *, is_loss: bool | None = None
    ) -> None:
        """Count texts that are not used, with the place of the first.

        It is not a loss if the configuration wants it, such as for boilerplate. By default it is
        one, unless the text is empty, which `refuse_empty` decides.
        """
        if is_loss is None:
            is_loss = reason != EMPTY or self.refuse_empty
        self.left_out.setdefault(reason, Entry(is_loss=is_loss)).add(place, number)
        if self.strict and is_loss:
            at = str(place) or self.name
            raise DataError(f"{at}: {reason}. Correct or remove it")

    def change(self, what: str, outcome: str, place: Place) -> None:
        """Count something that is kept, but not as it stands there. It is not a loss.

        Args:
            what: What it is, as `counted` takes it, such as `grade{s} with decimals`.
            outcome: What became of it, such as `cut to a whole number`.
            place: Where it stands.
        """
        self.changed.setdefault((what, outcome), Entry(is_loss=False)).add(place)

    def make(self, what: str, number: int = 1) -> None:
        """Count what was made of the texts, such as `passage{s}`."""
        self.made[what] += number

    def note(self, text: str) -> None:
        """Keep a remark for the user, such as the encoding of a file that had to be guessed."""
        self.notes.setdefault(text)

    def include(self, other: "Ledger") -> None:
        """Add the entries of an earlier pass, which this pass does not repeat."""
        self.files += other.files
        self.texts += other.texts
        _merge(self.unread, other.unread)
        _merge(self.left_out, other.left_out)
        _merge(self.changed, other.changed)
        self.made.update(other.made)
        self.notes.update(other.notes)
        self.beyond_limits += other.beyond_limits

    @property
    def has_losses(self) -> bool:
        """Return whether a file was not read, or a text left out, that should have been used."""
        return any(entry.is_loss for entry in (*self.unread.values(), *self.left_out.values()))

    @property
    def has_remarks(self) -> bool:
        """Return whether there is more to say than how many texts one file has."""
        odd = self.unread or self.left_out or self.changed or self.notes
        return bool(odd) or self.files > 1 or any(self.made.values())

    def lines(self) -> list[str]:
        """Return the account for a person, one sentence a line."""
        made = [counted(number, what) for what, number in self.made.items() if number]
        sentences = []
        if self.files or made:
            source = f"{counted(self.files, 'file{s}')} of " if self.files > 1 else ""
            numbers = ", ".join(made) or counted(self.texts, self.noun)
            sentences.append(f"read {source}{printable(self.name)}: {numbers}")
        return [*sentences, *self.oddities(), *self.notes]

    def account(self) -> list[str]:
        """Return `lines`. Those on what was lost or changed begin with `warning: `."""
        odd = self.oddities() if self.has_losses or self.changed else []
        return [f"warning: {line}" if line in odd else line for line in self.lines()]

    def oddities(self) -> list[str]:
        """Return the account of what was not read, left out or changed, one sentence a line."""
        changed = [
            f"{counted(entry.count, what)}{entry.places()}: {outcome}"
            for (what, outcome), entry in self.changed.items()
        ]
        unread = _listed("skipped", "file{s}", self.unread)
        left_out = _listed("left out", self.noun, self.left_out)
        return [*unread, *left_out, *changed]

    def summary(self) -> str:
        """Return the account in one line."""
        return "; ".join(self.lines())


def usable(texts: Sequence[str], place: Place, ledger: Ledger) -> tuple[str, ...] | None:
    """Return texts without white space around them.

    If one is not usable, make an entry in the ledger and return None.
    """
    stripped = tuple(text.strip() for text in texts)
    reason = ""
    if not all(stripped):
        reason = EMPTY
    elif any(len(text) > LONGEST_TEXT for text in stripped):
        reason = TOO_LONG
    elif any("\0" in text for text in stripped):
        reason = NUL_BYTE
    if not reason:
        return stripped
    ledger.leave_out(reason, place)
    return None


def _merge(mine: dict[Any, Entry], theirs: Mapping[Any, Entry]) -> None:
    for reason, entry in theirs.items():
        mine.setdefault(reason, Entry(is_loss=entry.is_loss)).merge(entry)


def _listed(verb: str, what: str, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield one line for all reasons, the most frequent first."""
    if not entries:
        return
    total = counted(sum(entry.count for entry in entries.values()), what)
    by_count = sorted(entries.items(), key=lambda item: -item[1].count)
    yield f"{verb} {total}: {', '.join(entry.describe(reason) for reason, entry in by_count)}"
