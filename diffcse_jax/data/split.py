"""Documents for training, and documents that are held out for evaluation.

The source is read once. A hash of a document's words decides whether it is held out, so that
neither the order nor other documents matter. Documents that share a text are held out together.
"""

import functools
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse.csgraph
from jaxtyping import Bool, UInt64

from diffcse_jax.documents.document import Document, Documents, Section, digest, is_in_share
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.errors import DataError, counted
from diffcse_jax.hosts import Progress
from diffcse_jax.io import disk_errors, json_digest

FEWEST_REPETITIONS = 10  # boilerplate is in at least this many documents,
REPEATED_SHARE = 0.01  # and in at least this share of them
LARGEST_GROUP = 0.5  # documents that share texts train if they are a larger share of all documents
# A verdict needs 20 documents, and not every document gives queries.
FEWEST_HELD_OUT = 25
MOST_HELD_OUT = 0.5  # of all documents; if `FEWEST_HELD_OUT` are more, the share decides alone

REPEATED = "of boilerplate, which many documents contain"
SHARED = "that held-out documents also contain"

_MIX = np.uint64(0x9E3779B97F4A7C15)  # an odd number: multiplying by it reorders hashes

Numbered = tuple[int, Document]  # the number of a document in the order of the source, from 0


class Split:
    """The documents of a source, divided into training and held-out ones.

    If a share is held out, the source is read once, at the first use, and its documents are kept in
    a temporary file. Otherwise each pass reads the source.

    Args:
        documents: The source.
        share: The share of the documents that is held out.
        strict: A file or text that cannot be used is an error.
    """

    def __init__(self, documents: Documents, share: float, *, strict: bool = False):
        self.name = documents.name
        self.share = share
        self._documents, self._strict = documents, strict

    def fingerprint(self) -> str:
        """Return the SHA-256 of the content in hexadecimal, and of what a limit left out.

        What is held out depends on all documents that could be read.
        """
        text = self._documents.fingerprint()
        missing = sorted(self.ledger.beyond_limits) if self.share else []
        return json_digest([text, *missing]) if missing else text

    def training(self, ledger: Ledger) -> Iterator[Numbered]:
        """Yield the documents to train on."""
        if not self.share:
            for number, document in enumerate(self._documents.read(ledger)):
                ledger.make("document{s}")
                yield number, document
            return
        ledger.include(self.ledger)
        yield from self._kept(self._read.is_training)

    def all(self) -> Iterator[tuple[bool, Document]]:
        """Yield all documents as they are, and whether each is held out.

        A share must be held out.
        """
        everything = np.ones(len(self._read.is_training), bool)
        for number, document in self._kept(everything):
            yield not self._read.is_training[number], document

    def held_out(self) -> Iterator[Numbered]:
        """Yield the documents that are held out, without boilerplate."""
        if self.share:
            yield from self._asked(~self._read.is_training)

    def sample(self, most: int) -> Iterator[Numbered]:
        """Yield documents without boilerplate, evenly spaced if there are more than `most`.

        A share must be held out.
        """
        chosen = np.zeros(len(self._read.is_training), bool)
        chosen[:: max(1, -(-len(chosen) // most))] = True
        yield from self._asked(chosen)

    def _asked(self, chosen: Bool[np.ndarray, " documents"]) -> Iterator[Numbered]:
        for number, document in self._kept(chosen):
            sections = tuple(map(self._without_boilerplate, document.sections))
            yield number, Document(document.id, sections, document.place)

    def drops(self, text: str, ledger: Ledger) -> bool:
        """Return whether training leaves out a text; if so, enter the reason in the ledger."""
        if not self.share:
            return False
        text_digest = digest(text)
        reason = ""
        if text_digest in self._read.boilerplate:
            reason = REPEATED
        elif text_digest in self._read.held_texts:
            reason = SHARED
        if reason:
            ledger.leave_out(reason, is_loss=False)
        return bool(reason)

    @property
    def ledger(self) -> Ledger:
        """The account of the one pass over the source, if a share is held out."""
        return self._read.ledger

    @functools.cached_property
    def _read(self) -> "_Read":
        ledger = Ledger(self.name, strict=self._strict)
        documents = _Read(self._documents, ledger, self.share)
        ledger.make("document{s}", len(documents.is_training))
        if self.share < 1:
            ledger.make("of them held out", int((~documents.is_training).sum()))
        return documents

    def _kept(self, chosen: Bool[np.ndarray, " documents"]) -> Iterator[Numbered]:
        with self._read.file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if chosen[number]:
                    yield number, _from_json(line)

    def _without_boilerplate(self, section: Section) -> Section:
        boilerplate = self._read.boilerplate
        title = "" if digest(section.title) in boilerplate else section.title
        texts = [text for text in section.sentences() if digest(text) not in boilerplate]
        return Section(title, texts, sentence_a_line=True)


class _Read:
    """What one pass over documents gives: a temporary file of them, and how they divide."""

    def __init__(self, documents: Documents, ledger: Ledger, share: float):
        self.ledger = ledger
        folder = tempfile.mkdtemp(prefix="diffcse_jax-")
        # The folder is also removed when Python ends.
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.file = Path(folder) / "documents.jsonl"
        whole: list[int] = []  # the digest of each document
        texts_of_each: list[UInt64[np.ndarray, " texts"]] = []
        # Digests that documents have in common if they belong together.
        identities: list[list[int]] = []
        place = Path("a temporary file in TMPDIR or /tmp")
        with (
            disk_errors(place, safe="Nothing was changed.", instead="set TMPDIR"),
            self.file.open("w", encoding="utf-8") as file,
            Progress(f"reading {documents.name}", "documents") as progress,
        ):
            for document in documents.read(ledger):
                file.write(_to_json(document))
                whole.append(digest(document.text()))
                texts = {digest(text) for part in document.sections for text in texts_of(part)}
                texts_of_each.append(np.fromiter(texts, np.uint64, len(texts)))
                identities.append(_identities(document))
                progress.update(1)
        if share < 1 and len(set(whole)) == 1:
            raise DataError(
                f"{documents.name} is a single document, and data.held_out={share} keeps whole "
                "documents for evaluation. Name a folder of documents, put blank lines between "
                "them, or set data.held_out=0"
            )
        self.boilerplate = _boilerplate([body for body, *_ in identities], texts_of_each)
        keys = [[key for key in each if key not in self.boilerplate] for each in identities]
        division = held_out_together(whole, keys, share)
        is_held_out = division.chosen
        if note := division.describe(share, "document{s}"):
            ledger.note(note)
        self.is_training = ~is_held_out
        held = [texts for texts, out in zip(texts_of_each, is_held_out, strict=True) if out]
        self.held_texts = set(_joined(held).tolist()) - self.boilerplate


def texts_of(section: Section) -> list[str]:
    """Return a section's title, if it has one, and its sentences. The first text is the lead."""
    return [*filter(None, [section.title]), *section.sentences()]


class HeldOut(NamedTuple):
    """Which items are held out."""

    chosen: Bool[np.ndarray, " items"]
    by_share: int  # how many of them are in the share; the others were added
    tied: int = 0  # items of all that share a text with another one

    def describe(self, share: float, what: str) -> str:
        """Say what was done if the share gives too few for a verdict.

        Otherwise the text is empty.

        Args:
            share: The share.
            what: The items, as `document{s}`.
        """
        count = int(self.chosen.sum())
        too_few = (
            f"data.held_out={share} would hold out {counted(self.by_share, what)}, too few for a "
            "verdict"
        )
        of_all = f"{counted(len(self.chosen), what)}"
        tied = (
            f". {self.tied} of the {of_all} share a text with another one, and such stay together: "
            "removing repeated texts helps"
            if self.tied
            else ""
        )
        if count > self.by_share:
            percent = round(100 * count / len(self.chosen))
            return f"{too_few}: {count} are held out ({percent}% of {of_all}){tied}"
        if 0 < share < 1 and count < FEWEST_HELD_OUT:
            remedy = f"Give at least {counted(2 * FEWEST_HELD_OUT, what)}"
            return f"{too_few} that says better. {remedy}{tied}"
        return ""


def held_out_together(
    digests: Sequence[int],
    keys: Sequence[Sequence[int]],
    share: float,
    *,
    fewest: int = FEWEST_HELD_OUT,
) -> HeldOut:
    """Choose items to hold out, so that items that share a key stay together.

    Args:
        digests: A 64-bit hash of each item. An item that shares no key is held out if its hash is
            in the share. Of a group, one member decides, chosen by another hash.
        keys: Hashes of what each item may have in common with others.
        share: The share of the items to hold out.
        fewest: If the share gives fewer groups, this many are held out: the smallest, and of
            equally small ones those with the lowest hashes. If these have more than half of all
            items, the share decides alone.
    """
    if not digests:
        return HeldOut(np.zeros(0, bool), 0)
    hashes = np.array(digests, np.uint64)
    group = _groups(keys)
    order = np.lexsort((hashes * _MIX, group))
    _, first = np.unique(group[order], return_index=True)
    deciding = order[first]  # by group
    chosen = np.array([is_in_share(int(each), share) for each in hashes[deciding]])
    if share == 1:
        return HeldOut(chosen[group], len(digests))
    sizes = np.bincount(group)
    is_small = sizes <= max(1, LARGEST_GROUP * len(digests))
    chosen &= is_small
    by_share = int(sizes[chosen].sum())
    if share > 0 and chosen.sum() < fewest:
        candidates = np.flatnonzero(is_small)
        smallest_first = np.lexsort((hashes[deciding][candidates], sizes[candidates]))
        extended = chosen.copy()
        extended[candidates[smallest_first[:fewest]]] = True
        is_enough = len(candidates) >= fewest
        if is_enough and sizes[extended].sum() <= MOST_HELD_OUT * len(digests):
            chosen = extended
    return HeldOut(chosen[group], by_share, int(sizes[sizes > 1].sum()))


def _groups(keys: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the number of each item's group: the items that are connected by shared keys."""
    flat = np.array([key for each in keys for key in each], np.uint64)
    items = np.repeat(np.arange(len(keys)), [len(each) for each in keys])
    distinct, numbers = np.unique(flat, return_inverse=True)
    size = len(keys) + len(distinct)
    edges = scipy.sparse.coo_array(
        (np.ones(len(flat), np.int8), (items, len(keys) + numbers)), shape=(size, size)
    )
    _, labels = scipy.sparse.csgraph.connected_components(edges, directed=False)
    return np.unique(labels[: len(keys)], return_inverse=True)[1]


def _identities(document: Document) -> list[int]:
    """Return the digests by which documents are the same text.

    They are of all lines, and of a row's title. Rows that have only a title have no text in common.
    """
    lines = [line for part in document.sections for line in part.lines]
    titles = [part.title for part in document.sections]
    has_title = len(titles) == 1 and bool(titles[0])
    texts = [" ".join(lines)] if lines or not has_title else []
    return [digest(text) for text in (*texts, *titles[: int(has_title)])]


def _boilerplate(
    bodies: Sequence[int], texts_of_each: Sequence[UInt64[np.ndarray, " _"]]
) -> set[int]:
    """Return the digests of texts that many different documents contain.

    Documents with equal bodies, such as answers that several questions share, count once.
    """
    first = np.unique(np.array(bodies, np.uint64), return_index=True)[1]
    counted = _joined([texts_of_each[index] for index in first])
    digests, counts = np.unique(counted, return_counts=True)
    fewest = max(FEWEST_REPETITIONS, REPEATED_SHARE * len(first))
    return set(digests[counts >= fewest].tolist())


def _joined(arrays: Iterable[UInt64[np.ndarray, " _"]]) -> UInt64[np.ndarray, " all"]:
    return np.concatenate([np.zeros(0, np.uint64), *arrays])


def _to_json(document: Document) -> str:
    sections = [[part.title, [*part.lines], part.sentence_a_line] for part in document.sections]
    return json.dumps([document.id, document.place, sections]) + "\n"


def _from_json(line: str) -> Document:
    name, place, sections = json.loads(line)
    return Document(name, tuple(Section(*section) for section in sections), Place(*place))
