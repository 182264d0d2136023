"""Encode texts: `encode` writes one file, `embed` writes a folder of Parquet files and can resume.

`embed` names its Parquet files after the input: `papers.csv.000000.parquet`, and so on. Each holds
a few thousand texts in order, with the settings in its metadata, and gets its name when it is
complete. The folder `OUTPUT.state` holds the SHA-256 of each input and the list of its files. The
same command, started again after a crash, embeds what is missing, and what it now reads otherwise.
"""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Float32

from diffcse_jax import hosts
from diffcse_jax.apps import (
    load_encoder,
    open_text,
    print_in_utf8,
    require_model,
    require_outside,
)
from diffcse_jax.commands import EmbedOptions, EncodeOptions
from diffcse_jax.documents.document import Document, Documents
from diffcse_jax.documents.find import STDIN, enter_skipped, find_source, is_pattern
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.tables.values import listed
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Interrupted,
    InUseError,
    counted,
    warn_user,
)
from diffcse_jax.hosts import Progress, log_line, report
from diffcse_jax.io import (
    disk_errors,
    expand_path,
    json_digest,
    lock,
    read_json_object,
    replace_file,
    write_json,
)
from diffcse_jax.models.unread import added_up
from diffcse_jax.search.passages import Passage, passages_of
from diffcse_jax.search.reading import read_source
from diffcse_jax.search.vector_store import (
    find_parts,
    input_state,
    read_settings,
    row_of,
    rows_table,
    state_of,
    vector_table,
)

FORMATS = (".jsonl", ".npy")
STDOUT = "-"
CHUNK = "texts"  # in the metadata of a Parquet file: a hash of what it holds

Placed = tuple[Document, Passage]


# One file


def encode(options: EncodeOptions) -> None:
    """Encode the texts of all inputs into one file, which gets its name when it is complete.

    The encoder is loaded once the texts are read.
    """
    output = options.output
    path = expand_path(output)
    if output != STDOUT:
        _require_format(path, output)
        for each in options.inputs:
            require_outside(path, expand_path(each))
    is_npy = path.suffix == ".npy"
    require_model(options.model)
    rows: list[Placed] = []
    for source in [open_text(each, options) for each in options.inputs]:
        # A row of .npy is known by its number alone, so none may be missing.
        ledger = Ledger(
            source.name,
            strict=options.strict or is_npy,
            refuse_empty=is_npy,
            may_skip_files=not options.strict,
        )
        rows += _one_each(source, ledger, options.columns) if is_npy else _placed(source, ledger)
        report(ledger)
    if output != STDOUT:  # now, because encoding may take hours
        with disk_errors(path, safe="Nothing was written.", instead="give another --output"):
            path.parent.mkdir(parents=True, exist_ok=True)
    vectors = load_encoder(options).encode(
        [passage.searched for _, passage in rows],
        batch_size=options.batch_size,
        normalize=options.normalize,
        show_progress=True,
        prompt_name=options.prompt_name,
    )
    lines = _json_lines(rows, vectors)
    if output == STDOUT:
        print_in_utf8()
        sys.stdout.writelines(lines)
        return
    with disk_errors(path, safe="Nothing else was changed."), replace_file(path.resolve()) as file:
        if path.suffix == ".npy":
            np.save(file, vectors)
        else:
            file.writelines(line.encode(errors="backslashreplace") for line in lines)


def _require_format(path: Path, output: str) -> None:
    """Raise `ConfigError` unless a file in one of the formats can be written."""
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"--output {output}: the suffix chooses the format. Use one of: {', '.join(FORMATS)}"
        )
    if path.exists() and not path.is_file():
        raise ConfigError(f"--output {output} is a folder, a pipe or a device. Name a file")


def _placed(source: Documents, ledger: Ledger) -> Iterator[Placed]:
    """Yield the passages of a source with their documents, and count them."""
    for number, document in enumerate(read_source(source, ledger)):
        passages = passages_of(document, number)
        ledger.make("passage{s}", len(passages))
        yield from ((document, passage) for passage in passages)


