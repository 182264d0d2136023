"""Reads ArrayRecord data sets through tensorflow-datasets, without TensorFlow.

Records are read in sequence and in large blocks; one by one is a hundred times slower.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorflow_datasets as tfds
from array_record.python import array_record_module

from diffcse_jax.data.corpus import Record, column_names
from diffcse_jax.errors import DataError

SPLIT = "train"
BLOCK_RECORDS = 10_000


@dataclasses.dataclass(frozen=True)
class PreparedCorpus:
    """The `train` split of an ArrayRecord data set.

    Attributes:
        columns: its text features: sentence, positive, hard negatives where it has these, then the others by name.
        usual: the former, which are read where none is named.
        files: its shards, in order.
    """

    columns: tuple[str, ...]
    usual: tuple[str, ...]
    files: tuple[Path, ...]
    features: tfds.features.FeaturesDict

    def records(self, columns: Sequence[str]) -> Iterator[Record]:
        """The rows, numbered from 1 over all shards.

        Raises:
            DataError: damaged records.
        """
        records = enumerate(self._serialised(), 1)
        number = 0
        while True:
            try:
                number, record = next(records)
                example = self.features.deserialize_example_np(record)
                row = tuple(example[column].decode(errors="surrogateescape") for column in columns)
            except StopIteration:
                return
            except Exception as error:  # the two libraries raise many types
                raise DataError(
                    f"{self.files[0].parent}: record {number + 1} or one near it is damaged: {error}"
                ) from error
            yield number, row

    def _serialised(self) -> Iterator[bytes]:
        for file in self.files:
            reader = array_record_module.ArrayRecordReader(str(file))
            count = reader.num_records()
            for start in range(0, count, BLOCK_RECORDS):
                yield from reader.read(start, min(start + BLOCK_RECORDS, count))
            reader.close()


def open_prepared(folder: Path) -> PreparedCorpus:
    """Opens the one data set in `folder` or up to three levels below it.

    Raises:
        DataError: it holds no data set or several, one that is no ArrayRecord, lacks the split `train`, text features
            or shards.
    """
    found = found_in(folder)
    if len(found) != 1:
        raise DataError(
            f"{folder}: {'no ArrayRecord data set' if not found else 'several data sets'} (dataset_info.json); prepare "
            "one with python -m diffcse_jax.data.array_record, or name the folder of one"
        )
    try:
        info = tfds.builder_from_directory(found[0]).info
    except Exception as error:  # the library raises many types
        raise DataError(f"{found[0]}: cannot read dataset_info.json or features.json: {error}") from error
    if info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        raise DataError(f"{found[0]}: the data set is {info.file_format.value}, not array_record")
    if SPLIT not in info.splits:
        raise DataError(f"{found[0]}: no split {SPLIT!r}; it has: {', '.join(info.splits)}")
    files = tuple(Path(file) for file in info.splits[SPLIT].filepaths)
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{found[0]}: {len(missing)} of {len(files)} shards are missing, first {missing[0].name}")
    texts = {name for name, feature in info.features.items() if isinstance(feature, tfds.features.Text)}
    if not texts:
        raise DataError(f"{found[0]}: no text feature; it has: {', '.join(sorted(info.features))}")
    known = [name for name in column_names(2 + len(texts)) if name in texts]
    others = sorted(texts.difference(known))  # the file keeps no order of features
    return PreparedCorpus((*known, *others), tuple(known), files, info.features)


def found_in(folder: Path) -> list[Path]:
    """Folders of data sets: `folder`, or `name/version` or `name/config/version` below it."""
    levels = ("", "*/", "*/*/", "*/*/*/")
    return sorted(file.parent for level in levels for file in folder.glob(f"{level}dataset_info.json"))
