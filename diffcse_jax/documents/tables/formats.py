"""Which reader opens a table: one line for each extension."""

from collections.abc import Callable, Sequence
from pathlib import Path

from diffcse_jax.documents.tables.arrow import open_arrow, open_data_set, open_parquet
from diffcse_jax.documents.tables.delimited import open_delimited
from diffcse_jax.documents.tables.json import open_json
from diffcse_jax.documents.tables.table import Table
from diffcse_jax.documents.text.lines import extension
from diffcse_jax.errors import DataError

# A csv or tsv file may have no names of columns: its reader also takes those that the user named.
_DELIMITED = {kind: open_delimited for kind in (".csv", ".tsv", ".tab")}
_OPENERS: dict[str, Callable[[Path, str], Table]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), open_json),
    ".parquet": open_parquet,
    **dict.fromkeys((".arrow", ".feather"), open_arrow),
}
KINDS = (*_DELIMITED, *_OPENERS)  # extensions of tables


def open_table(path: Path, name: str, columns: Sequence[str] = ()) -> Table:
    """Open a table: a file of a known kind, or the folder of a data set.

    Args:
        path: The file, or the folder; see `arrow.data_set_folders`.
        name: How messages call it.
        columns: Columns that the user named. If the first line of a csv file has them, it holds
            the names of its columns, whatever else it looks like.
    """
    if path.is_dir():
        return open_data_set(path, name)
    kind = extension(path)
    if kind in _DELIMITED:
        return _DELIMITED[kind](path, name, columns)
    if kind in _OPENERS:
        return _OPENERS[kind](path, name)
    raise DataError(f"{name}: unknown extension. Known: {', '.join(KINDS)}")
