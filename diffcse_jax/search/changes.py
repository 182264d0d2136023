"""From one contents of an index to the next: what a change keeps, and what has to be encoded.

A document is the same if its text and titles are. So a table whose rows have moved is not encoded
again.
"""

import collections
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int

from diffcse_jax.errors import DataError, counted
from diffcse_jax.search.contents import PASSAGES, Contents, passages_table, whole_numbers
from diffcse_jax.search.passages import Passage

NAMED = 5  # ids that an error names

# `add`: documents with new ids. `update`: documents replace those with the same id. `replace`: the
# documents of one input replace those of an earlier reading.
How = Literal["add", "update", "replace"]


class Changes(NamedTuple):
    """How many documents a change concerned."""

    new: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0

    def __str__(self) -> str:
        documents = f"{counted(self.new, 'document{s}')} new"
        others = f"{self.removed:,} removed, {self.unchanged:,} unchanged"
        return f"{documents}, {self.changed:,} changed, {others}"


class UpdatePlan(NamedTuple):
    """The documents after a change.

    Attributes:
        order: Their rows in the old table, continued by the table of new ones.
        reuses: For each of them, the row whose passages it has, numbered in the same way: an old
            row if the text is the same.
        old_rows: The number of rows of the old table.
        changes: What to tell the user.
    """

    order: Int[np.ndarray, " documents"]
    reuses: Int[np.ndarray, " documents"]
    old_rows: int
    changes: Changes

    @property
    def is_new(self) -> Bool[np.ndarray, " documents"]:
        """Whether the passages of a document have to be made."""
        return self.reuses >= self.old_rows

    @property
    def new_rows(self) -> list[int]:
        """The rows of the new table whose passages have to be made, in order."""
        return (self.reuses[self.is_new] - self.old_rows).tolist()


def plan(
    old: pa.Table, new: pa.Table, how: How, input_number: int = 0, removed: Collection[str] = ()
) -> UpdatePlan:
    """Plan a change. Both tables are of `contents.documents_table`.

    An update also removes the documents with the ids in `removed`, unless they are also new.
    """
    affected = _affected(old, new, how, input_number, removed)
    same, changes = _matched(old, new, affected)
    order = _order(old, new, how, affected)
    first = len(old)
    reuses = np.array(
        [row if row < first else same.get(row - first, row) for row in order], np.int64
    )
    return UpdatePlan(np.array(order, np.int64), reuses, first, changes)


def without(old: pa.Table, ids: Iterable[str]) -> UpdatePlan:
    """Plan to remove documents. Raises `DataError` if an id is not there."""
    gone = set(ids)
    keys = old["id"].to_pylist()
    if missing := sorted(gone.difference(keys)):
        raise DataError(f"the index has no document with the {_named(missing)}")
    order = np.array([row for row, key in enumerate(keys) if key not in gone], np.int64)
    changes = Changes(removed=len(keys) - len(order), unchanged=len(order))
    return UpdatePlan(order, order, len(keys), changes)


def _affected(
    old: pa.Table, new: pa.Table, how: How, input_number: int, removed: Collection[str]
) -> list[int]:
    """Return the old rows that the change may replace.

    Raises `DataError` if other rows have the id of a new document.
    """
    ids = set(new["id"].to_pylist())
    keys = old["id"].to_pylist()
    if how == "update":
        gone = ids.union(removed)
        return [row for row, key in enumerate(keys) if key in gone]
    is_replaced = (np.asarray(old["source"]) == input_number) & (how == "replace")
    if clashing := [key for row, key in enumerate(keys) if key in ids and not is_replaced[row]]:
        raise DataError(
            f"the index already has documents with the {_named(clashing)}. Use `update` to replace "
            "them. On the command line, leave them out of this input or, if they are rows, name "
            "another --id_column"
        )
    return np.flatnonzero(is_replaced).tolist()


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - NAMED:,} more" if len(ids) > NAMED else ""
    return f"id{'s' if len(ids) > 1 else ''} {', '.join(ids[:NAMED])}{more}"


def _matched(
    old: pa.Table, new: pa.Table, affected: Sequence[int]
) -> tuple[dict[int, int], Changes]:
    """Return the old row for each new row with the same text, first with the same id."""
    ids, digests = (old[name].to_pylist() for name in ("id", "digest"))
    wanted = [*zip(new["id"].to_pylist(), new["digest"].to_pylist(), strict=True)]
    same: dict[int, int] = {}
    left = dict.fromkeys(affected)
    for with_id in (True, False):
        there = collections.defaultdict[tuple[str, bytes], collections.deque[int]](
            collections.deque
        )
        for row in left:
            there[ids[row] if with_id else "", digests[row]].append(row)
        for number, (key, digest) in enumerate(wanted):
            candidates = there.get((key if with_id else "", digest))
            if number not in same and candidates:
                same[number] = candidates.popleft()
                del left[same[number]]
    gone = collections.Counter(ids[row] for row in left)
    fresh = collections.Counter(key for number, (key, _) in enumerate(wanted) if number not in same)
    changed = (gone & fresh).total()
    changes = Changes(fresh.total() - changed, changed, gone.total() - changed, len(same))
    return same, changes


def _order(old: pa.Table, new: pa.Table, how: How, affected: Sequence[int]) -> list[int]:
    """Return the rows after the change, in the order of a dict: replaced ids keep their place."""
    added = range(len(old), len(old) + len(new))
    if how != "update":
        first = affected[0] if affected else len(old)
        gone = set(affected)
        before, after = (
            [row for row in rows if row not in gone]
            for rows in (range(first), range(first, len(old)))
        )
        return [*before, *added, *after]
    groups: dict[str, list[int]] = {}
    for row, key in zip(added, new["id"].to_pylist(), strict=True):
        groups.setdefault(key, []).append(row)
    placed: list[int] = []
    gone = set(affected)
    for row, key in enumerate(old["id"].to_pylist()):
        placed += groups.pop(key, []) if row in gone else [row]
    return [*placed, *itertools.chain.from_iterable(groups.values())]


def passages_after(
    planned: UpdatePlan, old: Contents, passages: Sequence[Passage]
) -> tuple[Int[np.ndarray, " rows"], pa.Table]:
    """Return the passages after a change, with their rows in the old and then the new passages."""
    numbers = whole_numbers(old.passages["document"])
    bounds = np.searchsorted(numbers, np.arange(len(old.documents) + 1))
    is_new = planned.is_new
    new_bounds = np.searchsorted([each.document for each in passages], np.arange(is_new.sum() + 1))
    starts = np.zeros(len(is_new), np.int64)
    counts = np.zeros(len(is_new), np.int64)
    kept = planned.reuses[~is_new]
    starts[~is_new] = bounds[kept]
    counts[~is_new] = bounds[kept + 1] - bounds[kept]
    starts[is_new] = len(numbers) + new_bounds[:-1]
    counts[is_new] = np.diff(new_bounds)
    before = np.cumsum(counts) - counts
    order = np.repeat(starts - before, counts) + np.arange(counts.sum())
    table = pa.concat_tables([old.passages, passages_table(passages)]).take(order).combine_chunks()
    documents = pa.array(np.repeat(np.arange(len(counts)), counts), PASSAGES.field("document").type)
    return order, table.set_column(0, PASSAGES.field("document"), documents)