def _one_each(source: Documents, ledger: Ledger, columns: Sequence[str]) -> Iterator[Placed]:
    """Yield one passage for each document, or one for each column that the user named."""
    for number, document in enumerate(source.read(ledger)):
        passages = passages_of(dataclasses.replace(document, whole=True), number)
        if not columns:
            text = " ".join(passage.searched for passage in passages)
            yield document, Passage(number, "", text)
            continue
        there = {passage.column for passage in passages}
        if missing := [column for column in columns if column not in there]:
            raise DataError(
                f"{document.place}: the column {missing[0]!r} has no text, and the rows of .npy "
                "have no names. Fill it, or give a file .jsonl"
            )
        yield from ((document, passage) for passage in passages)


def _json_lines(
    rows: Sequence[Placed], vectors: Float32[np.ndarray, "rows dimension"]
) -> Iterator[str]:
    """Yield an object for each text, with the shortest numbers that are exact in float32."""
    for (document, passage), vector in zip(rows, vectors, strict=True):
        row = row_of(document, passage)
        columns = json.loads(row.pop("columns") or "{}")
        del row["document"]
        kept = {name: value for name, value in row.items() if value is not None and value != ""}
        text = json.dumps(kept | ({"columns": columns} if columns else {}), ensure_ascii=False)
        yield f'{text[:-1]}, "embedding": [{", ".join(map(str, vector))}]}}\n'


# A folder


def embed(options: EmbedOptions) -> None:
    """Embed the texts of the inputs that are not in the folder yet.

    The encoder is loaded once the inputs are open.

    Raises:
        Interrupted: Ctrl-C or SIGTERM; complete files are kept.
    """
    output = options.output
    process, count = hosts.process_from_environment() or (0, 1)
    if options.distributed:
        hosts.join()
        process, count = jax.process_index(), jax.process_count()
    paths = find_inputs(options.inputs, strict=options.strict, follow_links=options.follow_links)
    _require_folder(output)
    for path in [*options.inputs, *paths]:
        require_outside(output, expand_path(path))
    mine = {path: open_text(path, options) for path in paths[process::count]}
    encoder = load_encoder(options)
    settings = _settings(options, encoder)
    _check_settings(output, settings)
    job = _Job(output, encoder, settings, options)
    try:
        safe, instead = "Complete Parquet files are kept.", "give another --output"
        with hosts.terminated_like_interrupted(), disk_errors(output, safe=safe, instead=instead):
            for folder in (output, state_of(output)):
                folder.mkdir(parents=True, exist_ok=True)
            with lock(state_of(output) / ".lock", wait=True):
                # Also the inputs of other processes, because `search` warns of unfinished ones.
                for path in paths:
                    if not input_state(output, path).exists():
                        job.write_state(path)
            job.run(mine)
    except KeyboardInterrupt as error:
        kept = f"{counted(job.embedded, 'text{s}')}; complete Parquet files are kept"
        raise Interrupted(f"interrupted after {kept}. To resume, run {options.command}") from error
    who = f"process {process} of {count}: " if count > 1 else ""
    log_line(f"{who}embedded {counted(job.embedded, 'text{s}')} into {output}", on_all=True)
    _note_others(output, paths)
    # Every process waits for all, because the first one to exit would end the others.
    hosts.decided_by_first(lambda: None)


def _settings(options: EmbedOptions, encoder: SentenceEncoder) -> dict[str, Any]:
    """Return what all files of the folder have in common, as it is stored."""
    prompt = encoder.prompts.choose(None, options.prompt_name, encoder.prompts.document)
    return dataclasses.asdict(encoder.record(prompt)) | {
        "dtype": options.dtype,
        "normalize": options.normalize,
        "columns": [*options.columns],
        "id_column": options.id_column or "",
        "passages": bool(options.passages),
        "rows_per_file": options.rows_per_file,
    }


def find_inputs(
    patterns: Sequence[str], *, strict: bool = False, follow_links: bool = False
) -> list[str]:
    """Return the inputs that the patterns match, in the order of their names."""
    paths: dict[str, str] = {}
    for pattern in patterns:
        for path in _matching(pattern, strict=strict, follow_links=follow_links):
            if (other := paths.setdefault(Path(path).name, path)) != path:
                raise DataError(
                    f"--input: {other} and {path} have the same name, also for output. Name the "
                    "folder that holds both, or give each its own --output"
                )
    return [paths[name] for name in sorted(paths)]


