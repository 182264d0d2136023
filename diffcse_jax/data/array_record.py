"""Prepares a corpus as an ArrayRecord data set, in shards, through tensorflow-datasets and without TensorFlow.

    python -m diffcse_jax.data.array_record --input corpus.txt --output DIR [--shards N] [--columns a,b]

Then `data.train_file=DIR`; `diffcse_jax.data.array_record_reader` reads it.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from diffcse_jax.data.array_record_reader import SPLIT, found_in
from diffcse_jax.data.corpus import Corpus, column_names
from diffcse_jax.data.entries import told
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import DataError, reported_to_user
from diffcse_jax.groups import DataConfig


class SentenceCorpus(tfds.core.GeneratorBasedBuilder):
    """Sentences for contrastive learning; with a positive and hard negatives where the corpus has them."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # no checksums beside this module; looking for them needs a package that tfds does not declare

    def __init__(self, corpus: Corpus, data_dir: str | Path):
        self._corpus = corpus
        super().__init__(data_dir=str(data_dir), file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {name: tfds.features.Text() for name in column_names(len(self._corpus.columns))}
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
            yield key, dict(zip(column_names(len(row)), row, strict=True))


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
    if found_in(output):
        raise DataError(f"{output} already holds a data set; delete it or choose another --output")
    builder = SentenceCorpus(corpus, data_dir=output)
    download_config = tfds.download.DownloadConfig(num_shards=shards, try_download_gcs=False)
    try:
        builder.download_and_prepare(download_config=download_config)
    except AssertionError as error:
        raise DataError(f"{corpus.name} cannot fill {shards} shards: {error}") from error
    return Path(builder.data_path)


def main() -> None:
    """Prepares a data set from the command line."""
    parser = argparse.ArgumentParser(prog="python -m diffcse_jax.data.array_record", description=main.__doc__)
    parser.add_argument("--input", required=True, help="what data.train_file takes: a file, a folder, wiki1m, ...")
    parser.add_argument("--output", required=True, type=Path, help="folder to write the data set under")
    parser.add_argument("--shards", type=int, help="number of files; default: by size")
    parser.add_argument("--columns", default="", help="columns to keep, separated by commas")
    arguments = parser.parse_args()
    if arguments.shards is not None and arguments.shards < 1:
        parser.error("--shards must be at least 1")
    with reported_to_user():
        columns = tuple(filter(None, arguments.columns.split(",")))
        with told({"data.train_file": "--input", "data.columns": "--columns"}):
            corpus = open_corpus(DataConfig(train_file=arguments.input, columns=columns), "--input")
        folder = prepare(corpus, arguments.output, arguments.shards)
        print(f"{folder} is ready: data.train_file={arguments.output}")
        if corpus.skipped:
            print(corpus.skipped_summary())
        print(f"first row: {corpus.first_row()}")


if __name__ == "__main__":
    main()
