"""Prepare and read ArrayRecord data sets with tensorflow-datasets, without TensorFlow.

`prepare(open_text("corpus.txt"), "DIR", shards=8)` writes a data set that `data.train_file=DIR` reads.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.data.readers import Corpus, RowFile, column_names
from diffcse_jax.errors import DataError, require_extra

SPLIT = "train"
BLOCK_RECORDS = 10_000  # single records are read a hundred times slower


def prepare(corpus: Corpus, output: str | Path, shards: int | None = None) -> Path:
    """Write a corpus as an ArrayRecord data set, in the order of its rows, and return the data set's folder.

    Args:
        corpus: The rows, for example from `data.sources.open_text`.
        output: The folder to write to. It must not contain a data set.
        shards: The number of files. None: by size.
    """
    tfds = require_extra("tensorflow_datasets", "tfds")
    if _found_in(Path(output)):
        raise DataError(f"{output} already contains a data set. Delete it or name another folder")
    names = column_names(len(corpus.columns))

    with require_extra("tensorflow_datasets.core.registered", "tfds").skip_registration():  # else once per process

        class SentenceCorpus(tfds.core.GeneratorBasedBuilder):  # type: ignore[name-defined]
            """Sentences for contrastive learning, with positives and hard negatives if the corpus has them."""

            VERSION = tfds.core.Version("1.0.0")
            code_path = None  # looking for checksums would need a package that tfds does not declare

            def _info(self) -> Any:
                features = tfds.features.FeaturesDict({name: tfds.features.Text() for name in names})
                return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

            def _split_generators(self, dl_manager: Any) -> Any:
                return {SPLIT: self._generate_examples()}

            def _generate_examples(self) -> Iterator[tuple[int, dict[str, str]]]:
                for key, row in enumerate(corpus):
                    yield key, dict(zip(names, row, strict=True))

    builder = SentenceCorpus(data_dir=str(output), file_format="array_record")
    config = tfds.download.DownloadConfig(num_shards=shards, try_download_gcs=False)
    builder.download_and_prepare(download_config=config)
    return Path(builder.data_path)


def open_prepared(folder: Path, wanted: Sequence[str]) -> tuple[RowFile, list[Path]]:
    """Open the `train` split of the one data set in `folder` or up to three levels below it; also return its shards.

    The columns of the rows are all texts that are wanted, or those named after their roles, if there are any.
    """
    tfds = require_extra("tensorflow_datasets", "tfds")
    found = _found_in(folder)
    if len(found) != 1:
        raise DataError(f"{folder}: {len(found)} data sets (dataset_info.json). Name the folder of one data set")
    try:
        builder = tfds.builder_from_directory(found[0])
        source, features = builder.as_data_source(SPLIT), builder.info.features
        shards = [Path(file) for file in builder.info.splits[SPLIT].filepaths]
    except Exception as error:  # the library raises many types
        raise DataError(f"{found[0]}: cannot read the split {SPLIT!r} as ArrayRecord: {error}") from error
    texts = {name for name, feature in features.items() if isinstance(feature, tfds.features.Text)}
    if not texts:
        raise DataError(f"{found[0]}: no column of text. It has: {', '.join(sorted(features))}")
    known = tuple(name for name in column_names(2 + len(texts)) if name in texts)

    def entries(needed: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for start in range(0, len(source), BLOCK_RECORDS):
            try:
                block = source.__getitems__(range(start, min(start + BLOCK_RECORDS, len(source))))
            except Exception as error:
                raise DataError(f"{found[0]}: a record after number {start} is damaged: {error}") from error
            for number, example in enumerate(block, start + 1):
                yield number, {name: example[name].decode(errors="surrogateescape") for name in needed}

    others = sorted(texts.difference(known)) if wanted or not known else ()
    return RowFile(folder, (*known, *others), entries), shards


def _found_in(folder: Path) -> list[Path]:
    """Return folders of data sets: `folder`, or `name/version` or `name/config/version` below it."""
    levels = ("", "*/", "*/*/", "*/*/*/")
    return sorted(file.parent for level in levels for file in folder.glob(f"{level}dataset_info.json"))