def _matching(pattern: str, *, strict: bool, follow_links: bool) -> list[str]:
    """Return the files and folders that a pattern matches. Say which others are not read."""
    if pattern == STDIN:
        raise ConfigError(
            "--input -: `diffcse embed` reads its inputs twice, to be able to resume. Name a file, "
            "or use `diffcse encode`"
        )
    if not is_pattern(pattern):  # a missing file is reported when it is opened
        path = os.path.expanduser(pattern)
        return [path if Path(path).name not in ("", "..") else os.path.realpath(path)]
    source = find_source(pattern, "--input", follow_links=follow_links)
    used = [*source.files, *source.data_sets]
    folders = [each for each in source.folders if any(path.is_relative_to(each) for path in used)]

    def is_below(path: Path) -> bool:
        return not set(folders).isdisjoint(path.parents)

    ledger = Ledger(pattern, strict=strict)
    # What is skipped in a folder is reported when the folder is read.
    left = [each for each in source.skipped if not is_below(Path(each.name))]
    enter_skipped(left, ledger)
    report(ledger)
    inputs = [*folders, *(path for path in used if not is_below(path))]
    return list(dict.fromkeys(map(str, inputs)))


def _require_folder(output: Path) -> None:
    """Raise `ConfigError` if the folder of embeddings is something else."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is not a folder. Name a folder")


def _note_others(output: Path, paths: Sequence[str]) -> None:
    """Say which inputs of earlier commands a folder also holds: one of these may be renamed."""
    names = {Path(path).name for path in paths}
    states = sorted(state_of(output).glob("*.json"))
    if others := [state.stem for state in states if state.stem not in names]:
        inputs = counted(len(others), "input{s}")
        log_line(
            f"notice: {output} also holds {inputs} of earlier commands, for example {others[0]}"
        )


def _digest(path: str, documents: Documents, follow_links: bool) -> str:
    """Return the SHA-256 of an input: of its content and, in a folder, of the names of its files.

    Rows hold these names, and hits show them. The folder itself may move.
    """
    content = documents.fingerprint()
    if not os.path.isdir(path):
        return content
    source = find_source(path, "--input", follow_links=follow_links)
    folder = expand_path(path)
    names = [str(each.relative_to(folder)) for each in (*source.files, *source.data_sets)]
    return json_digest([content, *names])


def _check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder whose first Parquet file has other settings."""
    parts = find_parts(output)
    earlier = read_settings(parts[0]) if parts else settings
    settings["model"] = earlier.get("model")  # the same model may be moved
    if changed := [name for name, value in settings.items() if earlier.get(name) != value]:
        values = "; ".join(
            f"{name}: {earlier.get(name)!r} then, {settings[name]!r} now" for name in changed
        )
        raise ConfigError(
            f"{output} was begun with other settings: {values}. Use the earlier settings, or give "
            f"another --output, or remove {output} and {state_of(output)}"
        )


def _part_name(path: str, number: int) -> str:
    """Return the name of a Parquet file of an input."""
    return f"{Path(path).name}.{number:06d}.parquet"


def _chunk_digest(chunk: Sequence[Placed]) -> str:
    """Return a hash of the texts of a chunk and their places. The files may have moved."""
    return json_digest([passage for _, passage in chunk])


