"""ArrayRecord data sets: a prepared corpus in shards, written and read through tensorflow-datasets, no TensorFlow.

    python -m diffcse_jax.data.array_record --input corpus.txt --output DIR [--shards N] [--columns a,b]

Then `data.train_file=DIR`. Records are read in sequence and in large blocks; one by one is a hundred times slower.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from array_record.python import array_record_module

from diffcse_jax.config import DataConfig
from diffcse_jax.data.corpus import Corpus, Record, open_corpus
from diffcse_jax.errors import DataError, reported_to_user

FEATURES = ("sentence", "positive", "hard_negative")
SPLIT = "train"
BLOCK_RECORDS = 10_000


class SentenceCorpus(tfds.core.GeneratorBasedBuilder):
    """Sentences for contrastive learning; with a positive and a hard negative where the corpus has them."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # no checksums beside this module; looking for them needs a package that tfds does not declare

    def __init__(self, corpus: Corpus, data_dir: str | Path):
        self._corpus = corpus
        super().__init__(data_dir=str(data_dir), file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {name: tfds.features.Text() for name in FEATURES[: len(self._corpus.columns)]}
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,  # keeps the order of the corpus
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        return {SPLIT: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, str]]]:
        for key, row in enumerate(self._corpus):
            yield key, dict(zip(FEATURES, row, strict=False))


@dataclasses.dataclass(frozen=True)
class PreparedCorpus:
    """The `train` split of an ArrayRecord data set.

    Attributes:
        columns: its text features: sentence, positive, hard_negative where it has these; else by name.
        files: its shards, in order.
    """

    columns: tuple[str, ...]
    files: tuple[Path, ...]
    features: tfds.features.FeaturesDict

    def records(self, columns: Sequence[str]) -> Iterator[Record]:
        """The rows, numbered from 1 over all shards."""
        for number, record in enumerate(self._serialised(), 1):
            example = self.features.deserialize_example_np(record)
            yield number, tuple(example[column].decode(errors="surrogateescape") for column in columns)

    def _serialised(self) -> Iterator[bytes]:
        for file in self.files:
            reader = array_record_module.ArrayRecordReader(str(file))
            count = reader.num_records()
            for start in range(0, count, BLOCK_RECORDS):
                yield from reader.read(start, min(start + BLOCK_RECORDS, count))
            reader.close()


def prepare(corpus: Corpus, output: Path, shards: int | None = None) -> Path:
    """Writes a corpus as an ArrayRecord data set.

    Args:
        corpus: the rows, written in their order.
        output: the folder to write under.
        shards: the number of files; None: one, or more where tensorflow-datasets finds it too large.

    Returns:
        The data set's folder.

    Raises:
        DataError: `output` already holds a data set, or the corpus cannot be read.
    """
    if _found_in(output):
        raise DataError(f"{output} already holds a data set; delete it or choose another --output")
    builder = SentenceCorpus(corpus, data_dir=output)
    download_config = tfds.download.DownloadConfig(num_shards=shards, try_download_gcs=False)
    try:
        builder.download_and_prepare(download_config=download_config)
    except AssertionError as error:
        raise DataError(f"{corpus.name} cannot fill {shards} shards: {error}") from error
    return Path(builder.data_path)


def open_prepared(folder: Path) -> PreparedCorpus:
    """Opens the one data set in `folder` or up to three levels below it.

    Raises:
        DataError: it holds no data set or several, one that is no ArrayRecord, lacks the split `train`, text features
            or shards.
    """
    found = _found_in(folder)
    if len(found) != 1:
        raise DataError(
            f"{folder}: {'no ArrayRecord data set' if not found else 'several data sets'} (dataset_info.json); prepare "
            "one with python -m diffcse_jax.data.array_record, or name the folder of one"
        )
    info = tfds.builder_from_directory(found[0]).info
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
    columns = [name for name in FEATURES if name in texts] or sorted(texts)  # the file keeps no order of features
    return PreparedCorpus(tuple(columns), files, info.features)


def _found_in(folder: Path) -> list[Path]:
    """Folders of data sets: `folder`, or `name/version` or `name/config/version` below it."""
    levels = ("", "*/", "*/*/", "*/*/*/")
    return sorted(file.parent for level in levels for file in folder.glob(f"{level}dataset_info.json"))


def main() -> None:
    """Prepares a data set from the command line."""
    parser = argparse.ArgumentParser(prog="python -m diffcse_jax.data.array_record", description=main.__doc__)
    parser.add_argument("--input", required=True, help="what data.train_file takes: a file, wiki1m, docstrings")
    parser.add_argument("--output", required=True, type=Path, help="folder to write the data set under")
    parser.add_argument("--shards", type=int, help="number of files; default: by size")
    parser.add_argument("--columns", default="", help="columns to keep, separated by commas")
    arguments = parser.parse_args()
    if arguments.shards is not None and arguments.shards < 1:
        parser.error("--shards must be at least 1")
    with reported_to_user():
        columns = tuple(filter(None, arguments.columns.split(",")))
        corpus = open_corpus(DataConfig(train_file=arguments.input, columns=columns))
        folder = prepare(corpus, arguments.output, arguments.shards)
        print(f"{folder} is ready: data.train_file={arguments.output}")
        if corpus.skipped:
            print(corpus.skipped_summary())


if __name__ == "__main__":
    main()
