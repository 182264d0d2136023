"""Applications: each one uses the core, and nothing in the core imports them."""

import fnmatch
import io
import sys
from pathlib import Path
from typing import Any

from diffcse_jax.commands import (
    DemoOptions,
    EmbedOptions,
    EncodeOptions,
    SearchOptions,
    TextOptions,
)
from diffcse_jax.documents.document import Documents
from diffcse_jax.documents.find import is_pattern
from diffcse_jax.documents.open import open_documents_to_search
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError
from diffcse_jax.io import expand_path
from diffcse_jax.models.files import find_folder, read_model_config, transformer_folder
from diffcse_jax.models.routes import DOCUMENT, find_routes
from diffcse_jax.run_folder.finding import find_run, finished_export
from diffcse_jax.search.vector_store import EncoderRecord


def require_model(name: str) -> None:
    """Raise `CheckpointError` if there is no such model, before text is read for it."""
    path = expand_path(name)
    if finished_export(path) is None and not find_run(path):
        root = find_folder(name)
        folders = find_routes(root) or {DOCUMENT: root}
        for folder in folders.values():
            read_model_config(transformer_folder(folder))


def load_encoder(
    options: EncodeOptions | EmbedOptions | SearchOptions, record: EncoderRecord | None = None
) -> SentenceEncoder:
    """Load the encoder that options name. What they leave out is as recorded."""
    chosen = options.given("model", "pooler", "truncate_dim", "precision", "backend")
    if record:
        names = ("model", "pooler", "precision", "backend")
        recorded = {name: getattr(record, name) for name in names}
        chosen = recorded | {"truncate_dim": record.dimension} | chosen
    model, precision = chosen.pop("model"), chosen.pop("precision", "float32")
    return SentenceEncoder.from_pretrained(model, dtype=precision, **chosen)


def open_text(name: str, options: TextOptions) -> Documents:
    """Open the text of a command as documents to search or encode."""
    return open_documents_to_search(
        name,
        columns=options.columns,
        id_column=options.id_column or "",
        follow_links=options.follow_links,
    )


def check_options_of_mode(options: SearchOptions | DemoOptions, mode: str) -> None:
    """Raise `ConfigError` for options that a new index in this mode would not read."""
    if mode == "lexical" and options.passages is not None:
        flag = "--passages" if options.passages else "--no-passages"
        raise ConfigError(f"{flag} needs --mode dense or hybrid: only encoders truncate long texts")
    if mode == "dense" and options.language:
        raise ConfigError("--language needs --mode lexical or hybrid")
    if mode != "hybrid" and options.weight is not None:
        raise ConfigError("--weight needs --mode hybrid")


def require_outside(output: Path, source: Path) -> None:
    """Raise `ConfigError` if what is written would be read as text the next time.

    `source` may be a pattern. Names that begin with a dot are not read.
    """
    root, place = source.resolve(), output.resolve()
    if place.is_relative_to(root):
        is_read = not any(part.startswith(".") for part in place.relative_to(root).parts)
    else:
        is_read = is_pattern(str(source)) and fnmatch.fnmatch(str(place), str(root))
        is_read = is_read and not place.name.startswith(".")
    if is_read:
        raise ConfigError(
            f"--output {output} is inside --input {source}, so its files would be read as text. "
            "Choose a place outside, or a folder whose name starts with a dot"
        )


def print_in_utf8() -> None:
    """Make standard output UTF-8, whatever the terminal shows: JSON lines are for programs.

    Half of a surrogate pair, such as a name of a file may contain, becomes JSON's escape of it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def render(template: str, **values: Any) -> str:
    """Render a page from its template in `templates/`; text is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values) + "\n"