@dataclasses.dataclass
class _Job:
    """One call of `embed`."""

    output: Path
    encoder: SentenceEncoder
    settings: Mapping[str, Any]
    options: EmbedOptions
    embedded: int = 0

    def run(self, inputs: Mapping[str, Documents]) -> None:
        """Embed what is missing of the inputs."""
        links = self.options.follow_links
        digests = {path: _digest(path, documents, links) for path, documents in inputs.items()}
        pending = [path for path, digest in digests.items() if not self.is_done(path, digest)]
        if files := len(find_parts(self.output)):
            complete = f"{len(inputs) - len(pending)} of {len(inputs)} inputs are complete"
            log_line(
                f"resuming {self.output}: {complete}, {files:,} Parquet files exist", on_all=True
            )
        with added_up(), Progress("embedding", "texts") as progress:
            for path in pending:
                try:
                    held = lock(input_state(self.output, path).with_suffix(".lock"))
                except InUseError as error:
                    advice = (
                        "divide the inputs: give each process JAX_PROCESS_ID and JAX_NUM_PROCESSES"
                    )
                    raise InUseError(f"{error}. Wait until it ends, or {advice}") from error
                with held:
                    self.write_state(path, digests[path])
                    ledger = Ledger(path, strict=self.options.strict)
                    parts = self.write_parts(path, inputs[path], ledger, progress)
                    self.write_state(path, digests[path], parts, ledger.beyond_limits)

    def write_state(
        self,
        path: str,
        digest: str = "",
        parts: Sequence[str] | None = None,
        beyond_limits: Sequence[str] = (),
    ) -> None:
        """Record an input, its SHA-256 once it is read, and its Parquet files if all are there.

        `beyond_limits` are files that were left out by a limit of time or memory.
        """
        state: dict[str, Any] = {"sha256": digest} if digest else {}
        state["parts"] = parts
        if beyond_limits:
            state["beyond_limits"] = beyond_limits
        write_json(input_state(self.output, path), state)

    def is_done(self, path: str, digest: str) -> bool:
        """Return whether an input is embedded and its files exist; refuse one that changed."""
        state = input_state(self.output, path)
        try:
            earlier = read_json_object(state) if state.exists() else {}
        except CheckpointError as error:
            raise DataError(f"{error}. Remove that file and run the same command again") from error
        parts = earlier.get("parts")
        if parts != [] and earlier.get("sha256", digest) != digest:
            raise DataError(
                f"{path} is not the text that was embedded into {self.output} under this name: its "
                "SHA-256, which includes the names of files in a folder, has changed. Give another "
                f"--output, or remove {state} and the Parquet files of this name"
            )
        written = isinstance(parts, list) and all(
            (self.output / str(part)).is_file() for part in parts
        )
        is_done = written and earlier.get("sha256") == digest
        if is_done and (missing := earlier.get("beyond_limits")):
            warn_user(
                f"{self.output} lacks what took too long or too much memory when {path} was "
                f"embedded: {listed(missing)}. To try again, remove {state} and the Parquet files "
                "of this name"
            )
        return is_done

    def write_parts(
        self, path: str, source: Documents, ledger: Ledger, progress: Progress
    ) -> list[str]:
        """Write the missing Parquet files of an input, and return the names of all."""
        parts: list[str] = []
        rows = _placed(source, ledger)
        while chunk := list(itertools.islice(rows, self.settings["rows_per_file"])):
            parts.append(_part_name(path, len(parts)))
            if not self.has_part(parts[-1], chunk):
                self.write_part(parts[-1], chunk)
                self.embedded += len(chunk)
            progress.update(len(chunk))
        self.remove_parts_after(path, len(parts))
        if not parts:
            ledger.note(f"{path}: it contains no text")
        report(ledger)
        return parts

    def has_part(self, name: str, chunk: Sequence[Placed]) -> bool:
        """Return whether the Parquet file of a chunk exists.

        An earlier try may have read other texts, because a limit left a file out then or now.
        """
        file = self.output / name
        if not file.is_file():
            return False
        if read_settings(file).get(CHUNK) == _chunk_digest(chunk):
            return True
        log_line(
            f"notice: {file} has other texts than are read now, for example because a file was "
            "left out by a limit. Embedding them again"
        )
        return False

    def remove_parts_after(self, path: str, count: int) -> None:
        """Remove the Parquet files of an earlier try that read more texts of an input."""
        while (file := self.output / _part_name(path, count)).is_file():
            log_line(f"notice: removing {file}: an earlier try read more texts of {path}")
            file.unlink()
            count += 1

    def write_part(self, name: str, chunk: Sequence[Placed]) -> None:
        """Embed texts and write their Parquet file."""
        prompt, normalize = self.settings["prompt"], self.settings["normalize"]
        rows = self.split(chunk, prompt) if self.settings["passages"] else chunk
        texts = [passage.searched for _, passage in rows]
        vectors = self.encoder.encode_document(
            texts,
            batch_size=self.options.batch_size,
            normalize=normalize,
            prompt=self.encoder.prompts.or_warned(prompt),
        )
        stored = vector_table(
            rows_table(rows),
            vectors.astype(self.settings["dtype"]),
            {**self.settings, CHUNK: _chunk_digest(chunk)},
        )
        with replace_file(self.output / name, beside=state_of(self.output) / name) as file:
            pq.write_table(
                stored, file, compression="zstd", use_dictionary=False, write_page_checksum=True
            )

    def split(self, chunk: Sequence[Placed], prompt: str) -> list[Placed]:
        """Split passages that are longer than the model reads."""
        documents = {passage.document: document for document, passage in chunk}
        passages = self.encoder.split([passage for _, passage in chunk], prompt)
        return [(documents[passage.document], passage) for passage in passages]
